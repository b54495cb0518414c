"""The entries of record systems, such as threads: indexes their texts, and proves hits in them.

A text of an entry is indexed under its hash, so a text of many threads is indexed once. An entry is
indexed again when its time, its size or its title has changed. A hit is proven by reading the
entry: it must still have the text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

from casstore.errors import CasstoreError
from casstore.format.digest import plain_hash
from casstore.maintenance import systems
from casstore.maintenance.systems import EntryText, RecordSystem, SystemEntry, prefix_of
from casstore.search.docs import Docs
from casstore.search.tables import Database, next_id
from casstore.search.texts import text_of
from casstore.session.found import Hit
from casstore.store import Store

# _MAX_PLACES: how many entries with one text a search tries at most. _KEPT: the texts of how many
# entries it keeps in memory.
_MAX_PLACES: Final = 16
_KEPT: Final = 8


def kinds(store: Store) -> dict[str, str]:
    """The kind of each record system's texts, by the system's name and by the kind itself."""
    found = systems.held_by(store).systems
    return {name: prefix_of(one) for one in found for name in (one.name, prefix_of(one))}


class EntryUpdater:
    """Indexes the entries of record systems, for one ``Updater``."""

    def __init__(self, store: Store, db: Database, docs: Docs) -> None:
        self._store = store
        self._db = db
        self._docs = docs
        self._left = 0

    def scan(self, budget: int) -> bool:
        """Index what changed in all systems; False if ``budget`` texts were not enough."""
        known = [row[0] for row in self._db.rows("SELECT DISTINCT system FROM {s}entries")]
        return self._update({*known, *systems.names(self._store.engine)}, budget)

    def change(self, records: Sequence[bytes], budget: int) -> bool:
        """As ``scan``, only for the systems that own these record rows."""
        named = {systems.name_of(key) for key in records}
        return self._update({name for name in named if name is not None}, budget)

    def _update(self, names: Iterable[str], budget: int) -> bool:
        self._left = budget
        for name in sorted(names):
            system = systems.load(name)
            # A str says why the record system cannot be loaded. Its texts stay in the index, and
            # searches leave them out.
            if not isinstance(system, str) and not self._system(system):
                return False
        return True

    def _system(self, system: RecordSystem) -> bool:
        known = {
            entry: (number, bytes(signature))
            for number, entry, signature in self._db.rows(
                "SELECT id, entry, signature FROM {s}entries WHERE system = ?", (system.name,)
            )
        }
        for entry in systems.all_entries(system, self._store):
            number, signature = known.pop(entry.id, (None, b""))
            if signature != _signature(entry):
                if self._left <= 0:
                    return False
                self._entry(system, entry, number)
        for number, _ in known.values():
            self._clear(number)
            self._db.run("DELETE FROM {s}entries WHERE id = ?", (number,))
        return True

    def _entry(self, system: RecordSystem, entry: SystemEntry, number: int | None) -> None:
        if number is None:
            number = next_id(self._db, "entries")
        else:
            self._clear(number)
        kind = prefix_of(system)
        places: dict[str, int] = {}
        for one in system.texts(self._store, entry.id):
            text = text_of(one.value)
            if text:
                digest = plain_hash(text.encode(errors="surrogatepass"))
                places[one.position] = self._docs.put(digest, kind, partial(str, text))
        self._left -= len(places) + 1
        self._db.run(
            "INSERT INTO {s}entries (id, system, entry, signature) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET signature = excluded.signature",
            (number, system.name, entry.id, _signature(entry)),
        )
        self._db.run_many(
            "INSERT INTO {s}places (entry, position, doc) VALUES (?, ?, ?)",
            [(number, position, doc) for position, doc in places.items()],
        )

    def _clear(self, number: int) -> None:
        self._docs.loosen("SELECT doc FROM {s}places WHERE entry = ?", number)
        self._db.run("DELETE FROM {s}places WHERE entry = ?", (number,))


def _signature(entry: SystemEntry) -> bytes:
    """A hash of what changes whenever the entry does: its time, size and title."""
    said = f"{entry.changed_at_ms} {entry.size_bytes} {entry.title}"
    return plain_hash(said.encode(errors="surrogatepass"), 16)


class EntryFinder:
    """Proves hits in entries, for one search."""

    def __init__(self, store: Store, db: Database) -> None:
        self._store = store
        self._db = db
        self._systems: dict[str, RecordSystem | str] = {}
        self._texts: dict[tuple[str, str], dict[str, EntryText]] = {}

    def prove(self, doc: int, digest: bytes, score: float) -> tuple[Hit, str] | None:
        """The hit for a doc, and the doc's text; None if no entry has the text now."""
        rows = self._db.rows(
            "SELECT e.system, e.entry, p.position FROM {s}places p "
            f"JOIN {{s}}entries e ON e.id = p.entry WHERE p.doc = ? LIMIT {_MAX_PLACES}",
            (doc,),
        )
        for name, entry, position in rows:
            if name not in self._systems:
                self._systems[name] = systems.load(name)
            system = self._systems[name]
            if isinstance(system, str):
                continue
            one = self._read(system, entry).get(position)
            text = "" if one is None else text_of(one.value)
            if one is None or plain_hash(text.encode(errors="surrogatepass")) != digest:
                continue
            time_ms = one.made_at_ms
            if time_ms is None:
                found = system.find_entry(self._store, entry)
                time_ms = None if found is None else found.changed_at_ms
            kind = prefix_of(system)
            place = f"{kind}:{entry}", position
            hit = Hit(kind, None, None, None, None, *place, "", (), score, time_ms, (), 0)
            return hit, text
        return None

    def _read(self, system: RecordSystem, entry: str) -> dict[str, EntryText]:
        key = system.name, entry
        if key not in self._texts:
            if len(self._texts) >= _KEPT:
                self._texts.pop(next(iter(self._texts)))
            try:
                found = {one.position: one for one in system.texts(self._store, entry)}
            except CasstoreError:
                # It was deleted, or is being changed: what cannot be read is not found.
                found = {}
            self._texts[key] = found
        return self._texts[key]
