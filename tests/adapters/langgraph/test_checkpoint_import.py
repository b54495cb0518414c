"""Databases of SqliteSaver move over whole, are compared, and stay as they were."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("langgraph.checkpoint.sqlite", reason="needs the extra: pip install '.[dev]'")

from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.serde.encrypted import EncryptedSerializer
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.types import Command

from casstore.adapters.langgraph import CasstoreSaver, import_checkpoints
from casstore.errors import (
    CasstoreError,
    ConflictError,
    CorruptionError,
    ForeignStoreError,
    InvalidInputError,
    StoreNotFoundError,
    UnsafePayloadError,
)
from casstore.maintenance.progress import Step
from casstore.store import Store
from tests.adapters.langgraph import graphs
from tests.adapters.langgraph.graphs import on, say
from tests.adapters.langgraph.test_serializer import HERE as TYPES
from tests.adapters.langgraph.test_serializer import Mine
from tests.adapters.langgraph.test_threads import in_between, put, records


def fill(saver: Any) -> None:
    """Threads of all kinds."""
    chat = graphs.chat(saver)
    for n in range(12):
        chat.invoke(say(f"{n} " * 200), {**on("chat"), "metadata": {"run_id": f"r{n}"}})
    graphs.asking(saver).invoke({"log": ["x"], "answer": ""}, on("asking"))
    graphs.nested(saver).invoke({"log": [], "answer": ""}, on("nested"))
    graphs.parallel(saver).invoke({"log": [], "answer": ""}, on("parallel"))
    for n in range(5):
        graphs.delta(saver).invoke({"log": [f"in {n}"], "n": n}, on("delta"))
    put(saver, {"own": Mine(name="x"), "nan": float("nan"), "odd": {1: {2}}}, thread="own")
    put(saver, {"unversioned": [1]}, thread="own", versions={}, source="fork")
    saver.put_writes(on("early", checkpoint_ns="", checkpoint_id="later"), [("x", [1])], "task")


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("filled") / "checkpoints.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as saver:
        fill(saver)
    return path


@pytest.fixture
def source(filled: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(filled, tmp_path / "checkpoints.sqlite"))


def fingerprint(path: Path) -> Any:
    return [
        (each.name, each.stat().st_mtime_ns, hashlib.sha256(each.read_bytes()).hexdigest())
        for each in sorted(path.parent.glob(path.name + "*"))
    ]


def told(saver: Any) -> list[Any]:
    return [
        each._replace(
            checkpoint={
                **each.checkpoint,
                # As text: not-a-number is not equal to itself.
                "channel_values": repr(sorted(each.checkpoint["channel_values"].items())),
            }
        )
        for each in saver.list(None)
    ]


def test_everything_is_imported_and_the_source_is_unchanged(source: Path, store: Store) -> None:
    before = fingerprint(source)
    steps: list[Step] = []

    def look(step: Step) -> None:
        steps.append(step)
        # Nothing stands beside it in between, either.
        assert fingerprint(source) == before

    report = import_checkpoints(store, source, progress=look)
    assert fingerprint(source) == before
    ours = CasstoreSaver(store, allowed=[Mine])
    with SqliteSaver.from_conn_string(str(source)) as theirs:
        assert told(ours) == told(theirs)
        assert (
            report.part("checkpoints").found
            == report.part("checkpoints").imported
            == len(told(ours))
            > 60
        )
    assert report.source_bytes == source.stat().st_size
    assert report.store_bytes is not None
    assert report.store_bytes_before is not None
    assert report.store_bytes_before < report.store_bytes < report.source_bytes
    assert [step.phase for step in steps] == sorted(step.phase for step in steps)
    assert {step.phase: step.done for step in steps if step.unit == "checkpoints"} == dict.fromkeys(
        ("copy", "verify"), report.part("checkpoints").found
    )
    # Writes without a checkpoint wait for it here, too.
    assert len([row for row in records(store) if b"later" in row.key]) == 1


def test_imported_graphs_continue_where_they_were(source: Path, store: Store) -> None:
    import_checkpoints(store, source)
    saver = CasstoreSaver(store, on_branch="refuse")
    asking = graphs.asking(saver)
    asking.invoke(Command(resume="Ada"), on("asking"))
    assert asking.invoke(Command(resume="red"), on("asking"))["log"][-1] == "last Ada"
    assert graphs.nested(saver).invoke(Command(resume="s"), on("nested"))["log"][-1] == "told s"
    chat = graphs.chat(saver)
    assert len(chat.invoke(say("more"), on("chat"))["messages"]) == 26
    delta = graphs.delta(saver)
    assert len(delta.invoke({"log": ["more"], "n": 9}, on("delta"))["log"]) == 24
    # A branch from an old checkpoint, whose versions end in a random number.
    old = [each for each in delta.get_state_history(on("delta")) if each.next == ("count",)][-1]
    forked = delta.update_state(old.config, {"log": ["forked"]})
    assert "forked" in delta.invoke(None, forked)["log"]


def test_application_types_are_imported_without_loading_their_modules(
    source: Path, store: Store
) -> None:
    import_checkpoints(store, source)
    with pytest.raises(UnsafePayloadError, match=TYPES):
        list(CasstoreSaver(store).list(on("own")))
    [_, found] = CasstoreSaver(store, allowed=[Mine]).list(on("own"))
    assert found.checkpoint["channel_values"]["own"] == Mine(name="x")


class Stopped(Exception):
    """Raised by a progress that has had enough."""


def test_a_stopped_import_can_continue(
    source: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.compat.importing.PAGE_ROWS", 10)
    steps: list[Step] = []

    def stop(step: Step) -> None:
        steps.append(step)
        if len(steps) == 3:
            raise Stopped

    with pytest.raises(Stopped):
        import_checkpoints(store, source, progress=stop)
    there = len(list(CasstoreSaver(store, allowed=[Mine]).list(None)))
    assert there == 30
    report = import_checkpoints(store, source)
    assert report.part("checkpoints").imported == report.part("checkpoints").found - 30
    again = import_checkpoints(store, source)
    assert (again.part("checkpoints").imported, again.part("checkpoints").found) == (
        0,
        report.part("checkpoints").found,
    )
    with SqliteSaver.from_conn_string(str(source)) as theirs:
        assert told(CasstoreSaver(store, allowed=[Mine])) == told(theirs)


def test_a_database_in_use_is_read_as_of_one_moment(tmp_path: Path, store: Store) -> None:
    path = tmp_path / "live.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as saver:
        chat = graphs.chat(saver)
        chat.invoke(say("one"), on())
        assert Path(f"{path}-wal").stat().st_size
        before = [path.read_bytes(), Path(f"{path}-wal").read_bytes()]
        count = len(list(saver.list(None)))

        def meanwhile(step: Step) -> None:
            if step.phase == "copy" and len(list(saver.list(None))) == count:
                assert [path.read_bytes(), Path(f"{path}-wal").read_bytes()] == before
                chat.invoke(say("two"), on("other"))

        report = import_checkpoints(store, path, progress=meanwhile)
        assert report.part("checkpoints").found == count
        assert len(list(saver.list(None))) > count
    assert len(list(CasstoreSaver(store).list(None))) == count


def test_a_database_that_changes_while_it_is_read_is_reported(source: Path, store: Store) -> None:
    def write(step: Step) -> None:
        if (step.phase, step.unit) == ("verify", "checkpoints"):
            with SqliteSaver.from_conn_string(str(source)) as saver:
                graphs.chat(saver).invoke(say("late"), on("late"))

    with pytest.raises(ConflictError, match="once more"):
        import_checkpoints(store, source, progress=write)
    report = import_checkpoints(store, source)
    assert report.part("checkpoints").imported == 3


def test_other_content_under_the_same_name_is_reported(source: Path, store: Store) -> None:
    import_checkpoints(store, source)
    saver = CasstoreSaver(store)
    latest = saver.get_tuple(on("chat"))
    assert latest is not None
    saver.put_writes(latest.config, [("x", 1)], "somebody")
    with pytest.raises(ConflictError, match="another store"):
        import_checkpoints(store, source)


def test_a_later_import_adds_writes_made_since_to_an_imported_checkpoint(
    tmp_path: Path, store: Store
) -> None:
    path = tmp_path / "live.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as theirs:
        asking = graphs.asking(theirs)
        asking.invoke({"log": ["x"], "answer": ""}, on("asking"))
        waiting = theirs.get_tuple(on("asking"))
        assert waiting is not None
        import_checkpoints(store, path)
        # One task more, one write more of a task that has some.
        config, task = waiting.config, (waiting.pending_writes or [])[0][0]
        theirs.put_writes(config, [("one", 1)], "other task")
        theirs.put_writes(config, [("two", 2), ("three", 3)], task)
        graphs.chat(theirs).invoke(say("new"), on("new"))
        report = import_checkpoints(store, path)
        assert (report.part("checkpoints").imported, report.part("checkpoints").updated) == (3, 1)
        assert told(CasstoreSaver(store)) == told(theirs)
        again = import_checkpoints(store, path)
        assert (again.part("checkpoints").imported, again.part("checkpoints").updated) == (0, 0)


def test_a_later_import_continues_a_thread_resumed_in_the_source(
    tmp_path: Path, store: Store
) -> None:
    path = tmp_path / "live.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as theirs:
        graphs.nested(theirs).invoke({"log": [], "answer": ""}, on("nested"))
        import_checkpoints(store, path)
        graphs.nested(theirs).invoke(Command(resume="Ada"), on("nested"))
        assert import_checkpoints(store, path).part("checkpoints").updated
        assert told(CasstoreSaver(store)) == told(theirs)


def test_nothing_is_added_to_a_thread_that_continued_in_the_store(
    tmp_path: Path, store: Store
) -> None:
    path = tmp_path / "live.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as theirs:
        graphs.asking(theirs).invoke({"log": ["x"], "answer": ""}, on("asking"))
        import_checkpoints(store, path)
        ours = CasstoreSaver(store)
        for saver, answer in ((theirs, "there"), (ours, "here")):
            graphs.asking(saver).invoke(Command(resume=answer), on("asking"))
    before = records(store)
    with pytest.raises(ConflictError, match="another store"):
        import_checkpoints(store, path)
    assert records(store) == before


def test_writes_that_came_before_their_checkpoint_are_compared_too(
    tmp_path: Path, store: Store
) -> None:
    path = tmp_path / "early.sqlite"
    later = on("early", checkpoint_ns="", checkpoint_id="later")
    with SqliteSaver.from_conn_string(str(path)) as theirs:
        theirs.put_writes(later, [("x", [1])], "task")
    CasstoreSaver(store).put_writes(later, [("x", [2])], "task")
    with pytest.raises(ConflictError, match="later of thread 'early'"):
        import_checkpoints(store, path)


def test_a_checkpoint_that_comes_while_it_is_imported_is_not_overwritten(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.sqlite"
    with SqliteSaver.from_conn_string(str(path)) as stock:
        at = put(stock, {"n": 1})
    saver = CasstoreSaver(store)
    checkpoint = empty_checkpoint()
    checkpoint["id"] = at
    in_between(monkeypatch, lambda: saver.put(on(checkpoint_ns=""), checkpoint, {}, {}))
    with pytest.raises(ConflictError, match="import once more"):
        import_checkpoints(store, path)
    with pytest.raises(ConflictError, match="another store"):
        import_checkpoints(store, path)
    found = saver.get_tuple(on())
    assert found is not None
    assert found.checkpoint["channel_values"] == {}


def test_a_write_that_comes_while_writes_are_added_is_not_overwritten(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "one.sqlite"
    saver = CasstoreSaver(store)
    with SqliteSaver.from_conn_string(str(path)) as theirs:
        at = on(checkpoint_ns="", checkpoint_id=put(theirs, {"n": 1}))
        import_checkpoints(store, path)
        theirs.put_writes(at, [("x", "there")], "task")
    in_between(monkeypatch, lambda: saver.put_writes(at, [("x", "here")], "task"))
    with pytest.raises(ConflictError, match="import once more"):
        import_checkpoints(store, path)
    found = saver.get_tuple(at)
    assert found is not None
    assert found.pending_writes == [("task", "x", "here")]


def damage(path: Path, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute(statement, values)


def test_content_that_cannot_be_imported_is_refused_by_name(
    source: Path, store: Store, tmp_path: Path
) -> None:
    with pytest.raises(StoreNotFoundError):
        import_checkpoints(store, tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    (tmp_path / "text").write_text("no database " * 500)
    with pytest.raises(ForeignStoreError):
        import_checkpoints(store, tmp_path / "text")
    sqlite3.connect(tmp_path / "empty").close()
    with pytest.raises(ForeignStoreError, match="SqliteSaver"):
        import_checkpoints(store, tmp_path / "empty")
    damage(source, "UPDATE checkpoints SET metadata = '{' WHERE thread_id = 'asking'")
    with pytest.raises(CorruptionError, match="metadata"):
        import_checkpoints(store, source)
    damage(source, "UPDATE checkpoints SET metadata = '{}' WHERE thread_id = 'asking'")
    damage(source, "UPDATE checkpoints SET type = 'pickle' WHERE thread_id = 'chat'")
    with pytest.raises(UnsafePayloadError, match="serde"):
        import_checkpoints(store, source)
    damage(
        source,
        "UPDATE checkpoints SET type = 'msgpack', checkpoint = ? WHERE thread_id = 'chat'",
        b"\x91",
    )
    with pytest.raises(CorruptionError):
        import_checkpoints(store, source)


CONSTRUCTOR = {"lc": 1, "type": "constructor", "id": ["os", "system"], "kwargs": {}}
STATE = {"v": 1, "id": "x", "ts": "", "channel_values": {}, "channel_versions": {}}
ODD_STATES: list[tuple[type[CasstoreError], object, object]] = [
    (UnsafePayloadError, "json", CONSTRUCTOR),
    (UnsafePayloadError, "json", {"lc": 1, "type": "not_implemented", "id": ["x"]}),
    (UnsafePayloadError, "json", {**STATE, "channel_values": {"a": CONSTRUCTOR}}),
    (InvalidInputError, "json", {**STATE, "channel_values": {"a": 2**70}}),
    (CorruptionError, "json", "{"),
    (CorruptionError, "json", b"\xff"),
    (CorruptionError, "json", "[" * 100_000),
    (CorruptionError, "json", None),
    (CorruptionError, "json", 5),
    (CorruptionError, "bytes", None),
    (CorruptionError, "msgpack", None),
    (UnsafePayloadError, None, b""),
]
ODD_CHECKPOINTS = [
    {"channel_values": 5},
    {"channel_versions": [1]},
    {"channel_versions": {"a": 1, "b": "2"}},
    {"channel_versions": {"a": None}},
    {"versions_seen": 5},
    {"versions_seen": {"a": 5}},
    {"v": "1"},
]


def stored_as(value: object) -> object:
    return json.dumps(value).encode() if isinstance(value, dict) else value


@pytest.mark.parametrize(("error", "tag", "state"), ODD_STATES)
def test_state_that_cannot_be_rebuilt_is_a_typed_error(
    source: Path, store: Store, error: type[CasstoreError], tag: object, state: object
) -> None:
    change = "UPDATE {} SET type = ?, {} = ? WHERE thread_id = 'asking'"
    before = source.read_bytes()
    for table, column in (("checkpoints", "checkpoint"), ("writes", "value")):
        source.write_bytes(before)
        damage(source, change.format(table, column), tag, stored_as(state))
        with pytest.raises(error):
            import_checkpoints(store, source)


@pytest.mark.parametrize("fields", ODD_CHECKPOINTS)
def test_an_invalid_checkpoint_is_a_typed_error(
    source: Path, store: Store, fields: dict[str, Any]
) -> None:
    change = "UPDATE checkpoints SET type = 'json', checkpoint = ? WHERE thread_id = 'asking'"
    damage(source, change, stored_as({**STATE, **fields}))
    with pytest.raises(CorruptionError, match=r"'asking'.* is damaged"):
        import_checkpoints(store, source)


def test_metadata_that_is_not_text_raises_a_typed_error(source: Path, store: Store) -> None:
    damage(source, "UPDATE checkpoints SET metadata = 5 WHERE thread_id = 'asking'")
    with pytest.raises(CorruptionError, match="metadata"):
        import_checkpoints(store, source)


def without_paths(path: Path) -> None:
    damage(path, "ALTER TABLE writes DROP COLUMN task_path")


def as_json(path: Path) -> None:
    """As databases from before msgpack have it, for plain values."""
    strict = JsonPlusSerializer()
    with closing(sqlite3.connect(path)) as database, database:
        for thread, at, tag, blob in database.execute(
            "SELECT thread_id, checkpoint_id, type, checkpoint FROM checkpoints "
            "WHERE thread_id = 'asking'"
        ).fetchall():
            value = strict.loads_typed((tag, blob))
            database.execute(
                "UPDATE checkpoints SET type = 'json', checkpoint = ? "
                "WHERE thread_id = ? AND checkpoint_id = ?",
                (json.dumps(value).encode(), thread, at),
            )


@pytest.mark.parametrize("older", [without_paths, as_json])
def test_older_databases_are_read(
    source: Path, store: Store, older: Callable[[Path], None]
) -> None:
    older(source)
    import_checkpoints(store, source)
    saver = CasstoreSaver(store)
    asking = graphs.asking(saver)
    asking.invoke(Command(resume="Ada"), on("asking"))
    assert asking.invoke(Command(resume="red"), on("asking"))["log"][-1] == "last Ada"


class Mirror:
    """A cipher for tests."""

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        return "mirror", plaintext[::-1]

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        assert ciphername == "mirror"
        return ciphertext[::-1]


def test_an_encrypted_database_moves_with_its_serialiser_and_stays_encrypted(
    tmp_path: Path, store: Store
) -> None:
    path = tmp_path / "e.sqlite"
    serde = EncryptedSerializer(Mirror(), JsonPlusSerializer(allowed_msgpack_modules=None))
    with closing(sqlite3.connect(path, check_same_thread=False)) as database, database:
        stock = SqliteSaver(database, serde=serde)
        graphs.chat(stock).invoke(say("a secret " * 100), on())
        want = told(stock)
    with pytest.raises(UnsafePayloadError, match="serde"):
        import_checkpoints(store, path)
    import_checkpoints(store, path, serde=serde)
    assert told(CasstoreSaver(store, serde=serde)) == want
    content = b"".join(
        item.data
        for item in store.engine.get_many([info.digest for info in store.engine.scan_objects()])
        if item
    )
    assert b"a secret" not in content


class Salted(Mirror):
    """A cipher that never spells the same text twice, as every real one does."""

    def __init__(self) -> None:
        self._salts = count()

    def encrypt(self, plaintext: bytes) -> tuple[str, bytes]:
        name, mirrored = super().encrypt(plaintext)
        return name, next(self._salts).to_bytes(8) + mirrored

    def decrypt(self, ciphername: str, ciphertext: bytes) -> bytes:
        return super().decrypt(ciphername, ciphertext[8:])


def test_writes_encrypted_with_a_salt_are_compared_by_their_plaintext(
    tmp_path: Path, store: Store
) -> None:
    serde = EncryptedSerializer(Salted())
    path = tmp_path / "salted.sqlite"
    with closing(sqlite3.connect(path, check_same_thread=False)) as database:
        graphs.asking(SqliteSaver(database, serde=serde)).invoke(
            {"log": ["x"], "answer": ""}, on("asking")
        )
    assert import_checkpoints(store, path, serde=serde).imported
    assert import_checkpoints(store, path, serde=serde).part("checkpoints").imported == 0
    # Another value is told, although the bytes are others every time.
    changed = Path(shutil.copy(path, tmp_path / "changed.sqlite"))
    damage(changed, "UPDATE writes SET type = ?, value = ?", *serde.dumps_typed("other"))
    with pytest.raises(ConflictError, match="another store"):
        import_checkpoints(store, changed, serde=serde)

    asking = graphs.asking(CasstoreSaver(store, serde=serde))
    asking.invoke(Command(resume="Ada"), on("asking"))
    assert asking.invoke(Command(resume="red"), on("asking"))["log"][-1] == "last Ada"


def test_the_async_saver_of_the_stock_package_writes_the_same_files(
    tmp_path: Path, store: Store
) -> None:
    from langgraph.checkpoint.sqlite.aio import AsyncSqliteSaver

    async def write() -> None:
        async with AsyncSqliteSaver.from_conn_string(str(tmp_path / "a.sqlite")) as saver:
            await graphs.chat(saver).ainvoke(say("hello"), on())

    asyncio.run(write())
    import_checkpoints(store, tmp_path / "a.sqlite")
    assert len(graphs.chat(CasstoreSaver(store)).get_state(on()).values["messages"]) == 2
