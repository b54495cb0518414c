"""Three PostgreSQL nodes of which any two have every commit that was acknowledged.

The primary waits for one of two standbys (``ANY 1``). When it is lost, the standby that has
received more becomes the primary: at least one of them has everything that was acknowledged, and a
standby that has more has all that the other has. The third node then follows the new primary, and
the lost one is made anew from it.

Standbys are fed over links with delay, each with another one, so that something is always under way
and one standby is always behind; when the primary is lost, what is under way is lost with it.
Without that, nodes on one machine have everything at once, and no mistake would ever show.
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
# How late each node gets what the primary writes.
FEED_DELAYS_S = (0.002, 0.020, 0.005)
SETTINGS: Mapping[str, str] = {
    **DURABLE,
    "shared_buffers": "32MB",
    "wal_level": "replica",
    "max_wal_senders": "10",
    "wal_keep_size": "256MB",
    "hot_standby": "on",
    # How soon a standby that lost its primary tries again.
    "wal_retrieve_retry_interval": "100ms",
    "synchronous_standby_names": f"ANY 1 ({', '.join(f'n{at}' for at in range(NODES))})",
}


class Cluster:
    """A primary and two standbys, each behind a link of its own that can lose answers."""

    def __init__(
        self, installation: Installation | None = None, *, parent: Path | None = None
    ) -> None:
        self._installation = installation
        # In memory if there is such a place: three nodes flush a lot.
        memory = Path("/dev/shm")
        self._parent = parent or (memory if memory.is_dir() else None)
        self._nodes: list[Server | None] = [None] * NODES
        # Where clients connect stays the same, whatever stands behind it.
        self._links: list[DelayProxy] = []
        # Where each node is fed from.
        self._feeds: list[DelayProxy] = []
        self._primary = 0

    # --- its life ---------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            first = self._new_node(0)
            first.create()
            # Alone it would wait for a standby that is not there yet.
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
        """End all nodes and remove what they wrote."""
        for link in (*self._links, *self._feeds):
            link.close()
        for node in self._nodes:
            if node is not None:
                node.remove()

    # --- reaching it ------------------------------------------------------------------------

    @property
    def primary(self) -> Server:
        """The node that takes writes."""
        node = self._nodes[self._primary]
        assert node is not None
        return node

    @property
    def link(self) -> DelayProxy:
        """The link that leads to the primary."""
        return self._links[self._primary]

    def url(self, database: str = "postgres", **parameters: str) -> str:
        """All nodes by their links; the client finds out which one takes writes."""
        hosts = ",".join(f"127.0.0.1:{link.port}" for link in self._links)
        words = {"target_session_attrs": "read-write", "connect_timeout": "10", **parameters}
        query = "&".join(f"{name}={quote(value)}" for name, value in words.items())
        return f"postgresql://postgres@{hosts}/{database}?{query}"

    def standbys_in_step(self) -> int:
        """How many standbys the primary counts on at this moment."""
        with psycopg.connect(self.primary.url()) as connection:
            found = connection.execute(
                "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'quorum'"
            ).fetchone()
        assert found is not None
        return int(found[0])

    def standbys(self) -> list[int]:
        """The numbers of the nodes that follow the primary."""
        return [at for at in range(NODES) if at != self._primary]

    # --- losing a node ----------------------------------------------------------------------

    def stop_feeding(self, at: int) -> None:
        """Let a standby have nothing of what the primary writes from now on."""
        self._feeds[at].lead_to(str(self._node(at).place / "nobody listens here"))
        self._feeds[at].cut_all()

    def fail_over(self) -> None:
        """Kill the primary, promote the standby that has most, and let the third follow it."""
        lost = self._primary
        for feed in self._feeds:
            feed.cut_all()
        self.primary.kill()
        self._links[lost].cut_all()
        chosen = max(self.standbys(), key=self._received)
        self._primary = chosen
        self.primary.promote()
        # The third node tries again and again to reach its primary, and finds the new one.
        for feed in self._feeds:
            feed.lead_to(self._socket(chosen))
        gone, self._nodes[lost] = self._nodes[lost], None
        assert gone is not None
        gone.remove()

    def replace_lost(self) -> None:
        """Make a standby in the place of a node that was lost."""
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
        """How much of the primary's log a standby has, on its disk."""
        with psycopg.connect(self._node(at).url()) as connection:
            found = connection.execute(
                "SELECT coalesce(pg_last_wal_receive_lsn(), pg_last_wal_replay_lsn()) - '0/0'"
            ).fetchone()
        assert found is not None
        return int(found[0])
