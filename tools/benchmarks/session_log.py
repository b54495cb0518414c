"""The session log's claims: appending a message, against bare LMDB and against power-loop."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import casstore
from benchmarks.measuring import Goal, at_most, messages, side_by_side
from benchmarks.sessions import Recorder, bare_commits, times
from casstore.records.log import NewMessage, SessionLog
from casstore.store import Store

_SESSION = "s"


def appending(quick: bool) -> list[Goal]:
    """One message of 1.7 KB appended, in a process that has the store open."""
    count = 150 if quick else 400
    repeats = 5 if quick else 9
    sent = [
        NewMessage(str(message["role"]), message["content"], meta={"id": message["id"]})
        for message in messages(count)
    ]
    objects = _objects_of(sent)
    goals = [_against_bare(each, sent, objects, repeats) for each in ("full", "relaxed")]
    if find_spec("power_loop") is None:
        print("power-loop is skipped: it is not installed", file=sys.stderr)
    else:
        goals.append(_against_power_loop(sent, repeats))
    return goals


def _objects_of(sent: Sequence[NewMessage]) -> list[list[bytes]]:
    """The bytes of the objects that each append makes a store write."""
    engine = Recorder()
    log = SessionLog(Store(engine))
    log.create(_SESSION)
    engine.written.clear()
    for message in sent:
        log.append(_SESSION, message)
    return [[item.data for item in objects] for objects in engine.written]


def _ours(durability: str, sent: Sequence[NewMessage]) -> float:
    with tempfile.TemporaryDirectory() as place, casstore.open(place, durability) as store:
        log = SessionLog(store)
        log.create(_SESSION)
        return median(times(lambda message: log.append(_SESSION, message), sent))


def _against_bare(
    durability: str, sent: Sequence[NewMessage], objects: list[list[bytes]], repeats: int
) -> Goal:
    def bare() -> float:
        with tempfile.TemporaryDirectory() as place:
            return bare_commits(place, objects, durability)

    pair = side_by_side(lambda: _ours(durability, sent), bare, repeats)
    return at_most(
        f"log: append a message of 1.7 KB at `{durability}`, against a bare transaction that "
        "hashes, compresses and writes the same objects and a head row",
        pair.ratio, 2.0,
        detail=f"{pair.ours_s * 1e6:.0f} µs, bare {pair.theirs_s * 1e6:.0f} µs; {pair.spread}",
    )  # fmt: skip


def _against_power_loop(sent: Sequence[NewMessage], repeats: int) -> Goal:
    module: Any = import_module("power_loop.runtime.session_store")

    def theirs() -> float:
        with tempfile.TemporaryDirectory() as place:
            store = module.SessionStore.open(Path(place) / "db")
            session = store.create_session()

            def append(message: NewMessage) -> None:
                store.append_message(
                    session, role=message.role, content=message.content, meta=message.meta
                )

            taken = median(times(append, sent))
            store.close()
            return taken

    pair = side_by_side(lambda: _ours("relaxed", sent), theirs, repeats)
    return at_most(
        "log: append the same at `relaxed`, against power-loop 0.2.0 (SQLite, WAL, NORMAL)",
        pair.ratio, 2.0,
        detail=f"{pair.ours_s * 1e6:.0f} µs, power-loop {pair.theirs_s * 1e6:.0f} µs; "
        f"{pair.spread}",
    )  # fmt: skip


ALL: dict[str, Callable[[bool], list[Goal]]] = {"log": appending}
