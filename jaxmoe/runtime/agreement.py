"""What all processes of a run must decide alike."""

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
        self._spread = NamedSharding(mesh, P(mesh.axis_names))
        self._any = jax.jit(jnp.any, out_shardings=NamedSharding(mesh, P()))
        self._size = mesh.size
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
        flags = jax.make_array_from_callback((self._size,), self._spread, lambda _: own)
        self._asked = self._any(flags)
        return False
