"""One scope: its values by key, each call one transaction.

A call reads the rows it needs in one transaction: the value, the scope's row, the latest reset of
the conversation and the run. It writes under the condition that they are unchanged, and retries if
they are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

from casstore.engine.protocol import Write
from casstore.errors import (
    CorruptionError,
    ObjectNotFoundError,
    StateConflictError,
)
from casstore.format.canonical import Link
from casstore.records.json_values import restored
from casstore.records.schema import Key, RowPlace, number_text
from casstore.records.scoped import policy as policies
from casstore.records.scoped.changes import changed, find_late, forget, known, put_scope, put_value
from casstore.records.scoped.policy import Content, Quota, Reason, checked_key, content_of
from casstore.records.scoped.runs import RunGuard
from casstore.records.scoped.scope_keys import Context, real_key
from casstore.records.scoped.tables import (
    LATEST,
    ScopedTables,
    ScopeRow,
    Spot,
    ValueRow,
    charged_bytes,
    context_in_row,
    new_scope,
    value_in_row,
)
from casstore.session.arguments import check_count, check_ms, check_text
from casstore.session.attempts import ChangedMeanwhile, read_again, transaction
from casstore.session.records import Draft, Record, find_records
from casstore.store import Store

#: The most keys in one page.
MAX_LISTED: Final = 100

Built = TypeVar("Built")


class StateEntry(NamedTuple):
    """A value of a scope, with its version and times. ``value`` None is a stored JSON null.

    >>> entry = state.scope(context, "actor").put("language", "de")
    >>> entry.key, entry.value, entry.expires_ms
    ('language', 'de', None)
    """

    key: str
    value: Any
    #: Changes with every write and is never reused; pass it to ``swap``.
    version: str
    created_ms: int
    updated_ms: int
    expires_ms: int | None
    #: The bytes of the value's JSON, in UTF-8.
    size_bytes: int
    #: The type and id of the actor who wrote it last.
    written_by: tuple[str, str] | None


class KeyPage(NamedTuple):
    """Some keys in order. If there are more, ``cursor`` is what to list ``after``.

    >>> scope = state.scope(context, "actor")
    >>> entries = [scope.put(key, "a value") for key in ("a", "b", "c")]
    >>> page = scope.list_keys(limit=2)
    >>> page.keys, page.has_more, scope.list_keys(after=page.cursor).keys
    (['a', 'b'], True, ['c'])
    """

    keys: list[str]
    has_more: bool
    cursor: str | None


class ScopeUsage(NamedTuple):
    """The keys and bytes that count towards the quota, including expired values not yet removed.

    >>> scope = state.scope(context, "actor")
    >>> entry = scope.put("language", "de")
    >>> scope.usage().keys
    1
    """

    keys: int
    size_bytes: int


class _ExpectedVersion(NamedTuple):
    """The version that a key must have; None: the key must not exist."""

    text: str | None


class ScopeRows(NamedTuple):
    """Rows of scopes, read in one transaction."""

    now_ms: int
    #: The row of each scope, and the values of the keys asked for.
    heads: list[Record | None]
    values: list[list[ValueRow | None]]
    #: The latest reset of the conversation, and the row of the run.
    reset: Record | None
    run: Record | None


def read_rows(
    tables: ScopedTables,
    scopes: Sequence[tuple[Key, Sequence[str]]],
    conversation: str | None,
    guard: RunGuard | None,
) -> ScopeRows:
    """Read the rows of scopes, each given by the key of its row and the keys of its values.

    StateRefusedError if the run of the guard has ended.
    """
    places: list[RowPlace] = [(tables.scopes, place) for place, _ in scopes]
    places += [(tables.values, (*place, name)) for place, names in scopes for name in names]
    if conversation is not None:
        places.append((tables.resets, (conversation, LATEST)))
    if guard is not None:
        places.append(guard.place)
    found = find_records(tables.store, places)
    now_ms = tables.store.engine.now_ms()
    run = None
    if guard is not None:
        run = found.pop()
        guard.check(run, now_ms)
    reset = found.pop() if conversation is not None else None
    rows = iter(found)
    heads = list(islice(rows, len(scopes)))
    values = [
        [tables.values.decode_found(row) for row in islice(rows, len(names))] for _, names in scopes
    ]
    return ScopeRows(now_ms, heads, values, reset, run)


class _ScopeLook(NamedTuple):
    """The rows of one scope, and those of some of its values."""

    generation: int
    rows: ScopeRows
    head: ScopeRow | None

    @property
    def now_ms(self) -> int:
        """When the rows were read."""
        return self.rows.now_ms

    @property
    def value(self) -> ValueRow | None:
        """The only value asked for."""
        [[value]] = self.rows.values
        return value


class Scope:
    """The state of one scope. Made by ``ScopedState.scope`` or for a run; safe to share.

    The examples use ``state``, a ``ScopedState``, and ``context``.

    >>> scope = state.scope(context, "actor")
    >>> entry = scope.put("language", "de")
    >>> scope.find("language").value
    'de'
    """

    def __init__(
        self,
        tables: ScopedTables,
        spot: Spot,
        context: Context,
        quota: Quota,
        guard: RunGuard | None,
    ) -> None:
        self._tables = tables
        self._spot = spot
        self._context = context
        self._quota = quota
        self._guard = guard
        # The generation that the last call found. The next call tries it first, and checks it.
        self._generation = 0

    @property
    def key(self) -> str:
        """The key of the scope in the store.

        >>> scope = state.scope(context, "actor")
        >>> scope.key == state.scope(context._replace(conversation_id="c2"), "actor").key
        True
        """
        return self._spot.key

    # --- reading ------------------------------------------------------------------------

    def find(self, key: str, *, generation: int | None = None) -> StateEntry | None:
        """A value and its version, or None if it does not exist.

        ``generation`` reads an earlier generation: 0 is the one before the first reset.

        >>> scope = state.scope(context, "actor")
        >>> entry = scope.put("language", None)
        >>> scope.find("language").value is None, scope.find("colour") is None
        (True, True)
        """
        name = checked_key(key)
        return self._read(name, generation, lambda stored: entries(self._tables, [stored])[0])

    def origin(self, key: str) -> Context | None:
        """The context in which a value was first put, or None if it does not exist.

        >>> scope = state.scope(context, "actor")
        >>> entry = scope.put("language", "de")
        >>> scope.origin("language").conversation_id
        'c1'
        """
        return self._read(
            checked_key(key), None, lambda stored: context_of(self._tables.store, stored)
        )

    def _read(
        self, name: str, generation: int | None, build: Callable[[ValueRow], Built]
    ) -> Built | None:
        """The result of ``build`` for a value, or None if it does not exist."""

        def read() -> Built | None:
            look = self._look([name], generation)
            stored = look.value
            return build(stored) if stored is not None and stored.is_live(look.now_ms) else None

        # The value may be replaced between two reads, and gc may then collect its old objects.
        return read_again(read, (CorruptionError,))

    def list_keys(
        self,
        prefix: str = "",
        *,
        limit: int = MAX_LISTED,
        after: str | None = None,
        generation: int | None = None,
    ) -> KeyPage:
        """Keys that start with ``prefix``, in order; at most ``limit``, and never above 100.

        >>> scope = state.scope(context, "actor")
        >>> entries = [scope.put(key, "a value") for key in ("ui.size", "language", "ui.colour")]
        >>> scope.list_keys("ui.").keys
        ['ui.colour', 'ui.size']
        """
        check_text(prefix, "prefix")
        check_count(limit, "limit", least=1)
        if after is not None:
            check_text(after, "after")
        start, limit = real_key(prefix), min(limit, MAX_LISTED)
        look = self._look([], generation)
        keys: list[str] = []
        for name in self._names(start, after, look):
            if len(keys) == limit:
                return KeyPage(keys, True, keys[-1])
            keys.append(name)
        return KeyPage(keys, False, None)

    def _names(self, start: str, after: str | None, look: _ScopeLook) -> Iterator[str]:
        """The keys that have not expired, in order."""
        place = (self._spot.key, number_text(look.generation))
        values = self._tables.values
        for one in values.scan_starting(start, *place, after=after):
            if values.decode(one).is_live(look.now_ms):
                yield one.key[2]

    def usage(self, *, generation: int | None = None) -> ScopeUsage:
        """The number of keys and bytes.

        >>> scope = state.scope(context, "actor")
        >>> entry = scope.put("language", "de")
        >>> scope.usage()  # the key, and the JSON of the value
        ScopeUsage(keys=1, size_bytes=12)
        """
        head = self._look([], generation).head
        return ScopeUsage(0, 0) if head is None else ScopeUsage(head.keys, head.size_bytes)

    # --- writing ------------------------------------------------------------------------

    def put(self, key: str, value: Any, *, ttl_ms: int | None = None) -> StateEntry:
        """Write a value, replacing an existing one.

        It expires after ``ttl_ms``; without, it never does. StateRefusedError, and nothing changes,
        if it is not JSON, is too large, or exceeds the quota.

        >>> scope = state.scope(context, "actor")
        >>> entries = [scope.put("language", value, ttl_ms=60_000) for value in ("de", "fr")]
        >>> scope.find("language").value
        'fr'
        """
        return self._put(key, value, ttl_ms, None)

    def swap(
        self, key: str, value: Any, *, expected: str | None, ttl_ms: int | None = None
    ) -> StateEntry:
        """Write a value if the key has the version ``expected``; None: if it does not exist.

        Else StateConflictError, with the actual version.

        >>> scope = state.scope(context, "actor")
        >>> entry = scope.swap("count", 1, expected=None)
        >>> scope.swap("count", 2, expected=entry.version).value
        2
        >>> try:
        ...     scope.swap("count", 2, expected=entry.version)
        ... except casstore.errors.StateConflictError:
        ...     scope.find("count").value
        2
        """
        return self._put(key, value, ttl_ms, _ExpectedVersion(expected))

    def prepare_put(self, key: str, value: Any, *, ttl_ms: int | None = None) -> Write:
        """The write of ``put``, for the transaction of a session's commit.

        ``Commit(also=…)`` raises ConditionFailedError if the scope has changed since: prepare it
        again. A commit can have one such write for each scope.

        >>> scope = state.scope(context, "actor")
        >>> step = Commit(append=[NodeDraft("n3", "I speak German")])
        >>> result = session.commit(step._replace(also=scope.prepare_put("language", "de")))
        >>> scope.find("language").value
        'de'
        """
        draft = Draft(self._tables.store)
        self._draft_put(draft, *_checked(key, value, ttl_ms), ttl_ms, None)
        return draft.as_write()

    @transaction("state {key!r}")
    def delete(self, key: str, *, expected: str | None = None) -> bool:
        """Remove a value; False if it does not exist.

        With ``expected``, StateConflictError unless the value has this version.

        >>> scope = state.scope(context, "actor")
        >>> entry = scope.put("language", "de")
        >>> scope.delete("language"), scope.delete("language")
        (True, False)
        """
        name = checked_key(key)
        look = self._look([name])
        stored = look.value
        if stored is not None and not stored.is_live(look.now_ms):
            stored = None
        version = None if stored is None else stored.version
        if expected is not None and version != expected:
            raise StateConflictError(name, expected, version)
        if stored is None:
            return False
        draft = Draft(self._tables.store)
        self._expect(draft, look)
        forget(self._tables, draft, stored)
        if self._spot.scope == "subject" and self._context.subject is not None:
            draft.delete(self._tables.people, (*self._context.subject, *stored.row_key))
        head = changed(known(look.head, self._spot.key), gone=[stored])
        put_scope(self._tables, draft, head, look.head)
        draft.commit()
        return True

    @transaction("scope {self._spot.key}")
    def _put(
        self, key: str, value: Any, ttl_ms: int | None, expected: _ExpectedVersion | None
    ) -> StateEntry:
        name, content = _checked(key, value, ttl_ms)
        draft = Draft(self._tables.store)
        entry = self._draft_put(draft, name, content, ttl_ms, expected)
        draft.commit()
        return entry

    def _draft_put(
        self,
        draft: Draft,
        name: str,
        content: Content,
        ttl_ms: int | None,
        expected: _ExpectedVersion | None,
    ) -> StateEntry:
        look = self._look([name])
        now_ms, there = look.now_ms, look.value
        before = there if there is not None and there.is_live(now_ms) else None
        version = None if before is None else before.version
        if expected is not None and version != expected.text:
            raise StateConflictError(name, expected.text, version)
        self._expect(draft, look)
        expires_ms = None if ttl_ms is None else now_ms + ttl_ms
        old = look.head or new_scope(self._spot, look.generation)
        head = changed(
            old,
            gone=[] if there is None else [there],
            come_bytes=charged_bytes(name, content.size_bytes),
            expires_ms=expires_ms,
        )
        head = self._make_room(draft, look, old, head, name)
        put_scope(self._tables, draft, head, look.head)
        value = ValueRow(
            scope_key=self._spot.key,
            generation=look.generation,
            key=name,
            version=head.version,
            origin=head.version if before is None else before.origin,
            created_ms=now_ms if before is None else before.created_ms,
            updated_ms=now_ms,
            expires_ms=expires_ms,
            size_bytes=content.size_bytes,
            writer=self._context.actor,
            context=context_in_row(draft, self._context) if before is None else before.context,
            value=value_in_row(draft, content.stored, content.size_bytes),
        )
        put_value(self._tables, draft, self._spot.scope, self._context, value, before)
        return _entry(value, content.value)

    def _make_room(
        self, draft: Draft, look: _ScopeLook, old: ScopeRow, head: ScopeRow, name: str
    ) -> ScopeRow:
        """The scope's new row; StateRefusedError if it exceeds the quota.

        Removes the scope's expired values first if the quota would be exceeded with them.
        """
        reason = self._excess(old, head)
        if reason is not None and old.soonest_ms is not None and old.soonest_ms <= look.now_ms:
            place = (self._spot.key, number_text(look.generation))
            values = self._tables.values.scan(*place)
            # Find all expired values, not one batch: if one batch does not suffice, the refusal
            # writes nothing, and the next call would find the same batch.
            late = find_late(self._tables, values, look.now_ms, every=True)
            gone = [one for one in late.gone if one.key != name]
            for one in gone:
                forget(self._tables, draft, one)
            head = changed(head, gone=gone)
            reason = self._excess(old, head)
        if reason is not None:
            policies.refuse(
                reason,
                f"scope {self._spot.scope!r} would hold {head.keys} keys and {head.size_bytes} "
                f"bytes, more than its quota of {self._quota.max_keys} keys and "
                f"{self._quota.max_bytes} bytes: delete what is not needed",
            )
        return head

    def _excess(self, old: ScopeRow, head: ScopeRow) -> Reason | None:
        """The limit that a change exceeds, or None; a scope over its quota may still shrink."""
        keys, size_bytes = self._quota
        if keys is not None and head.keys > max(keys, old.keys):
            return Reason.TOO_MANY_KEYS
        if size_bytes is not None and head.size_bytes > max(size_bytes, old.size_bytes):
            return Reason.TOO_MANY_BYTES
        return None

    # --- rows -----------------------------------------------------------------------------

    @transaction("the generation of scope {self._spot.key}")
    def _look(self, names: Sequence[str], generation: int | None = None) -> _ScopeLook:
        """Read the rows of the scope and of these keys in one transaction, and check the guard."""
        if generation is not None:
            check_count(generation, "generation")
        tables, spot = self._tables, self._spot
        number = self._generation if generation is None else generation
        place = (spot.key, number_text(number))
        rows = read_rows(tables, [(place, names)], spot.conversation, self._guard)
        latest = tables.latest_number(rows.reset)
        if generation is None and latest != number:
            self._generation = latest
            raise ChangedMeanwhile
        return _ScopeLook(number, rows, tables.scopes.decode_found(rows.heads[0]))

    def _expect(self, draft: Draft, look: _ScopeLook) -> None:
        """Make the rows that were read conditions of the write."""
        tables, spot = self._tables, self._spot
        [head] = look.rows.heads
        draft.expect(tables.scopes, (spot.key, number_text(look.generation)), head)
        if spot.conversation is not None:
            draft.expect(tables.resets, (spot.conversation, LATEST), look.rows.reset)
        if self._guard is not None:
            draft.expect(*self._guard.place, look.rows.run)


def _checked(key: str, value: Any, ttl_ms: int | None) -> tuple[str, Content]:
    # Check the value first: refusals have a fixed order.
    content = content_of(value)
    if ttl_ms is not None:
        check_ms(ttl_ms, "ttl_ms", least=1)
    return checked_key(key), content


def get_linked(store: Store, links: Sequence[Link]) -> list[Any]:
    """The linked values of rows; CorruptionError if one is missing."""
    try:
        return store.get_many([link.digest for link in links])
    except ObjectNotFoundError as exc:
        raise CorruptionError(f"a value of state is not in the store: {exc}") from exc


def context_of(store: Store, stored: ValueRow) -> Context:
    """The context in which a value was first put."""
    fields = stored.context
    return Context(*(get_linked(store, [fields])[0] if type(fields) is Link else fields))


def entries(tables: ScopedTables, found: Sequence[ValueRow]) -> list[StateEntry]:
    """Values as callers see them; linked values are read in one call."""
    linked = iter(get_linked(tables.store, [one.value for one in found if type(one.value) is Link]))
    return [
        _entry(one, restored(next(linked) if type(one.value) is Link else one.value))
        for one in found
    ]


def _entry(row: ValueRow, value: Any) -> StateEntry:
    return StateEntry(
        key=row.key,
        value=value,
        version=row.version,
        created_ms=row.created_ms,
        updated_ms=row.updated_ms,
        expires_ms=row.expires_ms,
        size_bytes=row.size_bytes,
        written_by=row.writer,
    )
