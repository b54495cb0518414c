"""Arguments that cannot be: refused with an error of the store, before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from casstore.errors import StorageError
from casstore.records.lifecycles import Annotation, FileKeys, Hold, Lifecycles, Ref, Seal
from casstore.records.lifecycles.user_data import NewValue
from casstore.store import Store
from tests.refusals import CountingEngine, assert_refused

ODD: Any = 5
NONE: Any = None
UNHASHABLE: Any = []
HOLD = Hold("a law", 4_000_000_000_000)
SEAL = Seal("a decision", "a law")
FACT = Annotation(("process",))


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def life(engine: CountingEngine) -> Iterator[Lifecycles]:
    with Store(engine) as store:
        life = Lifecycles(store)
        life.create_session("s", user="anna").checkpoint("first")
        life.users.put("anna", "language", "en")
        life.records.put("facts", "one", 1, FACT)
        yield life


CALLS: dict[str, Callable[[Lifecycles], object]] = {
    "a key store that is its path": lambda life: Lifecycles(life.store, keys="keys"),  # type: ignore[arg-type]
    "an annotation that is a number": lambda life: life.users.put("anna", "name", 1, ODD),
    "an annotation that is its classes": lambda life: life.users.put(
        "anna",
        "name",
        1,
        ("identity",),  # type: ignore[arg-type]
    ),
    "a record without an annotation": lambda life: life.records.put("facts", "two", 2, NONE),
    "an annotation of a checkpoint": lambda life: life.restore("s").checkpoint("next", None, ODD),
    "an annotation that holds by a number": lambda life: life.records.put(
        "facts", "two", 2, FACT._replace(hold=ODD)
    ),
    "an annotation that seals by a text": lambda life: life.records.put(
        "facts",
        "two",
        2,
        FACT._replace(seal="a decision"),  # type: ignore[arg-type]
    ),
    "a name of a value that is a list": lambda life: life.users.put("anna", UNHASHABLE, 1),
    "the name of a ref": lambda life: life.users.ref("anna", ODD),
    "values that are a number": lambda life: life.users.put_many(ODD),
    "values that are none": lambda life: life.users.put_many(NONE),
    "values that are tuples": lambda life: life.users.put_many([("anna", "name", 1)]),  # type: ignore[list-item]
    "a value whose name is a list": lambda life: life.users.put_many(
        [NewValue("anna", UNHASHABLE, 1)]
    ),
    "places that are a number": lambda life: life.users.find_many(ODD),
    "places that are texts": lambda life: life.users.find_many(["anna"]),  # type: ignore[list-item]
    "places that are numbers": lambda life: life.users.find_many([ODD]),
    "names of working state that are lists": lambda life: life.restore("s").checkpoint(
        "next", [UNHASHABLE]
    ),
    "names of working state that are numbers": lambda life: life.restore("s").checkpoint(
        "next", [ODD]
    ),
    "a hold that is a number": lambda life: life.hold(life.users.ref("anna", "language"), ODD),
    "no hold": lambda life: life.hold(life.users.ref("anna", "language"), NONE),
    "no seal": lambda life: life.seal(life.users.ref("anna", "language"), NONE),
    "a row that is a text": lambda life: life.remove(
        Ref("record", "facts", "one"),
        only="row",  # type: ignore[arg-type]
    ),
    "the text of a ref that is none": lambda life: Ref.from_text(NONE),
    "a ref of bytes as text": lambda life: Ref("user", b"anna").to_text(),  # type: ignore[arg-type]
    "keys at no path": lambda life: FileKeys(NONE),
    "keys at a number": lambda life: FileKeys(ODD),
    "keys at a path of bytes": lambda life: FileKeys(b"keys"),  # type: ignore[arg-type]
    "keys at a path with a NUL": lambda life: FileKeys("ke\0ys"),
    "keys at an empty path": lambda life: FileKeys(""),
}


@pytest.mark.parametrize("call", CALLS)
def test_lifecycle_calls_refuse_invalid_arguments(
    engine: CountingEngine, life: Lifecycles, call: str
) -> None:
    assert_refused(engine, lambda: CALLS[call](life))
    assert life.records.get("facts", "one") == 1
    assert [info.label for info in life.restore("s").checkpoints()] == ["first"]


REFS: dict[str, Any] = {
    "none": None,
    "a number": 5,
    "a text": "record",
    "a kind that is a list": Ref([], "facts", "one"),  # type: ignore[arg-type]
}
ABOUT: dict[str, Callable[[Lifecycles, Ref], object]] = {
    "find_note": lambda life, ref: life.find_note(ref),
    "hold": lambda life, ref: life.hold(ref, HOLD),
    "seal": lambda life, ref: life.seal(ref, SEAL),
    "lift_hold": lambda life, ref: life.lift_hold(ref, review="done"),
    "lift_seal": lambda life, ref: life.lift_seal(ref, review="done"),
    "verify_seal": lambda life, ref: life.verify_seal(ref),
    "remove": lambda life, ref: life.remove(ref),
}


@pytest.mark.parametrize("call", ABOUT)
@pytest.mark.parametrize("ref", REFS)
def test_a_ref_that_is_not_a_record_is_refused(
    engine: CountingEngine, life: Lifecycles, ref: str, call: str
) -> None:
    assert_refused(engine, lambda: ABOUT[call](life, REFS[ref]))


def test_a_path_too_long_for_keys_is_an_error_of_the_disk(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        FileKeys(tmp_path / ("x" * 5000))


def test_an_annotation_accepts_an_iterator(life: Lifecycles) -> None:
    once: Any = iter(["process"])
    ref = life.records.put("facts", "two", 2, Annotation(once))
    note = life.find_note(ref)
    assert note is not None
    assert note.classes == ("process",)
