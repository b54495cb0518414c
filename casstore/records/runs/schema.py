"""Which family and version of rows a store's runs are in; both must be ours.

The first write stamps a store that has no rows of runs. Rows without a stamp, half a stamp or
another one are refused, before anything is written.
"""

from __future__ import annotations

from typing import Any, Final, Protocol, runtime_checkable

from casstore.errors import RecordsSchemaError
from casstore.records.runs.layout import Tables, read_value
from casstore.session.records import Draft, Record, Table, find_records
from casstore.store import Store

FAMILY: Final = "casstore.runs"
VERSION: Final = 1
_FAMILY_KEY: Final = ("family",)
_VERSION_KEY: Final = ("version",)


@runtime_checkable
class _Placed(Protocol):
    """An engine that keeps its store at some place."""

    @property
    def path(self) -> str:
        """Where."""
        ...


class Schema:
    """The stamp of one store: read along with other rows, and expected by every write."""

    def __init__(self, store: Store, tables: Tables) -> None:
        self._store = store
        self._tables = tables
        #: What ``is_stamped`` needs to know of, in this order.
        self.places: list[tuple[Table, tuple[str, ...]]] = [
            (tables.schema, _FAMILY_KEY),
            (tables.schema, _VERSION_KEY),
        ]

    def is_stamped(self, family: Record | None, version: Record | None) -> bool:
        """Are there runs in this store? RecordsSchemaError if they are not of this kind."""
        if family is None and version is None:
            self._require_empty()
            return False
        found = _told("family", family), _told("version", version)
        if found != (FAMILY, VERSION):
            raise self._refusal(f"runs of family {found[0]!r}, version {found[1]!r}")
        return True

    def expect(self, draft: Draft, family: Record | None, version: Record | None) -> None:
        """Let the write fail if the stamp is another by then; stamp what has none yet."""
        if family is None and version is None:
            draft.expect(self._tables.schema, _FAMILY_KEY, None)
            draft.put(self._tables.schema, _FAMILY_KEY, FAMILY)
            draft.put(self._tables.schema, _VERSION_KEY, VERSION)
        draft.expect(self._tables.schema, _VERSION_KEY, version)

    def _require_empty(self) -> None:
        """A store without a stamp is new only if it has no rows either."""
        if all(next(table.scan(page=1), None) is None for table in self._tables.all()):
            return
        stamp = find_records(self._store, self.places)
        if stamp == [None, None]:
            raise self._refusal("rows of runs without family and version")
        # Somebody has begun just now. What was read before that is still true of then.

    def _refusal(self, found: str) -> RecordsSchemaError:
        engine = self._store.engine
        place = engine.path if isinstance(engine, _Placed) else "this store"
        return RecordsSchemaError(place, found, f"family {FAMILY!r}, version {VERSION!r}")


def _told(what: str, record: Record | None) -> Any:
    return None if record is None else read_value(record, what)
