"""A proxy with delay: forwards bytes some milliseconds later, and counts round trips.

A round trip begins when a client sends its first bytes on a connection, or its first bytes after it
received an answer. Bytes sent before that belong to the same round trip: the client has pipelined
them. Both are measured at the client's end, after the delay, so an answer in transit does not count
as received.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

_CHUNK = 1 << 16
# How many bytes may be in transit in one direction before the sender has to wait.
_WINDOW_BYTES = 8 << 20


class Traffic(NamedTuple):
    """The traffic of a proxy."""

    connections: int
    round_trips: int
    bytes_up: int
    bytes_down: int

    def since(self, earlier: Traffic) -> Traffic:
        """The difference to an earlier measurement."""
        return Traffic(*[now - then for now, then in zip(self, earlier, strict=True)])


class DelayProxy:
    """Listens on a local TCP port and forwards everything to ``target`` with a delay.

    ``target`` is the path of a unix socket, or a host and a port. A context manager; leaving it
    cuts every connection.
    """

    def __init__(self, target: str | tuple[str, int], *, delay_s: float = 0.0) -> None:
        self._target = target
        self.delay_s = delay_s
        self._lock = threading.Lock()
        self._traffic = Traffic(0, 0, 0, 0)
        self._links: set[_Link] = set()
        # How many answers are forwarded before one is lost; None: all.
        self._given_before_loss: int | None = None
        self._lost = threading.Event()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._listen, name="delay proxy", daemon=True)
        self._thread.start()

    def traffic(self) -> Traffic:
        """The traffic so far."""
        with self._lock:
            return self._traffic

    def lose_next_answer(self, *, after: int = 0) -> threading.Event:
        """Cut the connection that gets the next answer, instead of forwarding the answer.

        The server has done what was requested, and the client does not learn it. ``after``: how
        many answers are forwarded first. The event is set when the answer was lost.
        """
        with self._lock:
            self._lost = threading.Event()
            self._given_before_loss = after
            return self._lost

    def lose_nothing(self) -> None:
        """Cancel ``lose_next_answer`` if no answer was lost yet."""
        with self._lock:
            self._given_before_loss = None

    def lead_to(self, target: str | tuple[str, int]) -> None:
        """Forward new connections to another target."""
        self._target = target

    def cut_all(self) -> None:
        """Cut every connection; new ones are accepted."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.cut()

    def close(self) -> None:
        """Stop listening and cut everything. Closing twice is allowed."""
        if self._closed:
            return
        self._closed = True
        # Closing a socket does not wake a thread that waits on it; shutting it down does.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        self.cut_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- called by links --------------------------------------------------------------------

    def _listen(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = self._connect()
            except OSError:
                # As on a real link: the connection is established and then breaks.
                client.close()
                continue
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = _Link(self, client, server)
            with self._lock:
                self._links.add(link)
                self._traffic = self._traffic._replace(connections=self._traffic.connections + 1)
            link.start()

    def _connect(self) -> socket.socket:
        if isinstance(self._target, str):
            made = socket.socket(socket.AF_UNIX)
            try:
                made.connect(self._target)
            except OSError:
                made.close()
                raise
            return made
        made = socket.create_connection(self._target)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def _sent_up(self, size: int, *, new_trip: bool) -> None:
        with self._lock:
            old = self._traffic
            self._traffic = old._replace(
                round_trips=old.round_trips + new_trip, bytes_up=old.bytes_up + size
            )

    def _sent_down(self, size: int) -> None:
        with self._lock:
            self._traffic = self._traffic._replace(bytes_down=self._traffic.bytes_down + size)

    def _is_to_be_lost(self) -> bool:
        with self._lock:
            if self._given_before_loss is None:
                return False
            if self._given_before_loss:
                self._given_before_loss -= 1
                return False
            self._given_before_loss = None
            self._lost.set()
            return True

    def _ended(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)


class _Link:
    """One connection through the proxy: two directions, each with its own delay line."""

    def __init__(self, proxy: DelayProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._state = threading.Lock()
        # True if the client received something since it last began to send.
        self._answered = True
        self._directions = 2

    def start(self) -> None:
        delay_s = self._proxy.delay_s
        up = _DelayLine(self._client, self._server, delay_s, arrived=self._asked)
        down = _DelayLine(self._server, self._client, delay_s, leaves=self._answers)
        for line in (up, down):
            threading.Thread(target=line.read, daemon=True).start()
            threading.Thread(target=self._write, args=(line,), daemon=True).start()

    def cut(self) -> None:
        for end in (self._client, self._server):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                # The other end has already cut it.
                pass

    def _write(self, line: _DelayLine) -> None:
        line.write()
        with self._state:
            self._directions -= 1
            last = not self._directions
        if last:
            self._proxy._ended(self)
            self._client.close()
            self._server.close()

    def _asked(self, size: int) -> None:
        with self._state:
            new_trip, self._answered = self._answered, False
        self._proxy._sent_up(size, new_trip=new_trip)

    def _answers(self, size: int) -> bool:
        if self._proxy._is_to_be_lost():
            self.cut()
            return False
        with self._state:
            self._answered = True
        self._proxy._sent_down(size)
        return True


class _DelayLine:
    """Forwards bytes from one socket to another, each chunk with its delay.

    ``arrived`` is called for chunks read, ``leaves`` for chunks about to be written; if it returns
    False, the chunk is dropped and the line ends.
    """

    def __init__(
        self,
        source: socket.socket,
        target: socket.socket,
        delay_s: float,
        *,
        arrived: Callable[[int], None] = lambda size: None,
        leaves: Callable[[int], bool] = lambda size: True,
    ) -> None:
        self._arrived = arrived
        self._leaves = leaves
        self._source = source
        self._target = target
        self._delay_s = delay_s
        self._changed = threading.Condition()
        self._waiting: deque[tuple[float, bytes]] = deque()
        self._waiting_bytes = 0
        self._stopped = False

    def read(self) -> None:
        """Read from the source until it ends."""
        while True:
            try:
                chunk = self._source.recv(_CHUNK)
            except OSError:
                chunk = b""
            due = time.monotonic() + self._delay_s
            if chunk:
                self._arrived(len(chunk))
            with self._changed:
                self._waiting.append((due, chunk))
                self._waiting_bytes += len(chunk)
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopped or self._waiting_bytes < _WINDOW_BYTES)
                if not chunk or self._stopped:
                    return

    def write(self) -> None:
        """Write each chunk when it is due, until the end."""
        try:
            while chunk := self._next():
                if not self._leaves(len(chunk)):
                    return
                self._target.sendall(chunk)
            self._target.shutdown(socket.SHUT_WR)
        except OSError:
            # The target has closed; the sender notices the end of its connection.
            self._shut_source()
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()

    def _next(self) -> bytes:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            due, chunk = self._waiting.popleft()
            self._waiting_bytes -= len(chunk)
            self._changed.notify_all()
        while (left := due - time.monotonic()) > 0:
            time.sleep(left)
        return chunk

    def _shut_source(self) -> None:
        try:
            self._source.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
