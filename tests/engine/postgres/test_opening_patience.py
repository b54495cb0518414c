"""A server that is away when a store is opened is waited for; one that refuses us is not."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest

pytest.importorskip("psycopg")

import psycopg

import casstore
from casstore.engine.postgres import connections
from casstore.errors import InvalidInputError, StorageUnavailableError
from casstore.testing.engine_threads import TIMEOUT_S, start
from servers.postgres import Server
from tests.engine.postgres.server import chosen_installation
from tests.faults.children import killed_at_the_end

# A test that waits where it should not hangs.
FOR_EVER = "patience=86400"


class Gatekeeper:
    """Answers every connection with an error of this code, as a server does it."""

    def __init__(self, code: str) -> None:
        self.code = code
        self.turned_away = 0
        self.seen = threading.Semaphore(0)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def close(self) -> None:
        # A thread that waits in accept does not notice that its socket was closed.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                with client, suppress(OSError):
                    self._turn_away(client)

    def _turn_away(self, client: socket.socket) -> None:
        while True:
            (size_bytes,) = struct.unpack("!i", client.recv(4, socket.MSG_WAITALL))
            asked = client.recv(size_bytes - 4, socket.MSG_WAITALL)
            if struct.unpack("!i", asked[:4])[0] >> 16 == 3:
                break
            client.sendall(b"N")  # neither TLS nor GSS
        fields = [b"SFATAL", b"VFATAL", b"C" + self.code.encode(), "Mнет".encode()]
        body = b"\0".join(fields) + b"\0\0"
        # Counted first: the client may read the count as soon as it has the answer.
        self.turned_away += 1
        client.sendall(b"E" + struct.pack("!i", len(body) + 4) + body)
        self.seen.release()


@contextmanager
def gatekeeper(code: str) -> Iterator[Gatekeeper]:
    with closing(Gatekeeper(code)) as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(chosen_installation(), tcp=True) as server:
        yield server


def test_open_waits_for_a_server_that_is_restarting(server: Server) -> None:
    casstore.open(server.url(schema="kept")).close()
    server.stop()
    with pytest.raises(StorageUnavailableError):
        casstore.open(server.url(schema="kept", patience="0"))
    opening = start(lambda: casstore.open(server.url(schema="kept"), create=False).close())
    server.start()
    opening.result(TIMEOUT_S)


def test_open_reconnects_if_the_connection_is_lost_while_opening(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[connections.Client] = []

    def connect(conninfo: str, **options: object) -> connections.Client:
        made = real(conninfo, **options)  # type: ignore[arg-type]
        if not lost:
            with psycopg.connect(server.url(), autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s)", (made.info.backend_pid,))
            lost.append(made)
        return made

    real = connections.Client.connect
    monkeypatch.setattr(connections.Client, "connect", connect)
    casstore.open(server.url(schema="lost")).close()
    assert lost[0].closed


def test_a_server_that_is_starting_is_retried_whatever_its_language() -> None:
    with gatekeeper("57P03") as starting:
        opening = start(lambda: casstore.open(starting.url + "?patience=2"))
        for _ in range(9):
            assert starting.seen.acquire(timeout=TIMEOUT_S)
        with pytest.raises(StorageUnavailableError):
            opening.result(TIMEOUT_S)


@pytest.mark.parametrize("code", ["28P01", "28000", "3D000"])
def test_a_server_that_rejects_a_connection_is_not_retried(code: str) -> None:
    with gatekeeper(code) as refusing:
        with pytest.raises(StorageUnavailableError, match="нет"):
            casstore.open(f"{refusing.url}?{FOR_EVER}")
        # Twice to connect, and twice whether anybody is there: it might have been starting.
        assert refusing.turned_away == 4


def test_open_reports_a_wrong_user_database_host_or_option_at_once(server: Server) -> None:
    url = server.url(tcp=True)
    for wrong in (
        url.replace("postgres@", "nobody_of_that_name@"),
        url.removesuffix("/postgres") + "/no_such_database",
        "postgresql://no-such-host.invalid/d",
        "postgresql:///?service=no_such_service",
    ):
        with pytest.raises(StorageUnavailableError):
            casstore.open(wrong + ("&" if "?" in wrong else "?") + FOR_EVER)
    with pytest.raises(InvalidInputError):
        casstore.open(f"{url}?nonsense=1&{FOR_EVER}")
    if not server.installation.name.startswith("debian"):
        with pytest.raises(StorageUnavailableError, match="SSL"):
            casstore.open(f"{url}?sslmode=require&{FOR_EVER}")


def test_open_waits_for_a_server_without_a_free_connection() -> None:
    with Server(chosen_installation(), tcp=True) as server:
        server.stop()
        server.settings = {
            **server.settings, "max_connections": "2", "superuser_reserved_connections": "0",
        }  # fmt: skip
        server.start()
        taken = [psycopg.connect(server.url()) for _ in range(2)]
        with pytest.raises(StorageUnavailableError):
            casstore.open(server.url(patience="0"))
        opening = start(lambda: casstore.open(server.url() + f"&pool=1&{FOR_EVER}").close())
        with pytest.raises(TimeoutError):
            opening.result(0.3)
        for each in taken:
            each.close()
        opening.result(TIMEOUT_S)


def test_open_waits_until_a_standby_becomes_the_primary(server: Server) -> None:
    """As it is found after a failover: it answers, and takes no writes yet."""
    with psycopg.connect(server.url(), autocommit=True) as connection:
        connection.execute("CREATE DATABASE waiting")
        connection.execute("ALTER DATABASE waiting SET default_transaction_read_only = on")
        url = server.url("waiting", target_session_attrs="read-write")
        with pytest.raises(StorageUnavailableError):
            casstore.open(url + "&patience=0")
        opening = start(lambda: casstore.open(f"{url}&{FOR_EVER}").close())
        with pytest.raises(TimeoutError):
            opening.result(0.3)
        connection.execute("ALTER DATABASE waiting RESET default_transaction_read_only")
    opening.result(TIMEOUT_S)


def test_open_does_not_wait_for_a_silent_host_longer_than_the_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever takes the connection never answers; by itself psycopg would wait for 130 seconds."""
    monkeypatch.delenv("PGCONNECT_TIMEOUT", raising=False)
    monkeypatch.setattr(connections, "_CONNECT_S", 2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://postgres@127.0.0.1:{silent.getsockname()[1]}/postgres?patience=0"
        opening = start(lambda: casstore.open(url))
        with pytest.raises(StorageUnavailableError):
            opening.result(TIMEOUT_S / 2)


def test_ctrl_c_ends_the_wait_of_open() -> None:
    code = "import casstore, sys; casstore.open(sys.argv[1])"
    with (
        gatekeeper("57P03") as starting,
        killed_at_the_end(
            subprocess.Popen(
                [sys.executable, "-c", code, f"{starting.url}?{FOR_EVER}"],
                stderr=subprocess.PIPE,
                text=True,
            )
        ) as waiting,
    ):
        for _ in range(4):
            assert starting.seen.acquire(timeout=TIMEOUT_S)
        waiting.send_signal(signal.SIGINT)
        _, said = waiting.communicate(timeout=TIMEOUT_S)
    assert waiting.returncode != 0
    assert said.strip().endswith("KeyboardInterrupt")
