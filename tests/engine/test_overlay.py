"""An overlay reads as if its writes were stored, and writes nothing to the engine below."""

from __future__ import annotations

import random

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.engine.overlay import OverlayEngine
from casstore.engine.protocol import (
    DeleteRow,
    NewObject,
    ObjectsExist,
    PutRow,
    Roots,
    Row,
    RowIs,
    RowKey,
    Stamp,
    Write,
)
from casstore.errors import ConditionFailedError, InvalidInputError, ObjectNotFoundError
from casstore.format.digest import plain_hash
from casstore.testing import ManualClock
from casstore.testing.engine_fixtures import all_objects, all_rows

KEYS = [bytes((number,)) for number in range(12)]


def made(name: str, *children: NewObject) -> NewObject:
    data = name.encode()
    return NewObject(plain_hash(data), 0, data, [child.digest for child in children])


def changes(chance: random.Random) -> Write:
    rows: list[PutRow | DeleteRow] = []
    for key in chance.sample(KEYS, 3):
        value = bytes((chance.randrange(256),))
        rows.append(DeleteRow("pins", key) if chance.random() < 0.4 else PutRow("pins", key, value))
    return Write(rows=rows)


@pytest.mark.parametrize("seed", range(20))
def test_an_overlay_reads_rows_as_if_its_writes_were_stored(seed: int) -> None:
    chance = random.Random(seed)
    base, reference = MemoryEngine(), MemoryEngine()
    for _ in range(4):
        write = changes(chance)
        base.write(write)
        reference.write(write)
    below = all_rows(base, "pins")
    overlay = OverlayEngine(base)
    for _ in range(6):
        write = changes(chance)
        overlay.write(write)
        reference.write(write)
        places = [RowKey("pins", key) for key in KEYS]
        assert overlay.get_rows(places) == reference.get_rows(places)
        for _ in range(8):
            start = chance.choice([b"", *KEYS])
            stop = chance.choice([None, *KEYS])
            limit, reverse = chance.choice([1, 2, 3, 1000]), chance.random() < 0.5
            assert overlay.scan_rows(
                "pins", start=start, stop=stop, limit=limit, reverse=reverse
            ) == reference.scan_rows("pins", start=start, stop=stop, limit=limit, reverse=reverse)
    assert all_rows(base, "pins") == below


def test_an_overlay_handles_objects_conditions_and_stamps_like_any_engine() -> None:
    clock = ManualClock()
    base = MemoryEngine(clock=clock)
    old, new, lost = made("old"), made("new"), made("lost")
    base.write(Write(objects=[old], rows=[PutRow("pins", b"a", b"1")]))
    overlay = OverlayEngine(base)
    parent = made("parent", old, new)
    stamped = PutRow("pins", b"b", bytes(8), [Stamp(0, 5)])
    assert overlay.write(Write(objects=[old, new, parent], rows=[stamped])).new_objects == 2
    assert overlay.get_rows([RowKey("pins", b"b")]) == [(clock.now_ms + 5).to_bytes(8, "big")]
    assert overlay.missing([old.digest, parent.digest, lost.digest]) == [lost.digest]
    assert [one and one.data for one in overlay.get_many([parent.digest, old.digest])] == [
        b"parent",
        b"old",
    ]
    with pytest.raises(ConditionFailedError):
        overlay.write(Write(conditions=[RowIs("pins", b"b", None)]))
    with pytest.raises(ObjectNotFoundError):
        overlay.write(Write(conditions=[ObjectsExist((lost.digest,))]))
    with pytest.raises(ObjectNotFoundError):
        overlay.write(Write(objects=[made("child of lost", lost)], rows=[DeleteRow("pins", b"a")]))
    with pytest.raises(InvalidInputError):
        overlay.write(Write(deletes=[old.digest]))
    assert overlay.get_rows([RowKey("pins", b"a")]) == [b"1"]
    overlay.close()
    assert len(all_objects(base)) == 1


def test_a_collection_uses_the_rows_and_objects_of_the_overlay() -> None:
    base = MemoryEngine(clock=ManualClock())
    leaf, kept, gone = made("leaf"), made("kept"), made("gone")
    base.write(
        Write(
            objects=[leaf, kept, gone],
            rows=[PutRow("pins", bytes((at,)), one.digest) for at, one in enumerate((kept, gone))],
        )
    )
    overlay = OverlayEngine(base)
    new = made("new", made("leaf"))
    top = made("top", new)
    overlay.write(
        Write(objects=[new, top], rows=[DeleteRow("pins", b"\1"), PutRow("pins", b"x", top.digest)])
    )

    def named(table: str, row: Row) -> list[bytes]:
        return [row.value]

    roots = Roots(("pins",), named)
    with overlay.collection(roots, grace_ms=0, dry_run=True) as collection:
        report = collection.mark()
    assert (report.objects_kept, report.objects_unreached) == (2, 1)
    with pytest.raises(InvalidInputError):
        overlay.collection(roots, grace_ms=0)
