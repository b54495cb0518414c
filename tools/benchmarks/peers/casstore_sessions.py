"""casstore's own sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import casstore
from benchmarks.peers.peer import Flush, Peer, Turn
from casstore import Checkpoint, Commit, NodeDraft
from casstore.format.digest import Digest
from casstore.maintenance import gc
from casstore.maintenance.compact import compact
from casstore.objects.edit import Set


class Casstore(Peer):
    """A commit a turn, with its stamp and a checkpoint that stays readable."""

    name = "casstore"
    flush = Flush.EACH
    durability = "full"

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._states: dict[str, Digest] = {}

    def start(self, place: Path) -> None:
        """Open the store."""
        self._place = place
        self._store = casstore.open(place / "store", self.durability)

    def stop(self) -> None:
        """Close the store."""
        self._store.close()

    def settle(self, place: Path) -> None:
        """Apply the log. Nothing is that old, so this packs nothing."""
        self._store.pack(min_age_ms=1 << 40)

    def commit(self, session: str, turn: Turn) -> None:
        """One commit."""
        number = self._turns[session] = self._turns.get(session, 0) + 1
        self._store.session(session).commit(
            Commit(
                append=[NodeDraft(message["id"], message) for message in turn],
                checkpoint=Checkpoint(turn_state={"turn_index": number}),
                turn=f"turn-{number}",
            )
        )

    def bulk(self, sessions: Mapping[str, Sequence[Turn]]) -> None:
        """One commit a session."""
        for session, turns in sessions.items():
            self.commit(session, [message for turn in turns for message in turn])

    def path(self, session: str) -> Sequence[Any]:
        """Checked against its digests on the way."""
        return list(self._store.session(session).nodes())

    def edit(self, session: str, state: Mapping[str, Any], key: str) -> None:
        """The new key alone: the store has the rest. Two writes, the state and the commit."""
        last = self._states.get(session)
        if last is None:
            digest = self._store.put_value(dict(state))
        else:
            digest = self._store.edit(last, Set((key,), state[key]))
        checkpoint = Checkpoint(tool_state=casstore.Link(digest))
        self._store.session(session).commit(Commit(checkpoint=checkpoint))
        self._states[session] = digest

    def fork(self, source: str, target: str) -> None:
        """One row."""
        self._store.fork(source, target)
        self._turns[target] = self._turns[source]

    def branch(self, source: str, target: str, turn: Turn) -> None:
        """A fork with its first nodes, in one write."""
        nodes = [NodeDraft(message["id"], message) for message in turn]
        self._store.fork(source, target, append=nodes)
        self._turns[target] = self._turns[source] + 1

    def diff(self, left: str, right: str) -> int:
        """Reads only what differs."""
        found = self._store.compare(left, right)
        return len(found.added) + len(found.dropped)

    def collect(self, gone: Sequence[str]) -> None:
        """Delete, mark and sweep."""
        for session in gone:
            self._store.delete_session(session)
        gc.collect(self._store, grace_ms=0)

    def pack(self) -> None:
        """Join slabs, then give free pages back to the file system."""
        self._store.pack(min_age_ms=0)
        self.stop()
        compact(self._place / "store")
        self.start(self._place)


class CasstoreRelaxed(Casstore):
    """The same, and no turn waits for a flush."""

    name = "casstore, `relaxed`"
    flush = Flush.LATER
    durability = "relaxed"
