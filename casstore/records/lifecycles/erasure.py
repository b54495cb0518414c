"""Finds, explains and removes the records that lifecycles hold about a subject, for ``erasure``.

    about the subject by name          the index of subjects
    the subject's own data             its user data, with the key; its agents' sessions
    derived from any of those          the index of derivation, as far as it leads

A sealed record stays until it is reviewed, a held record until its hold ends. The user's key is
destroyed in either case, because such values have keys of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NamedTuple

from casstore.maintenance.erasure import Staying
from casstore.records.lifecycles.annotation import Note
from casstore.records.lifecycles.kept_records import rewrite_record
from casstore.records.lifecycles.key_files import KeyStore, check_key_store
from casstore.records.lifecycles.lifecycles import Lifecycles
from casstore.records.lifecycles.notes import note_now
from casstore.records.lifecycles.references import (
    AGENT,
    CHECKPOINT,
    PERSON,
    RECORD,
    ROWS,
    SESSION,
    USER,
    Ref,
)
from casstore.records.lifecycles.removal import Stayed, objection
from casstore.records.lifecycles.tables import LifecycleChange
from casstore.session import subjects
from casstore.session.arguments import check_callable, list_of
from casstore.session.records import Record, row_links
from casstore.session.state import runtime_of
from casstore.store import Store

_READ_AT_ONCE: Final = 256
_REWRITTEN: Final = "about others as well: rewritten without the subject"
_KEY_WAITS: Final = (
    "to be destroyed, and the key store that has it was not given: erase again with it"
)


#: Called with a record and its content; returns the content without the subject, or None to remove
#: the record.
Rewrite = Callable[[Ref, Any], Any]


class AboutSubject(NamedTuple):
    """A record about a subject, or derived from such a record."""

    ref: Ref
    note: Note | None
    #: The seal or hold that prevents removal, or None.
    stays: Stayed | None


class LifecycleErasure:
    """The ``erasure`` provider for everything that ``Lifecycles`` stores.

    ``keys`` and ``secret`` as for ``Lifecycles``. Without the key store, rows are removed and their
    keys stay listed for destruction; the report says so.

    ``rewrite`` is called for each record of a collection that is also about other subjects. Its
    result replaces the content; if it returns None, the record is removed.

    >>> from casstore.maintenance import erasure
    >>> ref = life.users.put("anna", "language", "en")
    >>> providers = [LifecycleErasure()]
    >>> found = erasure.plan(store, "anna", providers=providers)
    >>> erasure.execute(store, found, providers=providers).records_erased
    1
    """

    def __init__(
        self,
        *,
        keys: KeyStore | None = None,
        secret: bytes | None = None,
        rewrite: Rewrite | None = None,
    ) -> None:
        if keys is not None:
            check_key_store(keys)
        if rewrite is not None:
            check_callable(rewrite, "rewrite")
        self._keys = keys
        self._secret = secret
        self._rewrite = rewrite
        self._rewritten: list[Ref] = []

    @property
    def name(self) -> str:
        """The name of the record system."""
        return "life"

    def find(self, store: Store, subject: str) -> list[str]:
        """The records about a subject, and those derived from them."""
        return [ref.to_text() for ref in find_refs(self._open(store), subject)]

    def rows(self, store: Store, found: Sequence[str]) -> Iterator[bytes]:
        """The keys of the rows of the records in ``found``, and of their notes."""
        life = self._open(store)
        for ref in records_of(found):
            for table, key in (life.tables.payload(ref), life.tables.note(ref)):
                yield table.keys.key(key)

    def roots(self, store: Store, found: Sequence[str]) -> Iterator[bytes]:
        """The digests of the objects that the records in ``found`` keep from gc."""
        for _, row, noted in _read(self._open(store), records_of(found)):
            for record in (row, noted):
                yield from () if record is None else row_links(record.row)

    def stays(self, store: Store, found: Sequence[str]) -> list[Staying]:
        """The records that cannot be removed now, and why."""
        found = list_of(found, "found")
        life = self._open(store)
        kept = [
            Staying(self.name, str(each.ref), _reason(each.stays))
            for each in explain(life, records_of(found))
            if each.stays is not None
        ]
        people = {ref.owner for ref in map(Ref.from_text, found) if ref.kind in (PERSON, USER)}
        waiting = [key for owner in sorted(people) for key in _doomed(life, owner)]
        kept += [Staying(self.name, f"key {key}", _KEY_WAITS) for key in waiting]
        named = {text for text in found if Ref.from_text(text) in self._rewritten}
        kept += [Staying(self.name, str(Ref.from_text(text)), _REWRITTEN) for text in sorted(named)]
        return kept

    def recipients(self, store: Store, found: Sequence[str]) -> list[str]:
        """Third parties that received any of the records that can be removed."""
        informed: set[str] = set()
        for each in explain(self._open(store), records_of(found)):
            if each.stays is None and each.note is not None:
                informed.update(each.note.processors)
        return sorted(informed)

    def erase(self, store: Store, subject: str, found: Sequence[str]) -> int:
        """Remove the records in ``found`` that are still about the subject; returns how many."""
        life = self._open(store)
        planned = {Ref.from_text(text) for text in list_of(found, "found")}
        refs = [ref for ref in find_refs(life, subject) if ref in planned]
        if self._rewrite is not None:
            done = rewrite_shared(life, subject, refs, self._rewrite)
            self._rewritten += done
            refs = [ref for ref in refs if ref not in done]
        return erase_refs(life, refs)

    def _open(self, store: Store) -> Lifecycles:
        return Lifecycles(store, keys=self._keys, secret=self._secret)


def find_refs(life: Lifecycles, subject: str) -> list[Ref]:
    """All records about a subject and all records derived from them, without duplicates.

    Holds all their names in memory.
    """
    life.subjects.check()
    tables, hashed = life.tables, life.subjects.hash(subject)
    # The store's own sessions are erased elsewhere; records derived from them are found here.
    sessions = [
        Ref(SESSION, name) for name in subjects.sessions_of(runtime_of(life.store), subject)
    ]
    start = [Ref(*record.key[1:]) for record in tables.subjects.scan(hashed)]
    if tables.people.find(hashed) is not None or _doomed(life, hashed):
        start.append(Ref(PERSON, hashed))
    found: dict[Ref, None] = {}
    waiting = [*sessions, *start]
    while waiting:
        ref = waiting.pop()
        if ref in found:
            continue
        found[ref] = None
        waiting += [Ref(*record.key[3:]) for record in tables.derived.scan(*ref)]
        if ref.kind == AGENT:
            waiting += [Ref(CHECKPOINT, *row.key) for row in tables.checkpoints.scan(ref.owner)]
        elif ref.kind == PERSON:
            waiting += [Ref(USER, *row.key) for row in tables.users.scan(ref.owner)]
    return sorted(ref for ref in found if ref.kind != SESSION)


def explain(life: Lifecycles, refs: Iterable[Ref]) -> Iterator[AboutSubject]:
    """The note of each existing record, and the seal or hold that prevents its removal."""
    now_ms = life.store.engine.now_ms()
    for ref, row, noted in _read(life, refs):
        if row is not None:
            note = note_now(life.tables, noted)
            yield AboutSubject(ref, note, objection(ref, note, now_ms))


def rewrite_shared(
    life: Lifecycles, subject: str, refs: Sequence[Ref], rewrite: Rewrite
) -> list[Ref]:
    """Rewrite the records that also have other subjects, each in one write; returns their refs."""
    hashed = life.subjects.hash(subject)
    done: list[Ref] = []
    for each in explain(life, [ref for ref in refs if ref.kind == RECORD]):
        if each.stays is not None or each.note is None or set(each.note.subjects) <= {hashed}:
            continue

        def step(change: LifecycleChange, ref: Ref = each.ref) -> bool:
            without = partial(rewrite, ref)
            return rewrite_record(change, ref, without, hashed, refs)

        if life.tables.change(str(each.ref), step):
            done.append(each.ref)
    return done


def erase_refs(life: Lifecycles, refs: Sequence[Ref]) -> int:
    """Remove records, whole users and sessions, except what is sealed or held; returns how many."""
    erased = 0
    wholes = {(USER if ref.kind == PERSON else CHECKPOINT, ref.owner): ref for ref in refs
              if ref.kind in (PERSON, AGENT)}  # fmt: skip
    for ref in refs:
        if ref.kind in ROWS and (ref.kind, ref.owner) not in wholes:
            removal = life.remove(ref)
            erased += removal.there and removal.stays is None
    for whole in wholes.values():
        if whole.kind == PERSON:
            erased += life.users.erase_hashed(whole.owner).deleted
        elif life.tables.sessions.find(whole.owner) is not None:
            erased += life.delete_session(whole.owner).deleted
    return erased


def _doomed(life: Lifecycles, user: str) -> list[str]:
    """The keys of a user that are listed for destruction."""
    return [record.key[0] for record in life.tables.doomed.scan_starting(f"{user}.")]


def records_of(found: Sequence[str]) -> list[Ref]:
    """The single records among the results of ``find``, without whole users and sessions."""
    texts = list_of(found, "found")
    return [ref for ref in map(Ref.from_text, texts) if ref.kind in ROWS]


def _read(
    life: Lifecycles, refs: Iterable[Ref]
) -> Iterator[tuple[Ref, Record | None, Record | None]]:
    wanted = list(refs)
    for start in range(0, len(wanted), _READ_AT_ONCE):
        page = wanted[start : start + _READ_AT_ONCE]
        read = life.tables.find(
            [place for ref in page for place in (life.tables.payload(ref), life.tables.note(ref))]
        )
        yield from zip(page, read[::2], read[1::2], strict=True)


def _reason(stays: Stayed) -> str:
    if stays.until_ms is None:
        return f"sealed by {stays.action} ({stays.basis}): needs a review"
    until = datetime.fromtimestamp(stays.until_ms / 1000, UTC).isoformat(timespec="seconds")
    return f"held until {until} ({stays.basis})"
