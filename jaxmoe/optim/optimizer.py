"""The optimiser: optax, on this rank's piece of every parameter."""

from typing import Any

import optax

from jaxmoe.config.schema import Optimizer
from jaxmoe.optim.schedule import learning_rate


def make_optimizer(optimizer: Optimizer, steps: int, decay_mask: Any) -> optax.GradientTransformation:
    """AdamW or SGD. Element-wise, so that it needs no collective; clipping by global norm is done by the step.

    Args:
        decay_mask: tree of bool like the parameters; weight decay only where True.
    """
    schedule = learning_rate(optimizer, steps)
    if optimizer.kind == "sgd":
        return optax.sgd(schedule)
    return optax.adamw(
        schedule,
        b1=optimizer.beta1,
        b2=optimizer.beta2,
        eps=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        mask=decay_mask,
    )
