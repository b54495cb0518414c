"""Overwrites one page in a hundred of a store and salvages it: what survived must be found.

The expected result is computed without the code under test. While the store is built, a model in
plain Python records the content of every revision. From the undamaged file, py-lmdb's verifier
gives the pages of each row and slab, and the engine gives the objects of each revision. A revision
whose row and objects are on undamaged pages must be salvaged, and every salvaged revision must have
the content of the model.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import casstore
from campaigns.tally import Progress, Report, Tally, silent
from casstore import Checkpoint, Commit, NodeDraft
from casstore.errors import CasstoreError
from casstore.maintenance import gc
from casstore.maintenance.salvage import salvage
from casstore.session import keys
from casstore.session.state import decode_head

ENGINES = (0, 1)
PAGE_BYTES = 4096
SHARE = 0.01
_SESSIONS = 24
_TURNS = 260
# How many times one store is damaged before another is built.
_ROUNDS_A_STORE = 8
_TOO_LONG = 1500
# Repetitive texts of agents, more than fit in one slab.
_SAYINGS = tuple(
    f"{call} of src/module_{number}.py: {what}, see line {number * 7} of its log."
    for number in range(40)
    for call, what in (
        ("reading", "it was not there when the tool looked for it"),
        ("editing", "two lines were replaced and one was left as it was"),
        ("testing", "all passed but the one that needs the network"),
    )
)


class Content(NamedTuple):
    """The content of one revision: its nodes in order, and its components."""

    nodes: tuple[tuple[str, str | None, Any], ...]
    tool_state: Any
    turn_state: Any


class Revision(NamedTuple):
    """The pages of a revision's row, and the pages of its objects."""

    content: Content
    row_pages: frozenset[int]
    object_pages: frozenset[int]


class Specimen(NamedTuple):
    """A store to be damaged, and its expected content."""

    data: bytes
    sessions: Mapping[str, Mapping[int, Revision]]
    deleted: frozenset[str]
    page_count: int
    #: How many slabs need a dictionary.
    dictionary_users: int


# --- building, with a model ------------------------------------------------------------------


class _Builder:
    def __init__(self, store: casstore.Store, rng: random.Random) -> None:
        self._store = store
        self._rng = rng
        self.model: dict[str, dict[int, Content]] = {}
        self.deleted: set[str] = set()

    def build(self) -> None:
        for turn in range(_TURNS):
            self._turn(turn)
            if turn == _TURNS // 2:
                self._delete()
                gc.collect(self._store, grace_ms=0)
                self._store.train_dictionary()
        self._delete()
        gc.collect(self._store, grace_ms=0)
        # Some content that is neither collected nor packed.
        for turn in range(_TURNS, _TURNS + 40):
            self._turn(turn)

    def _alive(self) -> list[str]:
        return sorted(self.model)

    def _turn(self, turn: int) -> None:
        rng = self._rng
        alive = self._alive()
        if len(alive) > 3 and rng.random() < 0.1:
            self._fork(rng.choice(alive), f"fork-{turn}")
            return
        name = rng.choice(alive) if len(alive) >= _SESSIONS else f"session-{turn}"
        revisions = self.model.setdefault(name, {})
        before = revisions[max(revisions)] if revisions else Content((), None, None)
        if len(revisions) > 3 and rng.random() < 0.05:
            target = rng.choice(sorted(revisions))
            result = self._store.session(name).rewind(target)
            revisions[result.revision] = revisions[target]
            return
        nodes = list(before.nodes)
        drafts: list[NodeDraft] = []
        parent = nodes[-1][0] if nodes else None
        for at in range(rng.randrange(1, 4)):
            payload = self._payload()
            node = f"{name}-{turn}-{at}"
            drafts.append(NodeDraft(node, payload))
            nodes.append((node, parent, payload))
            parent = node
        tools = {"cwd": f"/{turn}", "files": [f"file {n} {rng.random()}" for n in range(turn)]}
        also = Checkpoint(turn_state={"turn": turn}, tool_state=tools)
        result = self._store.session(name).commit(
            Commit(append=drafts, checkpoint=also, turn=f"turn-{turn}")
        )
        revisions[result.revision] = Content(tuple(nodes), tools, {"turn": turn})

    def _payload(self) -> dict[str, Any]:
        rng = self._rng
        if rng.random() < 0.6:
            # Like agents' messages: short and similar, so that a dictionary saves space.
            said = " ".join(rng.choices(_SAYINGS, k=rng.randrange(3, 12)))
            return {"role": rng.choice(("user", "assistant", "tool")), "text": said}
        size = rng.choice((20, 300, 3000, 12_000))
        text = rng.randbytes(size).hex() if rng.random() < 0.3 else f"word {rng.random()} " * size
        return {"role": "user", "text": text[: 2 * size]}

    def _fork(self, source: str, target: str) -> None:
        revisions = self.model[source]
        at = self._rng.choice(sorted(revisions))
        head = self._store.fork(source, target, at=at)
        self.model[target] = {head.revision: revisions[at]}

    def _delete(self) -> None:
        for name in self._rng.sample(self._alive(), 4):
            self._store.delete_session(name)
            self.deleted.add(name)
            del self.model[name]


def build(path: Path, seed: int, engine: int) -> Specimen:
    """Build a store, and compute the pages of each revision."""
    rng = random.Random(seed)
    with casstore.open(path, lmdb_version=engine, durability="relaxed") as store:
        builder = _Builder(store, rng)
        builder.build()
        closures = _closures(store)
    data = (path / "data.mdb").read_bytes()
    found = _map(path / "data.mdb")
    object_pages = _object_pages(found)
    sessions: dict[str, dict[int, Revision]] = {}
    for name, revisions in builder.model.items():
        sessions[name] = {}
        for revision, content in revisions.items():
            row, ids = closures[name, revision]
            pages = frozenset(page for each in ids for page in object_pages[each])
            sessions[name][revision] = Revision(content, found.pages[row], pages)
    users = len([number for number in found.dictionaries.values() if number])
    return Specimen(data, sessions, frozenset(builder.deleted), len(data) // PAGE_BYTES, users)


_Place = tuple[str, bytes]


def _closures(store: casstore.Store) -> dict[tuple[str, int], tuple[_Place, frozenset[int]]]:
    """For each revision: the place of its row, and the ids of all its objects."""
    infos = {info.id: info for info in store.engine.scan_objects(limit=1 << 30)}
    ids = {info.digest: info.id for info in infos.values()}
    found: dict[tuple[str, int], tuple[_Place, frozenset[int]]] = {}
    for table in ("heads", "history"):
        for row in store.engine.scan_rows(table, limit=1 << 30):
            if table == "history" and keys.is_label(row.key):
                continue
            head = decode_head(row.value)
            session = keys.session_of(row.key if table == "heads" else row.key[:-8])
            assert session is not None
            reached: set[int] = set()
            ahead = [ids[head.manifest]]
            while ahead:
                each = ahead.pop()
                if each not in reached:
                    reached.add(each)
                    ahead.extend(infos[each].children)
            found[session, head.revision] = ((table, row.key), frozenset(reached))
    return found


# --- pages, by py-lmdb's own verifier ----------------------------------------------------------


class _Map(NamedTuple):
    """The pages of each entry: those of its value if it is in overflow pages, else its leaf."""

    pages: dict[_Place, frozenset[int]]
    #: The number of the dictionary that each slab names, by its key.
    dictionaries: dict[bytes, int]


def _map(path: Path) -> _Map:
    from lmdb import verify

    found = _Map({}, {})

    class Recorder(verify._Verifier):
        def _leaf_value(self, ctx: Any, pgno: int, i: int, buf: Any, o: int, *rest: Any) -> None:
            _, ksize, _, key = rest
            table = ctx["name"].removeprefix("main/")
            table = bytes.fromhex(table).rstrip(b"\0").decode() if _is_hex(table) else table
            value_at = o + 8 + ksize + (ksize & 1 if self.pagebase else 0)
            self._table = table
            self._start = bytes(buf[value_at : value_at + 12])
            self._extent: frozenset[int] = frozenset((pgno,))
            super()._leaf_value(ctx, pgno, i, buf, o, *rest)  # type: ignore[no-untyped-call]
            found.pages[table, key] = self._extent
            if table == "slabs":
                found.dictionaries[key] = int.from_bytes(self._start[8:12], "little")

        def _bigdata(self, ctx: Any, pgno: int, i: int, buf: Any, doff: int, dsize: int,
                     want_bytes: bool) -> Any:  # fmt: skip
            first = int.from_bytes(buf[doff : doff + 8], "little")
            run = range(first, first + (self.hdrsz - 1 + dsize) // self.psize + 1)
            # Long slabs and dictionaries must be found without the leaf that refers to them.
            alone = self._table in ("slabs", "dictionaries")
            self._extent = frozenset(run if alone else (pgno, *run))
            self._start = self._read_at(first * self.psize + self.hdrsz, 12)  # type: ignore[no-untyped-call]
            return super()._bigdata(  # type: ignore[no-untyped-call]
                ctx, pgno, i, buf, doff, dsize, want_bytes
            )

    with path.open("rb") as source:
        recorder = Recorder(source, path.stat().st_size)  # type: ignore[no-untyped-call]
        problems = recorder.verify()  # type: ignore[no-untyped-call]
    assert not problems, problems
    return found


def _is_hex(text: str) -> bool:
    """Format 1 ends names in a zero byte; the verifier prints such names in hexadecimal."""
    return len(text) % 2 == 0 and all(digit in "0123456789abcdef" for digit in text)


def _object_pages(found: _Map) -> dict[int, frozenset[int]]:
    """The pages that each object needs, by id: those of its slab and of the slab's dictionary."""
    needed: dict[int, frozenset[int]] = {}
    above = 0
    for key, number in sorted(found.dictionaries.items()):
        pages = found.pages["slabs", key]
        if number:
            pages |= found.pages["dictionaries", number.to_bytes(4, "big")]
        last = int.from_bytes(key, "big")
        needed.update(dict.fromkeys(range(above + 1, last + 1), pages))
        above = last
    return needed


# --- damaging and comparing ----------------------------------------------------------------------


def damage(data: bytes, rng: random.Random, share: float) -> tuple[bytes, frozenset[int]]:
    """Overwrite a share of the pages with noise, zeros or another page; returns which."""
    count = len(data) // PAGE_BYTES
    hit = frozenset(rng.sample(range(count), max(1, round(count * share))))
    damaged = bytearray(data)
    for page in sorted(hit):
        other = rng.randrange(count) * PAGE_BYTES
        content = rng.choice(
            (rng.randbytes(PAGE_BYTES), bytes(PAGE_BYTES), data[other : other + PAGE_BYTES])
        )
        damaged[page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = content
    return bytes(damaged), hit


def run(
    scratch: Path,
    *,
    count: int,
    seed: int,
    share: float = SHARE,
    progress: Progress = silent,
) -> Report:
    """Damage and salvage ``count`` times, with stores of both LMDB formats in turn."""
    tally = Tally("salvage", total=count, progress=progress)
    specimen: Specimen | None = None
    for number in range(count):
        if specimen is None or not number % _ROUNDS_A_STORE:
            built, engine = number // _ROUNDS_A_STORE, ENGINES[number // _ROUNDS_A_STORE % 2]
            place = scratch / "specimen"
            shutil.rmtree(place, ignore_errors=True)
            specimen = build(place, seed + built, engine)
            revisions = sum(len(one) for one in specimen.sessions.values())
            tally.note(
                f"store {built}: format {engine}, {specimen.page_count} pages, "
                f"{len(specimen.sessions)} sessions, {revisions} revisions, "
                f"{specimen.dictionary_users} slabs that need a dictionary"
            )
        rng = random.Random(f"{seed} {number}")
        image, hit = damage(specimen.data, rng, share)
        _round(tally, scratch / "round", specimen, image, hit, f"round {number}")
        tally.tried()
    return tally.report()


def _round(
    tally: Tally, scratch: Path, specimen: Specimen, image: bytes, hit: frozenset[int], trial: str
) -> None:
    shutil.rmtree(scratch, ignore_errors=True)
    source = scratch / "damaged"
    source.mkdir(parents=True)
    (source / "data.mdb").write_bytes(image)
    try:
        report = salvage(source, scratch / "saved")
    except CasstoreError as exc:
        tally.broke(trial, f"refused: {type(exc).__name__} {exc}"[:_TOO_LONG])
        return
    if (source / "data.mdb").read_bytes() != image:
        tally.broke(trial, "the damaged file was written to")
    told = {one.session: one for one in report.sessions}
    with casstore.open(scratch / "saved", verify=True) as store:
        there = {info.meta.session for info in store.sessions()}
        for name in sorted(there - specimen.sessions.keys()):
            tally.broke(trial, f"resurrected: {name}")
        for name, revisions in specimen.sessions.items():
            _compare(tally, trial, store, name, revisions, hit, told)
    for table in sorted({gap.table for gap in report.gaps}):
        tally.count(f"rounds with rows lost in table {table}")
    if report.dictionaries_lost:
        tally.count("rounds with a dictionary lost")


def _compare(
    tally: Tally,
    trial: str,
    store: casstore.Store,
    name: str,
    revisions: Mapping[int, Revision],
    hit: frozenset[int],
    told: Mapping[str, Any],
) -> None:
    must = {
        number for number, one in revisions.items() if not (one.row_pages | one.object_pages) & hit
    }
    session = store.session(name)
    try:
        saved = {entry.revision for entry in session.history()}
    except CasstoreError as exc:
        tally.broke(trial, f"unreadable: {name}: {exc}")
        return
    for number in sorted(must - saved):
        tally.broke(trial, f"missing: {name} revision {number}; {told.get(name)}"[:_TOO_LONG])
    for number in sorted(saved - revisions.keys()):
        tally.broke(trial, f"invented: {name} revision {number}")
    for number in sorted(saved & revisions.keys()):
        found = _read(session, number)
        if found != revisions[number].content:
            tally.broke(trial, f"wrong: {name} revision {number} holds something else")
    tally.count("revisions that had to come back", len(must))
    tally.count("revisions that came back", len(saved))
    tally.count("revisions lost", len(revisions.keys() - saved))
    newest = max(revisions)
    word = "at its head" if newest in saved else "earlier" if saved else "not at all"
    tally.count(f"sessions that came back {word}")
    _compare_report(tally, trial, name, revisions.keys(), saved, told)


def _compare_report(
    tally: Tally,
    trial: str,
    name: str,
    revisions: Any,
    saved: set[int],
    told: Mapping[str, Any],
) -> None:
    """The report must not claim more than was saved, nor omit a loss that salvage noticed."""
    said = told.get(name)
    if said is None:
        if saved:
            tally.broke(trial, f"untold: {name} is there, but the report does not name it")
        return
    if said.revisions_saved != len(saved) or (saved and said.revision != max(saved)):
        tally.broke(trial, f"misreported: {name} has {len(saved)}; {said}"[:_TOO_LONG])
    if said.outcome == "whole" and max(saved) != said.head_revision:
        tally.broke(trial, f"misreported: {name} is called whole; {said}"[:_TOO_LONG])


def _read(session: Any, revision: int) -> Content:
    state = session.load(at=revision, scope="full")
    nodes = tuple((node.id, node.parent, node.payload) for node in state.nodes)
    return Content(nodes, state.checkpoint.tool_state, state.checkpoint.turn_state)
