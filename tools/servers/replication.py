"""Three PostgreSQL nodes, of which at least two have every acknowledged commit.

The primary waits for one of two standbys (``ANY 1``). When the primary is lost, the standby that
has received more becomes the primary: one of them has everything acknowledged, and the one with
more has everything that the other has. Then the third node follows the new primary, and the lost
node is recreated from it.

Each standby is fed through a proxy with a different delay, so that one standby is always behind and
data is always in transit. That data is lost with the primary. Without delays all nodes on one
machine would be equal, and faults would stay hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

import psycopg

from servers.delay_proxy import DelayProxy
from servers.postgres import DURABLE, PORT, Installation, Server

NODES = 3
# The delay of each node.
FEED_DELAYS_S = (0.002, 0.020, 0.005)
SETTINGS: Mapping[str, str] = {
    **DURABLE,
    "shared_buffers": "32MB",
    "wal_level": "replica",
    "max_wal_senders": "10",
    "wal_keep_size": "256MB",
    "hot_standby": "on",
    # How soon a standby retries after it has lost its primary.
    "wal_retrieve_retry_interval": "100ms",
    "synchronous_standby_names": f"ANY 1 ({', '.join(f'n{at}' for at in range(NODES))})",
}


class Cluster:
    """A primary and two standbys, each behind a proxy that can lose answers."""

    def __init__(
        self, installation: Installation | None = None, *, parent: Path | None = None
    ) -> None:
        self._installation = installation
        # In memory if possible: three nodes flush a lot.
        memory = Path("/dev/shm")
        self._parent = parent or (memory if memory.is_dir() else None)
        self._nodes: list[Server | None] = [None] * NODES
        # The addresses for clients; they stay the same when nodes are replaced.
        self._links: list[DelayProxy] = []
        # The proxies that feed the nodes.
        self._feeds: list[DelayProxy] = []
        self._primary = 0

    # --- its life ---------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            first = self._new_node(0)
            first.create()
            # Alone it would wait for a standby that does not exist yet.
            first.settings["synchronous_standby_names"] = ""
            first.start()
            self._feeds = [DelayProxy(self._socket(0), delay_s=delay) for delay in FEED_DELAYS_S]
            for at in range(1, NODES):
                self._join(at)
            first.stop()
            first.settings.update(SETTINGS)
            first.start()
            self._links = [DelayProxy(self._socket(at)) for at in range(NODES)]
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop all nodes and remove their files."""
        for link in (*self._links, *self._feeds):
            link.close()
        for node in self._nodes:
            if node is not None:
                node.remove()

    # --- reaching it ------------------------------------------------------------------------

    @property
    def primary(self) -> Server:
        """The node that accepts writes."""
        node = self._nodes[self._primary]
        assert node is not None
        return node

    @property
    def link(self) -> DelayProxy:
        """The proxy in front of the primary."""
        return self._links[self._primary]

    def url(self, database: str = "postgres", **parameters: str) -> str:
        """The URL with all nodes; the client finds the one that accepts writes."""
        hosts = ",".join(f"127.0.0.1:{link.port}" for link in self._links)
        words = {"target_session_attrs": "read-write", "connect_timeout": "10", **parameters}
        query = "&".join(f"{name}={quote(value)}" for name, value in words.items())
        return f"postgresql://postgres@{hosts}/{database}?{query}"

    def standbys_in_step(self) -> int:
        """How many standbys the primary currently counts as synchronous."""
        with psycopg.connect(self.primary.url()) as connection:
            found = connection.execute(
                "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'quorum'"
            ).fetchone()
        assert found is not None
        return int(found[0])

    def standbys(self) -> list[int]:
        """The numbers of the standbys."""
        return [at for at in range(NODES) if at != self._primary]

    # --- losing a node ----------------------------------------------------------------------

    def stop_feeding(self, at: int) -> None:
        """Cut a standby off from the primary's log."""
        self._feeds[at].lead_to(str(self._node(at).place / "no server listens here"))
        self._feeds[at].cut_all()

    def fail_over(self) -> None:
        """Kill the primary, promote the most advanced standby, and let the third node follow it."""
        lost = self._primary
        for feed in self._feeds:
            feed.cut_all()
        self.primary.kill()
        self._links[lost].cut_all()
        chosen = max(self.standbys(), key=self._received)
        self._primary = chosen
        self.primary.promote()
        # The third node keeps retrying, and finds the new primary.
        for feed in self._feeds:
            feed.lead_to(self._socket(chosen))
        gone, self._nodes[lost] = self._nodes[lost], None
        assert gone is not None
        gone.remove()

    def replace_lost(self) -> None:
        """Create a standby in place of a lost node."""
        for at, node in enumerate(self._nodes):
            if node is None:
                self._join(at)
                self._links[at].lead_to(self._socket(at))

    # --- parts ------------------------------------------------------------------------------

    def _new_node(self, at: int) -> Server:
        node = Server(self._installation, settings=SETTINGS, parent=self._parent)
        self._nodes[at] = node
        return node

    def _node(self, at: int) -> Server:
        node = self._nodes[at]
        assert node is not None
        return node

    def _join(self, at: int) -> None:
        node = self._new_node(at)
        node.create_standby(self.primary)
        feed = {"host": "127.0.0.1", "port": str(self._feeds[at].port)}
        node.settings["primary_conninfo"] = self.primary.conninfo(**feed, application_name=f"n{at}")
        node.start()

    def _socket(self, at: int) -> str:
        return str(self._node(at).place / f".s.PGSQL.{PORT}")

    def _received(self, at: int) -> int:
        """How much of the primary's log a standby has flushed."""
        with psycopg.connect(self._node(at).url()) as connection:
            found = connection.execute(
                "SELECT coalesce(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()) - '0/0'"
            ).fetchone()
        assert found is not None
        return int(found[0])
