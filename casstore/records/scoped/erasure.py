"""Scoped state as an erasure provider: erases values of a subject together with its sessions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from casstore.errors import InvalidInputError
from casstore.records.scoped.changes import REMOVED_AT_ONCE
from casstore.records.scoped.layout import ScopedTables, Writer
from casstore.records.scoped.removal import (
    check_place,
    checked_person,
    concerning,
    erase_found,
    runs_of,
)
from casstore.records.scoped.scope_keys import ACTOR_TYPE
from casstore.session.arguments import check_callable, list_of
from casstore.session.records import Table, row_links
from casstore.store import Store

_VALUE: Final = "value"
_RUN: Final = "run"


class ActorErasure:
    """Finds and erases values written by or about an actor, for ``maintenance.erasure``.

    ``actor_of`` returns the type and id of the actor for a subject of sessions; by default its id
    is the subject's name. ``workspace_id`` and ``bot_id`` as for ``erase_actor``.

    >>> from casstore.maintenance import erasure
    >>> entry = state.scope(context, "actor").put("language", "de")
    >>> providers = [ActorErasure()]
    >>> found = erasure.plan(store, "anna", providers=providers)
    >>> erasure.execute(store, found, providers=providers).records_erased
    1
    """

    def __init__(
        self,
        actor_of: Callable[[str], Writer] | None = None,
        *,
        workspace_id: str | None = None,
        bot_id: str | None = None,
    ) -> None:
        if actor_of is not None:
            check_callable(actor_of, "actor_of")
        check_place(workspace_id, bot_id)
        self._actor_of = actor_of or (lambda subject: (ACTOR_TYPE, subject))
        self._place = (workspace_id, bot_id)

    @property
    def name(self) -> str:
        """The name of the record system."""
        return "scoped"

    def find(self, store: Store, subject: str) -> Sequence[str]:
        """The values and runs of the actor of a subject, each as a text that ``erase`` accepts."""
        tables, person = ScopedTables(store), checked_person(self._actor_of(subject))
        found = [_encode(_VALUE, one.key) for one in concerning(tables, person, *self._place)]
        return found + [_encode(_RUN, one.key) for one in runs_of(tables, person, *self._place)]

    def roots(self, store: Store, found: Sequence[str]) -> Iterator[bytes]:
        """The digests of the objects that the values and runs in ``found`` link to."""
        for table, key in self._places(store, found):
            record = table.find(*key)
            if record is not None:
                yield from row_links(record.row)

    def rows(self, store: Store, found: Sequence[str]) -> Iterator[bytes]:
        """The keys of the rows of the values and runs in ``found``."""
        for table, key in self._places(store, found):
            yield table.keys.key(key)

    def stays(self, store: Store, found: Sequence[str]) -> Sequence[Any]:
        """Always empty: scoped state has no holds or seals."""
        return ()

    def recipients(self, store: Store, found: Sequence[str]) -> Sequence[str]:
        """Always empty: scoped state does not record that third parties received it."""
        return ()

    def _places(
        self, store: Store, found: Sequence[str]
    ) -> Iterator[tuple[Table, tuple[str, ...]]]:
        """The rows of the values and runs found."""
        tables = ScopedTables(store)
        for kind, key in map(_read, list_of(found, "found")):
            yield (tables.values if kind == _VALUE else tables.runs, key[2:])

    def erase(self, store: Store, subject: str, found: Sequence[str]) -> int:
        """Remove the values and runs in ``found``; returns how many were removed."""
        tables, found = ScopedTables(store), list_of(found, "found")
        erased = 0
        for start in range(0, len(found), REMOVED_AT_ONCE):
            entries = [_read(one) for one in found[start : start + REMOVED_AT_ONCE]]
            leads = tables.people.find_many([key for kind, key in entries if kind == _VALUE])
            own = tables.run_actors.find_many([key for kind, key in entries if kind == _RUN])
            erased += sum(
                erase_found(
                    tables,
                    [one for one in leads if one is not None],
                    [one for one in own if one is not None],
                )
            )
        return erased


def _encode(kind: str, key: tuple[str, ...]) -> str:
    return json.dumps([kind, *key], ensure_ascii=False)


def _read(text: str) -> tuple[str, tuple[str, ...]]:
    try:
        kind, *key = json.loads(text)
        if (kind, len(key)) not in ((_VALUE, 5), (_RUN, 3)):
            raise ValueError("neither a value nor a run")
    except (TypeError, ValueError, RecursionError) as exc:
        raise InvalidInputError(
            f"found must be the result of ActorErasure.find, got the item {text!r:.80}"
        ) from exc
    return kind, tuple(key)
