"""Crash images: possible contents of a disk after a power loss, drawn from a trace.

``disk_model`` defines which contents are possible. This module chooses where to crash and which
unsynced changes landed. Crash points are visited in order, so the trace is applied once for all
images.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from campaigns.disk_events import Ack, Event, Sync, SyncDirectory, SyncRange, Trace, headline
from campaigns.disk_model import Disk, Landed


class Image(NamedTuple):
    """The state after one crash; immutable."""

    contents: Mapping[str, bytes]
    acknowledged: tuple[str, ...]
    story: str

    def materialise(self, directory: Path) -> None:
        """Make ``directory`` hold exactly this image."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        for path, content in self.contents.items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)

    def describe(self) -> str:
        """Where the crash was, and which unsynced changes landed."""
        sizes = ", ".join(f"{path} {len(content)}" for path, content in self.contents.items())
        return f"{self.story}; {len(self.acknowledged)} acks; files: {sizes or 'none'}"


class _Outcome(NamedTuple):
    label: str
    landed: Landed


def _nothing(changes: list[int], rng: random.Random) -> _Outcome:
    return _Outcome("nothing landed", lambda change, place: False)


def _everything(changes: list[int], rng: random.Random) -> _Outcome:
    return _Outcome("everything landed", lambda change, place: True)


def _only_last(changes: list[int], rng: random.Random) -> _Outcome:
    return _Outcome("only the last landed", lambda change, place: change == changes[-1])


def _all_but_first(changes: list[int], rng: random.Random) -> _Outcome:
    return _Outcome("all but the first landed", lambda change, place: change != changes[0])


def _in_order(changes: list[int], rng: random.Random) -> _Outcome:
    last = rng.choice(changes)
    return _Outcome(f"all up to {last} landed", lambda change, place: change <= last)


def _all_but_one(changes: list[int], rng: random.Random) -> _Outcome:
    lost = rng.choice(changes)
    return _Outcome(f"all but {lost} landed", lambda change, place: change != lost)


def _one_torn(changes: list[int], rng: random.Random) -> _Outcome:
    torn = rng.choice(changes)
    return _Outcome(
        f"all landed, {torn} torn", lambda change, place: change != torn or rng.random() < 0.5
    )


def _random_fates(changes: list[int], rng: random.Random) -> _Outcome:
    """Give each change its share of parts that land: none, all, or a torn few or many."""
    share = {change: rng.choice((0.0, 0.0, 1.0, 1.0, 0.2, 0.8)) for change in changes}
    fates = ", ".join(f"{change}: {share[change]:.0%}" for change in changes[-8:])
    return _Outcome(f"landed in part ({fates})", lambda change, place: rng.random() < share[change])


_OUTCOMES = (
    _nothing,
    _everything,
    _only_last,
    _all_but_first,
    _in_order,
    _all_but_one,
    _one_torn,
    _random_fates,
    _random_fates,
    _random_fates,
)


def _crash_points(events: list[Event], rng: random.Random, count: int) -> list[int]:
    """Draw, in order, after how many events to crash.

    Three of four crash points are just after a change, where something can be lost; the others are
    anywhere, for example just after a sync or an acknowledgement.
    """
    settled = (Sync, SyncRange, SyncDirectory, Ack)
    changes = [at for at, event in enumerate(events, 1) if not isinstance(event, settled)]
    anywhere = range(len(events) + 1)
    return sorted(
        rng.choice(changes if changes and rng.random() < 0.75 else anywhere) for _ in range(count)
    )


def images(trace: Trace, seed: int, count: int, *, strict_entries: bool = False) -> Iterator[Image]:
    """Yield ``count`` images, ordered by crash point; the same for the same trace and seed.

    The extremes (nothing, everything, only the last, all but the first landed) take turns with
    random outcomes.
    """
    rng = random.Random(seed)
    events = list(trace.events)
    disk = Disk(trace.initial, strict_entries=strict_entries)
    applied = 0
    for number, point in enumerate(_crash_points(events, rng, count)):
        for change in range(applied, point):
            disk.apply(change, events[change])
        applied = point
        outcome = _OUTCOMES[number % len(_OUTCOMES)]
        after = f"{point} of {len(events)} events"
        if point:
            after += f", the last {headline(events[point - 1])}"
        yield _image(disk, outcome, rng, after)


def _image(
    disk: Disk,
    outcome: Callable[[list[int], random.Random], _Outcome],
    rng: random.Random,
    after: str,
) -> Image:
    unsynced = disk.unsynced()
    chosen = outcome(unsynced, rng) if unsynced else _everything(unsynced, rng)
    story = f"crash after {after}; {len(unsynced)} changes unsynced, {chosen.label}"
    return Image(disk.contents(chosen.landed), tuple(disk.acknowledged), story)


def final_contents(trace: Trace) -> dict[str, bytes]:
    """The files as the writer left them, without a crash."""
    disk = Disk(trace.initial, strict_entries=False)
    for change, event in enumerate(trace.events):
        disk.apply(change, event)
    return disk.contents(lambda change, place: True)
