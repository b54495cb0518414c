"""Erasing everything about one subject: its sessions, and what keeps them alive.

Sessions about a subject are found through the index of subjects (``session.subjects``), records
through providers: each record system in the store has one or none (``systems``), and the caller may
pass others. ``execute`` first removes pins on manifests of these sessions, then the records, then
each session with all its rows, its entry in the index last. If it is interrupted, a new plan finds
what is left.

Only rows are removed here. gc removes the objects, and compacting the file removes their bytes.
Objects that are also reached from other sessions, pins or records stay; the plan says which they
are and who their other owners are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

from casstore.engine.protocol import Condition, DeleteRow, Row, RowIs, RowKey, Write
from casstore.errors import InvalidInputError
from casstore.format.printing import ascii_json
from casstore.maintenance import sharing, systems
from casstore.maintenance.plan_fields import plain, read_plain
from casstore.maintenance.progress import Phase, Progress
from casstore.maintenance.roots import digests_in, kept_name, live_roots
from casstore.maintenance.rows import decoded
from casstore.maintenance.sharing import Root, Sharing
from casstore.session import attachments, catalogue, keys, pins, subjects
from casstore.session.arguments import check_count, check_flag, check_kind, list_of
from casstore.session.attempts import transact, transaction
from casstore.session.catalogue import KnownSession
from casstore.session.scanning import scan
from casstore.session.state import (
    HeadRow,
    Runtime,
    decode_head,
    head_key,
    meta_key,
    runtime_of,
    tombstone_key,
)
from casstore.store import Store, check_store

SCHEMA: Final = "casstore.erasure/1"
#: How many shared objects and sharers a plan lists.
LISTED: Final = 100
#: The commands that must run after an erasure before the bytes are gone.
STILL_TO_RUN: Final = ("gc", "compact")


class Provider(Protocol):
    """Finds and erases what a system other than sessions stores about subjects.

    ``name`` is the same in every process: a saved plan refers to it. That of a record system's
    provider is the system's. ``find`` names the records about a subject, as texts that only the
    provider needs to understand. ``roots`` gives the digests that these records keep alive.
    ``erase`` removes them, ignores those that are gone already, and returns how many it removed.
    """

    @property
    def name(self) -> str:
        """The name of the provider."""
        ...

    def find(self, store: Store, subject: str) -> Sequence[str]:
        """The names of the records about a subject."""
        ...

    def roots(self, store: Store, found: Sequence[str]) -> Iterator[bytes]:
        """The digests that the rows of these records keep alive."""
        ...

    def erase(self, store: Store, subject: str, found: Sequence[str]) -> int:
        """Remove these records; returns how many it removed."""
        ...


class Staying(NamedTuple):
    """A record about the subject that may not be erased, and why.

    Attributes:
        provider: the system that the record belongs to
        record: its name
        reason: a hold and its end, a seal, a key that is pending
    """

    provider: str
    record: str
    reason: str


@runtime_checkable
class RecordProvider(Provider, Protocol):
    """A provider whose records are rows of the table ``records``; some may have to stay."""

    def rows(self, store: Store, found: Sequence[str]) -> Iterator[bytes]:
        """The keys of these records' rows: a plan does not count them as other owners."""
        ...

    def stays(self, store: Store, found: Sequence[str]) -> Sequence[Staying]:
        """Which of these cannot be erased now, and why."""
        ...

    def recipients(self, store: Store, found: Sequence[str]) -> Sequence[str]:
        """The recipients of these records, who must be informed of the erasure."""
        ...


class ErasedSession(NamedTuple):
    """A session to erase, and what is erased with it.

    Attributes:
        session: the session
        revisions: its revisions; 0: only its deletion has to be finished
        labels: its labels
        batches: batches in its queue
        attachments: its attachments
        elsewhere: attachments whose bytes are outside the store: delete them yourself
        also_about: other subjects that it is about
    """

    session: str
    revisions: int
    labels: int
    batches: int
    attachments: int
    elsewhere: int
    also_about: tuple[str, ...]


class ErasurePlan(NamedTuple):
    """All that is stored about one subject, and what of it other sessions and rows reach, too.

    >>> names = session.add_subjects(["anna"])
    >>> found = plan(store, "anna")
    >>> [(gone.session, gone.revisions) for gone in found.sessions]
    [('s', 2)]

    Attributes:
        subject: the subject
        planned_at_ms: when it was planned
        sessions: sessions about the subject
        pins: tags and pins on checkpoints of these sessions, and pins that the sessions own, with
            what they name
        records: the records that each provider found
        sharing: what others reach as well, so that it stays
        stays: records that may not be erased
        recipients: recipients of erased data, who must be informed
        missing_systems: record systems in the store that are not installed, and why: they were not
            searched
    """

    subject: str
    planned_at_ms: int
    sessions: tuple[ErasedSession, ...]
    pins: tuple[tuple[str, str], ...]
    records: dict[str, tuple[str, ...]]
    sharing: Sharing
    stays: tuple[Staying, ...] = ()
    recipients: tuple[str, ...] = ()
    missing_systems: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> str:
        """The plan as one document of JSON.

        >>> names = session.add_subjects(["anna"])
        >>> text = plan(store, "anna").to_json()
        >>> ErasurePlan.from_json(text).sessions[0].session
        's'
        """
        return ascii_json({"schema": SCHEMA, **plain(self)})

    @staticmethod
    def from_json(text: str) -> ErasurePlan:
        """The plan from the output of ``to_json``; InvalidInputError if it is not a plan.

        >>> found = plan(store, "anna")
        >>> ErasurePlan.from_json(found.to_json()) == found
        True
        """
        try:
            fields = json.loads(text)
            if fields.pop("schema") != SCHEMA:
                raise ValueError(f"an erasure plan has the schema {SCHEMA}")
            plan: ErasurePlan = read_plain(ErasurePlan, fields)
            for one in plan.sessions:
                keys.session_key(one.session)
            keys.id_bytes(plan.subject, "a subject")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
            raise InvalidInputError(f"not an erasure plan: {exc}") from exc
        return plan


class ErasureReport(NamedTuple):
    """What an erasure did.

    Attributes:
        subject: the subject
        sessions_deleted: sessions deleted
        already_gone: sessions deleted before, by an earlier run or another process, whose deletion
            is finished now
        pins_removed: tags and pins removed
        records_erased: records erased
        kept: sessions in the plan that are not about the subject any more, and stayed
        remaining: sessions about the subject that were not in the plan: plan again for them
        sharing: what others reach as well, according to the plan
        still_to_run: commands to run next, which remove the bytes from the disk
        stays: records that may not be erased
        recipients: recipients of erased data, who must be informed
        records_remaining: records about the subject that were not in the plan, each with its
            provider
    """

    subject: str
    sessions_deleted: int
    already_gone: int
    pins_removed: int
    records_erased: int
    kept: tuple[str, ...]
    remaining: tuple[str, ...]
    sharing: Sharing
    still_to_run: tuple[str, ...]
    stays: tuple[Staying, ...] = ()
    recipients: tuple[str, ...] = ()
    records_remaining: tuple[tuple[str, str], ...] = ()


def plan(
    store: Store,
    subject: str,
    *,
    providers: Sequence[Provider] = (),
    survey: bool = True,
    listed: int = LISTED,
    progress: Progress | None = None,
) -> ErasurePlan:
    """Find everything about ``subject``, and what of it other sessions and rows reach, too.

    ``providers`` are asked in addition to those of the record systems in the store. One with the
    name of a system replaces the system's own, for example because it knows a secret.

    Without ``survey`` the plan has nothing about sharing. A survey passes once over all objects for
    the subject, and once for each 200,000 digests that other rows name. CorruptionError if a row
    cannot be read.

    >>> names = session.add_subjects(["anna"])
    >>> head = store.fork("s", "fork", subjects=[])
    >>> found = plan(store, "anna")
    >>> [gone.session for gone in found.sessions], found.sharing.shared_objects > 0
    (['s'], True)
    """
    check_store(store)
    keys.id_bytes(subject, "a subject")
    held = systems.held_by(store)
    known = _all_providers(held, providers)
    check_flag(survey, "survey")
    check_count(listed, "listed")
    runtime = runtime_of(store)
    now_ms = runtime.engine.now_ms()
    names = list(subjects.sessions_of(runtime, subject))
    manifests: set[bytes] = set()
    roots: set[bytes] = set()
    found: list[ErasedSession] = []
    report = Phase(progress, "find", "sessions")
    for name in names:
        found.append(_session(runtime, subject, name, manifests, roots))
        report(len(found), len(names))
    own_pins = [
        pin
        for pin in pins.list_pins(runtime, "", expired=True)
        if pin.digest in manifests or pin.session in names
    ]
    named = tuple([(pin.name, pin.digest.hex()) for pin in own_pins])
    roots.update([pin.digest for pin in own_pins])
    records = {one.name: tuple(one.find(store, subject)) for one in known.values()}
    my_rows = {
        key
        for name in names
        for system in held.systems
        for key in system.rows_of_session(store, name)
    }
    stays: list[Staying] = []
    recipients: set[str] = set()
    for one in known.values():
        own = records[one.name]
        roots.update(one.roots(store, own))
        if isinstance(one, RecordProvider):
            my_rows.update(one.rows(store, own))
            stays += one.stays(store, own)
            recipients.update(one.recipients(store, own))
    shared = sharing.NOTHING
    if survey:
        mine = {keys.session_key(name) for name in names}
        others = _others(runtime, mine, {name for name, _ in named}, my_rows, now_ms)
        shared = sharing.survey(
            runtime.engine, manifests | roots, others, listed=listed, progress=progress
        )
    return ErasurePlan(
        subject,
        now_ms,
        tuple(found),
        named,
        records,
        shared,
        tuple(stays),
        tuple(sorted(recipients)),
        tuple(held.missing.items()),
    )


def _session(
    runtime: Runtime, subject: str, name: str, manifests: set[bytes], roots: set[bytes]
) -> ErasedSession:
    """What is erased with a session; adds the digests that it keeps alive to the two sets."""
    key = keys.session_key(name)
    [about] = runtime.engine.get_rows([keys.subjects(key)])
    revisions = labels = batches = bytes_here = elsewhere = 0
    for row in _revisions_of(runtime, key):
        revisions += 1
        manifests.add(row.manifest)
        if row.hidden is not None:
            roots.add(row.hidden)
    labels = sum(1 for _ in scan(runtime.engine, "history", keys.labels(key), keys.past(key)))
    for item in scan(runtime.engine, "queue", key, keys.past(key)):
        items = digests_in("queue", item)
        batches += len(items)
        roots.update(items)
    for item in scan(runtime.engine, "attachments", key, keys.past(key)):
        attachment = attachments.decode(name, item.value)
        bytes_here += 1
        if attachment.digest is not None:
            roots.add(bytes(attachment.digest))
        elsewhere += attachment.uri is not None
    also = tuple([one for one in subjects.decode(about) if one != subject])
    return ErasedSession(name, revisions, labels, batches, bytes_here, elsewhere, also)


def _revisions_of(runtime: Runtime, key: bytes) -> Iterator[HeadRow]:
    """All revisions of a session, the head first; CorruptionError names a damaged row."""
    [head] = runtime.engine.get_rows([head_key(key)])
    if head is not None:
        yield decoded(head_key(key), head, decode_head)
    for row in scan(runtime.engine, "history", keys.history(key, 0), keys.labels(key)):
        yield decoded(RowKey("history", row.key), row.value, decode_head)


def _others(
    runtime: Runtime, mine: set[bytes], my_pins: set[str], my_rows: set[bytes], now_ms: int
) -> Iterator[Root]:
    """Every digest named by a row that is not part of the erasure, and the owner of that row."""

    def owner(table: str, row: Row) -> str | None:
        if table == "pins":
            name = kept_name(table, row)
            return None if name in my_pins else f"pin {name}"
        if table == "records":
            return None if row.key in my_rows else kept_name(table, row)
        key = keys.session_part(row.key)
        if key in mine:
            return None
        session = keys.session_of(key)
        return f"session {session if session is not None else key.hex()}"

    roots = live_roots(now_ms)
    for table in roots.tables:
        for row in scan(runtime.engine, table, b"", None):
            whose = owner(table, row)
            if whose is not None:
                for digest in digests_in(table, row, roots):
                    yield Root(whose, digest)


# --- carrying it out ------------------------------------------------------------------------


def _checked_providers(providers: Sequence[Provider]) -> Mapping[str, Provider]:
    """The providers by name; InvalidInputError if one lacks a method or two have one name."""
    given = list_of(providers, "providers")
    for one in given:
        can = all(callable(getattr(one, name, None)) for name in ("find", "roots", "erase"))
        if isinstance(one, type) or not can or type(getattr(one, "name", None)) is not str:
            raise InvalidInputError(
                f"a provider must have name, find, roots and erase, got {one!r:.80}"
            )
    known = {one.name: one for one in given}
    if len(known) < len(given):
        raise InvalidInputError("two providers have the same name: give each provider once")
    return known


def _all_providers(held: systems.Held, providers: Sequence[Provider]) -> Mapping[str, Provider]:
    """The given providers, and those of the systems that none is given for, by name."""
    own = [system.erasure() for system in held.systems]
    given = _checked_providers(providers)
    return {**_checked_providers([one for one in own if one is not None]), **given}


def execute(
    store: Store,
    plan: ErasurePlan,
    *,
    providers: Sequence[Provider] = (),
    progress: Progress | None = None,
) -> ErasureReport:
    """Erase what the plan lists. If this is interrupted, plan and execute again to finish.

    A session is erased even if it is leased or protected. A session that has lost the subject since
    is kept. InvalidInputError, before anything is erased, if the plan lists records of a provider
    that is neither in ``providers`` nor that of an installed record system.

    >>> names = session.add_subjects(["anna"])
    >>> report = execute(store, plan(store, "anna"))
    >>> report.sessions_deleted, [info.meta.session for info in store.sessions()]
    (1, [])
    """
    check_store(store)
    check_kind(plan, "plan", ErasurePlan)
    held = systems.held_by(store)
    given = _all_providers(held, providers)
    missing = [name for name, found in plan.records.items() if found and name not in given]
    if missing:
        raise InvalidInputError(
            f"the plan lists records of {missing[0]!r}: pass the provider of that name in "
            "providers, or install the package of that record system"
        )
    runtime = runtime_of(store)
    removed = _unpin(runtime, plan.subject, [one.session for one in plan.sessions], plan.pins)
    erased = sum(
        given[name].erase(store, plan.subject, found)
        for name, found in plan.records.items()
        if found
    )
    # Before the sessions are erased: providers use them to find records derived from them.
    unplanned = [
        (name, record)
        for name, provider in given.items()
        for record in provider.find(store, plan.subject)
        if record not in plan.records.get(name, ())
    ]
    deleted = gone = 0
    kept: list[str] = []
    report = Phase(progress, "erase", "sessions")
    for done, one in enumerate(plan.sessions):
        outcome = _erase(store, runtime, held, plan.subject, one.session)
        if outcome is None:
            kept.append(one.session)
        else:
            deleted += outcome
            gone += not outcome
        report(done + 1, len(plan.sessions))
    stays = [
        staying
        for name, found in plan.records.items()
        if isinstance(provider := given.get(name), RecordProvider)
        for staying in provider.stays(store, found)
    ]
    planned = set(kept)
    remaining = tuple(
        [name for name in subjects.sessions_of(runtime, plan.subject) if name not in planned]
    )
    return ErasureReport(
        subject=plan.subject,
        sessions_deleted=deleted,
        already_gone=gone,
        pins_removed=removed,
        records_erased=erased,
        kept=tuple(kept),
        remaining=remaining,
        sharing=plan.sharing,
        still_to_run=STILL_TO_RUN,
        stays=tuple(stays),
        recipients=plan.recipients,
        records_remaining=tuple(unplanned),
    )


def _erase(
    store: Store, runtime: Runtime, held: systems.Held, subject: str, session: str
) -> bool | None:
    """Delete a session if it is about the subject; False: it was gone; None: it stays."""
    key = keys.session_key(session)

    def bury() -> bool | None:
        places = [tombstone_key(key), head_key(key), meta_key(key), keys.subjects(key)]
        deleted, head, meta, about = runtime.engine.get_rows(places)
        if deleted is not None or (head is None and meta is None):
            return False
        if subject not in subjects.decode(about):
            return None
        catalogue.bury(runtime, KnownSession(key, head, meta), [RowIs(*keys.subjects(key), about)])
        return True

    outcome = transact(f"session {session!r}", bury)
    if outcome is not None:
        held.finish_deletion(store, runtime, session)
    return outcome


def _unpin(
    runtime: Runtime, subject: str, sessions: Iterable[str], planned: Sequence[tuple[str, str]]
) -> int:
    """Remove the planned pins, and those on revisions of these sessions; returns how many.

    Pins that a session owns are removed as well, and those created after the plan: once the session
    is deleted, they can no longer be attributed to the subject.
    """
    owners: dict[str, list[bytes]] = {}
    known = {session: keys.session_key(session) for session in sessions}
    for key in known.values():
        for manifest in {row.manifest.hex() for row in _revisions_of(runtime, key)}:
            owners.setdefault(manifest, []).append(key)
    listed = list(pins.list_pins(runtime, "", expired=True))
    owned = {pin.name: known[pin.session] for pin in listed if pin.session in known}
    now = [
        (pin.name, pin.digest.hex())
        for pin in listed
        if pin.digest.hex() in owners or pin.name in owned
    ]

    def owners_of(name: str, digest: str) -> list[bytes]:
        return [*owners.get(digest, ()), *([owned[name]] if name in owned else [])]

    return sum(
        _remove_pin(runtime, subject, name, digest, owners_of(name, digest))
        for name, digest in dict.fromkeys((*planned, *now))
    )


@transaction("the pin {name!r}")
def _remove_pin(
    runtime: Runtime, subject: str, name: str, digest: str, owners: Sequence[bytes]
) -> bool:
    """Remove a pin if it still names the same object, unless only kept sessions have the object."""
    place = RowKey("pins", keys.part(name, "a name"))
    about = [keys.subjects(key) for key in owners]
    deleted = [tombstone_key(key) for key in owners]
    row, *rows = runtime.engine.get_rows([place, *about, *deleted])
    if row is None or pins.decode_pin(row).digest.hex() != digest:
        return False
    named, gone = rows[: len(about)], rows[len(about) :]
    if owners and not any(
        tombstone is not None or subject in subjects.decode(one)
        for one, tombstone in zip(named, gone, strict=True)
    ):
        return False
    conditions: list[Condition] = [
        RowIs(*place, row),
        *[RowIs(*one, known) for one, known in zip(about, named, strict=True)],
    ]
    runtime.engine.write(Write(conditions=conditions, rows=[DeleteRow(*place)]))
    return True
