"""Learning rate by step."""

import optax

from jaxmoe.config.schema import Optimizer


def learning_rate(optimizer: Optimizer, steps: int) -> optax.Schedule:
    """Warm-up from 0, then constant, cosine, linear, or warm-up-stable-decay (linear, at the end of the run)."""
    schedule, peak = optimizer.schedule, optimizer.learning_rate
    warmup, final = schedule.warmup_steps, peak * schedule.final_fraction
    if schedule.kind == "constant":
        after = optax.constant_schedule(peak)
    elif schedule.kind == "cosine":
        length = schedule.decay_steps or max(steps - warmup, 1)
        after = optax.cosine_decay_schedule(peak, length, alpha=schedule.final_fraction)
    elif schedule.kind == "linear":
        after = optax.linear_schedule(peak, final, schedule.decay_steps or max(steps - warmup, 1))
    else:
        length = schedule.decay_steps or 1
        stable = max(steps - warmup - length, 0)
        after = optax.join_schedules(
            [optax.constant_schedule(peak), optax.linear_schedule(peak, final, length)], [stable]
        )
    if not warmup:
        return after
    # Step 0 already moves: the first update has 1 / warmup of the peak.
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, warmup - 1 or 1), after], [warmup])
