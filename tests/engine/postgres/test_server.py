"""The servers that tests run against: they start, and never outlive who started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

psycopg = pytest.importorskip("psycopg")

from servers.postgres import Installation, Server, installations
from tests.engine.postgres.server import started

TOOLS = Path(__file__).parent.parent.parent.parent / "tools"
# Long enough for any machine, short enough that a server that stays ends as a failure.
TIMEOUT_S = 60.0


def wait_until_gone(*pids: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a process of the server outlived its starter"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture(params=installations(), ids=lambda item: item.name)
def own_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of this test alone, of each installation."""
    installation: Installation = request.param
    server = started(Server(installation))
    yield server
    server.remove()


def test_the_test_server_keeps_rows_over_a_restart_and_remove_leaves_nothing(
    own_server: Server,
) -> None:
    with psycopg.connect(own_server.url()) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 7 AS number")
    own_server.stop()
    own_server.start()
    with psycopg.connect(own_server.url()) as connection:
        assert connection.execute("SELECT number FROM kept").fetchone() == (7,)
        version = connection.info.server_version
    assert version >= 150_000
    pid = own_server.pid
    own_server.remove()
    assert not alive(pid)
    assert not own_server.place.exists()


def test_killing_the_test_server_ends_its_connections_and_it_can_restart(
    postgres_server: Server,
) -> None:
    with Server(postgres_server.installation) as server:
        connection = psycopg.connect(server.url())
        backend = connection.info.backend_pid
        pid = server.pid
        server.kill()
        wait_until_gone(pid, backend)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
        connection.close()
        # What was killed can be had again: that is what a crash test needs.
        server.start()
        with psycopg.connect(server.url()) as again:
            assert again.execute("SELECT 1").fetchone() == (1,)


STARTER = """
import os, signal, sys
# Who runs tests in the background of a shell leaves them deaf to it.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, sys.argv[1])
from servers.postgres import Server
server = Server()
server.create()
server.start()
print(server.pid, server.place, flush=True)
sys.stdin.read()
server.remove()
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_server_does_not_outlive_its_parent_process(end: signal.Signals) -> None:
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(TOOLS)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    with starter:
        assert starter.stdout is not None
        pid, place = starter.stdout.readline().split()
        assert alive(int(pid))
        # To the whole group, as a terminal sends Ctrl-C.
        os.killpg(starter.pid, end)
        starter.wait(TIMEOUT_S)
    wait_until_gone(int(pid))
    deadline = time.monotonic() + TIMEOUT_S
    while Path(place).exists():
        assert time.monotonic() < deadline, "the server's directory stayed"
        time.sleep(0.02)


def test_the_shared_server_is_the_same_for_every_test_and_schemas_differ(
    postgres_server: Server, postgres_url: str
) -> None:
    assert "schema=test_" in postgres_url
    with psycopg.connect(postgres_server.url()) as connection:
        assert connection.execute("SHOW fsync").fetchone() == ("off",)
