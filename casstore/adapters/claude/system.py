"""Transcripts of the Claude Agent SDK as a record system."""

from __future__ import annotations

from typing import Final

from casstore.adapters.claude.transcripts import Place, Transcripts, decode_transcript
from casstore.maintenance.consistency import Facts, Judges
from casstore.maintenance.systems import RecordSystem, SystemEntry, entry_id, entry_keys
from casstore.session.records import Record
from casstore.store import Store


class TranscriptsSystem(RecordSystem):
    """Transcripts of sessions and of their subagents."""

    name = "claude"
    version = 1
    title = "Claude transcripts"
    tables = ("claude.entries", "claude.times", "claude.transcripts")

    def entries(
        self, store: Store, *, after: str | None = None, limit: int = 100
    ) -> list[SystemEntry]:
        """Sessions, by project and id, with the transcripts of their subagents."""
        transcripts = Transcripts(store)
        found: list[SystemEntry] = []
        for key in entry_keys(transcripts.heads, 2, after=after, limit=limit):
            own = list(transcripts.below(Place(*key)))
            title = f"{sum([one.entries for one in own])} entries in {len(own)} transcripts"
            changed_at_ms = max([one.mtime_ms for one in own], default=None)
            size_bytes = transcripts.heads.size_bytes(*key) + transcripts.rows.size_bytes(*key)
            found.append(SystemEntry(entry_id(key), title, changed_at_ms, size_bytes))
        return found

    def check(self, store: Store, facts: Facts, *, whole: bool) -> Judges:
        """Decode the row of each transcript."""
        return {Transcripts(store).heads: _check_transcript}


def _check_transcript(record: Record) -> None:
    decode_transcript(record)


SYSTEM: Final = TranscriptsSystem()
