"""How tokens are chosen. Does not import JAX."""

from dataclasses import dataclass

from jaxmoe.config.errors import UserError

#: Between these logits divided by the temperature are numbers in float32.
_LOWEST, _HIGHEST = 1e-6, 1e6


@dataclass(frozen=True)
class Sampling:
    """Settings of the choice; checked when made.

    Raises: UserError naming every bad one.
    """

    temperature: float = 0.8
    """0 always takes the best."""
    top_k: int | None = 50
    seed: int = 0

    def __post_init__(self) -> None:
        problems = []
        if self.temperature != 0 and not _LOWEST <= self.temperature <= _HIGHEST:
            problems.append(
                f"temperature={self.temperature}: must be 0 or from {_LOWEST:g} to {_HIGHEST:g}; "
                "use 0 for the best token, 0.8 for text"
            )
        if self.top_k is not None and self.top_k < 1:
            problems.append(f"top-k={self.top_k}: must be at least 1; use 50, or leave it out")
        if not 0 <= self.seed < 2**32:
            problems.append(f"seed={self.seed}: must be from 0 to {2**32 - 1}; use 0")
        if problems:
            raise UserError("\n".join(problems))
