"""Transcripts of the Claude Agent SDK as a record system."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from itertools import islice
from typing import Any, Final

from casstore.adapters.claude.transcripts import (
    ENTRIES,
    TIMES_TABLE,
    TRANSCRIPTS,
    TranscriptKey,
    Transcripts,
)
from casstore.format.printing import count
from casstore.maintenance.consistency import Facts, Judges
from casstore.maintenance.systems import (
    EntryStep,
    EntryText,
    RecordSystem,
    SystemEntry,
    entry_id,
    entry_key,
    entry_keys,
)
from casstore.records.schema import tables_of
from casstore.records.schema_check import judges
from casstore.session.messages import message_in, user_text
from casstore.store import Store


class TranscriptsSystem(RecordSystem):
    """Transcripts of sessions and of their subagents."""

    name = "claude"
    version = 1
    title = "Claude transcripts"
    tables = (*tables_of(ENTRIES, TRANSCRIPTS), TIMES_TABLE)

    def entries(
        self, store: Store, *, after: str | None = None, limit: int = 100
    ) -> list[SystemEntry]:
        """Sessions, by project and id, with the transcripts of their subagents."""
        transcripts = Transcripts(store)
        return [
            _entry(transcripts, TranscriptKey(*key))
            for key in entry_keys(transcripts.heads, 2, after=after, limit=limit)
        ]

    def find_entry(self, store: Store, entry: str) -> SystemEntry | None:
        """One session; None if it has no transcript."""
        transcripts, place = Transcripts(store), TranscriptKey(*entry_key(entry, 2))
        return _entry(transcripts, place) if any(transcripts.below(place)) else None

    def steps(self, store: Store, entry: str, *, limit: int = 100) -> Iterator[EntryStep]:
        """The entries of the transcripts of a session and its subagents, each newest first."""
        return islice(_steps(Transcripts(store), TranscriptKey(*entry_key(entry, 2))), limit)

    def content(self, store: Store, entry: str) -> dict[str, Any]:
        """The entries by transcript; "" is the session's own."""
        transcripts = Transcripts(store)
        found = transcripts.below(TranscriptKey(*entry_key(entry, 2)))
        return {one.place.subpath: transcripts.load(one.place) or [] for one in found}

    def texts(self, store: Store, entry: str) -> Iterator[EntryText]:
        """The message of each transcript line; if a line has no message, the whole line."""
        transcripts = Transcripts(store)
        for transcript in transcripts.below(TranscriptKey(*entry_key(entry, 2))):
            place = transcript.place
            where = f"{place.subpath}/" if place.subpath else ""
            for number, one in enumerate(transcripts.load(place) or []):
                time_ms = _time_ms(one.get("timestamp"))
                yield EntryText(f"{where}{number}", one.get("message", one), time_ms)

    def check(self, store: Store, facts: Facts, *, whole: bool) -> Judges:
        """Decode each row."""
        transcripts = Transcripts(store)
        return judges(store, facts, [transcripts.heads, transcripts.rows])


def _entry(transcripts: Transcripts, place: TranscriptKey) -> SystemEntry:
    own = list(transcripts.below(place))
    entries = count(sum([one.entries for one in own]), "entry", "entries")
    title = f"{entries} in {count(len(own), 'transcript')}"
    name = next((found for one in own if (found := _name(one.summary))), None)
    if name is not None:
        title = f"{name} ({title})"
    key = place.project, place.session
    size_bytes = transcripts.heads.size_bytes(*key) + transcripts.rows.size_bytes(*key)
    changed_at_ms = max([one.mtime_ms for one in own], default=None)
    return SystemEntry(entry_id(key), title, changed_at_ms, size_bytes)


def _name(summary: dict[str, Any] | None) -> str | None:
    """The title that a summary names, or the first prompt."""
    found = [(summary or {}).get(key) for key in ("custom_title", "ai_title", "first_prompt")]
    return next((text for text in found if isinstance(text, str) and text), None)


def _steps(transcripts: Transcripts, place: TranscriptKey) -> Iterator[EntryStep]:
    for transcript in transcripts.below(place):
        subpath = transcript.place.subpath
        for number, entry in reversed([*enumerate(transcripts.load(transcript.place) or [])]):
            message = message_in(entry)
            role = message["role"] if message is not None else entry.get("type")
            text = user_text(entry) if message is not None else ""
            where = f"{subpath}: " if subpath else ""
            yield EntryStep(
                str(entry.get("uuid") or number),
                _time_ms(entry.get("timestamp")),
                f"{where}{role}: {text}" if text else f"{where}{role}",
                {"transcript": subpath, "type": entry.get("type"), "role": role},
            )


def _time_ms(text: Any) -> int | None:
    try:
        return int(datetime.fromisoformat(text).timestamp() * 1000)
    except (TypeError, ValueError, OverflowError):
        return None


SYSTEM: Final = TranscriptsSystem()
