"""One scope: its values by key, each call one transaction.

A call reads the rows it needs at one moment (the value, the scope's own row, the latest reset
of the conversation, the run it is made for), decides, and writes under the condition that
those rows are as they were. If they are not, it begins again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from casstore.engine.protocol import MAX_STAMP_MS, Write
from casstore.errors import (
    ConditionFailedError,
    CorruptionError,
    InvalidInputError,
    ObjectNotFoundError,
    StateConflictError,
)
from casstore.format.canonical import Link
from casstore.records.json_values import restored
from casstore.records.scoped import policy as policies
from casstore.records.scoped.changes import changed, find_late, forget, known, put_head, put_leads
from casstore.records.scoped.contents import Content, checked_key, content_of
from casstore.records.scoped.layout import (
    LATEST,
    Head,
    Spot,
    Stored,
    Tables,
    charged_bytes,
    context_in_row,
    decode_head,
    decode_value,
    latest_number,
    new_head,
    number_text,
    value_in_row,
)
from casstore.records.scoped.policy import Quota, Reason
from casstore.records.scoped.scope_keys import Context, real_key
from casstore.session.arguments import check_count, check_text
from casstore.session.attempts import Attempts, read_again
from casstore.session.records import Draft, Record, Table, find_records
from casstore.store import Store

#: How many keys one page lists at the most.
MAX_LISTED: Final = 100

Built = TypeVar("Built")


class Entry(NamedTuple):
    """A value of state; a value of None is not the same as no entry.

    >>> entry = state.scope(context, "actor").put("language", "de")
    >>> entry.key, entry.value, entry.expires_ms
    ('language', 'de', None)
    """

    key: str
    value: Any
    #: Changes with every write, and never comes again: for ``swap``.
    version: str
    created_ms: int
    updated_ms: int
    expires_ms: int | None
    #: Of the value's JSON, as UTF-8.
    size_bytes: int
    #: The type and id of the actor who wrote it last.
    written_by: tuple[str, str] | None


class Page(NamedTuple):
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


class Usage(NamedTuple):
    """What a scope holds, as its quota counts; with what expired and was not yet removed.

    >>> scope = state.scope(context, "actor")
    >>> entry = scope.put("language", "de")
    >>> scope.usage().keys
    1
    """

    keys: int
    size_bytes: int


class Guard(Protocol):
    """A record that must be there, and say yes, whenever something is read or written."""

    @property
    def place(self) -> tuple[Table, tuple[str, ...]]:
        """Where it is."""
        ...

    def check(self, record: Record | None, now_ms: int) -> None:
        """StateRefusedError if it does not allow the call."""
        ...


class _Version(NamedTuple):
    """What a key must be at; None: it must not be there."""

    text: str | None


class _Look(NamedTuple):
    """Rows of a scope at one moment."""

    now_ms: int
    generation: str
    head_record: Record | None
    head: Head | None
    reset_record: Record | None
    guard_record: Record | None
    values: list[Stored | None]


class Scope:
    """The state of one scope. Made by ``ScopedState.scope`` or for a run; safe to share.

    The examples use ``state``, a ``ScopedState``, and ``context``.

    >>> scope = state.scope(context, "actor")
    >>> entry = scope.put("language", "de")
    >>> scope.find("language").value
    'de'
    """

    def __init__(
        self, tables: Tables, spot: Spot, context: Context, quota: Quota, guard: Guard | None
    ) -> None:
        self._tables = tables
        self._spot = spot
        self._context = context
        self._quota = quota
        self._guard = guard
        # As far as known; every call looks again.
        self._generation = 0

    @property
    def key(self) -> str:
        """What the scope is called in the store.

        >>> scope = state.scope(context, "actor")
        >>> scope.key == state.scope(context._replace(conversation_id="c2"), "actor").key
        True
        """
        return self._spot.key

    # --- reading ------------------------------------------------------------------------

    def find(self, key: str, *, generation: int | None = None) -> Entry | None:
        """A value and its version; None if there is none.

        With ``generation``, as it was between two resets: 0 before the first.

        >>> scope = state.scope(context, "actor")
        >>> entry = scope.put("language", None)
        >>> scope.find("language").value is None, scope.find("colour") is None
        (True, True)
        """
        name = checked_key(key)
        return self._read(name, generation, lambda stored: entries(self._tables, [stored])[0])

    def origin(self, key: str) -> Context | None:
        """Where a value was put first; None if there is none.

        >>> scope = state.scope(context, "actor")
        >>> entry = scope.put("language", "de")
        >>> scope.origin("language").conversation_id
        'c1'
        """
        return self._read(
            checked_key(key), None, lambda stored: context_of(self._tables.store, stored)
        )

    def _read(
        self, name: str, generation: int | None, build: Callable[[Stored], Built]
    ) -> Built | None:
        """What ``build`` makes of a value; None if there is none."""
        before: bytes | None = None
        attempts = Attempts(f"state {name!r}")
        while True:
            attempts.begin()
            look = self._look([name], generation)
            stored = look.values[0]
            if stored is None or not stored.is_live(look.now_ms):
                return None
            try:
                return build(stored)
            except CorruptionError:
                # It was replaced between two reads, and what it had linked to collected. If it
                # is still the same, the store is damaged.
                if before == stored.record.row:
                    raise
                before = stored.record.row

    def list_keys(
        self,
        prefix: str = "",
        *,
        limit: int = MAX_LISTED,
        after: str | None = None,
        generation: int | None = None,
    ) -> Page:
        """Keys that start with ``prefix``, in order; at most ``limit``, and never above 100.

        >>> scope = state.scope(context, "actor")
        >>> entries = [scope.put(key, "a value") for key in ("ui.size", "language", "ui.colour")]
        >>> scope.list_keys("ui.").keys
        ['ui.colour', 'ui.size']
        """
        check_text(prefix, "a prefix")
        check_count(limit, "a limit", least=1)
        if after is not None:
            check_text(after, "a cursor")
        start, limit = real_key(prefix), min(limit, MAX_LISTED)
        look = self._look([], generation)
        keys: list[str] = []
        for name in self._names(start, after, look):
            if len(keys) == limit:
                return Page(keys, True, keys[-1])
            keys.append(name)
        return Page(keys, False, None)

    def _names(self, start: str, after: str | None, look: _Look) -> Iterator[str]:
        """The keys that can be seen, in order."""
        place = (self._spot.key, look.generation)
        for one in self._tables.values.scan_starting(start, *place, after=after):
            if decode_value(one).is_live(look.now_ms):
                yield one.key[2]

    def usage(self, *, generation: int | None = None) -> Usage:
        """How many keys there are, and how many bytes.

        >>> scope = state.scope(context, "actor")
        >>> entry = scope.put("language", "de")
        >>> scope.usage()  # the key, and the JSON of the value
        Usage(keys=1, size_bytes=12)
        """
        head = self._look([], generation).head
        return Usage(0, 0) if head is None else Usage(head.keys, head.size_bytes)

    # --- writing ------------------------------------------------------------------------

    def put(self, key: str, value: Any, *, ttl_ms: int | None = None) -> Entry:
        """Write a value, whatever stood there before: the last one wins.

        After ``ttl_ms`` nobody sees it any more; without, it stays. StateRefusedError, and
        nothing changes, if it is no JSON, too large, or more than the quota allows.

        >>> scope = state.scope(context, "actor")
        >>> entries = [scope.put("language", value, ttl_ms=60_000) for value in ("de", "fr")]
        >>> scope.find("language").value
        'fr'
        """
        return self._put(key, value, ttl_ms, None)

    def swap(
        self, key: str, value: Any, *, expected: str | None, ttl_ms: int | None = None
    ) -> Entry:
        """Write a value if the key is at this version; None: if it is not there.

        StateConflictError, with the actual version, if not.

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
        return self._put(key, value, ttl_ms, _Version(expected))

    def prepare_put(self, key: str, value: Any, *, ttl_ms: int | None = None) -> Write:
        """What ``put`` would write now, to go beside the commit of a session.

        ``Commit(beside=…)`` ends with ConditionFailedError if the scope has changed by then;
        prepare it again. One such write for one scope in one commit.

        >>> scope = state.scope(context, "actor")
        >>> step = Commit(append=[NodeDraft("n3", "I speak German")], lease=UNFENCED)
        >>> result = session.commit(step._replace(beside=scope.prepare_put("language", "de")))
        >>> scope.find("language").value
        'de'
        """
        draft = Draft(self._tables.store)
        self._draft_put(draft, *_checked(key, value, ttl_ms), ttl_ms, None)
        return draft.as_write()

    def delete(self, key: str, *, expected: str | None = None) -> bool:
        """Remove a value; was there one? With ``expected``, only if it is at this version.

        >>> scope = state.scope(context, "actor")
        >>> entry = scope.put("language", "de")
        >>> scope.delete("language"), scope.delete("language")
        (True, False)
        """
        name = checked_key(key)
        attempts = Attempts(f"state {name!r}")
        while True:
            attempts.begin()
            look = self._look([name])
            stored = look.values[0]
            there = stored is not None and stored.is_live(look.now_ms)
            if expected is not None and (stored is None or not there or stored.version != expected):
                raise StateConflictError(
                    name, expected, stored.version if stored and there else None
                )
            if stored is None or not there:
                return False
            draft = Draft(self._tables.store)
            self._expect(draft, look)
            place = (self._spot.key, look.generation)
            forget(self._tables, draft, stored)
            if self._spot.scope == "subject" and self._context.subject is not None:
                draft.delete(self._tables.people, (*self._context.subject, *place, name))
            head = changed(known(look.head, self._spot.key), gone=[stored])
            put_head(self._tables, draft, place, head)
            try:
                draft.commit()
            except ConditionFailedError:
                continue
            return True

    def _put(self, key: str, value: Any, ttl_ms: int | None, expected: _Version | None) -> Entry:
        name, content = _checked(key, value, ttl_ms)
        attempts = Attempts(f"scope {self._spot.key}")
        while True:
            attempts.begin()
            draft = Draft(self._tables.store)
            entry = self._draft_put(draft, name, content, ttl_ms, expected)
            try:
                draft.commit()
            except ConditionFailedError:
                continue
            return entry

    def _draft_put(
        self,
        draft: Draft,
        name: str,
        content: Content,
        ttl_ms: int | None,
        expected: _Version | None,
    ) -> Entry:
        look = self._look([name])
        now_ms, there = look.now_ms, look.values[0]
        before = there if there is not None and there.is_live(now_ms) else None
        version = None if before is None else before.version
        if expected is not None and version != expected.text:
            raise StateConflictError(name, expected.text, version)
        self._expect(draft, look)
        expires_ms = None if ttl_ms is None else now_ms + ttl_ms
        old = new_head(self._spot.conversation) if look.head is None else look.head
        head = changed(
            old,
            gone=[] if there is None else [there],
            come_bytes=charged_bytes(name, content.size_bytes),
            expires_ms=expires_ms,
        )
        head = self._make_room(draft, look, old, head, name)
        put_head(
            self._tables, draft, (self._spot.key, look.generation), head, first=look.head is None
        )
        writer = self._context.actor
        origin = head.version if before is None else before.origin
        created_ms = now_ms if before is None else before.created_ms
        draft.put(
            self._tables.values,
            (self._spot.key, look.generation, name),
            [
                head.version,
                origin,
                created_ms,
                now_ms,
                expires_ms,
                content.size_bytes,
                None if writer is None else list(writer),
                context_in_row(draft, self._context) if before is None else before.context,
                value_in_row(draft, content.stored, content.size_bytes),
            ],
        )
        place = (self._spot.key, look.generation, name)
        put_leads(self._tables, draft, self._spot.scope, self._context, place, origin, before)
        return Entry(
            name,
            content.value,
            head.version,
            created_ms,
            now_ms,
            expires_ms,
            content.size_bytes,
            writer,
        )

    def _make_room(self, draft: Draft, look: _Look, old: Head, head: Head, name: str) -> Head:
        """The scope's row if the quota allows it; what has expired makes room if need be."""
        reason = self._excess(old, head)
        if reason is not None and old.soonest_ms is not None and old.soonest_ms <= look.now_ms:
            values = self._tables.values.scan(self._spot.key, look.generation)
            # All of them: a refusal writes nothing, so who tries again would find the same first.
            late = find_late(values, look.now_ms, every=True)
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

    def _excess(self, old: Head, head: Head) -> Reason | None:
        """What the quota does not allow: what is more than it, and more than before."""
        keys, size_bytes = self._quota
        if keys is not None and head.keys > max(keys, old.keys):
            return Reason.TOO_MANY_KEYS
        if size_bytes is not None and head.size_bytes > max(size_bytes, old.size_bytes):
            return Reason.TOO_MANY_BYTES
        return None

    # --- rows -----------------------------------------------------------------------------

    def _look(self, names: Sequence[str], generation: int | None = None) -> _Look:
        """The rows of a scope and of these keys, at one moment; is the call allowed?"""
        if generation is not None:
            check_count(generation, "a generation")
        # A run that ends, or a conversation begun anew, may take with it what its row links to.
        return read_again(lambda: self._look_once(names, generation), (CorruptionError,))

    def _look_once(self, names: Sequence[str], generation: int | None) -> _Look:
        tables, spot = self._tables, self._spot
        attempts = Attempts(f"the generation of scope {spot.key}")
        while True:
            attempts.begin()
            number = self._generation if generation is None else generation
            text = number_text(number)
            places: list[tuple[Table, tuple[str, ...]]] = [(tables.scopes, (spot.key, text))]
            places += [(tables.values, (spot.key, text, name)) for name in names]
            if spot.conversation is not None:
                places.append((tables.resets, (spot.conversation, LATEST)))
            if self._guard is not None:
                places.append(self._guard.place)
            found = find_records(tables.store, places)
            now_ms = tables.store.engine.now_ms()
            guard = found.pop() if self._guard is not None else None
            if self._guard is not None:
                self._guard.check(guard, now_ms)
            reset = found.pop() if spot.conversation is not None else None
            latest = latest_number(reset)
            if generation is None and latest != number:
                self._generation = latest
                continue
            head = found[0]
            return _Look(
                now_ms,
                text,
                head,
                None if head is None else decode_head(head),
                reset,
                guard,
                [None if one is None else decode_value(one) for one in found[1:]],
            )

    def _expect(self, draft: Draft, look: _Look) -> None:
        """Let a write fail if what was decided on has changed."""
        tables, spot = self._tables, self._spot
        draft.expect(tables.scopes, (spot.key, look.generation), look.head_record)
        if spot.conversation is not None:
            draft.expect(tables.resets, (spot.conversation, LATEST), look.reset_record)
        if self._guard is not None:
            draft.expect(*self._guard.place, look.guard_record)


def _checked(key: str, value: Any, ttl_ms: int | None) -> tuple[str, Content]:
    # The value first: that is the order of refusals.
    content = content_of(value)
    if ttl_ms is not None and (type(ttl_ms) is not int or not 0 < ttl_ms <= MAX_STAMP_MS):
        raise InvalidInputError(f"a time to live is 1 ms or more, not {ttl_ms!r}")
    return checked_key(key), content


def get_linked(store: Store, links: Sequence[Link]) -> list[Any]:
    """The values that rows link to; CorruptionError if one is not there."""
    try:
        return store.get_many([link.digest for link in links])
    except ObjectNotFoundError as exc:
        raise CorruptionError(f"a value of state is not in the store: {exc}") from exc


def context_of(store: Store, stored: Stored) -> Context:
    """Where a value was put first."""
    told = stored.context
    return Context(*(get_linked(store, [told])[0] if type(told) is Link else told))


def entries(tables: Tables, found: Sequence[Stored]) -> list[Entry]:
    """Values as callers see them; those that rows link to are read at once."""
    linked = iter(get_linked(tables.store, [one.value for one in found if type(one.value) is Link]))
    return [
        Entry(
            one.key,
            restored(next(linked) if type(one.value) is Link else one.value),
            one.version,
            one.created_ms,
            one.updated_ms,
            one.expires_ms,
            one.size_bytes,
            one.writer,
        )
        for one in found
    ]
