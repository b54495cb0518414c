"""The delaying link: what it passes on, how late, and that it counts round trips truthfully."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from servers.delay_proxy import DelayProxy, Traffic
from servers.postgres import Server

DELAY_S = 0.02
TIMEOUT_S = 60.0


class Echo:
    """A server that answers each line with that line, once it is complete."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = ("127.0.0.1", int(self._listener.getsockname()[1]))
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            try:
                for line in lines:
                    self.seen.append(line)
                    connection.sendall(line)
            except OSError:
                # Whoever asked has hung up.
                pass

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@contextmanager
def connected(proxy: DelayProxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), TIMEOUT_S) as made:
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield made


def receive(connection: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        more = connection.recv(size - len(got))
        assert more, "the connection ended"
        got += more
    return got


def test_bytes_are_forwarded_complete_and_with_delay(echo: Echo) -> None:
    with DelayProxy(echo.address, delay_s=DELAY_S) as proxy, connected(proxy) as client:
        said = bytes(range(10)).replace(b"\n", b"") * 200_000 + b"\n"
        began = time.monotonic()
        sender = threading.Thread(target=client.sendall, args=(said,))
        sender.start()
        assert receive(client, len(said)) == said
        sender.join()
        # Once each way; how much longer it took is the machine's affair.
        assert time.monotonic() - began >= 2 * DELAY_S
        assert proxy.traffic() == Traffic(1, 1, len(said), len(said))


def test_each_question_after_an_answer_is_a_round_trip(echo: Echo) -> None:
    with DelayProxy(echo.address) as proxy, connected(proxy) as client:
        for number in range(1, 8):
            client.sendall(b"question\n")
            receive(client, 9)
            assert proxy.traffic().round_trips == number


def test_pipelined_requests_are_one_round_trip(echo: Echo) -> None:
    with DelayProxy(echo.address) as proxy, connected(proxy) as client:
        # Nothing is answered before the line is complete.
        for part in (b"one ", b"question ", b"in ", b"pieces", b"\n"):
            client.sendall(part)
        receive(client, 23)
        assert proxy.traffic().round_trips == 1


def test_a_request_sent_before_the_answer_arrives_begins_no_further_round_trip(echo: Echo) -> None:
    delay_s = 0.1
    while True:
        with DelayProxy(echo.address, delay_s=delay_s) as proxy, connected(proxy) as client:
            echo.seen.clear()
            client.sendall(b"first\n")
            wait_for_a_line(echo)
            seen_at = time.monotonic()
            # The server has answered by now, or is about to; the client cannot know.
            client.sendall(b"second\n")
            # A machine that stood still for so long may have delivered the answer in between.
            in_time = time.monotonic() - seen_at < delay_s / 2
            receive(client, 13)
            trips = proxy.traffic().round_trips
            client.sendall(b"third\n")
            receive(client, 6)
            assert proxy.traffic().round_trips == trips + 1
        if in_time:
            assert trips == 1
            return
        delay_s *= 2


def wait_for_a_line(echo: Echo) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not echo.seen:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_pieces_of_an_answer_are_one_round_trip_and_connections_count_separately(
    echo: Echo,
) -> None:
    with DelayProxy(echo.address) as proxy:
        before = proxy.traffic()
        with connected(proxy) as first, connected(proxy) as second:
            for client in (first, second):
                client.sendall(b"one\ntwo\n")
                receive(client, 4)
                receive(client, 4)
        assert proxy.traffic().since(before) == Traffic(2, 2, 16, 16)


def test_losing_an_answer_cuts_the_client_after_the_server_received_the_request(
    echo: Echo,
) -> None:
    with DelayProxy(echo.address) as proxy:
        with connected(proxy) as client:
            client.sendall(b"before\n")
            receive(client, 7)
            lost = proxy.lose_next_answer()
            client.sendall(b"lost\n")
            try:
                assert client.recv(5) == b""
            except ConnectionResetError:
                pass
            assert lost.is_set()
            assert echo.seen == [b"before\n", b"lost\n"]
        with connected(proxy) as again:
            again.sendall(b"after\n")
            assert receive(again, 6) == b"after\n"


def test_the_connection_ends_if_the_server_is_closed(echo: Echo) -> None:
    echo.close()
    with DelayProxy(echo.address) as proxy, connected(proxy) as client:
        assert client.recv(1) == b""


def test_closing_cuts_every_connection(echo: Echo) -> None:
    with DelayProxy(echo.address) as proxy, connected(proxy) as client:
        client.sendall(b"question\n")
        receive(client, 9)
        proxy.close()
        assert client.recv(1) == b""
        with pytest.raises(ConnectionRefusedError), connected(proxy):
            pass


def test_the_proxy_counts_the_round_trips_of_psycopg(postgres_server: Server) -> None:
    psycopg = pytest.importorskip("psycopg")
    place = str(postgres_server.place / f".s.PGSQL.{postgres_server.port}")
    with DelayProxy(place) as proxy:
        url = postgres_server.url(port=proxy.port)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SELECT 1")

            def trips(*statements: str) -> int:
                before = proxy.traffic()
                for statement in statements:
                    connection.execute(statement, prepare=False)
                return proxy.traffic().since(before).round_trips

            assert trips("SELECT 1") == 1
            assert trips("SELECT 1", "SELECT 2", "SELECT 3") == 3
            # Long answers and long questions are one trip as well.
            assert trips("SELECT repeat('x', 3000000)") == 1
            assert trips(f"SELECT length('{'x' * 3_000_000}')") == 1
            assert trips("BEGIN", "SELECT 1", "COMMIT") == 3
            before = proxy.traffic()
            with connection.pipeline():
                for number in range(5):
                    connection.execute(f"SELECT {number}")
            # One, unless the server answers before all five have been sent.
            assert proxy.traffic().since(before).round_trips < 5
