"""Mixture-of-Experts language models, trained with numbers that do not depend on the layout.

The public API, one name a line. Names are imported when first used, so that commands can refuse a bad config before
JAX starts.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmoe.config.load import load_config as load_config
    from jaxmoe.interop.hf_config import load_hf_config as load_hf_config
    from jaxmoe.step.batch import Batch as Batch
    from jaxmoe.step.hf import load_hf as load_hf
    from jaxmoe.step.hf import save_hf as save_hf
    from jaxmoe.step.hf import to_hf_tree as to_hf_tree
    from jaxmoe.step.state import TrainState as TrainState
    from jaxmoe.step.state import init_state as init_state
    from jaxmoe.step.state import make_mesh as make_mesh
    from jaxmoe.step.train import eval_step as eval_step
    from jaxmoe.step.train import forward as forward
    from jaxmoe.step.train import loss_and_grads as loss_and_grads
    from jaxmoe.step.train import train_step as train_step

_HOMES = {
    "load_config": "jaxmoe.config.load",
    "load_hf_config": "jaxmoe.interop.hf_config",
    "Batch": "jaxmoe.step.batch",
    "load_hf": "jaxmoe.step.hf",
    "save_hf": "jaxmoe.step.hf",
    "to_hf_tree": "jaxmoe.step.hf",
    "TrainState": "jaxmoe.step.state",
    "init_state": "jaxmoe.step.state",
    "make_mesh": "jaxmoe.step.state",
    "eval_step": "jaxmoe.step.train",
    "forward": "jaxmoe.step.train",
    "loss_and_grads": "jaxmoe.step.train",
    "train_step": "jaxmoe.step.train",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxmoe' has no attribute {name!r}; it has {sorted(_HOMES)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
