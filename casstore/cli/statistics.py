"""``stats``: how large a store is, what for, what sharing and compressing save, whose it is."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, Final

import click

from casstore.cli.command import App, command
from casstore.cli.measuring import Contents, Day, Share, measure_contents, measure_sessions
from casstore.cli.output import Cells, Column, Printer, bold, dim, name
from casstore.cli.quantities import count, moment, size
from casstore.cli.records import SYSTEM_FIELDS, system_documents, write_systems
from casstore.cli.shapes import Part, Shape
from casstore.cli.spelling import clip_name
from casstore.format.hashing import KIND_NAMES
from casstore.maintenance import space, systems
from casstore.maintenance.space import SpaceReport
from casstore.maintenance.systems import SystemSize
from casstore.session.data import SessionInfo

_SECTION: Final = "Care"
_DAY_MS: Final = 86_400_000
_DAYS_SHOWN: Final = 14

_SHAPE: Final = Shape(
    "stats",
    {
        "file": Part(
            "the data file",
            {
                "file_bytes": "its length",
                "allocated_bytes": "what it takes on the disk",
                "used_bytes": "pages in use",
                "free_bytes": "pages that later writes will use",
                "content_bytes": "keys and values, as stored",
                "fragmentation": "the part of the file that holds nothing, 0 to 1",
                "reclaimable_by_pack_bytes": "at least so much",
                "reclaimable_by_compact_bytes": "so much, if written anew as it is",
                "log_bytes": "the length of the redo log beside it",
                "log_commits": "commits that were only there",
            },
        ),
        "objects": Part(
            "what is stored",
            {
                "objects": "how many",
                "size_bytes": "before compression",
                "stored_bytes": "in slabs, compressed",
                "slabs": "in how many",
                "dead_objects": "collected, but their bytes are still there",
                "reached_objects": "reached by a session, tag, pin, queue or attachment",
                "reached_bytes": "before compression",
            },
        ),
        "factors": Part(
            "what is saved",
            {
                "dedup": "every revision written whole, against what is stored, before compression",
                "compression": "before compression, against what is stored in slabs",
                "together": "every revision written whole, against what is stored in slabs",
                "whole_copies_bytes": "every revision written whole: its path and its state",
                "revisions": "how many there are, of all sessions",
            },
        ),
        "kinds": Part(
            "by kind of object",
            {"kind": "blob, value, node …", "objects": "how many", "size_bytes": "uncompressed"},
        ),
        "tables": Part(
            "by table of the file",
            {"name": "its name", "rows": "how many", "content_bytes": "keys and values"},
        ),
        "systems": Part("record systems, by the rows of table records", SYSTEM_FIELDS),
        "biggest": Part(
            "the biggest objects",
            {"digest": "its name", "kind": "what it is", "size_bytes": "uncompressed"},
        ),
        "sessions": Part(
            "who takes how much, most own bytes first",
            {
                "id": "the session",
                "objects": "what it reaches, all its revisions included",
                "size_bytes": "uncompressed",
                "own_bytes": "of that, what nobody else reaches",
                "shared_bytes": "and what others reach, too",
            },
        ),
        "sessions_left_out": "sessions that were not measured, because of --sessions",
        "growth": Part(
            "what is there, by the day of the first revision that has it",
            {
                "day": "in UTC",
                "revisions": "committed on it",
                "objects": "how many",
                "size_bytes": "uncompressed",
                "total_bytes": "with all before",
            },
        ),
    },
)


@command(_SECTION, _SHAPE, "casstore stats", "casstore stats --sessions 10 --biggest 5")
@click.option(
    "--sessions", "wanted", type=click.IntRange(0), default=62, show_default=True,
    help="Measure so many sessions, those that moved last. Every 62 are a pass over all objects.",
)  # fmt: skip
@click.option(
    "--biggest", type=click.IntRange(0), default=10, show_default=True,
    help="List so many of the biggest objects.",
)  # fmt: skip
def stats(app: App, wanted: int, biggest: int) -> None:
    """Say how large the store is, what sharing saves, whose it is, and how it grows.

    Dedup is what would be stored if every revision were written whole, its path and the state
    beside it, against what is stored.
    """
    with app.open() as store, app.meter() as meter:
        measured = space.measure(store, progress=meter)
        contents = measure_contents(store, listed=biggest, progress=meter)
        known = 0
        newest: list[tuple[int, str]] = []
        for info in store.sessions():
            known += 1
            heapq.heappush(newest, (_moved_at(info), info.meta.session))
            if len(newest) > wanted:
                heapq.heappop(newest)
        chosen = [session for _, session in newest]
        shares = measure_sessions(store, chosen, progress=meter)
        held = systems.measure(store)
    shares.sort(key=lambda one: (-one.own_bytes, one.session))
    document = _document(measured, contents, held, shares, known - len(shares))
    app.answer(document, lambda to: _write(to, document))


def _moved_at(info: SessionInfo) -> int:
    return info.meta.created_at_ms if info.head is None else info.head.committed_at_ms


def _ratio(one: float, other: float) -> float:
    return round(one / other, 2) if other else 0.0


def _document(
    measured: SpaceReport,
    contents: Contents,
    held: list[SystemSize],
    shares: Sequence[Share],
    left_out: int,
) -> dict[str, Any]:
    slabs = measured.slabs
    whole = contents.whole_copies_bytes
    total = 0
    growth: list[dict[str, Any]] = []
    for day in contents.days:
        total += day.size_bytes
        growth.append(_day(day, total))
    return {
        "file": {
            "file_bytes": measured.file_bytes,
            "allocated_bytes": measured.allocated_bytes,
            "used_bytes": measured.used_bytes,
            "free_bytes": measured.free_bytes,
            "content_bytes": measured.content_bytes,
            "fragmentation": round(measured.fragmentation, 4),
            "reclaimable_by_pack_bytes": measured.reclaimable_by_pack,
            "reclaimable_by_compact_bytes": measured.reclaimable_by_compact,
            "log_bytes": measured.log_bytes,
            "log_commits": measured.log_commits,
        },
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
            {"kind": KIND_NAMES.get(kind, str(kind)), "objects": counts[0], "size_bytes": counts[1]}
            for kind, counts in contents.by_kind.items()
        ],
        "tables": [
            {"name": table.name, "rows": table.rows, "content_bytes": table.content_bytes}
            for table in measured.tables
        ],
        "systems": system_documents(held),
        "biggest": [
            {
                "digest": big.digest.hex(),
                "kind": KIND_NAMES.get(big.kind, str(big.kind)).replace("rope", "blob"),
                "size_bytes": big.size_bytes,
            }
            for big in contents.biggest
        ],
        "sessions": [
            {
                "id": share.session,
                "objects": share.objects,
                "size_bytes": share.size_bytes,
                "own_bytes": share.own_bytes,
                "shared_bytes": share.shared_bytes,
            }
            for share in shares
        ],
        "sessions_left_out": left_out,
        "growth": growth,
    }


def _day(day: Day, total: int) -> dict[str, Any]:
    return {
        "day": moment(day.day * _DAY_MS)[:10],
        "revisions": day.revisions,
        "objects": day.objects,
        "size_bytes": day.size_bytes,
        "total_bytes": total,
    }


def _write(to: Printer, told: dict[str, Any]) -> None:
    file, objects, factors = told["file"], told["objects"], told["factors"]
    to.facts(
        [
            ("file", f"{size(file['file_bytes'])}, of it {size(file['free_bytes'])} free pages"),
            ("tidy up", f"pack at least {size(file['reclaimable_by_pack_bytes'])}, "
                        f"compact {size(file['reclaimable_by_compact_bytes'])}"),
            ("objects", f"{objects['objects']:,} in {count(objects['slabs'], 'slab')}: "
                        f"{size(objects['size_bytes'])}, "
                        f"stored as {size(objects['stored_bytes'])}"),
            ("reached", f"{objects['reached_objects']:,}, {size(objects['reached_bytes'])}"),
            ("revisions", f"{factors['revisions']:,}; each written whole: "
                          f"{size(factors['whole_copies_bytes'])}"),
            ("saved", [bold(f"{factors['together']:,}×"), f"  dedup {factors['dedup']:,}×, "
                       f"compression {factors['compression']}×"]),
        ]
    )  # fmt: skip
    _table(to, "sessions", told["sessions"], "own_bytes")
    if told["sessions_left_out"]:
        to.line(dim(f"{count(told['sessions_left_out'], 'session')} not measured: --sessions"))
    if told["systems"]:
        to.line()
        write_systems(to, told["systems"])
    if told["biggest"]:
        to.line()
        columns = [Column("biggest"), Column("kind"), Column("size", right=True)]
        rows: list[Cells] = [
            [name(one["digest"][:16]), one["kind"], size(one["size_bytes"])]
            for one in told["biggest"]
        ]
        to.table(columns, rows)
    growth = told["growth"]
    if growth:
        to.line()
        columns = [
            Column("day"),
            Column("revisions", right=True), Column("objects", right=True),
            Column("size", right=True), Column("total", right=True), Column(""),
        ]  # fmt: skip
        shown = growth[-_DAYS_SHOWN:]
        most = max(one["size_bytes"] for one in shown) or 1
        to.table(
            columns,
            [
                [one["day"], f"{one['revisions']:,}", f"{one['objects']:,}",
                 size(one["size_bytes"]), size(one["total_bytes"]),
                 "▇" * max(1, round(20 * one["size_bytes"] / most))]
                for one in shown
            ],
        )  # fmt: skip


def _table(to: Printer, title: str, shares: Sequence[dict[str, Any]], key: str) -> None:
    if not shares:
        return
    to.line()
    columns = [
        Column(title), Column("own", right=True), Column("shared", right=True),
        Column("objects", right=True),
    ]  # fmt: skip
    rows: list[Cells] = [
        [
            name(clip_name(one["id"])),
            size(one[key]),
            size(one["shared_bytes"]),
            f"{one['objects']:,}",
        ]
        for one in shares[:20]
    ]
    to.table(columns, rows)
    if len(shares) > len(rows):
        to.line(dim(f"… {len(shares) - len(rows):,} more: --json"))
