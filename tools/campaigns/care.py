"""Kills agents and maintenance processes: acknowledged calls survive gc, pack and vacuum."""

from __future__ import annotations

from pathlib import Path

from campaigns import session_kill
from campaigns.tally import Progress, Report, silent


def run(
    scratch: Path,
    *,
    count: int,
    seed: int,
    kills_per_store: int = 14,
    progress: Progress = silent,
) -> Report:
    """Kill ``count`` times, with two maintenance processes next to the agents."""
    return session_kill.run(
        scratch,
        count=count,
        seed=seed,
        kills_per_store=kills_per_store,
        keepers=tuple(session_kill.KEEPERS),
        # After maintenance the whole store is checked each time.
        verify_every=1,
        progress=progress,
    )
