"""The faults that an engine can find in its own storage, and the protocol for finding them.

A fault is a fact about stored bytes. ``maintenance.check`` reports what it means for sessions. The
methods of ``Checking`` return damage as faults; they do not raise errors for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

from casstore.engine.protocol import Row, StoredObject

HEADER_DAMAGED: Final = "header_damaged"
PAGE_DAMAGED: Final = "page_damaged"
SLAB_DAMAGED: Final = "slab_damaged"
SLABS_OVERLAP: Final = "slabs_overlap"
DICTIONARY_DAMAGED: Final = "dictionary_damaged"
INDEX_DANGLING: Final = "index_dangling"
OBJECT_DAMAGED: Final = "object_damaged"
ROW_DAMAGED: Final = "row_damaged"
ROWS_SUM_WRONG: Final = "rows_sum_wrong"


class Fault(NamedTuple):
    """One deviation from what was written, and its location."""

    code: str
    what: str
    digest: bytes | None = None
    table: str | None = None
    key: bytes | None = None
    #: Ids of objects that are lost because of the fault; 0: none.
    first_id: int = 0
    last_id: int = 0


class Examined(NamedTuple):
    """A stored object, and what an examination found out about it."""

    id: int
    digest: bytes
    kind: int
    children: tuple[int, ...]
    #: True if the index has the digest under this id, so that reads find the object.
    named: bool
    #: Its bytes, if content was requested and is valid.
    item: StoredObject | None = None
    #: The digests of its children, if content was requested and is valid.
    links: tuple[bytes, ...] = ()
    #: Why its content is invalid.
    fault: Fault | None = None


class Examination(NamedTuple):
    """A batch of objects by ascending id, and the faults that concern no single object."""

    objects: list[Examined]
    faults: list[Fault]
    #: Pass this as ``after`` for the next batch; None: this was the last.
    after: int | None


class Structure(NamedTuple):
    """Faults in the layout of tables, and the names of tables that are not safe to read."""

    faults: list[Fault]
    unsafe: frozenset[str]


#: Called with the number of items checked so far.
Progress = Callable[[int], None]


@runtime_checkable
class Checking(Protocol):
    """An engine that can check itself, concurrently with writers and collectors."""

    def check_header(self) -> list[Fault]:
        """Check the store's header, and that the counts of its parts agree."""
        ...

    def check_structure(self) -> Structure:
        """Check the layout of the tables."""
        ...

    def check_rows(
        self, tables: Sequence[str], progress: Progress | None = None, *, whole: bool = True
    ) -> list[Fault]:
        """Verify every row of these tables; ``whole``: they are all tables, so verify the checksum
        over all rows, too.
        """
        ...

    def readable_rows(self, table: str, *, start: bytes, limit: int) -> list[Row]:
        """At most ``limit`` rows from the key ``start`` on, in order; damaged rows are left out."""
        ...

    def examine(self, *, after: int, content: Callable[[int], bool] | None) -> Examination:
        """A batch of objects with ids above ``after``.

        ``content(id)`` returns whether an object's bytes are wanted.
        """
        ...

    def find_ids(self, digests: Sequence[bytes]) -> list[int | None]:
        """The ids of objects, from one snapshot; None for digests that are not stored."""
        ...

    def find_names(self, ids: Sequence[int]) -> list[bytes | None]:
        """The digests of objects, from one snapshot; None for ids that the index does not have."""
        ...

    def check_index(
        self, excused: Callable[[int], bool], progress: Progress | None = None
    ) -> list[Fault]:
        """Find index rows that lead to no object, except for ids for which ``excused`` is true."""
        ...

    def read_mark(self) -> bytes | None:
        """What the last check passed to ``write_mark``; None if there was none."""
        ...

    def write_mark(self, mark: bytes) -> None:
        """Save bytes for the next check, which says in them what this one has checked."""
        ...
