"""Runs of many processes: where a process finds its place, that peers are missed, and the numbers of one process.

This file is also what the processes of a test run: `python test_processes.py steps OUT [options of a place]`.
"""

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from jaxmoe.config.errors import UserError
from jaxmoe.runtime.peers import Peers, Timing
from jaxmoe.runtime.processes import Place, add_arguments, find_place, first_host, joined, own_gpus
from tests.e2e.commands import read_until, tiny_tree, write_config

ROOT = Path(__file__).parents[2]
DEVICES = 4
STEPS = 3
QUICK = Timing(join=20.0, beat=0.2, silence=2.0, leave=10.0)


# ---------------------------------------------------------------- what a process of a test runs


def three_steps(out: str) -> None:
    """Losses, norms and the parameters after three steps, saved by process 0; every process loads its own rows."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import jaxmoe
    from tests.reference import cases

    with cases.float64():
        config = cases.make_config(rows=8, microbatches=2, layers=2, router=cases.SIGMOID_BIAS, dp=2, tp=2)
        mesh = jaxmoe.make_mesh(config)
        state = jaxmoe.init_state(config, mesh)
        asked: list[tuple[int, int]] = []
        numbers = {}
        for step in range(STEPS):
            whole = cases.ragged_batch(8, step)

            def rows(start: int, stop: int, whole: dict = whole) -> dict:
                asked.append((start, stop))
                return {name: value[start:stop] for name, value in whole.items()}

            state, metrics = jaxmoe.train_step(state, jaxmoe.Batch.from_rows(rows, (8, cases.SEQ), mesh))
            numbers |= {f"{step} {name}": value for name, value in metrics.scalars().items()}
        whole_params = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, P()))(state.params)
        numbers |= {
            jax.tree_util.keystr(path): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_leaves_with_path(whole_params)
        }
    np.savez(f"{out}.{jax.process_index()}.npz", **numbers, asked=np.array(asked))


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    add_arguments(parser)
    arguments = parser.parse_args()
    with joined(find_place(arguments)) as processes:
        processes.start_jax()
        three_steps(arguments.out)


# ---------------------------------------------------------------- starting them


def free_port() -> int:
    """A port whose neighbour is free too."""
    for _ in range(100):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        try:
            with socket.create_server(("127.0.0.1", port + 1)):
                return port
        except OSError:
            continue
    raise AssertionError("no two neighbouring ports are free")


def start(words: list[str], count: int) -> list[subprocess.Popen]:
    """`words` as `count` processes with four CPU devices together."""
    environment = dict(os.environ)
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment["XLA_FLAGS"] = " ".join([*flags, f"--xla_force_host_platform_device_count={DEVICES // count}"])
    environment["PYTHONPATH"] = str(ROOT)
    place = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(count), "--process-id"]
    return [
        subprocess.Popen(
            [sys.executable, *words, *place, str(number)],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for number in range(count)
    ]


def outputs(processes: list[subprocess.Popen], timeout: float) -> list[str]:
    """Of all, when they have ended; what still runs at the time limit is killed, which fails the test."""
    deadline = time.monotonic() + timeout
    try:
        return [process.communicate(timeout=max(deadline - time.monotonic(), 0.1))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


# ---------------------------------------------------------------- numbers


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[dict]]:
    """What each of `count` processes saved."""
    folder = tmp_path_factory.mktemp("processes")
    found: dict[int, list[dict]] = {}

    def of(count: int) -> list[dict]:
        if count not in found:
            running = start([__file__, str(folder / str(count))], count)
            texts = outputs(running, 400)
            assert [process.returncode for process in running] == [0] * count, "\n".join(texts)
            found[count] = [dict(np.load(folder / f"{count}.{number}.npz")) for number in range(count)]
        return found[count]

    return of


@pytest.mark.slow  # seven processes compile a step
@pytest.mark.parametrize("count", [2, 4])
def test_processes_give_the_numbers_of_one(numbers, count):
    want, got = numbers(1)[0], numbers(count)[0]
    assert want.keys() == got.keys()
    assert want["0 grad_norm"] > 0
    for name in want.keys() - {"asked"}:
        scale = max(float(np.abs(want[name]).max()), 1e-4)
        np.testing.assert_allclose(got[name], want[name], rtol=0, atol=1e-10 * scale, err_msg=name)


@pytest.mark.slow
def test_each_process_loads_its_rows_only(numbers):
    assert numbers(1)[0]["asked"].tolist() == [[0, 8]] * STEPS
    assert [each["asked"].tolist() for each in numbers(2)] == [[[0, 4]] * STEPS, [[4, 8]] * STEPS]


# ---------------------------------------------------------------- the train command


def start_train(config: Path, *words: str) -> list[subprocess.Popen]:
    return start(["-u", "-m", "jaxmoe.train", "--config", str(config), *words], 2)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train")
    tree = tiny_tree(folder, folder / "run")
    tree["run"] |= {"steps": 100_000, "eval_every": 0}
    tree["model"]["vocab_size"] = 258
    tree["parallel"] = {"dp": 2, "tp": 2}
    return write_config(folder / "tiny.yaml", tree)


def test_a_wrong_config_is_told_once(config):
    running = start_train(config, "run.steps=x")
    first, second = outputs(running, 100)
    assert [process.returncode for process in running] == [2, 2]
    assert "error: 1 problem in" in first
    assert second == ""


@pytest.mark.slow  # two processes compile a run
@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_process_ends_the_other_within_a_minute_and_is_named(config, tmp_path, dead):
    running = start_train(config, f"run.dir={tmp_path}", "checkpoint.every=100000")
    try:
        read_until(running[0], " 3/100000")
        running[dead].kill()
        output, _ = running[1 - dead].communicate(timeout=60)
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert running[1 - dead].returncode != 0
    assert f"error: process {dead} on " in output
    assert "ended without a word" in output


@pytest.mark.slow  # two processes compile a run, twice
def test_a_signal_to_one_process_stops_all_after_the_same_step_and_the_run_goes_on(config):
    running = start_train(config)
    read_until(running[0], " 3/100000")
    running[1].send_signal(signal.SIGTERM)
    texts = outputs(running, 300)
    assert [process.returncode for process in running] == [0, 0], "\n".join(texts)
    saved = re.search(r"stopped by a signal to another process: saved step (\d+)", texts[0])
    assert saved, texts[0]
    steps = int(saved.group(1)) + 2
    words = ["bash", "launch/local.sh", "2", "--config", str(config), f"run.steps={steps}", "run.sample_tokens=2"]
    environment = os.environ | {
        "VIRTUAL_ENV": sys.prefix,
        "XLA_FLAGS": " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag)
        + " --xla_force_host_platform_device_count=2",
    }
    done = subprocess.run(
        words,
        check=False,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout
    assert f"resuming from step {steps - 2} of {steps}" in done.stdout
    assert done.stdout.count(f"step {steps}/{steps}  loss") == 1, done.stdout
    assert "sample:" in done.stdout


# ---------------------------------------------------------------- peers


class Run:
    """Peers in threads of this process."""

    def __init__(self, count: int) -> None:
        self.port, self.count, self.lost = free_port(), count, {}
        self.peers: dict[int, Peers] = {}
        threads = [threading.Thread(target=self._join, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _join(self, number: int) -> None:
        def lost(text: str) -> None:
            self.lost[number] = text

        self.peers[number] = Peers(("127.0.0.1", self.port), self.count, number, timing=QUICK, on_loss=lost)

    def close(self) -> None:
        for peer in self.peers.values():
            peer.fail("the test is over")

    def lost_within(self, seconds: float, numbers: set[int]) -> dict[int, str]:
        deadline = time.monotonic() + seconds
        while self.lost.keys() != numbers and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.lost


@pytest.fixture
def run() -> Iterator[Run]:
    """Three peers."""
    run = Run(3)
    yield run
    run.close()


def test_peers_that_leave_are_not_missed(run):
    leaving = [threading.Thread(target=peer.leave) for peer in run.peers.values()]
    for thread in leaving:
        thread.start()
        time.sleep(0.5)
    for thread in leaving:
        thread.join()
    assert run.lost == {}


def test_a_number_that_is_taken_is_refused():
    port, errors = free_port(), []

    def join(number: int) -> None:
        try:
            Peers(("127.0.0.1", port), 3, number, timing=QUICK)
        except UserError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=join, args=(number,)) for number in (0, 1, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 3
    assert all("joined as number 1, which is taken" in error for error in errors)


@pytest.mark.parametrize("dead", [0, 2])
def test_a_closed_connection_is_a_dead_peer_and_all_name_it(run, dead):
    run.peers[dead]._done.set()  # its thread ends without a word, as killed
    for link in run.peers[dead]._links.values():
        link.connection.shutdown(socket.SHUT_RDWR)
    lost = run.lost_within(5, {0, 1, 2} - {dead})
    assert lost.keys() == {0, 1, 2} - {dead}
    assert all(f"process {dead} on" in text and "ended without a word" in text for text in lost.values())


@pytest.mark.parametrize("dead", [0, 2])
def test_a_silent_peer_is_a_dead_peer(run, dead):
    run.peers[dead]._done.set()  # no signs of life any more, connection still open
    lost = run.lost_within(8, {0, 1, 2} - {dead})
    assert all(f"process {dead} on" in text and "silent" in text for text in lost.values())
    assert lost.keys() == {0, 1, 2} - {dead}


def test_a_pause_of_all_processes_is_no_silence(run, monkeypatch):
    real, pause = time.monotonic, 0.0
    monkeypatch.setattr("jaxmoe.runtime.peers.time.monotonic", lambda: real() + pause)
    pause = 100 * QUICK.silence
    time.sleep(1.0)
    assert run.lost == {}


def test_kernels_watch_a_connection_that_nobody_uses(run):
    for peer in run.peers.values():
        for link in peer._links.values():
            assert link.connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if sys.platform == "linux":
                assert link.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failing_process_tells_the_others_why(run, failing):
    run.peers[failing].fail("ValueError: no more")
    lost = run.lost_within(5, {0, 1, 2} - {failing})
    assert lost.keys() == {0, 1, 2} - {failing}
    assert all(f"process {failing} on" in text and "ValueError: no more" in text for text in lost.values())


def test_who_does_not_join_is_named():
    with pytest.raises(UserError, match=r"of 3 processes, \[1, 2\] did not join within 1 s"):
        Peers(("127.0.0.1", free_port()), 3, 0, timing=Timing(join=1.0))


# ---------------------------------------------------------------- places


def place(words: str = "", **environment: str) -> Place:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return find_place(parser.parse_args(words.split()), environment)


SLURM = {
    "SLURM_JOB_ID": "8193",
    "SLURM_STEP_NODELIST": "gpu[007-009,12],login",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "JAX_COORDINATOR_ADDRESS": "node7:5000",
}
JOBSET = {
    "JAX_COORDINATOR_ADDRESS": "run-workers-0-0.run",
    "JAX_NUM_PROCESSES": "4",
    "JOB_COMPLETION_INDEX": "2",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
}


@pytest.mark.parametrize(
    ("words", "environment", "want"),
    [
        ("", {}, ("127.0.0.1:0", 1, 0, "alone")),
        ("--coordinator a:5 --num-processes 3 --process-id 2", SLURM, ("a:5", 3, 2, "command line")),
        ("--coordinator a:5 --num-processes 1 --process-id 0", {}, ("127.0.0.1:0", 1, 0, "alone")),
        ("", SLURM, ("gpu007:61450", 8, 5, "Slurm")),
        ("", SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, ("127.0.0.1:0", 1, 0, "alone")),
        ("", MPI, ("node7:5000", 4, 3, "MPI")),
        ("", {"PMI_RANK": "1", "PMI_SIZE": "2", "JAX_COORDINATOR_ADDRESS": "n:1"}, ("n:1", 2, 1, "MPI")),
        ("", JOBSET, ("run-workers-0-0.run:61440", 4, 2, "Kubernetes")),
        ("", JOBSET | {"JAX_PROCESS_ID": "3"}, ("run-workers-0-0.run:61440", 4, 3, "environment")),
        ("", {"JOB_COMPLETION_INDEX": "1"}, ("127.0.0.1:0", 1, 0, "alone")),
    ],
)
def test_the_place_of_a_process(words, environment, want):
    found = place(words, **environment)
    assert (found.coordinator, found.num_processes, found.process_id, found.source) == want


@pytest.mark.parametrize(
    ("words", "environment", "speaks"),
    [
        ("", {}, True),
        ("--coordinator 127.0.0.1:5 --num-processes 2 --process-id 0", {}, True),
        ("--coordinator 127.0.0.1:5 --num-processes 2 --process-id 1", {}, False),
        ("--coordinator a:5 --num-processes 2 --process-id 1", {}, True),  # perhaps another machine, with other files
        ("", SLURM, False),
        ("", SLURM | {"SLURM_LOCALID": "0"}, True),
    ],
)
def test_one_process_of_a_machine_speaks(words, environment, speaks):
    assert place(words, **environment).speaks == speaks


def test_processes_of_one_machine_share_a_port_that_mpi_does_not_tell():
    here = {name: value for name, value in MPI.items() if name != "JAX_COORDINATOR_ADDRESS"}
    found = place(**(here | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}))
    assert found.host == "127.0.0.1"
    assert 61440 <= found.port < found.port + 1 < 65536


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        ("--process-id 1", {}, "--coordinator, --num-processes: must be given too"),
        ("--coordinator a:5 --num-processes 2 --process-id 2", {}, "process 2 of 2"),
        ("--coordinator a --num-processes 2 --process-id 1", {}, "coordinator=a .*must be host:port"),
        ("", {n: v for n, v in MPI.items() if n[0] != "J"}, "add -x JAX_COORDINATOR_ADDRESS=HOST:PORT"),
        ("", {n: v for n, v in JOBSET.items() if n != "JOB_COMPLETION_INDEX"}, "JOB_COMPLETION_INDEX=not set"),
        ("", SLURM | {"SLURM_PROCID": "x"}, "SLURM_PROCID=x: must be a whole number"),
    ],
)
def test_a_wrong_place_is_refused(words, environment, message):
    with pytest.raises(UserError, match=message):
        place(words, **environment)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [("n1", "n1"), ("n1,n2", "n1"), ("n[007-009]", "n007"), ("a-b[3,5]-x,c[1-2]", "a-b3-x"), ("n1,m[2-3]", "n1")],
)
def test_the_first_host_of_a_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("local", "visible", "want"),
    [
        ((0, 1), None, None),
        ((1, 4), None, [1]),
        ((1, 2), "0,1,2,3,4,5,6,7", [4, 5, 6, 7]),
        ((3, 4), "6", None),  # the launcher gave this process a GPU of its own
    ],
)
def test_gpus_of_a_machine_are_shared(local, visible, want):
    assert own_gpus(Place("a:1", 8, 0, *local), visible) == want


if __name__ == "__main__":
    _main()
