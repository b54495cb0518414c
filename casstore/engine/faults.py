"""What an engine can find wrong with itself, as plain data, and how it is asked.

A fault is a fact about stored bytes; what it means for sessions is for others to say
(``maintenance.check``). Asking never raises because something is damaged.
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
    """One thing that is not as it was written, and where."""

    code: str
    what: str
    digest: bytes | None = None
    table: str | None = None
    key: bytes | None = None
    #: The ids of objects that are lost with it; 0: none.
    first_id: int = 0
    last_id: int = 0


class Examined(NamedTuple):
    """An object as it is stored. ``named``: it can be found by its digest."""

    id: int
    digest: bytes
    kind: int
    children: tuple[int, ...]
    named: bool
    #: Its bytes, and the digests of what it links to, if content was asked for.
    item: StoredObject | None = None
    links: tuple[bytes, ...] = ()
    fault: Fault | None = None


class Examination(NamedTuple):
    """A run of objects by ascending id, and what is wrong with how they are stored."""

    objects: list[Examined]
    faults: list[Fault]
    #: Go on after this id; None: that was the last.
    after: int | None


class Structure(NamedTuple):
    """Faults in how tables are laid out, and tables that are not safe to be read."""

    faults: list[Fault]
    unsafe: frozenset[str]


#: Told how many of what were looked at.
Told = Callable[[int], None]


@runtime_checkable
class Checking(Protocol):
    """An engine that can say what is wrong with it, beside writers and collectors."""

    def check_header(self) -> list[Fault]:
        """Look at what the store says of itself, and that its parts fit together in number."""
        ...

    def check_structure(self) -> Structure:
        """Look at how tables are laid out, as far as that can be wrong."""
        ...

    def check_rows(
        self, tables: Sequence[str], told: Told | None = None, *, whole: bool = True
    ) -> list[Fault]:
        """Prove every row of these tables; ``whole``: these are all, so the sum over them, too."""
        ...

    def readable_rows(self, table: str, *, start: bytes, limit: int) -> list[Row]:
        """Rows from ``start`` on, in order, without those that are damaged."""
        ...

    def examine(self, *, after: int, content: Callable[[int], bool] | None) -> Examination:
        """Objects with an id above ``after``, a run of them at a time.

        ``content`` is asked by id which objects are to come with their bytes.
        """
        ...

    def find_ids(self, digests: Sequence[bytes]) -> list[int | None]:
        """The ids of objects, all of one moment; None where there is none."""
        ...

    def find_names(self, ids: Sequence[int]) -> list[bytes | None]:
        """The digests by which objects are found, all of one moment; None: by none."""
        ...

    def check_index(self, excused: Callable[[int], bool], told: Told | None = None) -> list[Fault]:
        """Look for names that lead nowhere, but not to ids that are ``excused``."""
        ...

    def read_mark(self) -> bytes | None:
        """What the last check left behind."""
        ...

    def write_mark(self, mark: bytes) -> None:
        """Leave something for the next check."""
        ...
