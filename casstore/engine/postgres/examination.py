"""Finds faults in a store on a server, apart from those that the server's own tools can find.

Page checksums and ``amcheck`` check the server's pages, indexes and unique keys. This module reads
objects for ``maintenance.check``, which calls it step by step; it finds objects that do not
decompress to their recorded size, malformed digests and lists of children, rows of unknown tables,
and a sequence of ids that is too low.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from psycopg.types.numeric import Int2, Int8

from casstore.engine.faults import (
    HEADER_DAMAGED,
    OBJECT_DAMAGED,
    ROW_DAMAGED,
    Examination,
    Examined,
    Fault,
    Progress,
    Structure,
)
from casstore.engine.postgres.adapting import ByteStrings, Longs
from casstore.engine.postgres.connections import Connections
from casstore.engine.postgres.request import TABLE_NUMBERS
from casstore.engine.protocol import Row, StoredObject
from casstore.errors import CorruptionError, ReadOnlyError
from casstore.format.digest import DIGEST_BYTES

_OBJECTS_A_BATCH: Final = 512
# About how many compressed bytes one answer of the server may contain.
_BYTES_A_BATCH: Final = 8 << 20


class Examining:
    """The part of the engine that finds faults; see ``engine.faults.Checking``."""

    connections: Connections
    readonly: bool
    statement: Callable[[str], bytes]
    #: Decodes an object: (digest, codec, size, content) → bytes.
    _inflated: Callable[[bytes, int, int, bytes], bytes]

    def _ask(self, text: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self.connections.fetch(self.statement(text), parameters)

    # --- the methods of Checking ------------------------------------------------------------

    def check_header(self) -> list[Fault]:
        """Check that ``state`` has one row, and that the next id is above the highest one."""
        [[states, given, highest, lowest]] = self._ask(
            "SELECT (SELECT count(*) FROM {s}.state), (SELECT last_value FROM {s}.object_ids), "
            "(SELECT coalesce(max(id), 0) FROM {s}.objects), "
            "(SELECT coalesce(min(id), 1) FROM {s}.objects)"
        )
        faults = []
        if states != 1:
            what = f"the table state has {states} rows instead of one"
            faults.append(Fault(HEADER_DAMAGED, what, table="state"))
        if given < highest:
            what = f"the highest object id is {highest}, but the next id will be {given + 1}"
            faults.append(Fault(HEADER_DAMAGED, what, table="object_ids"))
        if lowest < 1:
            what = f"the lowest object id is {lowest}, but ids begin with 1"
            faults.append(Fault(HEADER_DAMAGED, what, table="object_ids"))
        return faults

    def check_structure(self) -> Structure:
        """Return no faults: the server is responsible for the layout of its tables."""
        return Structure([], frozenset())

    def check_rows(
        self, tables: Sequence[str], progress: Progress | None = None, *, whole: bool = True
    ) -> list[Fault]:
        """Find rows of unknown tables. The layer that reads a row checks its content."""
        found = self._ask("SELECT kind, count(*) FROM {s}.rows GROUP BY kind")
        known = set(TABLE_NUMBERS.values())
        return [
            Fault(ROW_DAMAGED, f"{number} rows belong to table number {kind}, which does not exist")
            for kind, number in found
            if kind not in known
        ]

    def readable_rows(self, table: str, *, start: bytes, limit: int) -> list[Row]:
        """At most ``limit`` rows from the key ``start`` on, in order."""
        found = self._ask(
            "SELECT key, value FROM {s}.rows WHERE kind = %b AND key >= %b "
            "ORDER BY kind, key LIMIT %b",
            Int2(TABLE_NUMBERS[table]),
            bytes(start),
            Int8(limit),
        )
        return [Row(*row) for row in found]

    def examine(self, *, after: int, content: Callable[[int], bool] | None) -> Examination:
        """A batch of objects with ids above ``after``."""
        found = self._ask(
            "SELECT id, digest, kind, children, octet_length(content) FROM {s}.objects "
            "WHERE id > %b ORDER BY id LIMIT %b",
            Int8(after),
            Int8(_OBJECTS_A_BATCH),
        )
        last = found[-1][0] if len(found) == _OBJECTS_A_BATCH else None
        faults = [
            Fault(
                OBJECT_DAMAGED, f"object id {id_} has an invalid digest or list of children",
                first_id=id_, last_id=id_,
            )
            for id_, digest, _, children, _ in found
            if not _is_well_formed(digest, children)
        ]  # fmt: skip
        found = [row for row in found if _is_well_formed(row[1], row[3])]
        wanted = {row[0]: row[4] for row in found if content is not None and content(row[0])}
        stored = dict(self._stored(wanted))
        children = {child for row in found if row[0] in stored for child in row[3]}
        names = dict(zip(children, self.find_names(list(children)), strict=True))
        objects = [
            self._examined(id_, digest, kind, children, stored.get(id_), names)
            for id_, digest, kind, children, _ in found
        ]
        return Examination(objects, faults, last)

    def find_ids(self, digests: Sequence[bytes]) -> list[int | None]:
        """The ids of objects, from one snapshot; None for digests that are not stored."""
        if not digests:
            return []
        found = dict(
            self._ask(
                "SELECT digest, id FROM {s}.objects WHERE digest = ANY(%b)", ByteStrings(digests)
            )
        )
        return [found.get(bytes(digest)) for digest in digests]

    def find_names(self, ids: Sequence[int]) -> list[bytes | None]:
        """The digests of objects, from one snapshot; None for ids that are not stored."""
        if not ids:
            return []
        found = dict(self._ask("SELECT id, digest FROM {s}.objects WHERE id = ANY(%b)", Longs(ids)))
        return [found.get(each) for each in ids]

    def check_index(
        self, excused: Callable[[int], bool], progress: Progress | None = None
    ) -> list[Fault]:
        """Return no faults: the index of digests belongs to the server."""
        return []

    def read_mark(self) -> bytes | None:
        """What the last check passed to ``write_mark``; None if there was none."""
        found = self._ask("SELECT mark FROM {s}.state")
        return found[0][0] if found else None

    def write_mark(self, mark: bytes) -> None:
        """Save bytes for the next check."""
        if self.readonly:
            raise ReadOnlyError("the store is open read-only")
        self._ask("UPDATE {s}.state SET mark = %b RETURNING true", mark)

    # --- its parts --------------------------------------------------------------------------

    def _stored(self, sizes: dict[int, int]) -> Iterator[tuple[int, tuple[int, bytes, int]]]:
        """The id of each object with its codec, stored bytes and size, a few megabytes at a time.

        ``sizes``: the length of the stored bytes by id.
        """
        for batch in _batches(sizes):
            for id_, codec, content, size_bytes in self._ask(
                "SELECT id, codec, content, size_bytes FROM {s}.objects WHERE id = ANY(%b)",
                Longs(batch),
            ):
                yield id_, (codec, content, size_bytes)

    def _examined(
        self,
        id_: int,
        digest: bytes,
        kind: int,
        children: list[int],
        stored: tuple[int, bytes, int] | None,
        names: dict[int, bytes | None],
    ) -> Examined:
        found = Examined(id_, digest, kind, tuple(children), named=True)
        if stored is None:
            return found
        codec, content, size_bytes = stored
        try:
            data = self._inflated(digest, codec, size_bytes, content)
        except CorruptionError as exc:
            what = f"object {digest.hex()}: {exc}"
            return found._replace(fault=Fault(OBJECT_DAMAGED, what, digest=digest))
        # An empty digest for a missing child: ``maintenance.check`` compares the ids, and reports
        # that it is missing.
        links = tuple([names.get(child) or b"" for child in children])
        return found._replace(item=StoredObject(kind, data), links=links)


def _is_well_formed(digest: bytes, children: list[Any]) -> bool:
    """True if a write could have stored this; the server accepts any digest and any list."""
    return len(digest) == DIGEST_BYTES and all(isinstance(child, int) for child in children)


def _batches(sizes: dict[int, int]) -> Iterator[list[int]]:
    batch: list[int] = []
    taken = 0
    for id_, size_bytes in sizes.items():
        if batch and taken + size_bytes > _BYTES_A_BATCH:
            yield batch
            batch, taken = [], 0
        batch.append(id_)
        taken += size_bytes
    if batch:
        yield batch
