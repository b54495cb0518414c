"""Adds docs and their texts to an index, each text once, and removes unreferenced docs.

A doc is the index's row for one text; ``tables`` has the details.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from casstore.search.tables import Database, next_id, read_meta, write_meta

#: The kinds of docs; those of record systems have the names of their systems.
NODE: Final = "node"
COMPONENT: Final = "component"
# How many characters of texts are gathered in memory before they are written to the database.
_GATHERED: Final = 16 << 20


class Docs:
    """Adds and removes docs, for one ``Updater``."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._texts: list[tuple[int, str]] = []
        self._characters = 0
        self._loose: set[int] = set()
        self.added = self.removed = 0
        self._counted = 0

    def add_text(self, doc: int, text: str) -> None:
        """Add the words of a doc."""
        if text:
            self._texts.append((doc, text))
            self._characters += len(text)
            if self._characters > _GATHERED:
                self._write()

    def put(
        self, digest: bytes, kind: str, text: Callable[[], str], at_ms: int | None = None
    ) -> int:
        """The id of the doc of a component or entry; added, with ``text()``, if there is none."""
        rows = self._db.rows(
            "SELECT id FROM {s}docs WHERE digest = ? AND kind = ? AND id < 4294967296",
            (digest, kind),
        )
        if rows:
            return int(rows[0][0])
        doc = next_id(self._db, "docs")
        self._db.run(
            "INSERT INTO {s}docs (id, digest, at_ms, kind) VALUES (?, ?, ?, ?)",
            (doc, digest, at_ms, kind),
        )
        self.add_text(doc, text())
        self.added += 1
        return doc

    def loosen(self, statement: str, *values: object) -> None:
        """Mark the docs that a query returns: ``trim`` removes those that are unreferenced."""
        self._loose.update([row[0] for row in self._db.rows(statement, values)])

    def loosen_all(self) -> None:
        """Mark all docs but those of nodes."""
        self.loosen("SELECT id FROM {s}docs WHERE id < 4294967296")

    def trim(self) -> None:
        """Remove the marked docs that no component and no entry refers to."""
        for doc in sorted(self._loose):
            self.removed += self._db.run(
                "DELETE FROM {s}docs WHERE id = ? "
                "AND NOT EXISTS (SELECT 1 FROM {s}parts WHERE doc = ?) "
                "AND NOT EXISTS (SELECT 1 FROM {s}places WHERE doc = ?)",
                (doc, doc, doc),
            )
        self._loose.clear()

    def flush(self) -> None:
        """Write the gathered texts and the counters; call this at the end of each transaction."""
        self._write()
        for name, count in (("added", self.added - self._counted), ("removed", self.removed)):
            if count:
                before = int(read_meta(self._db, name) or b"0")
                write_meta(self._db, name, b"%d" % (before + count))
        self._counted, self.removed = self.added, 0

    def _write(self) -> None:
        # In order: FTS5 writes a new segment of its own whenever an id is lower than the last.
        self._texts.sort()
        self._db.add_texts(self._texts)
        self._texts, self._characters = [], 0
