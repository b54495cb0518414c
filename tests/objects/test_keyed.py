"""A long map changed key by key, a few at once or many, is what storing it whole gives."""

from __future__ import annotations

import random
from typing import Any

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.format import splitting
from casstore.format.graph import FIELD_DEPTH, NIL
from casstore.format.splitting import Encoded
from casstore.objects import keyed
from casstore.objects.pieces import PendingReader, PieceWriter

TEXT = "a text " * 9


def changed(encoded: Encoded, engine: MemoryEngine, put: dict[str, Any], drop: list[str]) -> Any:
    writer = PieceWriter()
    reader = PendingReader(engine, writer)
    after = keyed.change_map(reader, encoded, put, drop, FIELD_DEPTH, writer.emit)
    pieces = len(writer.objects)
    writer.flush(engine)
    return after, pieces


@pytest.mark.parametrize("steps", [1, 31, 32, 300, 3000])
@pytest.mark.parametrize("length", [0, 5, 900, 2500])
def test_a_keyed_map_after_any_number_of_changes_equals_the_map_stored_whole(
    length: int, steps: int
) -> None:
    rng = random.Random(length * steps)
    engine = MemoryEngine()
    mapping: dict[str, Any] = {f"key {at}": rng.choice([at, TEXT, None]) for at in range(length)}
    before = changed(NIL, engine, mapping, [])[0]
    keys = [f"key {rng.randrange(length + 500)}" for _ in range(steps)]
    put = {key: rng.choice([-1, TEXT + key]) for key in keys[::2]}
    drop = [*keys[1::2], "nobody"]
    after = changed(before, engine, put, drop)[0]
    for key in drop:
        mapping.pop(key, None)
    mapping.update(put)
    assert after == splitting.encode_split(mapping, FIELD_DEPTH, PieceWriter().emit)


def test_many_changes_to_a_keyed_map_write_fewer_pieces_than_changes() -> None:
    engine = MemoryEngine()
    before = changed(NIL, engine, {f"a{at}": at for at in range(2000)}, [])[0]
    _, pieces = changed(before, engine, {f"b{at}": at for at in range(2000)}, [])
    assert pieces < 2000
