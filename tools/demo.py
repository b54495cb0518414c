"""The main job, shown: a session grows, branches and is compared, and stays small.

Run by ``tools/demo``. Everything printed is measured while it runs.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

import casstore
from casstore import Append, Set
from casstore.engine.lmdb.engine import LmdbEngine

TURNS = 400
BRANCHES = 50
WORDS = (
    "open the file and read what it says before you change anything then run the tests again "
    "because the last commit broke them and nobody noticed until the agent tried to resume"
).split()


def size(number: float) -> str:
    """Bytes for people."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:,.0f} {unit}" if unit == "bytes" else f"{number:,.1f} {unit}"
        number /= 1024
    raise AssertionError


def message(source: random.Random, turn: int, role: str) -> dict[str, object]:
    """One message of about 1.5 KB that compresses as prose does."""
    words = [
        source.choice(WORDS) + (str(turn) if source.random() < 0.2 else "") for _ in range(250)
    ]
    return {"role": role, "turn": turn, "text": " ".join(words)}


def used(store: casstore.Store) -> int:
    """What the store takes."""
    assert isinstance(store.engine, LmdbEngine)
    return store.engine.used_bytes()


def main() -> None:
    """Tell the story."""
    place = Path(sys.argv[1] if len(sys.argv) > 1 else "demo-store")
    if place.exists() and any(place.iterdir()) and not (place / "data.mdb").exists():
        raise SystemExit(f"{place} is not empty and holds no store; name another directory")
    shutil.rmtree(place, ignore_errors=True)
    source = random.Random(1)

    print(f"1. A session of {TURNS} turns, a durable checkpoint after each, all of them kept.")
    with casstore.open(place) as store:
        session = store.put_value({"messages": [], "tools": {"cwd": "/repo"}})
        checkpoints = [session]
        full_copies = 0
        length = 0
        for turn in range(TURNS):
            for role in ("user", "assistant"):
                new = message(source, turn, role)
                length += len(json.dumps(new))
                session = store.edit(session, Append(("messages",), new))
            checkpoints.append(session)
            full_copies += length
        print(f"   the conversation itself        {size(length):>12}")
        print(f"   {TURNS} full copies of it          {size(full_copies):>12}")
        print(f"   this store, all checkpoints    {size(used(store)):>12}\n")

        print(f"2. {BRANCHES} branches go on from turn 200; each also changes a tool's state.")
        before = used(store)
        branches = [
            store.edit(
                checkpoints[200],
                Append(("messages",), message(source, 201, "user")),
                Set(("tools", "cwd"), f"/branch-{number}"),
            )
            for number in range(BRANCHES)
        ]
        print(f"   {BRANCHES} full copies             {size(BRANCHES * length / 2):>12}")
        print(f"   all branches together          {size(used(store) - before):>12}\n")

        print("3. What tells two of them apart, read from the pieces that differ:")
        for change in store.diff(branches[0], branches[1]):
            where = ".".join(map(str, change.path))
            print(f"   {change.op:8} {where:20} {change.before!r:.30} → {change.after!r:.30}")
        print(f"   pieces read: {change.pieces_read}\n")

        print("4. One message of the long session, without reading the session:")
        view = store.view(session)
        by, length = view.at(("messages", 500, "role")), len(view["messages"])
        print(f"   message 500 of {length} is by {by}; pieces read: {view.pieces_read}\n")

        assert isinstance(store.engine, LmdbEngine)
        print(f"5. Every digest recomputed: {store.engine.verify()} objects are sound.")
        print(f"\nThe store is in {place}/ and the last checkpoint is {session}. Try:")
        print(f"   .venv/bin/python -c \"import casstore; print(casstore.open('{place}').view("
              f"bytes.fromhex('{session}')).at(('messages', -1, 'text')))\"")  # fmt: skip


if __name__ == "__main__":
    main()
