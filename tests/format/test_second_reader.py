"""docs/internals/format.md is enough: a reader written from it alone reads every stored object."""

from __future__ import annotations

import ast
import io
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from zstandard import ZstdError

import casstore
from casstore.maintenance import gc
from casstore.session.data import Checkpoint, Commit, Usage
from casstore.session.session import Session
from casstore.session.state import runtime_of
from casstore.store import Store
from tests.engine.lmdb.wrapped_log import wrap_log
from tests.format.second_reader import Link, Refused, SecondReader, decode
from tests.maintenance.wounds import (
    copy_as_killed,
    flip,
    open_store,
    populate,
    step,
    wounding,
)

ROOT = Path(__file__).parent.parent.parent

LONG = "a long text, " * 300


@contextmanager
def second(path: Path) -> Iterator[SecondReader]:
    reader = SecondReader(str(path))
    try:
        yield reader
    finally:
        reader.close()


def as_links(value: Any) -> Any:
    """What casstore gives, with the second reader's links."""
    if isinstance(value, casstore.Link):
        return Link(0, bytes(value.digest))
    if isinstance(value, list):
        return [as_links(item) for item in value]
    if isinstance(value, dict):
        return {key: as_links(item) for key, item in value.items()}
    return value


def make(path: Path, *, then: str, saved: Path | None = None) -> dict[str, Any]:
    """A store of many kinds of things, and all that casstore reads in it.

    ``saved``: where to leave that before this process is killed with the store open.
    """
    source = random.Random(5)
    with open_store(path) as store:
        words = [source.randbytes(5).hex() for _ in range(400)]
        if then == "packed":
            for number in range(500):
                store.put_value({"n": number, "text": " ".join(source.choices(words, k=90))})
            # What comes from here on is compressed with it, and the rest when it is packed.
            assert store.train_dictionary().adopted
        populate(store)
        step(store, "x" * 300, "long-name", text=LONG)
        for number in range(180):
            step(store, "many", f"m{number}", text=" ".join(source.choices(words, k=90)))
        values: list[Any] = [
            None, -1, 2**64 - 1, -(2**63), 1.5, "", "text", LONG, b"bytes" * 200, [], {}, [[]],
            list(range(5000)), {f"k{n}": {"n": n, "text": LONG[:n]} for n in range(900)},
            [{"role": "user", "text": source.randbytes(40).hex()} for _ in range(700)],
            {"deep": [[[[{"link": casstore.Link(store.put_blob(b"linked"))}]]]]},
        ]  # fmt: skip
        names = [store.put_value(value) for value in values]
        blobs = [
            store.put_stream(io.BytesIO(source.randbytes(300_000))), store.put_blob(b""),
            store.put_blob(LONG.encode()),
        ]  # fmt: skip
        if then == "packed":
            store.delete_session("s1")
            gc.collect(store, grace_ms=1_000_000_000)
            store.pack(min_age_ms=0)
            step(store, "many", "after", text="packing")
        if then == "killed":
            wrap_log(store)
            step(store, "many", "after", text="wrapping")
        found: dict[str, Any] = {
            "objects": {item.digest for item in store.engine.scan_objects(limit=1_000_000)},
            "values": {name: as_links(store.get_value(name)) for name in names},
            "blobs": {name: store.get_blob(name) for name in blobs},
            "listed": {
                info.meta.session: _listed(store, info.meta.session) for info in store.sessions()
            },
            "paths": {
                info.meta.session: _paths(store.session(info.meta.session))
                for info in store.sessions()
            },
        }
        if saved is not None:
            saved.write_bytes(pickle.dumps(found))
            os.kill(os.getpid(), signal.SIGKILL)
    return found


def make_killed(path: Path) -> dict[str, Any]:
    """The same by a process that is killed with the store open."""
    saved = path.with_suffix(".pickle")
    code = (
        "import sys; from pathlib import Path; from tests.format.test_second_reader import make; "
        "make(Path(sys.argv[1]), then='killed', saved=Path(sys.argv[2]))"
    )
    ended = subprocess.run([sys.executable, "-c", code, path, saved], cwd=ROOT, check=False)
    assert ended.returncode == -signal.SIGKILL
    found: dict[str, Any] = pickle.loads(saved.read_bytes())
    return found


def _listed(store: Store, session: str) -> list[bytes]:
    """All nodes that the node index of a session lists, hidden ones included."""
    state = runtime_of(store).find(session)
    if state is None:
        return []
    return [place.digest for place in runtime_of(store).index(state.manifest).places()]


def _paths(session: Session) -> dict[int, list[tuple[str, Any]]]:
    """The first revisions of a session and the last, each with its active path."""
    revisions = sorted(entry.revision for entry in session.history())
    return {
        revision: [(node.id, node.payload) for node in session.nodes(at=revision)]
        for revision in {*revisions[:20], *revisions[-1:]}
    }


@pytest.mark.parametrize("then", ["as written", "packed", "killed"])
def test_the_second_reader_reads_every_object_and_session(tmp_path: Path, then: str) -> None:
    path = tmp_path / "s"
    known = make_killed(path) if then == "killed" else make(path, then=then)
    with second(path) as reader:
        if then == "killed":
            # The log is read from somewhere in its middle to its end, and from its start.
            assert reader.log_offsets[0] > reader.log_offsets[-1]
        else:
            assert reader.log_offsets == []
        assert reader.sum_is_right()
        assert set(reader.digests()) == known["objects"]
        for digest in known["objects"]:
            # Each is proven by its digest on the way.
            reader.get(digest)
        assert reader.layouts == ({1, 2} if then == "packed" else {1})
        assert reader.used_dictionary == (then == "packed")
        for digest, value in known["values"].items():
            assert reader.value(digest) == value
        for digest, content in known["blobs"].items():
            assert reader.blob(digest) == content
        heads = dict(reader.sessions())
        # A session that was only named has no head yet.
        paths = {session: found for session, found in known["paths"].items() if found}
        assert set(heads) == set(paths)
        for session, head in heads.items():
            found = reader.listed(head)
            assert [name for name, _, _ in found] == known["listed"][session]
        for session, revisions in paths.items():
            assert reader.path(heads[session]) == revisions[max(revisions)]
            if len(session) < 240:
                for revision, row in reader.history(session):
                    if revision in revisions:
                        assert reader.path(heads[session], row) == revisions[revision]


def test_the_second_reader_reads_the_components(tmp_path: Path) -> None:
    path = tmp_path / "s"
    tools = {"enabled": ["read", LONG], "n": 7}
    with open_store(path) as store:
        store.session("s").commit(
            Commit(
                checkpoint=Checkpoint(tool_state=tools, turn_state={"t": 1}),
                usage=[Usage("main", "m", 1, 2)],
            )
        )
    with second(path) as reader:
        manifest = reader.manifest(dict(reader.sessions())["s"])
        assert reader.value(manifest[6]["tool_state"].digest) == tools
        assert reader.encoded(manifest[6]["turn_state"]) == {"t": 1}
        assert reader.encoded(manifest[6]["usage"]) == [["main", "m", 1, 2, 0, 0]]


def test_the_second_reader_refuses_damage(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        step(store, "s", "a", text=LONG)
    with wounding(path) as cut:
        key, value = cut.rows("slabs")[0]
        cut.put("slabs", key, flip(value))
        head, row = cut.rows("heads")[0]
        cut.put("heads", head, flip(row, 30))
    with second(path) as reader:
        with pytest.raises((Refused, ZstdError)):
            [reader.get(digest) for digest in reader.digests()]
        with pytest.raises(Refused):
            list(reader.sessions())
        assert not reader.sum_is_right()


@pytest.fixture
def killed(tmp_path: Path) -> tuple[Path, list[bytes]]:
    """A store that was not closed, and blobs that are in its log alone, in order."""
    with casstore.open(tmp_path / "open") as store:
        # A process does not begin a log for its first commits.
        for number in range(2):
            store.put_blob(b"in the tables %d" % number)
        digests = [store.put_blob(b"in the log %d" % number) for number in range(4)]
        copy_as_killed(store, tmp_path / "killed")
    return tmp_path / "killed", [bytes(digest) for digest in digests]


def damage_record(path: Path, number: int) -> None:
    """Change a byte in the body of a record of the log, counted from the first that is needed."""
    with second(path) as reader:
        offset = reader.log_offsets[number]
    log = path / "redo.log"
    log.write_bytes(flip(log.read_bytes(), offset + 64))


def test_the_second_reader_reads_commits_that_are_only_in_the_log(
    killed: tuple[Path, list[bytes]],
) -> None:
    path, digests = killed
    with second(path) as reader:
        assert len(reader.log_offsets) == len(digests)
        for number, digest in enumerate(digests):
            assert reader.blob(digest) == b"in the log %d" % number


@pytest.mark.parametrize("number", [-2, -1])
def test_the_second_reader_refuses_a_damaged_flushed_record(
    killed: tuple[Path, list[bytes]], number: int
) -> None:
    path, _ = killed
    damage_record(path, number)
    with pytest.raises(Refused, match="was flushed, and is damaged"), second(path):
        pass


def test_the_second_reader_ignores_a_damaged_last_record_that_was_not_flushed(
    killed: tuple[Path, list[bytes]],
) -> None:
    path, digests = killed
    damage_record(path, -1)
    log = bytearray((path / "redo.log").read_bytes())
    # The flushed LSN of the header, as it was before the last commit.
    log[72] -= 1
    (path / "redo.log").write_bytes(log)
    with second(path) as reader:
        assert len(reader.log_offsets) == len(digests) - 1
        assert reader.blob(digests[-2])
        with pytest.raises(KeyError):
            reader.blob(digests[-1])


def test_the_second_reader_refuses_a_store_with_a_missing_or_foreign_log(
    tmp_path: Path, killed: tuple[Path, list[bytes]]
) -> None:
    path, _ = killed
    with open_store(tmp_path / "other") as store:
        for number in range(3):
            store.put_blob(b"another %d" % number)
        copy_as_killed(store, tmp_path / "another")
    shutil.copyfile(tmp_path / "another" / "redo.log", path / "redo.log")
    with pytest.raises(Refused, match="of another store"), second(path):
        pass
    (path / "redo.log").unlink()
    with pytest.raises(Refused, match="missing"), second(path):
        pass


def test_the_second_reader_ignores_the_log_of_a_closed_store(
    tmp_path: Path, killed: tuple[Path, list[bytes]]
) -> None:
    path, _ = killed
    shutil.copyfile(path / "redo.log", tmp_path / "open" / "redo.log")
    with second(tmp_path / "open") as reader:
        assert reader.log_offsets == []
        assert len(reader.digests()) == 6


@pytest.mark.parametrize(
    "spelling",
    ["cc7f", "cd00ff", "d0ff", "d1ff80", "ca3fc00000", "cb7ff0000000000000", "d903616263",
     "c5000161", "dc000101", "82a16201a16102", "8101c0", "c1", "d4ff00", "c72105" + "00" * 33,
     "c0c0", "91" * 65 + "90", "a2c328", "93c0"],
)  # fmt: skip
def test_the_second_reader_refuses_non_canonical_encodings(spelling: str) -> None:
    with pytest.raises((Refused, UnicodeDecodeError)):
        decode(bytes.fromhex(spelling))


def test_the_second_reader_imports_no_casstore_module() -> None:
    source = Path(__file__).with_name("second_reader.py").read_text()
    imported = {
        name
        for statement in ast.walk(ast.parse(source))
        if isinstance(statement, ast.Import | ast.ImportFrom)
        for name in (
            [statement.module or ""]
            if isinstance(statement, ast.ImportFrom)
            else [alias.name for alias in statement.names]
        )
    }
    assert imported == {
        "__future__", "blake3", "collections.abc", "itertools", "lmdb", "struct", "typing",
        "zstandard",
    }  # fmt: skip
