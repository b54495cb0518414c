"""The engine contract: the guarantees of every engine, as a pytest suite to subclass.

    class TestMine(EngineContract):
        @pytest.fixture
        def make_engine(self) -> Iterator[EngineFactory]: ...

Each call of the factory returns a new, empty engine; the fixture closes them. A persistent engine
subclasses ``PersistentEngineContract`` and overrides ``reopen`` too.
"""

from __future__ import annotations

import pytest

from casstore.engine.protocol import DeleteRow, Engine, PutRow, Row, RowIs, Write
from casstore.errors import ConditionFailedError, ObjectNotFoundError
from casstore.testing.engine_fixtures import (
    ABSENT,
    ManualClock,
    Reopen,
    all_objects,
    all_rows,
    assert_reads_back,
    find_row,
    new_blob,
    new_object,
    new_parent,
    put_objects,
    put_row,
)
from casstore.testing.engine_inputs import InputContract
from casstore.testing.engine_objects import ObjectContract
from casstore.testing.engine_rows import RowContract
from casstore.testing.engine_threads import ThreadContract
from casstore.testing.engine_watch import WatchContract
from casstore.testing.engine_writes import WriteContract


class EngineContract(
    ObjectContract, RowContract, WriteContract, InputContract, ThreadContract, WatchContract
):
    """The guarantees of an engine while it is open."""


class PersistentEngineContract(EngineContract):
    """The same guarantees, and that reopening a store preserves its content."""

    @pytest.fixture
    def reopen(self) -> Reopen:
        """A function that closes an engine and opens its store again in a new one.

        The fixture ``make_engine`` closes the new one.
        """
        raise NotImplementedError(f"{type(self).__name__} must override the fixture reopen")

    def test_an_empty_store_is_empty_when_opened_again(
        self, engine: Engine, reopen: Reopen
    ) -> None:
        engine = reopen(engine)
        assert engine.scan_objects() == []
        assert engine.scan_rows("heads") == []

    def test_a_store_opened_again_holds_everything(self, engine: Engine, reopen: Reopen) -> None:
        leaves = [new_blob(b"leaf %d" % n * (n * 100 + 1)) for n in range(20)]
        parents = [new_parent(*leaves[n : n + 5]) for n in range(15)]
        put_objects(engine, *leaves)
        for n, parent in enumerate(parents):
            rows = [PutRow("heads", b"s", parent.digest), PutRow("history", b"%02d" % n, b"")]
            engine.write(Write(objects=[parent], rows=rows))
        infos = all_objects(engine)
        for _ in range(3):
            engine = reopen(engine)
            found = all_objects(engine)
            # Compare without times: after reopening, some objects may share the time of the latest.
            assert [info._replace(stored_at_ms=0) for info in found] == [
                info._replace(stored_at_ms=0) for info in infos
            ]
            assert all(
                now.stored_at_ms >= before.stored_at_ms
                for now, before in zip(found, infos, strict=True)
            )
            assert_reads_back(engine, *leaves, *parents)
            assert find_row(engine, "heads", b"s") == parents[-1].digest
            assert [row.key for row in all_rows(engine, "history")] == [
                b"%02d" % n for n in range(15)
            ]

    def test_deleted_objects_and_rows_stay_deleted(self, engine: Engine, reopen: Reopen) -> None:
        kept, gone = new_blob(b"kept"), new_blob(b"gone")
        put_objects(engine, kept, gone)
        put_row(engine, "pins", b"kept", b"")
        put_row(engine, "pins", b"gone", b"")
        engine.write(Write(rows=[DeleteRow("pins", b"gone")], deletes=[gone.digest]))
        engine = reopen(engine)
        assert engine.missing([kept.digest, gone.digest]) == [gone.digest]
        assert engine.scan_rows("pins") == [Row(b"kept", b"")]

    def test_a_failed_write_leaves_no_objects_and_rows_after_reopening(
        self, engine: Engine, reopen: Reopen
    ) -> None:
        put_row(engine, "heads", b"key", b"1")
        rows = [PutRow("heads", b"key", b"2"), PutRow("heads", b"new", b"2")]
        blob = new_blob(b"blob")
        with pytest.raises(ConditionFailedError):
            engine.write(Write([blob], [RowIs("heads", b"key", b"0")], rows))
        with pytest.raises(ObjectNotFoundError):
            engine.write(Write([blob, new_object(b"orphan", [ABSENT])], rows=rows))
        engine = reopen(engine)
        assert engine.scan_objects() == []
        assert engine.scan_rows("heads") == [Row(b"key", b"1")]

    def test_a_reopened_store_accepts_writes_based_on_its_content(
        self, engine: Engine, reopen: Reopen
    ) -> None:
        child = new_blob(b"child")
        put_objects(engine, child)
        put_row(engine, "heads", b"key", b"1")
        engine = reopen(engine)
        parent = new_parent(child)
        result = engine.write(
            Write(
                objects=[child, parent],
                conditions=[RowIs("heads", b"key", b"1")],
                rows=[PutRow("heads", b"key", b"2")],
            )
        )
        assert result.new_objects == 1
        engine = reopen(engine)
        assert_reads_back(engine, child, parent)
        parent_info, child_info = engine.scan_objects()
        assert parent_info.children == (child_info.id,)
        assert find_row(engine, "heads", b"key") == b"2"

    def test_the_time_an_object_was_stored_is_kept(
        self, clocked: Engine, clock: ManualClock, reopen: Reopen
    ) -> None:
        put_objects(clocked, new_blob(b"blob"))
        [info] = reopen(clocked).scan_objects()
        assert info.stored_at_ms == clock.now_ms

    def test_ids_keep_growing_after_reopening(self, engine: Engine, reopen: Reopen) -> None:
        for n in range(5):
            put_objects(engine, new_blob(b"a%d" % n), new_blob(b"b%d" % n))
            engine = reopen(engine)
        infos = all_objects(engine)
        names = [name % n for n in range(5) for name in (b"a%d", b"b%d")]
        assert [info.digest for info in infos] == [new_blob(name).digest for name in names[::-1]]
        ids = [info.id for info in infos]
        assert ids == sorted(set(ids), reverse=True)

    @pytest.mark.parametrize("deleted", [1, 2, 3])
    def test_no_id_is_reused_after_deleting_the_newest_objects_and_reopening(
        self, engine: Engine, reopen: Reopen, deleted: int
    ) -> None:
        # The remaining objects do not show the highest id used, so the engine has to store it.
        blobs = [new_blob(b"%d" % n) for n in range(3)]
        put_objects(engine, *blobs)
        highest = engine.scan_objects()[0].id
        for _ in range(3):
            newest = [info.digest for info in engine.scan_objects()[:deleted]]
            engine.write(Write(deletes=newest))
            engine = reopen(engine)
            assert put_objects(engine, *blobs) == deleted
            fresh = [info.id for info in engine.scan_objects()[:deleted]]
            assert min(fresh) > highest
            highest = max(fresh)

    def test_a_flushed_store_holds_everything_when_opened_again(
        self, engine: Engine, reopen: Reopen
    ) -> None:
        blob = new_blob(b"flushed")
        put_objects(engine, blob)
        engine.flush()
        engine = reopen(engine)
        assert_reads_back(engine, blob)
