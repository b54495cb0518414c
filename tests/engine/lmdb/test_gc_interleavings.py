"""Two writers and a collector, in every order in which their steps can fall.

First on a model small enough to read, with the three rules of collection as switches; then
the same story with the engine itself, one of its own rules removed at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from casstore.engine.lmdb import marking
from casstore.engine.lmdb.batches import BatchBuilder
from casstore.engine.lmdb.collection import LmdbCollection
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.marking import Candidates, Marks
from casstore.engine.protocol import (
    DeleteRow,
    NewObject,
    PutRow,
    Roots,
    Row,
    RowKey,
    Write,
    WriteResult,
)
from casstore.errors import CorruptionError, ObjectNotFoundError
from casstore.format.digest import plain_hash


def schedules(*steps: int) -> list[tuple[int, ...]]:
    """Every order of the steps of several actors, each in its own order."""
    names = [actor for actor, count in enumerate(steps) for _ in range(count)]
    return sorted(set(permutations(names)))


# --- the model ---------------------------------------------------------------------------------

# Garbage at the beginning: c links to b, b to a. The first writer stores all three and names
# c; the second stores d, which links to b, and names d.
LINKS = {"a": "", "b": "a", "c": "b", "d": "b"}
ORDER = {"a": 1, "b": 2, "c": 3, "d": 4}


class World:
    """A store of four objects, and who works on it."""

    def __init__(self, rules: frozenset[int]) -> None:
        self.rules = rules
        self.stored = {"a", "b", "c"}
        self.heads: dict[str, str] = {}
        self.doomed: list[str] = []

    def writer(self, name: str, objects: str, head: str) -> Iterator[None]:
        hits = [each for each in objects if each in self.stored]
        yield
        new = [each for each in objects if each not in hits]
        if 1 in self.rules:
            # Look again: what was found may be gone.
            new = [each for each in objects if each not in self.stored]
            for each in new:
                if any(child not in self.stored and child not in new for child in LINKS[each]):
                    return
        self.stored.update(new)
        self.heads[name] = head
        yield

    def collector(self) -> Iterator[None]:
        reached = self.reached()
        self.doomed = sorted(self.stored - reached, key=ORDER.__getitem__)
        if 3 in self.rules:
            self.doomed.reverse()
        yield
        for each in list(self.doomed):
            if 2 not in self.rules or each not in self.reached():
                self.stored.discard(each)
            yield

    def reached(self) -> set[str]:
        found: set[str] = set()
        for head in self.heads.values():
            each = head
            while each:
                found.add(each)
                each = LINKS[each]
        return found

    def is_whole(self) -> bool:
        return self.reached() <= self.stored


def lost_in_model(rules: frozenset[int]) -> tuple[int, int]:
    """In how many schedules something named is missing at any moment, and of how many."""
    lost = 0
    found = schedules(2, 2, 4)
    for schedule in found:
        world = World(rules)
        actors = [
            world.writer("first", "abc", "c"), world.writer("second", "d", "d"),
            world.collector(),
        ]  # fmt: skip
        whole = True
        for actor in schedule:
            next(actors[actor], None)
            whole = whole and world.is_whole()
        lost += not whole
    return lost, len(found)


def test_with_all_rules_no_schedule_of_the_model_loses_anything() -> None:
    assert lost_in_model(frozenset({1, 2, 3})) == (0, 420)


@pytest.mark.parametrize("rule", [1, 2, 3])
def test_without_any_one_rule_a_schedule_of_the_model_loses_an_object(rule: int) -> None:
    lost, _ = lost_in_model(frozenset({1, 2, 3}) - {rule})
    assert lost > 0


# --- the engine --------------------------------------------------------------------------------


def made(name: str, *children: NewObject) -> NewObject:
    links = [child.digest for child in children]
    data = name.encode() + b"".join(links)
    return NewObject(plain_hash(data), 0, data, links)


A = made("a")
B = made("b", A)
C = made("c", B)
D = made("d", B)
FIRST, SECOND = RowKey("records", b"first"), RowKey("records", b"second")


def _named(table: str, row: Row) -> list[bytes]:
    return [row.value]


ROOTS = Roots(("records",), _named)


class Stage:
    """A store with the garbage of the model, and the actors' steps."""

    def __init__(self, engine: LmdbEngine) -> None:
        self.engine = engine
        #: What the writer that writes now has looked up before.
        self.seen: dict[bytes, int | None] = {}

    def reset(self) -> None:
        everything = [item.digest for item in (D, C, B, A)]
        rows = [DeleteRow(*FIRST), DeleteRow(*SECOND)]
        self.engine.write(Write(rows=rows, deletes=everything))
        self.engine.write(Write(objects=[A, B, C]))

    def writer(self, write: Write) -> Iterator[None]:
        digests = [item.digest for item in (A, B, C, D)]
        seen = dict(zip(digests, self.engine.find_ids(digests), strict=True))
        yield
        self.seen = seen
        try:
            self.engine.write(write)
        except ObjectNotFoundError:
            # Refused by name: the caller knows, and nothing is named that is not there.
            pass
        yield

    def collector(self) -> Iterator[None]:
        with LmdbCollection(
            self.engine._env, ROOTS, self.engine.now_ms, grace_ms=0, dry_run=False
        ) as collection:
            collection.mark()
            yield
            done = False
            while not done:
                done = collection.sweep(1).done
                yield

    def is_whole(self) -> bool:
        heads = [row for row in self.engine.get_rows([FIRST, SECOND]) if row is not None]
        wanted = {C.digest: [C, B, A], D.digest: [D, B, A]}
        needed = [item.digest for head in heads for item in wanted[head]]
        return not self.engine.missing(needed)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed", auto_train=False)
    yield Stage(engine)
    engine.close()


def lost_in_engine(stage: Stage, limit: int | None = None) -> tuple[int, int]:
    lost = 0
    found = schedules(2, 2, 4)
    for schedule in found:
        stage.reset()
        first = Write(objects=[A, B, C], rows=[PutRow(*FIRST, C.digest)])
        second = Write(objects=[D], rows=[PutRow(*SECOND, D.digest)])
        collector = stage.collector()
        actors = [stage.writer(first), stage.writer(second), collector]
        whole = True
        try:
            for actor in schedule:
                next(actors[actor], None)
                whole = whole and stage.is_whole()
            for _ in collector:
                whole = whole and stage.is_whole()
        except CorruptionError:
            # The collector itself has found that something reached is missing.
            whole = False
        lost += not whole
        if limit is not None and lost >= limit:
            break
    return lost, len(found)


def test_no_schedule_loses_anything(stage: Stage) -> None:
    assert lost_in_engine(stage) == (0, 420)


def _do_not_catch_up(self: Marks, snapshot: Any, limit: int | None = None) -> bool:
    """The second rule removed."""
    return True


def _oldest_first(
    original: Callable[[Marks, int, int], Candidates],
) -> Callable[[Marks, int, int], Candidates]:
    """The third rule removed: children go before parents, one with each step."""

    def candidates(self: Marks, below: int, limit: int) -> Candidates:
        found = original(self, self.last_id + 1, 1000)
        if not found.ids:
            return found._replace(down_to=1)
        return Candidates(found.ids[-1:], found.digests[-1:], found.sizes_bytes[-1:], below)

    return candidates


def test_trusting_lookups_from_before_the_write_lock_loses_an_object(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was looked up before the lock was taken counts."""
    look_up = BatchBuilder._look_up

    def believe_what_was_seen(
        self: BatchBuilder, digests: Sequence[bytes]
    ) -> dict[bytes, int | None]:
        seen = {digest: stage.seen.get(digest) for digest in digests}
        self._ids.update({digest: own for digest, own in seen.items() if own})
        return look_up(self, digests)

    monkeypatch.setattr(BatchBuilder, "_look_up", believe_what_was_seen)
    assert lost_in_engine(stage, limit=3)[0] == 3


def test_sweeping_without_catching_up_with_writers_loses_an_object(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Marks, "catch_up", _do_not_catch_up)
    assert lost_in_engine(stage, limit=3)[0] == 3


def test_sweeping_the_oldest_objects_first_loses_an_object(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(marking.Marks, "candidates", _oldest_first(Marks.candidates))
    assert lost_in_engine(stage, limit=3)[0] == 3


def test_without_notes_of_written_rows_a_schedule_loses_an_object(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that names again what was there before tells nothing by new objects."""
    monkeypatch.setattr(
        "casstore.engine.lmdb.notes.note_rows", lambda env, txn, places, now_ms: None
    )
    assert lost_in_engine(stage, limit=1)[0] == 1


def test_new_objects_keep_what_they_link_to(stage: Stage) -> None:
    """D is put, and no row names it yet; while it is young it must be whole."""
    stage.reset()
    collector = stage.collector()
    next(collector)
    result = stage.engine.write(Write(objects=[D]))
    assert isinstance(result, WriteResult)
    for _ in collector:
        assert stage.engine.missing([D.digest, B.digest, A.digest]) == []
    assert stage.engine.missing([C.digest]) == [C.digest]
