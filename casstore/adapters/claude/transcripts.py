"""Transcripts as records: one row each, and rows of the entries that came together.

    claude.transcripts   project, session, subpath        rows, entries, time, summary
    claude.entries       project, session, subpath, row   heads, bodies
    claude.times         the times that writes have used (``records.unique_times``)

The subpath of a session's own transcript is empty. The transcript's row is a condition of every
write that adds rows, so row numbers are unique and the summary covers all entries. No two writes
have the same time.
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
from casstore.errors import CorruptionError, InvalidInputError
from casstore.format.canonical import Link
from casstore.records.json_values import restored, storable
from casstore.records.schema import RowTable, Schema, number_text
from casstore.records.unique_times import UniqueTimes
from casstore.session.attempts import ChangedMeanwhile, transaction
from casstore.session.records import Draft, Record
from casstore.store import Store

# The most entries in a row such that their heads, and their links, are each one object.
_ROW_ENTRIES: Final = 24
_KNOWN_TRANSCRIPTS: Final = 64
_BIRTH_BYTES: Final = 8
_PAGE: Final = 256


class TranscriptKey(NamedTuple):
    """The key of a transcript: of a session, or of one of its subagents."""

    project: str
    session: str
    subpath: str = ""

    @property
    def is_main(self) -> bool:
        """Whether it is the transcript of the session itself."""
        return not self.subpath

    @property
    def key(self) -> SessionKey:
        """The key in the form of the SDK."""
        key: SessionKey = {"project_key": self.project, "session_id": self.session}
        if self.subpath:
            key["subpath"] = self.subpath
        return key


def place_of(key: SessionKey) -> TranscriptKey:
    """The transcript that a key of the SDK names."""
    subpath = key.get("subpath")
    if subpath == "":
        raise InvalidInputError(
            "subpath must not be empty; leave it out for the session's own transcript"
        )
    return TranscriptKey(key["project_key"], key["session_id"], subpath or "")


class Transcript(NamedTuple):
    """The row of a transcript."""

    place: TranscriptKey
    #: Distinguishes it from a deleted transcript of the same key.
    birth: bytes
    rows: int
    entries: int
    mtime_ms: int
    #: The SDK's summary in stored form; None for the transcript of a subagent.
    stored_summary: Any = None
    record: Record | None = None

    @property
    def summary(self) -> dict[str, Any] | None:
        """The summary as the SDK computes it."""
        return None if self.stored_summary is None else restored(self.stored_summary)


class EntriesRow(NamedTuple):
    """Entries that were appended together."""

    project: str
    session: str
    subpath: str
    row: int
    heads: list[Any]
    bodies: list[Any]


TRANSCRIPTS: Final = Schema("claude.transcripts", Transcript, 3)
ENTRIES: Final = Schema("claude.entries", EntriesRow, 4)
TIMES_TABLE: Final = "claude.times"


class _KnownIds(NamedTuple):
    """The ids of the entries in the first rows of a transcript, up to a number of rows."""

    birth: bytes
    rows: int
    ids: set[Any]


class Transcripts:
    """Reads and writes transcripts. Only one thread may write to a transcript at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.heads = RowTable(store, TRANSCRIPTS)
        self.rows = RowTable(store, ENTRIES)
        self._times = UniqueTimes(TIMES_TABLE)
        self._lock = Lock()
        self._known: OrderedDict[TranscriptKey, _KnownIds] = OrderedDict()

    # --- reading ------------------------------------------------------------------------

    def find(self, place: TranscriptKey) -> Transcript | None:
        """A transcript, or None if it does not exist."""
        return self.heads.get(*place)

    @transaction("session {place.session!r}")
    def load(self, place: TranscriptKey) -> list[dict[str, Any]] | None:
        """All entries of a transcript, or None if it does not exist."""
        found = self.find(place)
        if found is None:
            return None
        rows = list(self._read_rows(found, 0))
        if len(rows) == found.rows:
            return self._entries(found, rows)
        again = self.find(place)
        if again is None or again.birth != found.birth:
            raise ChangedMeanwhile  # the transcript was deleted while it was read
        raise CorruptionError(
            f"the transcript of session {place.session!r} lacks rows; check the store"
        )

    def of_project(self, project: str) -> Iterator[Transcript]:
        """The transcripts of a project; those of subagents follow their session's."""
        for record in self.heads.scan(project):
            yield self.heads.decode(record)

    def below(self, place: TranscriptKey) -> Iterator[Transcript]:
        """All transcripts of a session."""
        for record in self.heads.scan(place.project, place.session):
            yield self.heads.decode(record)

    def projects(self) -> Iterator[str]:
        """The keys of all projects."""
        for (project,) in self.heads.groups(1):
            yield project

    def _read_rows(self, found: Transcript, start: int) -> Iterator[EntriesRow]:
        """The rows that a transcript had when it was found; fewer if it was deleted since."""
        for first in range(start, found.rows, _PAGE):
            last = min(first + _PAGE, found.rows)
            keys = [(*found.place, number_text(number)) for number in range(first, last)]
            for record in self.rows.find_many(keys):
                if record is None:
                    return
                yield self.rows.decode(record)

    def _entries(self, found: Transcript, rows: Sequence[EntriesRow]) -> list[dict[str, Any]]:
        read: list[dict[str, Any]] = []
        for row in rows:
            heads, bodies = row.heads, row.bodies
            if len(heads) != len(bodies):
                raise CorruptionError("a row of a transcript is damaged; check the store")
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

    @transaction("session {place.session!r}")
    def append(self, place: TranscriptKey, entries: list[dict[str, Any]]) -> int:
        """Append entries, except those whose id is stored already; returns how many were new."""
        moment = self._times.read(self._store, self.heads, [place])
        [record] = moment.records
        found = self.heads.decode_found(record)
        known = _KnownIds(os.urandom(_BIRTH_BYTES), 0, set())
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
            self.rows.put(draft, EntriesRow(*place, rows, packed.heads, packed.bodies))
            rows += 1
        known = known._replace(rows=rows)
        now_ms = self._store.engine.now_ms()
        if found is not None:
            # The last time may come from a release that did not reserve times, or from a clock
            # that ran ahead.
            now_ms = max(now_ms, found.mtime_ms + 1)
        with self._times.reserve(draft, moment, now_ms) as mtime_ms:
            self.heads.put(draft, _grown(place, found, known, new, mtime_ms))
            draft.commit()
        known.ids.update(ids)
        self._remember(place, known)
        return len(new)

    @transaction("session {place.session!r}")
    def delete(
        self, place: TranscriptKey, *, unless: Callable[[list[Transcript]], bool] | None = None
    ) -> int:
        """Delete a transcript; returns how many were deleted.

        With the transcript of a session itself, those of its subagents are deleted. Nothing is
        deleted if ``unless`` returns True for the transcripts at the time of the write.
        """
        one = self.find(place)
        found = list(self.below(place)) if place.is_main else [] if one is None else [one]
        if not found or (unless is not None and unless(found)):
            return 0
        draft = Draft(self._store)
        for each in found:
            draft.expect(self.heads, each.place, each.record)
            draft.delete(self.heads, each.place)
            for number in range(each.rows):
                draft.delete(self.rows, (*each.place, number_text(number)))
        draft.commit()
        return len(found)

    # --- ids ------------------------------------------------------------------------------

    def _ids(self, found: Transcript) -> _KnownIds:
        """The ids of a transcript's entries; reads only the rows that are not cached, no bodies."""
        with self._lock:
            known = self._known.get(found.place)
        if known is None or known.birth != found.birth or known.rows > found.rows:
            known = _KnownIds(found.birth, 0, set())
        for row in self._read_rows(found, known.rows):
            known.ids.update(forms.head_id(head) for head in row.heads)
        known.ids.discard(None)
        return known._replace(rows=found.rows)

    def _remember(self, place: TranscriptKey, known: _KnownIds) -> None:
        with self._lock:
            self._known[place] = known
            self._known.move_to_end(place)
            while len(self._known) > _KNOWN_TRANSCRIPTS:
                self._known.popitem(last=False)


def _grown(
    place: TranscriptKey,
    found: Transcript | None,
    known: _KnownIds,
    new: list[dict[str, Any]],
    mtime_ms: int,
) -> Transcript:
    """The row of a transcript after these entries were appended."""
    count = len(new) + (0 if found is None else found.entries)
    summary = None
    if place.is_main:
        before: SessionSummaryEntry | None = None
        if found is not None and found.summary is not None:
            before = {"session_id": place.session, "mtime": mtime_ms, "data": found.summary}
        appended = cast(list[SessionStoreEntry], new)
        summary = storable(fold_session_summary(before, place.key, appended)["data"])
    return Transcript(
        place=place,
        birth=known.birth,
        rows=known.rows,
        entries=count,
        mtime_ms=mtime_ms,
        stored_summary=summary,
    )


def _new_entries(
    entries: list[dict[str, Any]], known: set[Any]
) -> tuple[list[dict[str, Any]], set[Any]]:
    """The entries whose id is not stored, and their ids. Entries without an id are always new."""
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
