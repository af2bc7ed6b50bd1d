"""How a run of many processes finds itself: command line, Kubernetes, Slurm or MPI. Does not import JAX.

One process may hold all devices of its machine, or a part of them. The mesh does not know the difference, and the
numbers are the same.
"""

import argparse
import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from jaxmoe.config.errors import USER_ERROR_EXIT_CODE, UserError
from jaxmoe.runtime.peers import Peers, Timing

#: Where process 0 listens when the launcher does not say. JAX takes this port, `Peers` the next one.
DEFAULT_PORT = 61440
_PORTS = 4096
_COORDINATOR, _COUNT, _ID = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"


@dataclass(frozen=True)
class Place:
    """A process's place in a run."""

    coordinator: str
    """host:port of process 0."""
    num_processes: int
    process_id: int
    local_id: int = 0
    """Number among the processes of this machine."""
    local_count: int = 1
    source: str = "command line"

    @property
    def host(self) -> str:
        return self.coordinator.rpartition(":")[0]

    @property
    def port(self) -> int:
        return int(self.coordinator.rpartition(":")[2])

    @property
    def is_beside_the_first(self) -> bool:
        """Whether the coordinator's address can only be this machine."""
        return self.host in ("localhost", "127.0.0.1")

    @property
    def speaks(self) -> bool:
        """Whether this process says what every process of its machine finds before they join."""
        return self.process_id == 0 if self.is_beside_the_first else self.local_id == 0


ALONE = Place("127.0.0.1:0", 1, 0, source="alone")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that place a process by hand. Without them the launcher's environment does."""
    group = parser.add_argument_group("many processes (under Slurm, MPI and the JobSet of launch/k8s not needed)")
    group.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 listens; it takes PORT and PORT + 1")
    group.add_argument("--num-processes", type=int, metavar="N")
    group.add_argument("--process-id", type=int, metavar="I", help="0 <= I < N")


def find_place(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Place:
    """The place that the command line gives, else the launcher; `ALONE` when there is neither.

    Raises: UserError for a place that is incomplete or impossible.
    """
    given = {
        "--coordinator": arguments.coordinator,
        "--num-processes": arguments.num_processes,
        "--process-id": arguments.process_id,
    }
    missing = [name for name, value in given.items() if value is None]
    if not missing:
        place = Place(arguments.coordinator, arguments.num_processes, arguments.process_id)
    elif len(missing) < len(given):
        raise UserError(f"{', '.join(missing)}: must be given too, the three belong together; add what is missing")
    else:
        place = _from_jax(environment) or _from_slurm(environment) or _from_mpi(environment) or ALONE
    _check(place)
    return ALONE if place.num_processes == 1 else place


def _check(place: Place) -> None:
    if place.num_processes < 1 or not 0 <= place.process_id < place.num_processes:
        raise UserError(
            f"process {place.process_id} of {place.num_processes} ({place.source}): numbers go from 0 to one less than "
            "the count; mend the launcher's command"
        )
    if place.num_processes > 1 and not re.fullmatch(r".+:\d{1,5}", place.coordinator):
        raise UserError(
            f"coordinator={place.coordinator} ({place.source}): must be host:port; write for example 10.0.0.1:61440"
        )


def _integer(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except (KeyError, ValueError) as error:
        got = environment.get(name, "not set")
        raise UserError(f"{name}={got}: must be a whole number; mend the launcher's command") from error


def _from_jax(environment: Mapping[str, str]) -> Place | None:
    """Variables that a launcher sets by hand. A pod of an indexed Kubernetes job has its number already."""
    if _COORDINATOR not in environment or _COUNT not in environment:
        return None
    name = _ID if _ID in environment else "JOB_COMPLETION_INDEX"
    source = "environment" if name == _ID else "Kubernetes"
    coordinator = environment[_COORDINATOR]
    if ":" not in coordinator:
        coordinator = f"{coordinator}:{DEFAULT_PORT}"
    return Place(coordinator, _integer(environment, _COUNT), _integer(environment, name), source=source)


def first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts: "n[007-009,12],m1" is n007."""
    found = re.match(r"([^,\[]+)(?:\[([^,\-\]]+)[^\]]*\]([^,\[]*))?", nodes)
    if not found:
        raise UserError(f"SLURM_STEP_NODELIST={nodes}: is no list of hosts; start the command by srun")
    return "".join(part for part in found.groups() if part)


def _job_port(job: int) -> int:
    """Two ports that no other job of this machine is likely to use."""
    return DEFAULT_PORT + 2 * (job % (_PORTS // 2 - 1))


def _from_slurm(environment: Mapping[str, str]) -> Place | None:
    if "SLURM_STEP_NODELIST" not in environment or "SLURM_PROCID" not in environment:
        return None
    host = first_host(environment["SLURM_STEP_NODELIST"])
    coordinator = environment.get(_COORDINATOR, f"{host}:{_job_port(_integer(environment, 'SLURM_JOB_ID'))}")
    here = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")
    return Place(
        coordinator,
        _integer(environment, "SLURM_STEP_NUM_TASKS"),
        _integer(environment, "SLURM_PROCID"),
        _integer(environment, "SLURM_LOCALID"),
        int(re.split(r"[(,]", here)[0]),
        "Slurm",
    )


#: Rank, count, local rank, local count of Open MPI; of MPICH and Intel MPI.
_MPI = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def _from_mpi(environment: Mapping[str, str]) -> Place | None:
    for rank, count, local_rank, local_count in _MPI:
        if rank not in environment or count not in environment:
            continue
        number = _integer(environment, count)
        here = _integer(environment, local_count) if local_count in environment else 1
        coordinator = environment.get(_COORDINATOR)
        if coordinator is None and here == number:
            coordinator = f"127.0.0.1:{_job_port(os.getppid())}"
        if coordinator is None and number > 1:
            raise UserError(
                f"{_COORDINATOR}: MPI does not tell where its first process runs; "
                f"add -x {_COORDINATOR}=HOST:PORT (Open MPI) or -genv {_COORDINATOR} HOST:PORT, with the first host"
            )
        local = _integer(environment, local_rank) if local_rank in environment else 0
        return Place(coordinator or ALONE.coordinator, number, _integer(environment, rank), local, here, "MPI")
    return None


def own_gpus(place: Place, visible: str | None) -> list[int] | None:
    """Which of the visible GPUs a process takes where several share a machine; None is all that are visible.

    `visible` is CUDA_VISIBLE_DEVICES. A launcher that hides the others' GPUs has settled it already.
    """
    if place.local_count == 1:
        return None
    count = len([name for name in visible.split(",") if name]) if visible else place.local_count
    share, rest = divmod(count, place.local_count)
    if share == 0 or rest:
        return None
    return list(range(place.local_id * share, (place.local_id + 1) * share))


class Processes:
    """The processes of this run, from inside `joined`."""

    def __init__(self, place: Place) -> None:
        self.place = place

    @property
    def is_first(self) -> bool:
        return self.place.process_id == 0

    def start_jax(self, environment: Mapping[str, str] = os.environ) -> None:
        """Makes `jax.devices()` those of all processes. To be called once, before JAX is used."""
        place = self.place
        if place.num_processes == 1:
            return
        import jax

        # The run answers SIGTERM itself, at the same step on all processes.
        jax.config.update("jax_enable_preemption_service", False)
        jax.distributed.initialize(
            place.coordinator,
            place.num_processes,
            place.process_id,
            local_device_ids=own_gpus(place, environment.get("CUDA_VISIBLE_DEVICES")),
            cluster_detection_method="deactivate",
            coordinator_bind_address=place.coordinator if place.is_beside_the_first else None,
            shutdown_timeout_seconds=60,
        )


@contextmanager
def joined(place: Place, timing: Timing | None = None) -> Iterator[Processes]:
    """All processes are there, and stay there until all are done.

    A process that fails inside ends at once, with the exit code that it would have had: JAX would wait minutes for the
    others to end as well. The others end with a message that names it.

    Raises: UserError when not everyone joins.
    """
    processes = Processes(place)
    if place.num_processes == 1:
        yield processes
        return
    peers = Peers((place.host, place.port + 1), place.num_processes, place.process_id, timing=timing)
    try:
        yield processes
        _stop_jax()
        peers.leave()
    # Whatever it is, it is shown, told to the others, and ends the process.
    except BaseException as error:  # noqa: BLE001
        _end(peers, error)


def _stop_jax() -> None:
    """Waits for all processes at JAX's own barrier."""
    jax = sys.modules.get("jax")
    if jax is not None:
        jax.distributed.shutdown()


def _end(peers: Peers, error: BaseException) -> None:
    code, why = 1, f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else 1
    elif isinstance(error, UserError):
        code, why = USER_ERROR_EXIT_CODE, str(error)
        print(f"error: {error}", file=sys.stderr)
    else:
        # A collective fails when a peer dies: then the watching thread names the peer and ends the process here.
        time.sleep(1.0)
        traceback.print_exception(error)
    sys.stdout.flush()
    sys.stderr.flush()
    peers.fail(why)
    os._exit(code)
