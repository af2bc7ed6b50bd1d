"""One line of text about one step: what the console shows while training, and a report afterwards."""

from collections.abc import Mapping

from jaxmoe.runtime.metrics_file import Kind

#: What the console line shows, in this order, with its format. Everything else is in the other sinks.
_CONSOLE = {
    "loss": ".4f",
    "bits_per_byte": ".4f",
    "total_loss": ".4f",
    "mtp_loss": ".4f",
    "load_balancing_loss": ".3f",
    "seq_load_balancing_loss": ".3f",
    "global_load_balancing_loss": ".3f",
    "load_max_over_mean": ".2f",
    "dead_experts": ".1f",
    "grad_norm": ".3g",
    "learning_rate": ".3g",
    "tokens_per_second": ",.0f",
}


def console_line(step: int, num_steps: int | None, scalars: Mapping[str, float], kind: Kind) -> str:
    """The numbers of one step that people watch, in one line."""
    parts = [f"{name} {scalars[name]:{form}}" for name, form in _CONSOLE.items() if name in scalars]
    if scalars.get("skipped"):
        parts.append("skipped: parameters unchanged")
    head = f"step {step}" if num_steps is None else f"step {step:>{len(str(num_steps))}}/{num_steps}"
    return "  ".join([head, *(["validation"] if kind == "eval" else []), *parts])
