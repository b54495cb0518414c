"""The store as its callers know it: opening, sharing, closing, many at once, dictionaries."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import io
import json
import os
import pkgutil
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import casstore
from casstore import Append, Commit, Digest, NodeDraft, Set, Store
from casstore.engine.memory import MemoryEngine
from casstore.errors import (
    BusyError,
    ClosedError,
    InvalidInputError,
    InvalidValueError,
    ObjectNotFoundError,
    ReadOnlyError,
    StoreNotFoundError,
)
from casstore.maintenance.backup import backup
from casstore.maintenance.compact import compact
from casstore.maintenance.export import export_session, read_have, write_have
from casstore.maintenance.import_ import import_session
from casstore.maintenance.salvage import salvage
from casstore.maintenance.space import measure
from casstore.maintenance.verify import verify_bundle
from casstore.session.data import Claim
from casstore.testing.inspection import open_places

ROOT = Path(casstore.__file__).parent


@pytest.fixture(params=["memory", "lmdb"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = (
        Store(MemoryEngine())
        if request.param == "memory"
        else casstore.open(tmp_path / "s", "relaxed")
    )
    with made:
        yield made


def count_objects(store: Store) -> int:
    return len(store.engine.scan_objects(limit=1_000_000))


# --- opening and closing --------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["full", "relaxed"])
def test_stored_values_are_there_after_reopening(tmp_path: Path, durability: str) -> None:
    with casstore.open(tmp_path / "s", durability) as store:
        blob, value = store.put_blob(b"content"), store.put_value({"a": ["text " * 500]})
    with casstore.open(str(tmp_path / "s"), durability) as store:
        assert store.get_blob(blob) == b"content"
        assert store.get_value(value) == {"a": ["text " * 500]}


def test_a_store_that_must_exist_is_not_created(tmp_path: Path) -> None:
    for options in ({"create": False}, {"readonly": True}):
        with pytest.raises(StoreNotFoundError):
            casstore.open(tmp_path / "s", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "s").exists()


def test_an_unknown_durability_is_refused_before_anything_is_created(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="relaxed"):
        casstore.open(tmp_path / "s", "fast")
    assert not (tmp_path / "s").exists()


def test_closing_twice_is_allowed(store: Store) -> None:
    store.close()
    store.close()


def test_the_context_manager_closes_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="inside"), casstore.open(tmp_path / "s") as store:
        raise RuntimeError("inside")
    with pytest.raises(ClosedError):
        store.flush()


# What to call each public method with, so that only its being closed can stop it.
CALLS: dict[str, Callable[[Store, Digest], object]] = {
    "check": lambda store, digest: store.check(),
    "gc": lambda store, digest: store.gc(),
    "prune": lambda store, digest: store.prune(),
    "vacuum": lambda store, digest: store.vacuum(),
    "diff": lambda store, digest: store.diff(digest, digest),
    "edit": lambda store, digest: store.edit(digest, Append((), 1)),
    "flush": lambda store, digest: store.flush(),
    "get_blob": lambda store, digest: store.get_blob(digest),
    "get_many": lambda store, digest: store.get_many([]),
    "get_value": lambda store, digest: store.get_value(digest),
    "missing": lambda store, digest: store.missing([]),
    "open_blob": lambda store, digest: store.open_blob(digest),
    "put_blob": lambda store, digest: store.put_blob(b"x"),
    "put_many": lambda store, digest: store.put_many([]),
    "put_stream": lambda store, digest: store.put_stream(io.BytesIO(b"x")),
    "put_value": lambda store, digest: store.put_value(1),
    "pack": lambda store, digest: store.pack(),
    "train_dictionary": lambda store, digest: store.train_dictionary(),
    "view": lambda store, digest: store.view(digest),
    "compare": lambda store, digest: store.compare(digest, digest),
    "create_session": lambda store, digest: store.create_session("s"),
    "delete_session": lambda store, digest: store.delete_session("s"),
    "find_pin": lambda store, digest: store.find_pin("p"),
    "fork": lambda store, digest: store.fork("s", "t"),
    "pin": lambda store, digest: store.pin("p", digest),
    "pins": lambda store, digest: list(store.pins()),
    "search": lambda store, digest: store.search("word"),
    "session": lambda store, digest: store.session("s").head(),
    "sessions": lambda store, digest: list(store.sessions()),
    "sessions_about": lambda store, digest: list(store.sessions_about("anna")),
    "tag": lambda store, digest: store.tag("t", digest),
    "unpin": lambda store, digest: store.unpin("p"),
    "engine": lambda store, digest: store.engine,
    "__contains__": lambda store, digest: digest in store,
}


def public_names(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def test_every_public_method_is_tried_on_a_closed_store() -> None:
    assert public_names(Store) - {"close"} <= set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_a_closed_store_refuses_every_call_by_name(store: Store, name: str) -> None:
    digest = store.put_value([1])
    store.close()
    with pytest.raises(ClosedError):
        CALLS[name](store, digest)


def test_views_blobs_and_diffs_of_a_closed_store_raise_closed_error(store: Store) -> None:
    digest = store.put_value(list(range(5_000)))
    view, blob = store.view(digest), store.open_blob(store.put_blob(bytes(300_000)))
    changes = store.diff(digest, store.put_value(list(range(1, 5_000))))
    store.close()
    with pytest.raises(ClosedError):
        _ = view[2_500]
    with pytest.raises(ClosedError):
        blob.read()
    with pytest.raises(ClosedError):
        list(changes)


# --- sharing -----------------------------------------------------------------------------------


def test_two_opens_of_one_store_share_its_engine_and_close_independently(tmp_path: Path) -> None:
    first = casstore.open(tmp_path / "s")
    (tmp_path / "link").symlink_to(tmp_path / "s")
    second = casstore.open(tmp_path / "link")
    assert first.engine is second.engine
    digest = first.put_blob(b"shared")
    assert second.get_blob(digest) == b"shared"
    first.close()
    first.close()
    with pytest.raises(ClosedError):
        first.get_blob(digest)
    assert second.get_blob(digest) == b"shared"
    engine = second.engine
    second.close()
    with pytest.raises(ClosedError):
        engine.missing([digest])
    with casstore.open(tmp_path / "s") as third:
        assert third.engine is not engine
        assert third.get_blob(digest) == b"shared"


@pytest.mark.parametrize(
    "options",
    [{"readonly": True}, {"map_bytes": 1 << 30}, {"verify": True}],
)
def test_a_second_open_with_other_options_is_refused(tmp_path: Path, options: Any) -> None:
    with casstore.open(tmp_path / "s") as store:
        digest = store.put_blob(b"here")
        with pytest.raises(BusyError, match=str(tmp_path)):
            casstore.open(tmp_path / "s", **options)
        assert store.get_blob(digest) == b"here"
    assert open_places() == []


def test_a_second_open_may_differ_in_options_that_do_not_affect_the_first(tmp_path: Path) -> None:
    with (
        casstore.open(tmp_path / "s") as first,
        casstore.open(tmp_path / "s", create=False, cache_bytes=0, lmdb_version=0) as second,
    ):
        assert first.engine is second.engine


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    "wrong",
    [
        {"durability": "fast"},
        {"durability": None},
        {"map_bytes": -1},
        {"map_bytes": "1G"},
        {"cache_bytes": -1},
        {"lmdb_version": 2},
        {"readonly": "yes"},
        {"create": None},
        {"verify": 1},
        {"auto_train": "no"},
        {"auto_pack": "no"},
    ],
    ids=str,
)
def test_a_wrong_value_is_named_whether_or_not_the_store_is_open(
    tmp_path: Path, wrong: dict[str, Any], *, is_open: bool
) -> None:
    [name] = wrong
    with contextlib.ExitStack() as stack:
        if is_open:
            stack.enter_context(casstore.open(tmp_path / "s"))
        with pytest.raises(InvalidInputError, match=name):
            casstore.open(tmp_path / "s", **wrong)
    assert (tmp_path / "s").exists() is is_open


def test_a_failed_open_leaves_no_shared_engine(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "stranger.txt").write_text("not a store")
    with pytest.raises(casstore.CasstoreError):
        casstore.open(tmp_path / "s")
    assert open_places() == []


def test_a_store_opened_read_only_reads_everything_and_writes_nothing(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s") as store:
        blob, value = store.put_blob(bytes(100_000)), store.put_value(list(range(5_000)))
    with casstore.open(tmp_path / "s", readonly=True) as store:
        assert store.get_blob(blob) == bytes(100_000)
        assert store.get_value(value) == list(range(5_000))
        assert store.view(value)[7] == 7
        assert blob in store
        assert list(store.diff(value, value)) == []
        for write in (
            lambda: store.put_blob(b"new"),
            lambda: store.put_value("new"),
            lambda: store.put_many([b"new", 1]),
            lambda: store.put_stream(io.BytesIO(b"new")),
            lambda: store.edit(value, Set((0,), "new")),
            store.train_dictionary,
            store.flush,
        ):
            with pytest.raises(ReadOnlyError):
                write()
        assert store.missing([Digest.of_blob(b"new")]) == [Digest.of_blob(b"new")]


# --- many at once ------------------------------------------------------------------------------


def test_get_many_returns_the_items_of_put_many_in_order(store: Store) -> None:
    items: list[Any] = [
        b"blob",
        "value",
        b"",
        [1],
        {"a": b"blob"},
        b"blob",
        bytes(200_000),
        None,
        1.5,
    ]
    items += [b"blob %d" % n if n % 2 else {"n": n} for n in range(600)]
    digests = store.put_many(items)
    assert all(type(digest) is Digest for digest in digests)
    assert store.get_many(digests) == items
    assert store.get_many(digests[::-1]) == items[::-1]
    assert store.get_many([]) == store.put_many([]) == []
    assert digests[0] == store.put_blob(b"blob")
    assert digests[1] == store.put_value("value")


def test_items_may_come_from_a_generator(store: Store) -> None:
    digests = store.put_many(n for n in range(10))
    assert store.get_many(digests) == list(range(10))


@pytest.mark.parametrize("bad", [{1, 2}, [float("nan")], object(), bytearray(b"x")])
def test_one_invalid_item_among_many_stores_none(store: Store, bad: Any) -> None:
    before = count_objects(store)
    with pytest.raises(InvalidValueError):
        store.put_many([b"one", "two", ["three " * 500], bad, b"four"])
    assert count_objects(store) == before


def test_one_item_with_a_link_to_nothing_stores_none(store: Store) -> None:
    before = count_objects(store)
    with pytest.raises(ObjectNotFoundError):
        store.put_many([b"one", casstore.Link(Digest.of_blob(b"nowhere")), "two"])
    assert count_objects(store) == before


def test_a_failing_source_of_items_stores_none(store: Store) -> None:
    def items() -> Iterator[Any]:
        yield b"one"
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        store.put_many(items())
    assert count_objects(store) == 0


def test_one_missing_digest_among_many_is_named(store: Store) -> None:
    absent = Digest.of_blob(b"absent")
    digests = store.put_many([b"%d" % n for n in range(300)])
    with pytest.raises(ObjectNotFoundError) as caught:
        store.get_many([*digests, absent])
    assert caught.value.digest == absent


def test_missing_and_in_report_which_objects_are_stored(store: Store) -> None:
    there = store.put_many([b"a", 1])
    absent = [Digest.of_blob(b"x"), Digest.of_blob(b"y")]
    assert store.missing([absent[0], there[0], absent[1], there[1], absent[0]]) == absent
    assert all(type(digest) is Digest for digest in store.missing(absent))
    assert there[0] in store
    assert bytes(there[1]) in store
    assert absent[0] not in store
    assert "text" not in store
    assert None not in store


# --- on any engine -----------------------------------------------------------------------------


def test_a_store_on_the_memory_engine_does_everything_but_train() -> None:
    store = Store(MemoryEngine())
    blob = store.put_stream(io.BytesIO(bytes(100_000)))
    old = store.put_value({"list": list(range(3_000))})
    new = store.edit(old, Append(("list",), "end"))
    assert store.get_blob(blob) == store.open_blob(blob).read() == bytes(100_000)
    assert [change.path for change in store.diff(old, new)] == [("list", 3_000)]
    assert store.view(new)["list"][-1] == "end"
    store.flush()
    with pytest.raises(InvalidInputError, match="LMDB"):
        store.train_dictionary()
    store.close()


# --- dictionaries ------------------------------------------------------------------------------


def messages(count: int, seed: int = 0, kind: str = "tool_call") -> list[bytes]:
    """Short documents that repeat each other, as sessions do."""
    source = random.Random(f"{kind} {seed}")
    return [
        json.dumps(
            {
                "type": kind,
                "conversation_identifier": source.randrange(1 << 40),
                f"{kind}_parameters": {
                    "path": f"/home/user/{source.randrange(1000)}.py",
                    "line": n,
                },
                "result_of_the_operation": source.choice(["accepted", "refused", "postponed"]),
            }
        ).encode()
        for n in range(count)
    ]


def stored_bytes(store: Store, items: list[bytes]) -> int:
    """How much the slabs take in which these items are put, one at a time."""

    def slab_bytes() -> int:
        [slabs] = [table for table in measure(store).tables if table.name == "slabs"]
        return slabs.content_bytes

    before = slab_bytes()
    for item in items:
        store.put_blob(item)
    return slab_bytes() - before


READER = """
import sys, casstore
with casstore.open(sys.argv[1], "relaxed") as store:
    print("open", flush=True)
    for line in sys.stdin:
        name, content = line.split()
        assert store.get_blob(bytes.fromhex(name)) == bytes.fromhex(content)
        print(store.put_blob(bytes.fromhex(content) + b"!").hex(), flush=True)
"""


@pytest.mark.usefixtures("slab_a_commit")
def test_a_dictionary_that_pays_is_adopted_and_everything_reads_back(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed", auto_train=False) as store:
        old = messages(5_000)
        digests = store.put_many(old)
        plain_bytes = stored_bytes(store, messages(100, seed=1))
        # A process that knows no dictionary, because it was started before there was one.
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(tmp_path / "s")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT.parent,
        )  # fmt: skip
        assert reader.stdin is not None
        assert reader.stdout is not None
        assert reader.stdout.readline() == "open\n"

        report = store.train_dictionary()
        assert report.adopted == 1
        assert report.samples >= 5_000
        assert report.after_bytes <= 0.9 * report.before_bytes
        new = messages(100, seed=2)
        assert stored_bytes(store, new) < 0.9 * plain_bytes
        assert store.get_many(digests) == old
        for item in new[:10]:
            reader.stdin.write(f"{Digest.of_blob(item).hex()} {item.hex()}\n")
            reader.stdin.flush()
            assert store.get_blob(bytes.fromhex(reader.stdout.readline())) == item + b"!"
        reader.stdin.close()
        assert reader.wait(60) == 0
        reader.stdout.close()

    with casstore.open(tmp_path / "s", "relaxed", verify=True, auto_train=False) as store:
        assert store.get_many(digests) == old
        assert store.get_many([Digest.of_blob(item) for item in new]) == new
        assert stored_bytes(store, messages(100, seed=3)) < 0.9 * plain_bytes

        again = store.train_dictionary()
        assert again.adopted is None, "the same content again cannot gain another 10%"
        others = messages(40_000, kind="something_else_entirely")
        store.put_many(others)
        third = store.train_dictionary()
        assert third.adopted == 2
        assert store.get_many(digests) == old
        assert store.get_blob(Digest.of_blob(others[7])) == others[7]
    with casstore.open(tmp_path / "s", "relaxed", verify=True) as store:
        assert store.get_many(digests) == old


def test_a_dictionary_for_random_content_is_not_adopted(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed", auto_train=False) as store:
        source = random.Random(1)
        store.put_many([source.randbytes(500) for _ in range(3_000)])
        assert store.train_dictionary().adopted is None


@pytest.mark.usefixtures("slab_a_commit")
def test_a_writer_of_short_slabs_trains_a_dictionary_without_being_asked(tmp_path: Path) -> None:
    parts = [messages(10, seed=seed) for seed in range(500)]
    with casstore.open(tmp_path / "s", "relaxed") as store:
        digests = [store.put_many(part) for part in parts]
    with casstore.open(tmp_path / "s") as store:
        # Closing waited for the trial, so these slabs are compressed with its dictionary.
        learned = stored_bytes(store, messages(100, seed=999))
        assert [store.get_many(part) for part in digests] == parts
    with casstore.open(tmp_path / "plain", auto_train=False) as store:
        for part in parts:
            store.put_many(part)
        assert learned < 0.9 * stored_bytes(store, messages(100, seed=999))


def test_a_writer_of_full_slabs_trains_no_dictionary(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        for seed in range(500):
            store.put_many(messages(10, seed=seed))
    with casstore.open(tmp_path / "s") as store:
        full = stored_bytes(store, messages(100, seed=999))
        assert store.train_dictionary().adopted == 1
        assert stored_bytes(store, messages(100, seed=998)) < 0.95 * full


@pytest.mark.parametrize("count", [0, 1, 100])
def test_too_little_content_trains_no_dictionary(tmp_path: Path, count: int) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        store.put_many(messages(count))
        report = store.train_dictionary()
        assert report.adopted is None
        assert report.samples == count
        assert store.get_many([Digest.of_blob(item) for item in messages(count)]) == messages(count)


# --- what is public ----------------------------------------------------------------------------

DOCUMENTED = {
    "Append", "CasstoreError", "Change", "Checkpoint", "Commit", "CommitResult", "Delete",
    "Digest", "Entry", "Head", "HeldSession", "Insert", "LAST", "LEAF", "Lease", "Link", "Node",
    "NodeDraft", "Session", "Set", "Store", "Usage", "View", "__version__", "open",
}  # fmt: skip


def test_the_public_names_are_those_documented() -> None:
    assert set(casstore.__all__) == DOCUMENTED
    assert len(casstore.__all__) == len(DOCUMENTED)
    for name in DOCUMENTED:
        assert getattr(casstore, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_the_kind"):
        _ = casstore.nothing_of_the_kind


def test_a_star_import_gives_the_public_names_alone() -> None:
    names: dict[str, Any] = {}
    exec("from casstore import *", names)
    assert set(names) - {"__builtins__"} == DOCUMENTED


MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages([str(ROOT)], "casstore.")
    if not info.name.startswith("casstore.testing")
)


def undocumented(module: str) -> list[str]:
    """Public functions, classes and methods of a module that say nothing of themselves."""
    source = inspect.getsource(importlib.import_module(module))
    silent = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            continue
        inside = node.body if isinstance(node, ast.ClassDef) else []
        for part in (node, *inside):
            if not isinstance(part, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
                continue
            private = part.name.startswith("_") or node.name.startswith("_")
            # The docstring of an overloaded function is in its implementation.
            overload = "overload" in map(ast.unparse, part.decorator_list)
            if not private and not overload and not ast.get_docstring(part):
                silent.append(f"{module}:{part.lineno} {part.name}")
    return silent


def test_everything_public_has_a_docstring() -> None:
    assert len(MODULES) > 20
    assert [name for module in MODULES for name in undocumented(module)] == []


@pytest.mark.parametrize(
    "place",
    ["mysql://me:secret@h/db", "postgresql+psycopg://me:secret@h/db", "POSTGRESQL://me:secret@h/db",
     "postgresql:/me:secret@h/db", "file:///tmp/x"],
)  # fmt: skip
def test_a_url_of_another_kind_does_not_become_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match="postgresql://HOST/DATABASE") as caught:
        casstore.open(place)
    assert "secret" not in str(caught.value)
    assert os.listdir(tmp_path) == []


TAKE_PATHS: dict[str, Callable[[Store, Any], object]] = {
    "open": lambda store, path: casstore.open(path),
    "backup": backup,
    "compact": lambda store, path: compact(path),
    "export": lambda store, path: export_session(store, "s", path),
    "write_have": write_have,
    "read_have": lambda store, path: read_have(path),
    "import": import_session,
    "verify": lambda store, path: verify_bundle(path),
    "salvage from": lambda store, path: salvage(path, store),
    "salvage to": lambda store, path: salvage("there", path),
}


@pytest.mark.parametrize("call", TAKE_PATHS)
@pytest.mark.parametrize("path", [None, 5, b"bytes", ["list"], "", "a\0b", "a\ud800"])
def test_an_invalid_path_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with Store(MemoryEngine()) as store:
        store.session("s").commit(Commit(append=[NodeDraft("n", 1)]))
        with pytest.raises(InvalidInputError, match="path"):
            TAKE_PATHS[call](store, path)
    assert os.listdir(tmp_path) == []


def test_a_store_may_be_in_a_directory_whose_name_is_no_text(tmp_path: Path) -> None:
    place = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    with casstore.open(place) as store:
        name = store.put_blob(b"here")
    with casstore.open(place, readonly=True) as store:
        assert store.get_blob(name) == b"here"


def wrong_calls() -> list[tuple[str, Callable[[Store, Digest], object]]]:
    claim = Claim("c", "s", 1, (5,))  # type: ignore[arg-type]
    calls: dict[str, Callable[[Any, Digest], object]] = {
        "compare": lambda store, name: store.compare((), name),
        "create_session": lambda store, name: store.create_session("s", subjects=5),
        "edit what": lambda store, name: store.edit([], Set(["a"], 1)),
        "edit how": lambda store, name: store.edit(name, None),
        "edit where": lambda store, name: store.edit(name, Set("ab", 1)),
        "get_many": lambda store, name: store.get_many(None),
        "get_many bytes": lambda store, name: store.get_many(name),
        "get_value": lambda store, name: store.get_value(name, max_bytes=None),
        "get_value nan": lambda store, name: store.get_value(name, max_bytes=float("nan")),
        "missing": lambda store, name: store.missing(5),
        "tag": lambda store, name: store.tag("t", None),
        "put_many": lambda store, name: store.put_many(None),
        "put_many bytes": lambda store, name: store.put_many(b"one blob"),
        "put_many text": lambda store, name: store.put_many("one text"),
        "put_many map": lambda store, name: store.put_many({"one": "map"}),
        "put_stream": lambda store, name: store.put_stream(None),
        "sessions": lambda store, name: list(store.sessions(prefix=b"x")),
        "pins": lambda store, name: list(store.pins(prefix="\ud800")),
        "from_hex": lambda store, name: Digest.from_hex(None),  # type: ignore[arg-type]
        "tombstone": lambda store, name: store.session("s").tombstone(5),
        "enqueue": lambda store, name: store.session("s").queue.enqueue(5),
        "claim": lambda store, name: store.session("s").commit(Commit(completes=[claim])),
        "time": lambda store, name: store.session("s").commit(
            Commit(append=[NodeDraft("n", 1, time=2**70)])
        ),
    }
    return list(calls.items())


@pytest.mark.parametrize("call", [call for _, call in wrong_calls()],
                         ids=[name for name, _ in wrong_calls()])  # fmt: skip
def test_invalid_arguments_raise_invalid_input_error_and_write_nothing(
    call: Callable[[Store, Digest], object],
) -> None:
    store = Store(MemoryEngine())
    name = store.put_value({"a": {"b": 1}})
    with pytest.raises(InvalidInputError):
        call(store, name)
    assert list(store.sessions()) == []


def test_missing_and_get_many_accept_an_iterator_of_digests(tmp_path: Path) -> None:
    """An engine goes through them twice, and found nothing missing of what was used up."""
    absent = Digest.of_blob(b"absent")
    for store in (Store(MemoryEngine()), casstore.open(tmp_path / "store")):
        there = store.put_blob(b"there")
        both: list[Any] = [[there, absent], {there, absent}, (one for one in (there, absent))]
        for digests in both:
            assert store.missing(digests) == [absent]
        one_by_one: Any = (one for one in (there,))
        assert store.get_many(one_by_one) == [b"there"]
        store.close()
