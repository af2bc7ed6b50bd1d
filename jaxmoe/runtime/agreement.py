"""What all processes of a run must decide alike."""

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmoe.runtime.signals import StopSignals


class AgreedStop:
    """Whether any process was asked to stop, known to all before the same step.

    A process that stopped alone would leave the others in a collective. So each puts its own answer beside every step,
    and the sum over all is read before the next one: no step waits for it.
    """

    def __init__(self, stop: StopSignals, mesh: Mesh) -> None:
        self._stop = stop
        self._alone = jax.process_count() == 1
        self._mesh = mesh
        self._asked: jax.Array | None = None

    def ask(self) -> bool:
        """Called by all processes before each step: whether to stop here."""
        if self._alone:
            return self._stop.requested
        agreed = self._asked is not None and bool(self._asked)
        if agreed:
            self._stop.reason = self._stop.reason or "a signal to another process"
            return True
        own = np.array([self._stop.requested])
        spread, whole = (NamedSharding(self._mesh, spec) for spec in (P(self._mesh.axis_names), P()))
        flags = jax.make_array_from_callback((self._mesh.size,), spread, lambda _: own)
        self._asked = _any(whole)(flags)
        return False


@cache
def _any(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jnp.any, out_shardings=sharding)
