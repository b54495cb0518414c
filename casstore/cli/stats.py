"""``stats``: size and growth of a store, savings by sharing and compression, size by session."""

from __future__ import annotations

import heapq
from itertools import accumulate
from typing import Any, Final, NamedTuple

import click

from casstore.cli.command import App, command
from casstore.cli.fields import Field, Fields, described, document, nested
from casstore.cli.output import Printer, dim
from casstore.cli.quantities import Whole, count, moment
from casstore.format.digest import KIND_NAMES
from casstore.maintenance import space, systems
from casstore.maintenance.check import LastCheck, last_check
from casstore.maintenance.contents import (
    Big,
    Contents,
    Day,
    Share,
    measure_contents,
    measure_sessions,
    moved_at,
)
from casstore.maintenance.space import SpaceReport
from casstore.maintenance.systems import SystemSize

_DAY_MS: Final = 86_400_000
_DAYS_SHOWN: Final = 14
# The most sessions that the text lists.
_SHOWN: Final = 20


def _ratio(one: float, other: float) -> float:
    return round(one / other, 2) if other else 0.0


SYSTEM_FIELDS: Final[Fields] = described(
    SystemSize,
    {
        "name": Field(label="records"),
        "rows": Field(label="rows", unit="row"),
        "size_bytes": Field(label="size"),
        "version": Field(),
        "missing": Field(),
        "title": Field(label="title", gives=True),
    },
)
_FILE: Final[Fields] = described(
    SpaceReport,
    {
        "file_bytes": Field(label="file"),
        "allocated_bytes": Field(),
        "used_bytes": Field(),
        "free_bytes": Field(label="free pages"),
        "content_bytes": Field(),
        "fragmentation": Field(of=lambda one: round(one.fragmentation, 4)),
        "reclaimable_by_pack_bytes": Field(label="pack frees at least", of="reclaimable_by_pack"),
        "reclaimable_by_compact_bytes": Field(label="compact frees", of="reclaimable_by_compact"),
        "log_bytes": Field(label="redo log"),
        "log_commits": Field(),
    },
)


class _DayGrowth(NamedTuple):
    """What was added on one day, and the size with all days before."""

    added: Day
    total_bytes: int


class _Measured(NamedTuple):
    """What ``stats`` measures."""

    last_check: LastCheck | None
    file: SpaceReport
    contents: Contents
    sessions: list[Share]
    sessions_left_out: int
    systems: list[SystemSize]

    @property
    def growth(self) -> list[_DayGrowth]:
        """The days in order, each with the sum up to it."""
        totals = accumulate([day.size_bytes for day in self.contents.days])
        return [_DayGrowth(*one) for one in zip(self.contents.days, totals, strict=True)]


def _whole(measured: Any) -> Any:
    return measured


_OBJECTS: Final[Fields] = described(
    Contents,
    {
        "objects": Field(label="objects", unit="object", of="contents.objects"),
        "size_bytes": Field(label="uncompressed", of="contents.size_bytes"),
        "stored_bytes": Field(
            "their size in slabs, compressed", "compressed", of="file.slabs.stored_bytes"
        ),
        "slabs": Field("slabs", "slabs", "slab", of="file.slabs.slabs"),
        "dead_objects": Field(
            "removed objects whose bytes are still in slabs", of="file.slabs.dead_objects"
        ),
        "reached_objects": Field(label="reachable", unit="object", of="contents.reached_objects"),
        "reached_bytes": Field(of="contents.reached_bytes"),
    },
)
_FACTORS: Final[Fields] = described(
    Contents,
    {
        "revisions": Field(label="revisions", unit="revision", of="contents.revisions"),
        "whole_copies_bytes": Field(
            label="each written whole", of=lambda one: int(one.contents.whole_copies_bytes)
        ),
        "dedup": Field(
            "every revision written whole, divided by the reachable objects, before compression",
            "deduplication factor",
            of=lambda one: _ratio(one.contents.whole_copies_bytes, one.contents.reached_bytes),
        ),
        "compression": Field(
            "size before compression, divided by the size in slabs",
            "compression factor",
            of=lambda one: round(one.file.compression, 2),
        ),
        "together": Field(
            "every revision written whole, divided by the size in slabs",
            "both factors together",
            of=lambda one: _ratio(one.contents.whole_copies_bytes, one.file.slabs.stored_bytes),
        ),
    },
)


def _kind_name(kind: int) -> str:
    return KIND_NAMES.get(kind, str(kind))


_FIELDS: Final[Fields] = {
    "last_check": nested(
        "the last check that could store its result, null if there was none",
        described(
            LastCheck,
            {
                "checked_at": Field(label="last check"),
                "level": Field(label="check level"),
                "since_last": Field(),
                "sound": Field(label="sound"),
                "findings": Field(label="findings", unit="finding"),
            },
        ),
        "last check",
    ),
    "file": nested("the data file", _FILE, "file"),
    "objects": nested("what is stored", _OBJECTS, "objects", _whole),
    "factors": nested("what sharing and compression save", _FACTORS, "factors", _whole),
    "sessions": nested(
        "the space of each session, the largest own size first",
        described(
            Share,
            {
                "id": Field(label="session", of="session"),
                "own_bytes": Field(label="own size"),
                "shared_bytes": Field(label="shared size"),
                "size_bytes": Field(),
                "objects": Field(label="objects", unit="object"),
            },
        ),
        "sessions",
    ),
    "sessions_left_out": "sessions that were not measured, because of --sessions",
    "systems": nested("record systems, by the rows of table records", SYSTEM_FIELDS, "systems"),
    "biggest": nested(
        "the largest objects",
        described(
            Big,
            {
                "digest": Field("its digest", "largest objects"),
                "kind": Field(
                    "blob, value, node …",
                    "kind",
                    of=lambda one: _kind_name(one.kind).replace("rope", "blob"),
                ),
                "size_bytes": Field(label="size"),
            },
        ),
        "largest",
        "contents.biggest",
    ),
    "growth": nested(
        "what is stored, by the day of the first revision that has it",
        described(
            Day,
            {
                "day": Field(
                    "the day, in UTC", "day", of=lambda one: moment(one.added.day * _DAY_MS)[:10]
                ),
                "revisions": Field(label="revisions", unit="revision", of="added.revisions"),
                "objects": Field(label="objects", unit="object", of="added.objects"),
                "size_bytes": Field(label="size", of="added.size_bytes"),
                "total_bytes": Field("the size with all days before", "total"),
            },
        ),
        "growth",
    ),
    "kinds": nested(
        "by kind of object",
        {
            "kind": Field("blob, value, node …", of=lambda item: _kind_name(item[0])),
            "objects": Field("objects", of=lambda item: item[1][0]),
            "size_bytes": Field("uncompressed", of=lambda item: item[1][1]),
        },
        of=lambda one: list(one.contents.by_kind.items()),
    ),
    "tables": nested(
        "by table of the file",
        {"name": "its name", "rows": "its rows", "content_bytes": "keys and values"},
        of="file.tables",
    ),
}


@command(_FIELDS, "casstore stats", "casstore stats --sessions 10 --biggest 5")
@click.option(
    "--sessions", "wanted", type=Whole(0), default=62, show_default=True,
    help="Measure this many sessions, last changed first. Each 62 need a pass over all objects.",
)  # fmt: skip
@click.option(
    "--biggest", type=Whole(0), default=10, show_default=True,
    help="List this many of the biggest objects.",
)  # fmt: skip
def stats(app: App, wanted: int, biggest: int) -> None:
    """Measure size, sharing, growth, and the space of sessions.

    The deduplication factor compares what is stored with every revision written whole: its path
    and its state.
    """
    with app.open() as store, app.meter() as meter:
        measured = space.measure(store, progress=meter)
        contents = measure_contents(store, listed=biggest, progress=meter)
        known = 0
        newest: list[tuple[int, str]] = []
        for info in store.sessions():
            known += 1
            heapq.heappush(newest, (moved_at(info), info.meta.session))
            if len(newest) > wanted:
                heapq.heappop(newest)
        chosen = [session for _, session in newest]
        shares = measure_sessions(store, chosen, progress=meter)
        held = systems.measure(store)
        checked = last_check(store)
    shares.sort(key=lambda one: (-one.own_bytes, one.session))
    found = _Measured(checked, measured, contents, shares, known - len(shares), held)
    answer = document(_FIELDS, found)
    app.answer(answer, lambda to: _write(to, found, answer))


def _write(to: Printer, found: _Measured, answer: dict[str, Any]) -> None:
    shown = {
        **answer,
        "sessions": answer["sessions"][:_SHOWN],
        "growth": answer["growth"][-_DAYS_SHOWN:],
        "systems": [
            {**one, "title": one["title"] or f"not installed: {one['missing']}"}
            for one in answer["systems"]
        ],
    }
    if found.last_check is None:
        to.line(dim("no check has stored its result yet: casstore check"))
    to.report(_FIELDS, shown)
    if len(found.sessions) > _SHOWN:
        to.line(dim(f"{count(len(found.sessions) - _SHOWN, 'more session')}: --json"))
    if found.sessions_left_out:
        to.line(dim(f"{count(found.sessions_left_out, 'session')} not measured: --sessions"))
