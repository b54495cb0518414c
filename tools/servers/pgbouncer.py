"""PgBouncer before a test server, in transaction mode: clients share a few backends."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from servers.keeping import Kept, Order
from servers.postgres import Server, free_port

# Where Debian puts it is on no path but root's.
_PLACES = "/usr/sbin:/usr/bin:/usr/local/bin"
_START_S = 60.0
_LOOK_S = 0.02

_CONFIG = """\
[databases]
* = host={place} port={port} user=postgres

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {backends}
max_prepared_statements = 0
ignore_startup_parameters = extra_float_digits
logfile = {log}
"""


def program() -> str | None:
    """Where PgBouncer is, if it is installed."""
    return shutil.which("pgbouncer") or shutil.which("pgbouncer", path=_PLACES)


class Bouncer:
    """A context that runs PgBouncer before ``server`` with so few backends that clients share."""

    def __init__(self, server: Server, *, backends: int = 2) -> None:
        self._server = server
        self._backends = backends
        self.port = free_port()
        self._kept: Kept | None = None

    def __enter__(self) -> Self:
        found = program()
        assert found is not None, "PgBouncer is not installed"
        server = self._server
        place = server.place / "bouncer"
        place.mkdir(exist_ok=True)
        config = place / "pgbouncer.ini"
        text = _CONFIG.format(
            place=server.place, port=server.port, listen=self.port, backends=self._backends,
            log=place / "log",
        )  # fmt: skip
        if _version_is_old(found):
            # It knows no prepared statements at all, and not the setting that says so.
            text = text.replace("max_prepared_statements = 0\n", "")
        config.write_text(text)
        if server.user is not None:
            shutil.chown(place, server.user)
        self._kept = Kept(
            Order(
                argv=[found, str(config)],
                log=place / "stderr",
                cwd=place,
                remove=place,
                env={"PATH": _PLACES},
                user=server.user,
                stop=signal.SIGINT,
                abandon=signal.SIGTERM,
            )
        )
        self._wait(place)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._kept is not None:
            self._kept.stop()

    def _wait(self, place: Path) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
                return
            except ConnectionRefusedError:
                assert self._kept is not None
                if not self._kept.running or time.monotonic() > deadline:
                    self._kept.stop()
                    said = (place / "stderr").read_text(errors="replace")
                    raise RuntimeError(f"PgBouncer did not start: {said}") from None
                time.sleep(_LOOK_S)


def _version_is_old(found: str) -> bool:
    words = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
    numbers = words.stdout.split()[1].split(".")
    return [int(number) for number in numbers[:2]] < [1, 21]
