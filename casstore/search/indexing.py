"""Brings an index up to date with its store, in transactions of bounded size.

Each transaction begins with what the tables say. So an update that was interrupted continues where
it stopped, and two processes that update at the same time share the work. ``Versioning`` engines
report which rows have changed; otherwise all head rows are compared with what is indexed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

from casstore.engine.protocol import Versioning
from casstore.objects import graph
from casstore.objects.node_index import NodeIndex
from casstore.search import contents, lineage
from casstore.search.dating import Times, commit_times
from casstore.search.docs import COMPONENT, Docs
from casstore.search.entries import EntryUpdater
from casstore.search.lineage import IndexedGraph, doc_id
from casstore.search.tables import SHORT, Database, next_id, read_meta, write_meta
from casstore.session.attempts import read_again
from casstore.session.state import HeadRow, Runtime, decode_head, head_key, manifest_in
from casstore.store import Store

# The most texts of one transaction. Other processes that update the index wait for its end.
_BUDGET: Final = 20_000
_PAGE: Final = 1024
# Comparing this many rows that have not changed counts like one text.
_ROWS_A_TEXT: Final = 16
_READ: Final = 256
# An index with more removed texts than this, and fewer others, is rebuilt: the words of removed
# texts are still in it.
_LEAST_GARBAGE: Final = 10_000

#: Called with the number of texts indexed so far.
Progress = Callable[[int], None]


class _State(NamedTuple):
    """A row of ``states``."""

    id: int
    segment: int
    nodes: int


class Updater:
    """One update of an index."""

    def __init__(self, store: Store, db: Database, progress: Progress | None = None) -> None:
        self._engine = store.engine
        self._runtime: Runtime = store._runtime
        self._db = db
        self._progress = progress
        self._docs = Docs(db)
        self._entries = EntryUpdater(store, db, self._docs)
        # The head row of the session that is being indexed, and when its nodes were committed.
        self._times: tuple[bytes, Times] | None = None
        self._left = 0
        # Segments that may have nodes that no state needs.
        self._loose: set[int] = set()

    def run(self) -> int:
        """Bring the whole index up to date; returns how many texts were added."""
        db = self._db
        if self._is_mostly_garbage():
            with db.writing():
                if self._is_mostly_garbage():
                    db.clear()
        finished = self._is_current()
        while not finished:
            with db.writing():
                self._left = _BUDGET
                finished = self._step()
                self._docs.flush()
            if self._progress is not None:
                self._progress(self._docs.added)
        return self._docs.added

    def _is_mostly_garbage(self) -> bool:
        added, removed = (int(read_meta(self._db, name) or b"0") for name in ("added", "removed"))
        return removed > _LEAST_GARBAGE and removed > added - removed

    def _version(self) -> bytes | None:
        engine = self._engine
        return engine.rows_version() if isinstance(engine, Versioning) else None

    def _is_current(self) -> bool:
        """True if no head and no record has changed since the last update. Writes nothing."""
        engine, current = self._engine, read_meta(self._db, "current")
        if not isinstance(engine, Versioning) or current is None:
            return False
        if read_meta(self._db, "begun") is not None:
            return False
        if engine.rows_version() == current:
            return True
        return all(engine.changed_keys(table, current) == [] for table in ("heads", "records"))

    def _step(self) -> bool:
        """One transaction; True if the index is then as the store was when the update began."""
        db = self._db
        begun = read_meta(db, "begun")
        if begun is None:
            # Before anything is indexed, so that the next update sees all later changes.
            begun = self._version() or b""
            current = read_meta(db, "current")
            engine = self._engine
            if isinstance(engine, Versioning) and current is not None:
                heads = engine.changed_keys("heads", current)
                records = engine.changed_keys("records", current)
                if heads is not None and records is not None:
                    return self._change(heads, records, begun)
            write_meta(db, "begun", begun)
        if not self._scan() or not self._entries.scan(self._left):
            return False
        for name in ("begun", "scanned"):
            write_meta(db, name, None)
        self._loose.update([row[0] for row in db.rows("SELECT id FROM {s}segments")])
        self._docs.loosen_all()
        self._finish(begun)
        return True

    def _change(self, heads: Sequence[bytes], records: Sequence[bytes], version: bytes) -> bool:
        """Bring the sessions and entries with these rows up to date."""
        for key in sorted(set(heads)):
            if not self._session(key):
                return False
        if not self._entries.change(records, self._left):
            return False
        self._finish(version)
        return True

    def _finish(self, version: bytes) -> None:
        """Remove unused segments and docs; the index is then at ``version``."""
        self._docs.removed += lineage.trim(self._db, self._loose)
        self._docs.trim()
        write_meta(self._db, "current", version or None)

    def _scan(self) -> bool:
        """Compare the head rows with what is indexed, from where the last transaction stopped."""
        db = self._db
        start = read_meta(db, "scanned") or b""
        while self._left > 0:
            page = self._engine.scan_rows("heads", start=start, limit=_PAGE)
            is_last = len(page) < _PAGE
            behind, stop = ("", ()) if is_last else (" AND s.key <= ?", (page[-1].key,))
            known = {
                bytes(key): bytes(manifest)
                for key, manifest in db.rows(
                    "SELECT s.key, t.manifest FROM {s}sessions s JOIN {s}states t "
                    f"ON t.id = s.state WHERE s.key >= ?{behind} ORDER BY s.key",
                    (start, *stop),
                )
            }
            for key, row in page:
                if known.pop(key, None) == manifest_in(row):
                    continue
                if not self._session(key):
                    for gone in known:
                        if gone < key:
                            self._remove(gone)
                    write_meta(db, "scanned", key)
                    return False
            for gone in known:
                self._remove(gone)
            self._left -= len(page) // _ROWS_A_TEXT
            if is_last:
                return True
            start = page[-1].key + b"\0"
        write_meta(db, "scanned", start)
        return False

    # --- one session --------------------------------------------------------------------

    def _session(self, key: bytes) -> bool:
        """Bring one session up to date; False if the transaction's budget is used up before."""
        return read_again(lambda: self._attempt(key))

    def _attempt(self, key: bytes) -> bool:
        [row] = self._engine.get_rows([head_key(key)])
        if row is None:
            self._remove(key)
            return True
        self._left -= 1
        manifest_digest = manifest_in(row)
        old = self._state_of(key)
        same = self._db.rows("SELECT id FROM {s}states WHERE manifest = ?", (manifest_digest,))
        if same:
            self._assign(key, old, same[0][0])
            return True
        manifest = graph.read_manifest(self._runtime.reader(), manifest_digest)
        index = self._runtime.index(manifest)
        located = lineage.locate(self._db, index, None if old is None else old.segment)
        if located.nodes < index.count:
            located = self._add_nodes(key, row, index, located)
        if located.nodes < index.count:
            return False
        state = self._put_state(old, manifest_digest, located)
        reader = self._runtime.reader()
        parts = [
            (
                self._docs.put(digest, COMPONENT, partial(contents.component_text, reader, one)),
                state,
                name,
            )
            for name, digest, one in contents.components(manifest)
        ]
        self._docs.loosen("SELECT doc FROM {s}parts WHERE state = ?", state)
        self._db.run("DELETE FROM {s}parts WHERE state = ?", (state,))
        self._db.run_many("INSERT INTO {s}parts (doc, state, name) VALUES (?, ?, ?)", parts)
        self._assign(key, old, state)
        return True

    def _add_nodes(
        self, key: bytes, row: bytes, index: NodeIndex, located: IndexedGraph
    ) -> IndexedGraph:
        """Index the nodes after those indexed already (``located``), up to the budget of this
        transaction; returns what is indexed then.
        """
        start = located.nodes
        stop = min(index.count, start + max(0, self._left))
        if start == stop:
            return located
        segment = lineage.extended(self._db, located, index.place(start).digest)
        if self._times is None or self._times[0] != row:
            head: HeadRow = decode_head(row)
            times = commit_times(self._runtime, key, head, index.count, start)
            self._times = row, times
        _, times = self._times
        reader = self._runtime.reader()
        for first in range(start, stop, _READ):
            positions = range(first, min(stop, first + _READ))
            digests = index.digests(positions, ahead=True)
            self._db.run_many(
                "INSERT INTO {s}docs (id, digest, at_ms) VALUES (?, ?, ?)",
                [
                    (doc_id(segment.id, position), digest[:SHORT], times.at(position))
                    for position, digest in zip(positions, digests, strict=True)
                ],
            )
            for position, (_, text) in zip(
                positions, contents.node_texts(reader, digests), strict=True
            ):
                self._docs.add_text(doc_id(segment.id, position), text)
        self._docs.added += stop - start
        self._left -= stop - start
        self._db.run("UPDATE {s}segments SET stop = ? WHERE id = ?", (stop, segment.id))
        return IndexedGraph(segment._replace(stop=stop), stop)

    # --- states -------------------------------------------------------------------------

    def _state_of(self, key: bytes) -> _State | None:
        rows = self._db.rows(
            "SELECT t.id, t.segment, t.nodes FROM {s}sessions s JOIN {s}states t "
            "ON t.id = s.state WHERE s.key = ?",
            (key,),
        )
        return _State(*rows[0]) if rows else None

    def _put_state(self, old: _State | None, manifest: bytes, located: IndexedGraph) -> int:
        """The id of the state of a new manifest.

        It is the old state of the session, changed, unless other sessions are in that one too.
        """
        db = self._db
        segment, nodes = located.segment.id, located.nodes
        if old is not None and self._users(old.id) == 1:
            self._loose.add(old.segment)
            db.run(
                "UPDATE {s}states SET manifest = ?, segment = ?, nodes = ? WHERE id = ?",
                (manifest, segment, nodes, old.id),
            )
            return old.id
        made = next_id(db, "states")
        db.run(
            "INSERT INTO {s}states (id, manifest, segment, nodes) VALUES (?, ?, ?, ?)",
            (made, manifest, segment, nodes),
        )
        return made

    def _users(self, state: int) -> int:
        """How many sessions are in a state, counted up to two."""
        rows = self._db.rows("SELECT key FROM {s}sessions WHERE state = ? LIMIT 2", (state,))
        return len(rows)

    def _assign(self, key: bytes, old: _State | None, state: int) -> None:
        if old is not None and old.id == state:
            return
        self._db.run(
            "INSERT INTO {s}sessions (key, state) VALUES (?, ?) "
            "ON CONFLICT (key) DO UPDATE SET state = excluded.state",
            (key, state),
        )
        if old is not None:
            self._release(old)

    def _remove(self, key: bytes) -> None:
        """Remove a session that has no head any more from the index."""
        old = self._state_of(key)
        self._db.run("DELETE FROM {s}sessions WHERE key = ?", (key,))
        if old is not None:
            self._release(old)

    def _release(self, state: _State) -> None:
        """Remove a state if no session is in it."""
        if not self._users(state.id):
            self._loose.add(state.segment)
            self._docs.loosen("SELECT doc FROM {s}parts WHERE state = ?", state.id)
            self._db.run("DELETE FROM {s}parts WHERE state = ?", (state.id,))
            self._db.run("DELETE FROM {s}states WHERE id = ?", (state.id,))
