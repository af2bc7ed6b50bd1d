"""MoE metrics: what every layer's router did, reduced over the mesh once and reported."""

from jaxmoe.metrics.reporting import MetricWriter as MetricWriter
from jaxmoe.metrics.reporting import count_moe_layers as count_moe_layers
from jaxmoe.metrics.reporting import layer_key as layer_key
from jaxmoe.metrics.rules import DEFAULT_RULES as DEFAULT_RULES
from jaxmoe.metrics.rules import MEGATRON_RULES as MEGATRON_RULES
from jaxmoe.metrics.rules import SUM_OF_PARTS as SUM_OF_PARTS
from jaxmoe.metrics.rules import MetricError as MetricError
from jaxmoe.metrics.rules import MetricRule as MetricRule
from jaxmoe.metrics.tracker import MoEMetricsTracker as MoEMetricsTracker
from jaxmoe.metrics.tracker import TrackerHolder as TrackerHolder
from jaxmoe.metrics.tracker import destroy_moe_metrics_tracker as destroy_moe_metrics_tracker
from jaxmoe.metrics.tracker import get_moe_metrics_tracker as get_moe_metrics_tracker
from jaxmoe.metrics.tracker import set_moe_metrics_tracker as set_moe_metrics_tracker
