"""Transcripts as records: one row each, and rows of the entries that came together.

    claude.transcripts   project, session, subpath        rows, entries, time, summary
    claude.entries       project, session, subpath, row   heads, bodies
    claude.times         which times are taken (``records.unique_times``)

The subpath of a session's own transcript is empty. A write that adds rows expects the transcript
to be as it was, so nothing is numbered twice, and the summary is that of all entries. No two
writes have the same time.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, cast

from claude_agent_sdk import fold_session_summary
from claude_agent_sdk.types import SessionKey, SessionStoreEntry, SessionSummaryEntry

from casstore.adapters.claude import entries as forms
from casstore.engine.forks import Lock
from casstore.errors import ConditionFailedError, CorruptionError, InvalidInputError
from casstore.format.canonical import Link
from casstore.records.json_values import restored, storable
from casstore.records.unique_times import UniqueTimes
from casstore.session.attempts import Attempts, read_again
from casstore.session.records import Draft, Record, Table
from casstore.store import Store

# So many entries in a row that their heads and their links are each one object.
_ROW_ENTRIES: Final = 24
_KNOWN_TRANSCRIPTS: Final = 64
_BIRTH_BYTES: Final = 8
_PAGE: Final = 256


class Place(NamedTuple):
    """Which transcript: a session's own, or below it, one of a subagent."""

    project: str
    session: str
    subpath: str = ""

    @property
    def is_main(self) -> bool:
        """Is it the session's own?"""
        return not self.subpath

    @property
    def key(self) -> SessionKey:
        """As the SDK names it."""
        key: SessionKey = {"project_key": self.project, "session_id": self.session}
        if self.subpath:
            key["subpath"] = self.subpath
        return key


def place_of(key: SessionKey) -> Place:
    """The transcript that the SDK names so."""
    subpath = key.get("subpath")
    if subpath == "":
        raise InvalidInputError("a subpath is not empty; leave it out for the session's own")
    return Place(key["project_key"], key["session_id"], subpath or "")


class Transcript(NamedTuple):
    """A transcript's row."""

    place: Place
    record: Record
    #: Tells it from one of the same name that was deleted before.
    birth: bytes
    rows: int
    entries: int
    mtime_ms: int
    summary: dict[str, Any] | None


class _Known(NamedTuple):
    """The ids of the entries in the first so many rows of a transcript."""

    birth: bytes
    rows: int
    ids: set[Any]


class Transcripts:
    """Reads and writes transcripts. Writes to one of them come from one thread at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.heads = Table(store, "claude.transcripts", 3)
        self.rows = Table(store, "claude.entries", 4)
        self._times = UniqueTimes("claude.times")
        self._lock = Lock()
        self._known: OrderedDict[Place, _Known] = OrderedDict()

    # --- reading ------------------------------------------------------------------------

    def find(self, place: Place) -> Transcript | None:
        """A transcript; None if there is none."""
        record = self.heads.find(*place)
        return None if record is None else decode_transcript(record)

    def load(self, place: Place) -> list[dict[str, Any]] | None:
        """All entries of a transcript; None if there is none."""
        return read_again(lambda: self._load(place))

    def _load(self, place: Place) -> list[dict[str, Any]] | None:
        attempts = Attempts(f"session {place.session!r}")
        while True:
            attempts.begin()
            found = self.find(place)
            if found is None:
                return None
            rows = list(self._read_rows(found, 0))
            if len(rows) == found.rows:
                return self._entries(found, rows)
            again = self.find(place)
            if again is not None and again.birth == found.birth:
                raise CorruptionError(f"the transcript of session {place.session!r} has gaps")
            # It was deleted while it was read.

    def of_project(self, project: str) -> Iterator[Transcript]:
        """The transcripts of a project, those of subagents behind their session's."""
        for record in self.heads.scan(project):
            yield decode_transcript(record)

    def below(self, place: Place) -> Iterator[Transcript]:
        """All transcripts of a session."""
        for record in self.heads.scan(place.project, place.session):
            yield decode_transcript(record)

    def projects(self) -> Iterator[str]:
        """The keys of all projects."""
        for (project,) in self.heads.groups(1):
            yield project

    def _read_rows(self, found: Transcript, start: int) -> Iterator[Any]:
        """The rows that a transcript had when it was found; fewer if it was deleted since."""
        for first in range(start, found.rows, _PAGE):
            last = min(first + _PAGE, found.rows)
            keys = [(*found.place, _row_name(number)) for number in range(first, last)]
            for record in self.rows.find_many(keys):
                if record is None:
                    return
                yield record.value

    def _entries(self, found: Transcript, rows: Sequence[Any]) -> list[dict[str, Any]]:
        read: list[dict[str, Any]] = []
        for row in rows:
            heads, bodies = _parts(row)
            places = [at for at, body in enumerate(bodies) if type(body) is Link]
            values = self._store.get_many([bodies[at].digest for at in places])
            for at, value in zip(places, values, strict=True):
                bodies[at] = value
            read.extend(forms.unpack(found.place.session, heads, bodies))
        if len(read) != found.entries:
            raise CorruptionError(
                f"the transcript of session {found.place.session!r} has {len(read)} entries, "
                f"not {found.entries}; check the store"
            )
        return read

    # --- writing ------------------------------------------------------------------------

    def append(self, place: Place, entries: list[dict[str, Any]]) -> int:
        """Add entries at the end, those left out whose id is there already; how many were new."""
        return read_again(lambda: self._append(place, entries))

    def _append(self, place: Place, entries: list[dict[str, Any]]) -> int:
        attempts = Attempts(f"session {place.session!r}")
        while True:
            attempts.begin()
            moment = self._times.read(self._store, self.heads, [place])
            [record] = moment.records
            found = None if record is None else decode_transcript(record)
            known = _Known(os.urandom(_BIRTH_BYTES), 0, set())
            if found is not None:
                known = self._ids(found)
            new, ids = _new_entries(entries, known.ids)
            if not new:
                return 0
            draft = Draft(self._store)
            draft.expect(self.heads, place, record)
            rows = known.rows
            for start in range(0, len(new), _ROW_ENTRIES):
                packed = forms.pack(draft, place.session, new[start : start + _ROW_ENTRIES])
                content = {"h": packed.heads, "b": packed.bodies}
                draft.put(self.rows, (*place, _row_name(rows)), content)
                rows += 1
            known = known._replace(rows=rows)
            now_ms = self._store.engine.now_ms()
            if found is not None:
                # Of a release that did not reserve times, or of a clock that ran ahead there.
                now_ms = max(now_ms, found.mtime_ms + 1)
            with self._times.reserve(draft, moment, now_ms) as mtime_ms:
                draft.put(self.heads, place, _grown(place, found, known, new, mtime_ms))
                try:
                    draft.commit()
                except ConditionFailedError:
                    continue
            known.ids.update(ids)
            self._remember(place, known)
            return len(new)

    def delete(
        self, place: Place, *, unless: Callable[[list[Transcript]], bool] | None = None
    ) -> int:
        """Take a transcript away, and if it is a session's own, all below it; how many there were.

        Not if ``unless`` says so of those that are there at the moment of the write.
        """
        attempts = Attempts(f"session {place.session!r}")
        while True:
            attempts.begin()
            one = self.find(place)
            found = list(self.below(place)) if place.is_main else [] if one is None else [one]
            if not found or (unless is not None and unless(found)):
                return 0
            draft = Draft(self._store)
            for each in found:
                draft.expect(self.heads, each.place, each.record)
                draft.delete(self.heads, each.place)
                for number in range(each.rows):
                    draft.delete(self.rows, (*each.place, _row_name(number)))
            try:
                draft.commit()
            except ConditionFailedError:
                continue
            return len(found)

    # --- ids ------------------------------------------------------------------------------

    def _ids(self, found: Transcript) -> _Known:
        """The ids of a transcript's entries; reads only what was not known, and no bodies."""
        with self._lock:
            known = self._known.get(found.place)
        if known is None or known.birth != found.birth or known.rows > found.rows:
            known = _Known(found.birth, 0, set())
        for row in self._read_rows(found, known.rows):
            heads, _ = _parts(row)
            known.ids.update(forms.head_id(head) for head in heads)
        known.ids.discard(None)
        return known._replace(rows=found.rows)

    def _remember(self, place: Place, known: _Known) -> None:
        with self._lock:
            self._known[place] = known
            self._known.move_to_end(place)
            while len(self._known) > _KNOWN_TRANSCRIPTS:
                self._known.popitem(last=False)


def _grown(
    place: Place,
    found: Transcript | None,
    known: _Known,
    new: list[dict[str, Any]],
    mtime_ms: int,
) -> dict[str, Any]:
    """The row of a transcript with these entries more."""
    count = len(new) + (0 if found is None else found.entries)
    content: dict[str, Any] = {"i": known.birth, "r": known.rows, "n": count, "m": mtime_ms}
    if place.is_main:
        before: SessionSummaryEntry | None = None
        if found is not None and found.summary is not None:
            before = {"session_id": place.session, "mtime": mtime_ms, "data": found.summary}
        appended = cast(list[SessionStoreEntry], new)
        content["d"] = storable(fold_session_summary(before, place.key, appended)["data"])
    return content


def _new_entries(
    entries: list[dict[str, Any]], known: set[Any]
) -> tuple[list[dict[str, Any]], set[Any]]:
    """Those whose id is not known, and their ids. Entries without an id are always new."""
    new: list[dict[str, Any]] = []
    ids: set[Any] = set()
    for entry in entries:
        own = forms.entry_id(entry)
        if own is not None:
            if own in known or own in ids:
                continue
            ids.add(own)
        new.append(entry)
    return new, ids


def decode_transcript(record: Record) -> Transcript:
    """The transcript that a record holds; CorruptionError if it holds something else."""
    value = record.value
    try:
        summary = restored(value["d"]) if "d" in value else None
        return Transcript(
            Place(*record.key), record, value["i"], value["r"], value["n"], value["m"], summary
        )
    except (KeyError, TypeError) as exc:
        raise CorruptionError("the row of a transcript is damaged, or of a newer kind") from exc


def _parts(row: Any) -> tuple[list[Any], list[Any]]:
    try:
        heads, bodies = row["h"], row["b"]
    except (KeyError, TypeError) as exc:
        raise CorruptionError("a row of a transcript is damaged, or of a newer kind") from exc
    if type(heads) is not list or type(bodies) is not list or len(heads) != len(bodies):
        raise CorruptionError("a row of a transcript is damaged")
    return heads, bodies


def _row_name(number: int) -> str:
    # In order as texts, as far as anybody will ever count.
    return f"{number:010d}"
