"""``stats``: size and growth of a store, savings by sharing and compression, size by session."""

from __future__ import annotations

import heapq
from typing import Any, Final

import click

from casstore.cli.command import App, command
from casstore.cli.fields import Field, Fields, document, nested
from casstore.cli.output import Printer, dim
from casstore.cli.quantities import Whole, count, moment
from casstore.format.digest import KIND_NAMES
from casstore.maintenance import space, systems
from casstore.maintenance.contents import measure_contents, measure_sessions, moved_at

_DAY_MS: Final = 86_400_000
_DAYS_SHOWN: Final = 14
# The most sessions that the text lists.
_SHOWN: Final = 20


def _ratio(one: float, other: float) -> float:
    return round(one / other, 2) if other else 0.0


SYSTEM_FIELDS: Final[Fields] = {
    "name": Field("its name: its tables are called NAME.table", "records"),
    "rows": Field("its rows", "rows", "row"),
    "size_bytes": Field("their keys and values, without objects that they link to", "size"),
    "version": "the version of its row layout in the installed code, null if it is not installed",
    "missing": "why its code cannot be used, null if it can",
    "title": Field("what it stores, null if it is not installed", "title", gives=True),
}
_FILE: Final[Fields] = {
    "file_bytes": Field("the length of data.mdb", "file"),
    "allocated_bytes": "what it takes on the disk",
    "used_bytes": "pages in use",
    "free_bytes": Field("free pages, which later writes use", "free pages"),
    "content_bytes": "stored keys and values",
    "fragmentation": Field(
        "the fraction of the file that is empty: free pages, and the empty parts of others",
        of=lambda one: round(one.fragmentation, 4),
    ),
    "reclaimable_by_pack_bytes": Field(
        "at least this much is freed by pack", "pack frees at least", of="reclaimable_by_pack"
    ),
    "reclaimable_by_compact_bytes": Field(
        "freed by compact", "compact frees", of="reclaimable_by_compact"
    ),
    "log_bytes": Field("the length of the redo log next to it", "redo log"),
    "log_commits": "commits that only the redo log has",
}
_OBJECTS: Final[Fields] = {
    "objects": Field("stored objects", "objects", "object"),
    "size_bytes": Field("their size before compression", "uncompressed"),
    "stored_bytes": Field("their size in slabs, compressed", "compressed"),
    "slabs": Field("slabs", "slabs", "slab"),
    "dead_objects": "removed objects whose bytes are still in slabs",
    "reached_objects": Field(
        "objects that a session, tag, pin, queue, attachment or record reaches",
        "reachable",
        "object",
    ),
    "reached_bytes": "their size before compression",
}
_FACTORS: Final[Fields] = {
    "revisions": Field("revisions of all sessions", "revisions", "revision"),
    "whole_copies_bytes": Field(
        "the size of every revision written whole: its path and its state", "each written whole"
    ),
    "dedup": Field(
        "every revision written whole, divided by the reachable objects, before compression",
        "deduplication factor",
    ),
    "compression": Field("size before compression, divided by the size in slabs",
                         "compression factor"),
    "together": Field(
        "every revision written whole, divided by the size in slabs", "both factors together"
    ),
}  # fmt: skip
_KIND: Final = Field(
    "blob, value, node …",
    "kind",
    of=lambda one: KIND_NAMES.get(one.kind, str(one.kind)).replace("rope", "blob"),
)
_FIELDS: Final[Fields] = {
    "last_check": nested(
        "the last check that could store its result, null if there was none",
        {
            "checked_at": Field("when it ended", "last check"),
            "level": Field("its level", "check level"),
            "since_last": "true: it looked only at what was added since the check before",
            "sound": Field("true: it found no error", "sound"),
            "findings": Field("what it found, harmless notes included", "findings", "finding"),
        },
        "last check",
    ),
    "file": nested("the data file", _FILE, "file"),
    "objects": nested("what is stored", _OBJECTS, "objects"),
    "factors": nested("what sharing and compression save", _FACTORS, "factors"),
    "sessions": nested(
        "the space of each session, the largest own size first",
        {
            "id": Field("the session", "session", of="session"),
            "own_bytes": Field("what only this session reaches, uncompressed", "own size"),
            "shared_bytes": Field(
                "what other sessions, tags or records reach too, uncompressed", "shared size"
            ),
            "size_bytes": "both together",
            "objects": Field("objects it reaches, from all its revisions", "objects", "object"),
        },
        "sessions",
    ),
    "sessions_left_out": "sessions that were not measured, because of --sessions",
    "systems": nested("record systems, by the rows of table records", SYSTEM_FIELDS, "systems"),
    "biggest": nested(
        "the largest objects",
        {
            "digest": Field("its digest", "largest objects"),
            "kind": _KIND,
            "size_bytes": Field("its size before compression", "size"),
        },
        "largest",
    ),
    "growth": nested(
        "what is stored, by the day of the first revision that has it",
        {
            "day": Field("the day, in UTC", "day"),
            "revisions": Field("revisions committed on it", "revisions", "revision"),
            "objects": Field("objects", "objects", "object"),
            "size_bytes": Field("their size before compression", "size"),
            "total_bytes": Field("the size with all days before", "total"),
        },
        "growth",
    ),
    "kinds": nested(
        "by kind of object",
        {"kind": "blob, value, node …", "objects": "objects", "size_bytes": "uncompressed"},
    ),
    "tables": nested(
        "by table of the file",
        {"name": "its name", "rows": "its rows", "content_bytes": "keys and values"},
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
    from casstore.maintenance.check import last_check

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
    slabs, whole, total = measured.slabs, contents.whole_copies_bytes, 0
    growth: list[dict[str, Any]] = []
    for day in contents.days:
        total += day.size_bytes
        date = moment(day.day * _DAY_MS)[:10]
        growth.append({**day._asdict(), "day": date, "total_bytes": total})
    answer = document(
        _FIELDS,
        {
            "last_check": checked,
            "file": measured,
            "objects": {
                "objects": contents.objects,
                "size_bytes": contents.size_bytes,
                "stored_bytes": slabs.stored_bytes,
                "slabs": slabs.slabs,
                "dead_objects": slabs.dead_objects,
                "reached_objects": contents.reached_objects,
                "reached_bytes": contents.reached_bytes,
            },
            "factors": {
                "dedup": _ratio(whole, contents.reached_bytes),
                "compression": round(measured.compression, 2),
                "together": _ratio(whole, slabs.stored_bytes),
                "whole_copies_bytes": int(whole),
                "revisions": contents.revisions,
            },
            "kinds": [
                {"kind": KIND_NAMES.get(kind, str(kind)), "objects": one[0], "size_bytes": one[1]}
                for kind, one in contents.by_kind.items()
            ],
            "tables": measured.tables,
            "systems": held,
            "biggest": contents.biggest,
            "sessions": shares,
            "sessions_left_out": known - len(shares),
            "growth": growth,
        },
    )
    app.answer(answer, lambda to: _write(to, answer))


def _write(to: Printer, answer: dict[str, Any]) -> None:
    shown = {
        **answer,
        "sessions": answer["sessions"][:_SHOWN],
        "growth": answer["growth"][-_DAYS_SHOWN:],
        "systems": [
            {**one, "title": one["title"] or f"not installed: {one['missing']}"}
            for one in answer["systems"]
        ],
    }
    if answer["last_check"] is None:
        to.line(dim("no check has stored its result yet: casstore check"))
    to.report(_FIELDS, shown)
    if len(answer["sessions"]) > _SHOWN:
        to.line(dim(f"{count(len(answer['sessions']) - _SHOWN, 'more session')}: --json"))
    if answer["sessions_left_out"]:
        to.line(dim(f"{count(answer['sessions_left_out'], 'session')} not measured: --sessions"))
