"""Real damage: bytes changed in a closed store, through LMDB or in its file."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lmdb

import casstore
from casstore.engine.lmdb.creation import DATABASES
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.lookup import (
    CHECKSUM_BYTES,
    PREFIX_BYTES,
    SUM_KEY,
    RowSum,
    prove_row,
    row_hash,
)
from casstore.engine.lmdb.page_scan import PageFile, read_record
from casstore.engine.protocol import TABLES
from casstore.session.data import Attachment, Checkpoint, Commit, NodeDraft
from casstore.store import Store

PAGE_BYTES = 4096
LONG = "long " * 800


class Wound:
    """A write transaction on a closed store that obeys none of its rules."""

    def __init__(self, txn: Any, databases: dict[str, Any]) -> None:
        self._txn = txn
        self._databases = databases

    def rows(self, database: str) -> list[tuple[bytes, bytes]]:
        """All that a database holds."""
        return [(bytes(k), bytes(v)) for k, v in self._txn.cursor(db=self._databases[database])]

    def get(self, database: str, key: bytes) -> bytes:
        """What stands there."""
        return bytes(self._txn.get(key, db=self._databases[database]))

    def put(self, database: str, key: bytes, value: bytes) -> None:
        """Write bytes as they are."""
        self._txn.put(key, value, db=self._databases[database])

    def delete(self, database: str, key: bytes) -> None:
        """Take an entry away."""
        assert self._txn.delete(key, db=self._databases[database])

    def unname(self, digest: bytes) -> None:
        """Take an object's name out of the index."""
        [key] = [key for key, _ in self.rows("index") if key.startswith(digest[:PREFIX_BYTES])]
        self.delete("index", key)

    def drop(self, database: str) -> None:
        """Take all entries away."""
        self._txn.drop(self._databases[database], delete=False)

    def put_row(self, table: str, key: bytes, value: bytes) -> None:
        """Write a row as the engine would, checksum and all."""
        self.put(table, key, value + row_hash(table, key, value)[:CHECKSUM_BYTES])

    def value(self, table: str, key: bytes) -> bytes:
        """The value of a row, without its checksum."""
        return self.get(table, key)[:-CHECKSUM_BYTES]

    def fix_sum(self) -> None:
        """Make the sum over the rows right again, so that only the wound itself is wrong."""
        total = RowSum()
        for table in TABLES:
            for key, stored in self.rows(table):
                total.add(prove_row(table, key, stored)[1])
        self._txn.put(SUM_KEY, total.encode())


def engine_of(store: Store) -> LmdbEngine:
    """The engine of a store in a directory."""
    engine = store.engine
    assert isinstance(engine, LmdbEngine)
    return engine


def copy_as_killed(store: Store, place: Path) -> None:
    """Copy the files of an open store, as its process would leave them if it were killed now.

    Nobody may write meanwhile.
    """
    place.mkdir()
    for name in ("data.mdb", "redo.log"):
        shutil.copyfile(Path(engine_of(store).path) / name, place / name)


@contextmanager
def wounding(path: Path) -> Iterator[Wound]:
    """Open a closed store's file to change it at will."""
    env = lmdb.open(str(path), max_dbs=len(DATABASES), map_size=1 << 30, lock=False)
    try:
        databases = {name: env.open_db(name.encode(), create=False) for name in DATABASES}
        with env.begin(write=True) as txn:
            yield Wound(txn, databases)
    finally:
        env.close()


def flip(data: bytes, at: int = -1) -> bytes:
    """The same bytes, one of them changed."""
    changed = bytearray(data)
    changed[at] ^= 0xFF
    return bytes(changed)


def pages_of(path: Path, database: str) -> tuple[list[int], list[int]]:
    """The tree pages of a database, root first, and the first pages of its long values."""
    tree: list[int] = []
    runs: list[int] = []

    def visit(page: int, count: int) -> bool:
        tree.append(page)
        return True

    with PageFile(str(path / "data.mdb")) as pages:
        main = pages.metas()[0].main.root
        roots = {
            entry.key.rstrip(b"\0").decode(): read_record(entry.value or b"").root
            for _, entry in pages.walk(main, _fail, lambda page, count: True)
            if entry.is_database
        }
        if database == "main":
            return [main], []
        for _, entry in pages.walk(roots[database], _fail, visit):
            if entry.value is None:
                runs.append(entry.run)
    return tree, runs


def _fail(lost: object) -> None:
    raise AssertionError(lost)


def overwrite(path: Path, *pages: int, fill: Callable[[int], bytes] = bytes) -> None:
    """Overwrite whole pages of the data file."""
    with (path / "data.mdb").open("r+b") as file:
        for page in pages:
            file.seek(page * PAGE_BYTES)
            file.write(fill(PAGE_BYTES))


def lose_slab(path: Path, digest: bytes) -> None:
    """Damage the slab that holds an object, wherever in the file a copy of it lies."""
    with wounding(path) as cut:
        slab = next(value for _, value in cut.rows("slabs") if digest in value[: 28 + 40 * 32])
    checksum = slab[20:28]
    data = (path / "data.mdb").read_bytes()
    assert checksum in data
    (path / "data.mdb").write_bytes(data.replace(checksum, flip(checksum)))


def step(store: Store, session: str, *ids: str, text: str = "", **fields: Any) -> None:
    """Commit some nodes."""
    drafts = [NodeDraft(each, {"role": "user", "text": f"{each} {text}"}) for each in ids]
    store.session(session).commit(Commit(append=drafts, **fields))


def populate(store: Store) -> Attachment:
    """A little of everything that a store can hold."""
    for number in range(40):
        tools = Checkpoint(
            tool_state={"n": number, "log": [f"{at} {LONG[:80]}" for at in range(9)]}
        )
        step(store, f"s{number % 4}", f"n{number}", text=LONG[: number * 90], checkpoint=tools,
             turn=f"t{number}", label=f"l{number}")  # fmt: skip
    store.fork("s1", "fork", at=3)
    step(store, "fork", "own")
    # A fork of one branch, whose source goes away: others' nodes are left out of it.
    step(store, "s2", "branch", text="other way", leaf="branch")
    store.session("s2").commit(Commit(append=[NodeDraft("left", 1, parent="n2")]))
    store.fork("s2", "path", node="left")
    step(store, "path", "further")
    store.session("s3").rewind(2)
    step(store, "s3", "again")
    store.session("s0").tombstone(["n4"])
    store.session("s0").queue.enqueue([LONG, 1], batch_id="b1", source_key="k1")
    store.session("s0").queue.enqueue([2], batch_id="b2")
    attached = store.session("s0").attachments.put(b"bytes " * 500)
    store.session("s0").attachments.intend("elsewhere", uri="s3://bucket/key")
    store.create_session("named", name="a name", extra={"x": 1})
    store.session("s1").claim_lease("worker", 1)
    store.tag("release", store.session("s1").entry(3).manifest, note="shipped")
    store.put_blob(b"nobody reaches this " * 50)
    store.put_stream(__import__("io").BytesIO(bytes(range(256)) * 1024))
    return attached


def everything(store: Store) -> dict[str, Any]:
    """All that can be read of all sessions, at all revisions."""
    found: dict[str, Any] = {"pins": list(store.pins())}
    for info in store.sessions():
        session = store.session(info.meta.session)
        found[session.id] = (
            info,
            [
                (
                    entry,
                    session.checkpoint(entry, hydrate=True),
                    list(session.nodes("full", at=entry)),
                    [node.id for node in session.nodes(at=entry)],
                )
                for entry in session.history()
            ],
            session.queue.batches(),
            session.attachments.list(),
        )
    return found


def open_store(path: Path, **options: Any) -> Store:
    """Open without flushing, and without training dictionaries by the way."""
    return casstore.open(path, durability="relaxed", auto_train=False, **options)
