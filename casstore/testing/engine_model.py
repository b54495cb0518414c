"""Compares an engine with the reference by random writes and reads.

The reference (``casstore.engine.memory``) is assumed to be right. A seed reproduces the calls, so a
difference is reported with its seed and step. Ids may differ, because an engine may skip some.
Their guarantees are checked instead: they descend in a scan, stay with their object and are never
reused.
"""

from __future__ import annotations

import random

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import (
    MAX_KIND,
    TABLES,
    TIME_BYTES,
    Condition,
    DeleteRow,
    Engine,
    NewObject,
    ObjectInfo,
    ObjectsExist,
    PutRow,
    RowChange,
    RowIs,
    RowKey,
    RowLapsed,
    RowLive,
    RowStarts,
    Stamp,
    Write,
)
from casstore.errors import ConditionFailedError, InvalidInputError, ObjectNotFoundError
from casstore.format.digest import Digest
from casstore.testing.engine_fixtures import Reopen, all_objects

# Few keys, so that changes, conditions and bounds collide often; the last key has the maximal
# length.
_KEYS = (b"a", b"a\x00", b"ab", b"b", b"\x00", b"\xff", b"\xff\xff", b"k" * 510, b"k" * 511)
_TABLES = ("heads", "leases", "records")
_OWNERS = (b"ada ", b"bob ")
# Stamps are this far from now, much longer than the two engines are apart when they run one call:
# so a condition on a stamp has the same result in both.
_FAR_MS = 3_600_000


def compare_with_reference(
    engine: Engine, seed: int, steps: int, *, reopen: Reopen | None = None
) -> Engine:
    """Make ``steps`` random calls on ``engine``, which must be empty, and on the reference.

    AssertionError at the first difference. ``reopen``: the engine is reopened occasionally; the
    engine that is open at the end is returned.
    """
    run = _Run(engine, seed, reopen)
    for step in range(steps):
        run.take_step(step)
    run.compare_everything()
    return run.engine


class _Run:
    """One comparison: both engines, and a record of the calls so far."""

    def __init__(self, engine: Engine, seed: int, reopen: Reopen | None) -> None:
        self.engine = engine
        self._reopen = reopen
        self._rng = random.Random(seed)
        self._seed = seed
        self._step = 0
        # The engine runs first, and its time is passed to the reference, so that stamps agree.
        self._now_ms = 0
        self._reference = MemoryEngine(clock=lambda: self._now_ms)
        # Every object ever written, stored or refused: to link to, request or put again.
        self._tried: list[NewObject] = []
        # The last known ids of the engine, and the highest id ever seen.
        self._id_of: dict[bytes, int] = {}
        self._highest_id = 0

    def take_step(self, step: int) -> None:
        """Make one random call on both engines and compare the results."""
        self._step = step
        [act] = self._rng.choices(
            [self._write, self._delete, self._look, self.compare_everything, self._open_again],
            [60, 12, 24, 3, 1],
        )
        act()

    # --- calls ------------------------------------------------------------------

    def _write(self) -> None:
        rng = self._rng
        stored = [info.digest for info in self._reference.scan_objects(limit=100)]
        if rng.random() < 0.05:
            # Links to deleted or unknown objects, so the whole write is refused.
            stored += [item.digest for item in self._tried[-20:]] + self._unknown_digests(2)
        objects: list[NewObject] = []
        for _ in range(rng.choice([0, 1, 1, 2, 3, 8, 40])):
            objects.append(self._object([*stored, *(item.digest for item in objects)]))
        if rng.random() < 0.05:
            # Children after their parents: usually refused.
            rng.shuffle(objects)
        self._tried += objects
        write = Write(
            objects=objects,
            conditions=[self._condition() for _ in range(rng.choice([0, 0, 0, 1, 1, 2]))],
            rows=[self._row_change() for _ in range(rng.choice([0, 1, 1, 2, 5]))],
        )
        self._run(self._malformed(write) if rng.random() < 0.04 else write)

    def _delete(self) -> None:
        """Delete as a collector does: only unlinked objects, parents first."""
        rng = self._rng
        infos = all_objects(self._reference)
        if not infos:
            return
        if rng.random() < 0.3:
            doomed = {info.id for info in infos[: rng.choice([1, 1, 2, 10, len(infos)])]}
        else:
            # An object and its ancestors. Parents are newer, so one pass finds them all.
            doomed = {rng.choice(infos[:30] if rng.random() < 0.7 else infos).id}
            for info in reversed(infos):
                if doomed.intersection(info.children):
                    doomed.add(info.id)
        deletes = [info.digest for info in infos if info.id in doomed]
        if rng.random() < 0.3:
            # Also objects that are not stored.
            [unknown] = self._unknown_digests(1)
            deletes.insert(rng.randrange(len(deletes) + 1), unknown)
        self._run(
            Write(
                conditions=[self._condition()] if rng.random() < 0.2 else [],
                rows=[self._row_change()] if rng.random() < 0.5 else [],
                deletes=deletes,
            )
        )

    def _run(self, write: Write) -> None:
        actual, self._now_ms = _outcome(self.engine, write)
        expected, _ = _outcome(self._reference, write)
        self._expect(write, actual, expected)
        if expected[0] == "written":
            for digest in write.deletes:
                self._id_of.pop(digest, None)

    def _look(self) -> None:
        """Make the same random reads on both engines."""
        rng = self._rng
        known = [item.digest for item in self._tried]
        digests = rng.choices(known, k=rng.choice([1, 5, 50])) if known else []
        digests += self._unknown_digests(rng.randrange(3))
        rng.shuffle(digests)
        keys = [RowKey(rng.choice(_TABLES), rng.choice(_KEYS)) for _ in range(rng.randrange(8))]
        engine, reference = self.engine, self._reference
        self._expect("missing", engine.missing(digests), reference.missing(digests))
        self._expect("get_many", engine.get_many(digests), reference.get_many(digests))
        self._expect("get_rows", engine.get_rows(keys), reference.get_rows(keys))

        table, start, stop = rng.choice(_TABLES), self._bound() or b"", self._bound()
        limit, reverse = rng.choice([1, 2, 3, 1000]), rng.random() < 0.5
        self._expect(
            ("scan_rows", table, start, stop, limit, reverse),
            engine.scan_rows(table, start=start, stop=stop, limit=limit, reverse=reverse),
            reference.scan_rows(table, start=start, stop=stop, limit=limit, reverse=reverse),
        )

    def compare_everything(self) -> None:
        """Compare all rows and objects, and check the guarantees of ids."""
        for table in TABLES:
            actual = self.engine.scan_rows(table, limit=10**6)
            self._expect(table, actual, self._reference.scan_rows(table, limit=10**6))

        infos = all_objects(self.engine, limit=self._rng.choice([1, 3, 20, 1000]))
        expected = all_objects(self._reference)
        self._expect("scan_objects", self._without_ids(infos), self._without_ids(expected))
        stored_at_ms = {info.digest: info.stored_at_ms for info in expected}
        early = [info for info in infos if info.stored_at_ms < stored_at_ms[info.digest]]
        self._expect("objects with a stored time before their write", early, [])
        digests = [info.digest for info in expected]
        actual_data = self.engine.get_many(digests)
        self._expect("all objects", actual_data, self._reference.get_many(digests))

        ids = [info.id for info in infos]
        self._expect("ids descend in a scan", ids, sorted(set(ids), reverse=True))
        fresh = []
        for info in infos:
            if info.digest in self._id_of:
                self._expect("the id of an object is constant", info.id, self._id_of[info.digest])
            else:
                fresh.append(info.id)
        reused = [id_ for id_ in fresh if id_ <= self._highest_id]
        self._expect("reused ids", reused, [])
        self._id_of = {info.digest: info.id for info in infos}
        self._highest_id = max([self._highest_id, *ids])

    def _open_again(self) -> None:
        if self._reopen is not None:
            self.engine = self._reopen(self.engine)
            self.compare_everything()

    def _without_ids(self, infos: list[ObjectInfo]) -> list[object]:
        digest_of = {info.id: info.digest for info in infos}
        # Parents are deleted first, so every child of a stored object is stored.
        return [
            (
                info.digest,
                info.kind,
                info.size_bytes,
                {digest_of.get(child, child) for child in info.children},
            )
            for info in infos
        ]

    def _expect(self, what: object, actual: object, expected: object) -> None:
        # Not an assert statement: the comparison must also run under python -O.
        if actual != expected:
            raise AssertionError(
                f"seed {self._seed}, step {self._step}: {_shortened(what)}\n"
                f"got      {_shortened(actual)}\nexpected {_shortened(expected)}"
            )

    # --- random parts -----------------------------------------------------------

    def _object(self, linkable: list[bytes]) -> NewObject:
        """An object, new or put before, with links to some of ``linkable``."""
        rng = self._rng
        if self._tried and rng.random() < 0.1:
            # It, and the objects it links to, may be stored, deleted or refused by now.
            again = rng.choice(self._tried)
            return again._replace(children=[c for c in again.children if c in linkable])
        count = rng.choice([0, 0, 1, 2, 5]) if linkable else 0
        children = rng.choices(linkable, k=count)
        parts = [self._data()]
        for child in children:
            # The data contains some digests of children once, some twice, some not at all.
            parts += [child] * rng.choice([0, 1, 1, 1, 2])
            if rng.random() < 0.5:
                parts.append(self._data())
        if rng.random() < 0.1:
            parts += self._unknown_digests(1)
        kind, data = rng.randrange(MAX_KIND + 1), b"".join(parts)
        digest = Digest.of_blob(bytes([kind]) + data + b"".join(children))
        if self._tried and rng.random() < 0.02:
            # Other bytes with a digest in use: the stored bytes must stay.
            digest = Digest(rng.choice(self._tried).digest)
        return NewObject(digest, kind, data, children)

    def _data(self) -> bytes:
        rng = self._rng
        size_bytes = rng.choice([0, 1, 10, 10, 100, 100, 1000, 20_000])
        if rng.random() < 0.5:
            return rng.randbytes(size_bytes)
        return (b"again %d " % rng.randrange(5) * size_bytes)[:size_bytes]

    def _unknown_digests(self, count: int) -> list[bytes]:
        """Digests without an object."""
        return [Digest.of_blob(self._rng.randbytes(16)) for _ in range(count)]

    def _bound(self) -> bytes | None:
        rng = self._rng
        between = b"".join(rng.choices([b"\x00", b"a", b"b", b"k", b"\xff"], k=rng.randrange(4)))
        return rng.choice([None, between, rng.choice(_KEYS), rng.choice(_KEYS) + b"\x00"])

    def _row_change(self) -> RowChange:
        rng = self._rng
        table, key = rng.choice(_TABLES), rng.choice(_KEYS)
        if rng.random() < 0.25:
            return DeleteRow(table, key)
        owner = rng.choice(_OWNERS)
        if rng.random() < 0.5:
            stamp = Stamp(len(owner), rng.choice([-_FAR_MS, _FAR_MS]))
            return PutRow(table, key, owner + bytes(TIME_BYTES) + self._data(), [stamp])
        return PutRow(table, key, rng.choice([b"", owner, owner + self._data()]))

    def _condition(self) -> Condition:
        """A condition of any type, more often true than false."""
        rng = self._rng
        table, key, owner = rng.choice(_TABLES), rng.choice(_KEYS), rng.choice(_OWNERS)
        [value] = self._reference.get_rows([RowKey(table, key)])
        if rng.random() < 0.2:
            value = rng.choice([None, b"", owner, owner + b"x"])
        if self._tried and rng.random() < 0.3:
            stored = [info.digest for info in self._reference.scan_objects(limit=20)]
            digests = rng.sample(stored, min(len(stored), 3))
            if rng.random() < 0.2:
                digests.append(rng.choice(self._tried).digest)
            return ObjectsExist(digests)
        held = value or b""
        conditions: list[Condition] = [
            RowIs(table, key, value),
            RowIs(table, key, value),
            RowStarts(table, key, held[: rng.randrange(20)]),
            RowLive(table, key, held[: len(owner)], len(owner)),
            RowLapsed(table, key, held, len(owner)),
        ]
        return rng.choice(conditions)

    def _malformed(self, write: Write) -> Write:
        rng = self._rng
        flawed_rows: list[RowChange] = [
            PutRow("nothing", b"key", b""),
            PutRow("heads", b"", b""),
            PutRow("heads", b"k" * 512, b""),
            PutRow("heads", b"key", bytes(8), [Stamp(1)]),
            DeleteRow("heads", b""),
        ]
        flawed_object = NewObject(*rng.choice([(b"short", 0), (bytes(32), MAX_KIND + 1)]), b"", ())
        return rng.choice(
            [
                write._replace(rows=[*write.rows, rng.choice(flawed_rows)]),
                write._replace(objects=[*write.objects, flawed_object]),
                write._replace(conditions=[*write.conditions, RowIs("heads", b"", None)]),
            ]
        )


def _outcome(engine: Engine, write: Write) -> tuple[tuple[object, ...], int]:
    """Run a write; returns its result as data, and the engine's time."""
    try:
        result = engine.write(write)
    except ConditionFailedError as exc:
        return ("condition failed", exc.index, exc.condition, exc.actual), engine.now_ms()
    except ObjectNotFoundError as exc:
        return ("not found", exc.digest), engine.now_ms()
    except InvalidInputError:
        return ("invalid",), engine.now_ms()
    return ("written", result.new_objects), result.now_ms


def _shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 2000 else f"{text[:2000]}… ({len(text)} characters)"
