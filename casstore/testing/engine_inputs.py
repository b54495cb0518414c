"""The part of the engine contract about the arguments of a write and their mutability."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from casstore.engine.protocol import (
    DeleteRow,
    Engine,
    NewObject,
    ObjectsExist,
    PutRow,
    Row,
    RowChange,
    RowIs,
    RowLapsed,
    RowLive,
    RowStarts,
    Write,
)
from casstore.errors import InvalidInputError
from casstore.testing.engine_fixtures import (
    EngineFixtures,
    all_rows,
    assert_reads_back,
    info_of,
    new_blob,
    new_parent,
)

_BLOB = new_blob(b"a blob of its own")

#: For each field of a write that takes bytes, a write in which ``make`` has made that field.
_PLACES: dict[str, Callable[[Callable[[bytes], Any]], Write]] = {
    "digest": lambda make: Write(objects=[_BLOB._replace(digest=make(_BLOB.digest))]),
    "data": lambda make: Write(objects=[_BLOB._replace(data=make(_BLOB.data))]),
    "child": lambda make: Write(
        objects=[_BLOB, NewObject(bytes(32), 0, _BLOB.digest, [make(_BLOB.digest)])]
    ),
    "key of a row": lambda make: Write(rows=[PutRow("heads", make(b"new"), b"2")]),
    "value of a row": lambda make: Write(rows=[PutRow("heads", b"new", make(b"2"))]),
    "key of a row with a deleted row": lambda make: Write(
        rows=[DeleteRow("heads", b"key"), PutRow("heads", make(b"new"), b"2")]
    ),
    "value of a row with a deleted row": lambda make: Write(
        rows=[DeleteRow("heads", b"key"), PutRow("heads", b"new", make(b"2"))]
    ),
    "key of a deleted row": lambda make: Write(rows=[DeleteRow("heads", make(b"key"))]),
    "key of a condition": lambda make: Write(conditions=[RowIs("heads", make(b"key"), b"1")]),
    "value of a condition": lambda make: Write(conditions=[RowIs("heads", b"key", make(b"1"))]),
    "beginning of a row": lambda make: Write(conditions=[RowStarts("heads", b"key", make(b"1"))]),
    "prefix of a live row": lambda make: Write(
        conditions=[RowLive("heads", b"key", make(b"1"), 0)]
    ),
    "value of a lapsed row": lambda make: Write(
        conditions=[RowLapsed("heads", b"key", make(b"1"), 0)]
    ),
    "required object": lambda make: Write(conditions=[ObjectsExist([make(_BLOB.digest)])]),
    "deleted object": lambda make: Write(deletes=[make(_BLOB.digest)]),
}


def _view(data: bytes) -> memoryview:
    return memoryview(bytearray(data))


class InputContract(EngineFixtures):
    """Later changes to the arguments of a write do not change what was written."""

    @pytest.mark.parametrize("place", list(_PLACES))
    def test_bytes_that_can_change_are_refused(self, engine: Engine, place: str) -> None:
        # Otherwise the caller could change a stored row, or an object under its digest.
        old, new = new_blob(b"old"), new_blob(b"new")
        engine.write(Write(objects=[old], rows=[PutRow("heads", b"key", b"1")]))
        for changeable in (bytearray, _view):
            write = _PLACES[place](changeable)
            with pytest.raises(InvalidInputError):
                engine.write(write._replace(objects=[new, *write.objects]))
            assert engine.missing([old.digest, new.digest]) == [new.digest]
            assert all_rows(engine, "heads") == [Row(b"key", b"1")]

    def test_instances_of_a_subclass_of_bytes_are_accepted(self, engine: Engine) -> None:
        class Named(bytes):
            """A subclass of bytes, as Digest is."""

        blob = new_blob(b"blob")
        engine.write(
            Write(
                objects=[blob._replace(digest=Named(blob.digest), data=Named(blob.data))],
                conditions=[RowIs("heads", Named(b"key"), None)],
                rows=[
                    PutRow("heads", Named(b"key"), Named(b"1")),
                    DeleteRow("heads", Named(b"no")),
                ],
            )
        )
        engine.write(
            Write(
                conditions=[RowIs("heads", b"key", Named(b"1")), ObjectsExist([blob.digest])],
                rows=[PutRow("heads", b"key", b"2")],
            )
        )
        assert_reads_back(engine, blob)
        assert all_rows(engine, "heads") == [Row(b"key", b"2")]

    def test_the_caller_may_change_its_lists_after_the_write_returns(self, engine: Engine) -> None:
        child = new_blob(b"child")
        parent = new_parent(child)
        children = list(parent.children)
        objects = [child, parent._replace(children=children)]
        rows: list[RowChange] = [PutRow("heads", b"key", b"1")]
        engine.write(Write(objects=objects, rows=rows))
        for given in (objects, rows, children):
            given.clear()
        assert_reads_back(engine, child, parent)
        assert info_of(engine, parent.digest).children == (info_of(engine, child.digest).id,)
        assert all_rows(engine, "heads") == [Row(b"key", b"1")]
