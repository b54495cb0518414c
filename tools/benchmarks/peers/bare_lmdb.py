"""Plain LMDB: one row for each message with its parent, and one for each head.

Messages are packed and compressed one by one, as an afternoon's work would do it. Nothing is
checked on reading, and nothing stops two writers from overwriting each other's head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import zstandard
from blake3 import blake3

from benchmarks.peers.peer import Flush, Peer, Turn


class BareLmdb(Peer):
    """Every transaction flushed."""

    name = "bare LMDB"
    flush = Flush.EACH
    sync = True

    def start(self, place: Path) -> None:
        """Open the environment."""
        self._place = place
        (place / "env").mkdir(exist_ok=True)
        self._env = lmdb.open(str(place / "env"), map_size=1 << 40, max_dbs=3, sync=self.sync)
        self._nodes = self._env.open_db(b"nodes")
        self._heads = self._env.open_db(b"heads")
        self._states = self._env.open_db(b"states")
        self._deflate = zstandard.ZstdCompressor(level=3).compress
        self._inflate = zstandard.ZstdDecompressor().decompress

    def stop(self) -> None:
        """Close the environment."""
        self._env.close()

    def _append(self, txn: lmdb.Transaction, source: str, target: str, turn: Turn) -> None:
        parent = txn.get(source.encode(), b"", db=self._heads)
        for message in turn:
            row = self._deflate(msgpack.packb([parent, message]))
            parent = message["id"].encode()
            txn.put(parent, row, db=self._nodes)
        txn.put(target.encode(), parent, db=self._heads)

    def commit(self, session: str, turn: Turn) -> None:
        """One transaction."""
        self.branch(session, session, turn)

    def bulk(self, sessions: Mapping[str, Sequence[Turn]]) -> None:
        """One transaction for all."""
        with self._env.begin(write=True) as txn:
            for session, turns in sessions.items():
                for turn in turns:
                    self._append(txn, session, session, turn)

    def path(self, session: str) -> Sequence[Any]:
        """From the leaf to the root, then turned round."""
        found: list[Any] = []
        with self._env.begin() as txn:
            step = txn.get(session.encode(), b"", db=self._heads)
            while step:
                step, message = msgpack.unpackb(self._inflate(txn.get(step, b"", db=self._nodes)))
                found.append(message)
        found.reverse()
        return found

    def edit(self, session: str, state: Mapping[str, Any], key: str) -> None:
        """The whole state, compressed, under its digest."""
        packed = msgpack.packb(dict(state))
        with self._env.begin(write=True) as txn:
            digest = blake3(packed).digest()
            txn.put(digest, self._deflate(packed), db=self._states)
            txn.put(b"state of " + session.encode(), digest, db=self._heads)

    def fork(self, source: str, target: str) -> None:
        """One row."""
        self.branch(source, target, ())

    def branch(self, source: str, target: str, turn: Turn) -> None:
        """One transaction."""
        with self._env.begin(write=True) as txn:
            self._append(txn, source, target, turn)

    def collect(self, gone: Sequence[str]) -> None:
        """Walk from the heads that stay, delete the other rows; one transaction."""
        with self._env.begin(write=True) as txn:
            for session in gone:
                txn.delete(session.encode(), db=self._heads)
            live: set[bytes] = set()
            for _, leaf in txn.cursor(db=self._heads):
                step = bytes(leaf)
                while step and step not in live:
                    live.add(step)
                    step = msgpack.unpackb(self._inflate(txn.get(step, b"", db=self._nodes)))[0]
            for key in [key for key, _ in txn.cursor(db=self._nodes) if key not in live]:
                txn.delete(key, db=self._nodes)

    def pack(self) -> None:
        """Copy without free pages, and take the copy."""
        copy = self._place / "copy"
        copy.mkdir()
        self._env.copy(str(copy), compact=True)
        self._env.close()
        (copy / "data.mdb").replace(self._place / "env" / "data.mdb")
        copy.rmdir()
        self.start(self._place)


class BareLmdbLater(BareLmdb):
    """No flush a transaction."""

    name = "bare LMDB, no sync"
    flush = Flush.LATER
    sync = False
