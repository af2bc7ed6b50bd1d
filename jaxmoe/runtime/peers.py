"""That all processes of a run are alive, known within seconds. Does not import JAX.

Every process keeps a TCP connection to process 0. A process that dies loses its connection at once; when a machine
dies, the kernels of the others notice that its own no longer answers. Process 0 tells the others, and each ends with a
message that names the dead one, where otherwise it would wait in a collective for minutes, or for ever.
"""

import json
import os
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from jaxmoe.config.errors import UserError

#: Exit code of a process that ends because another one did.
PEER_LOST = 1
_PROTOCOL = "jaxmoe-peers-1"
_LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class Timing:
    """Seconds."""

    join: float = 300.0
    beat: float = 5.0
    """Between two signs of life."""
    answer: int = 30
    """A machine whose kernel has not answered for so long is dead."""
    silence: float = 600.0
    """A process that has shown no sign of life for so long hangs. One that compiles may be silent for a minute."""
    leave: float = 60.0
    """How long process 0 waits for the others at the end."""


def end_process(text: str) -> None:
    """Says why, and ends the process at once: its main thread may never come back from a collective."""
    os.write(sys.stderr.fileno(), f"error: {text}; this process ends\n".encode())
    os._exit(PEER_LOST)


@dataclass(eq=False)
class _Link:
    """A connection, in lines of JSON."""

    connection: socket.socket
    id: int
    name: str
    heard: float = field(default_factory=time.monotonic)
    buffer: bytes = b""

    def send(self, message: dict[str, Any]) -> bool:
        """Whether it went out."""
        try:
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> Iterator[dict[str, Any]]:
        """What has come in, waiting for at least one piece. Raises EOFError at the end of the connection."""
        try:
            piece = self.connection.recv(1 << 16)
        except OSError as error:
            raise EOFError(str(error)) from error
        if not piece:
            raise EOFError("its connection closed")
        self.heard = time.monotonic()
        *lines, self.buffer = (self.buffer + piece).split(b"\n")
        if len(self.buffer) > _LONGEST_LINE:
            raise EOFError("it sends what is no message of a run")
        for line in lines:
            try:
                yield json.loads(line)
            except ValueError as error:
                raise EOFError("it sends what is no message of a run") from error

    def first(self, timeout: float) -> dict[str, Any]:
        """The first message. Raises EOFError when none comes in time."""
        self.connection.settimeout(max(timeout, 0.01))
        while True:
            for message in self.receive():
                return message


def _named(process_id: int, host: str) -> str:
    return f"process {process_id} on {host}"


class Peers:
    """All processes of a run, joined. A thread watches until `leave` or `fail`.

    Args:
        address: host and port where process 0 listens; `process_id` counts from 0.
        on_loss: called in the watching thread with a text that names who was lost.

    Raises: UserError when not everyone joins in time.
    """

    def __init__(
        self,
        address: tuple[str, int],
        num_processes: int,
        process_id: int,
        *,
        timing: Timing | None = None,
        on_loss: Callable[[str], None] = end_process,
    ) -> None:
        self.num_processes, self.process_id = num_processes, process_id
        self._address, self._timing, self._on_loss = address, timing or Timing(), on_loss
        self._name = _named(process_id, socket.gethostname())
        self._links: dict[int, _Link] = {}
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._everyone_left = threading.Event()
        if process_id == 0:
            self._gather()
        else:
            self._connect()
        for link in self._links.values():
            link.connection.settimeout(self._timing.answer)
            _end_when_unanswered(link.connection, self._timing.answer)
        self._thread = threading.Thread(target=self._watch, name="peers", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------ joining

    def _gather(self) -> None:
        host, port = self._address
        deadline = time.monotonic() + self._timing.join
        try:
            server = _listen(host, port)
        except OSError as error:
            raise UserError(f"{host}:{port}: process 0 cannot listen there ({error}); name another port") from error
        with server:
            while len(self._links) < self.num_processes - 1:
                server.settimeout(max(deadline - time.monotonic(), 0.01))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    self._give_up()
                self._welcome(connection, deadline)
        for link in self._links.values():
            link.send({"kind": "joined"})

    def _welcome(self, connection: socket.socket, deadline: float) -> None:
        link = _Link(connection, -1, "")
        try:
            hello = link.first(min(10.0, deadline - time.monotonic()))
        except EOFError:
            connection.close()  # a port scanner, or a process that died while it joined
            return
        if hello.get("protocol") != _PROTOCOL or not isinstance(hello.get("id"), int):
            connection.close()
            return
        wrong = None
        if hello["num_processes"] != self.num_processes:
            wrong = f"says that the run has {hello['num_processes']} processes, process 0 says {self.num_processes}"
        elif not 0 < hello["id"] < self.num_processes or hello["id"] in self._links:
            wrong = f"joined as number {hello['id']}, which is taken or not below {self.num_processes}"
        if wrong:
            text = f"{hello['name']} {wrong}; give every process its own number and all the same count"
            link.send({"kind": "lost", "text": text})
            connection.close()
            self._refuse(text)
        link.id, link.name = hello["id"], hello["name"]
        self._links[link.id] = link

    def _give_up(self) -> None:
        missing = [number for number in range(1, self.num_processes) if number not in self._links]
        text = (
            f"of {self.num_processes} processes, {missing} did not join within {self._timing.join:.0f} s at "
            f"{self._address[0]}:{self._address[1]}; see their output, and whether a firewall closes that port"
        )
        self._refuse(text)

    def _refuse(self, text: str) -> NoReturn:
        self._tell_all(text)
        self._close_links()
        raise UserError(text)

    def _connect(self) -> None:
        host, port = self._address
        deadline = time.monotonic() + self._timing.join
        hello = {"protocol": _PROTOCOL, "id": self.process_id, "name": self._name, "num_processes": self.num_processes}
        while True:
            try:
                connection = socket.create_connection((host, port), timeout=5.0)
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"{self._name} cannot reach process 0 at {host}:{port} ({error}); see the output of process 0, "
                        "and whether its address is right"
                    ) from error
                time.sleep(0.2)
        link = _Link(connection, 0, _named(0, host))
        link.send(hello)
        try:
            # Process 0 counts from its own start, so it is the one that gives up first.
            answer = link.first(deadline - time.monotonic() + 2 * self._timing.join)
        except EOFError as error:
            connection.close()
            raise UserError(f"{link.name} went away while the processes joined ({error}); see its output") from error
        if answer["kind"] != "joined":
            connection.close()
            raise UserError(answer["text"])
        self._links[0] = link

    # ------------------------------------------------------------ watching

    def _watch(self) -> None:
        next_beat = last_turn = time.monotonic()
        with selectors.DefaultSelector() as selector:
            for link in self._links.values():
                selector.register(link.connection, selectors.EVENT_READ, link)
            while not self._done.is_set():
                for key, _ in selector.select(timeout=min(self._timing.beat, 0.5)):
                    self._hear(key.data, selector)
                now = time.monotonic()
                if now - last_turn > self._timing.beat + 1:
                    # This process itself stood still, perhaps with all others: a suspended job, a paused machine.
                    for link in self._links.values():
                        link.heard = now
                last_turn = now
                for link in list(self._links.values()):
                    if now - link.heard > self._timing.silence:
                        self._lose(link, f"has been silent for {self._timing.silence:.0f} s")
                if now >= next_beat:
                    next_beat = now + self._timing.beat
                    self._tell_all(None)

    def _hear(self, link: _Link, selector: selectors.BaseSelector) -> None:
        try:
            for message in link.receive():
                if message["kind"] == "lost":
                    self._lost(message["text"])
                elif message["kind"] == "left":
                    selector.unregister(link.connection)
                    self._forget(link)
                    return
        except EOFError as error:
            if self._done.is_set() or link.id not in self._links:
                return
            selector.unregister(link.connection)
            self._lose(
                link,
                f"ended without a word ({error}): killed, out of memory, crashed, or its machine is gone; see its log",
            )

    def _forget(self, link: _Link) -> None:
        self._links.pop(link.id, None)
        link.connection.close()
        if not self._links:
            self._everyone_left.set()

    def _lose(self, link: _Link, how: str) -> None:
        self._links.pop(link.id, None)
        link.connection.close()
        self._lost(f"{link.name} {how}")

    def _lost(self, text: str) -> None:
        if self._done.is_set():
            return
        self._done.set()
        self._tell_all(text)
        self._on_loss(text)
        self._close_links()

    def _tell_all(self, lost: str | None) -> None:
        """Sends what was lost to those that hang on this process, or a sign of life."""
        message = {"kind": "beat"} if lost is None else {"kind": "lost", "text": lost}
        with self._lock:
            for link in list(self._links.values()):
                link.send(message)

    # ------------------------------------------------------------ leaving

    def leave(self) -> None:
        """For a process that is done; process 0 stays until all have left."""
        if self.process_id == 0:
            if self._links:
                self._everyone_left.wait(self._timing.leave)
        else:
            self._done.set()  # from here on, process 0 may leave too
            with self._lock:
                for link in self._links.values():
                    link.send({"kind": "left"})
        self._close()

    def fail(self, why: str) -> None:
        """For a process that cannot go on: the others end, and say why."""
        self._done.set()  # from here on, nobody who leaves is missed
        self._tell_all(f"{self._name} failed: {why}")
        self._close()

    def _close(self) -> None:
        self._done.set()
        self._thread.join(timeout=5.0)
        self._close_links()

    def _close_links(self) -> None:
        for link in self._links.values():
            link.connection.close()
        self._links.clear()


def _listen(host: str, port: int) -> socket.socket:
    if host in ("localhost", "127.0.0.1"):
        return socket.create_server(("127.0.0.1", port), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def _end_when_unanswered(connection: socket.socket, seconds: int) -> None:
    """Closes a connection whose other kernel is gone, whether anything waits to be sent or not (Linux, macOS)."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe = max(seconds // 6, 1)
    for name, value in (
        ("TCP_KEEPIDLE", seconds // 3),
        ("TCP_KEEPALIVE", seconds // 3),
        ("TCP_KEEPINTVL", probe),
        ("TCP_KEEPCNT", 4),
        ("TCP_USER_TIMEOUT", 1000 * seconds),
    ):
        option = getattr(socket, name, None)
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
