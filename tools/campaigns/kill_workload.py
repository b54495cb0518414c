"""The writer that ``kill`` kills, and the checker of the store it leaves.

    kill_workload.py write STORE DURABILITY ENGINE NAME THREADS   until killed
    kill_workload.py check                                        serves ``replay``'s protocol

After each call that returned, the writer prints an acknowledgement, a line of JSON from which the
stored content can be generated again. A counter row is incremented by compare-and-swap, in one
write with the thread's own row that counts its share. If counter and shares disagree, a write was
torn.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # When run as a program, only its own folder is on the import path.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import casstore
from campaigns import specimen
from campaigns.replay import Violation, serve
from casstore.engine.protocol import PutRow, RowIs, RowKey, Write
from casstore.errors import CasstoreError, ConditionFailedError

_COUNTER = RowKey("records", b"counter")
_SHARE = b"share/"
_PARTNER = b"partner/"


def item(kind: str, name: str, number: int) -> Any:
    """The item of a writer's thread at this step; deterministic."""
    rng = random.Random(f"{kind} {name} {number}")
    if kind == "blob":
        return rng.randbytes(rng.choice((10, 600, 5_000, 90_000)))
    size = rng.choice((0, 1, 5, 200))
    return {
        "by": name,
        "step": number,
        "list": [rng.random() for _ in range(size)],
        "text": "text " * rng.randrange(300),
    }


def _ack(line: dict[str, Any]) -> None:
    # One short write to a pipe is atomic, also from several threads.
    os.write(1, json.dumps(line).encode() + b"\n")


def _work(store: casstore.Store, name: str) -> None:
    share = 0
    last: tuple[int, casstore.Digest] | None = None
    number = 0
    while True:
        number += 1
        what = number % 6
        if what == 1:
            digest = store.put_value(item("value", name, number))
            _ack({"kind": "value", "name": name, "number": number, "digest": str(digest)})
            last = number, digest
        elif what == 2:
            digest = store.put_blob(item("blob", name, number))
            _ack({"kind": "blob", "name": name, "number": number, "digest": str(digest)})
        elif what == 3:
            steps = range(number * 100, number * 100 + 5)
            digests = store.put_many([item("value", name, step) for step in steps])
            for step, digest in zip(steps, digests, strict=True):
                _ack({"kind": "value", "name": name, "number": step, "digest": str(digest)})
        elif what == 4 and last is not None:
            digest = store.edit(
                last[1], casstore.Append(("list",), number), casstore.Set(("edited",), name)
            )
            _ack({"kind": "edit", "name": name, "of": last[0], "number": number,
                  "digest": str(digest)})  # fmt: skip
        elif what == 5:
            _put_partners(store, name, number)
        else:
            share += 1
            _raise_counter(store, name, share)
            _ack({"kind": "counter", "name": name, "share": share})


def _put_partners(store: casstore.Store, name: str, number: int) -> None:
    """Write two rows that are always equal, unless a write is torn."""
    value = b"%s %d" % (name.encode(), number)
    keys = [_PARTNER + side + name.encode() for side in (b"a/", b"b/")]
    store.engine.write(Write(rows=[PutRow("records", key, value) for key in keys]))
    _ack({"kind": "partners", "name": name, "number": number})


def _raise_counter(store: casstore.Store, name: str, share: int) -> None:
    while True:
        found = store.engine.get_rows([_COUNTER])[0]
        raised = b"%d" % (int(found or b"0") + 1)
        write = Write(
            conditions=[RowIs(*_COUNTER, found)],
            rows=[
                PutRow(*_COUNTER, raised),
                PutRow("records", _SHARE + name.encode(), b"%d" % share),
            ],
        )
        try:
            store.engine.write(write)
        except ConditionFailedError:
            continue
        return


def write(path: str, durability: str, engine: int, name: str, threads: int) -> None:
    """Work on the store until killed."""
    os.write(1, b"opening\n")
    store = casstore.open(path, durability, lmdb_version=engine)
    workers = [
        threading.Thread(target=_work, args=(store, f"{name}-{number}"))
        for number in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    # Only an exception ends a worker; its traceback is on stderr.
    os._exit(1)


def check(directory: Path, words: Sequence[str]) -> str:
    """Open the store; everything acknowledged is stored, and the content is valid."""
    log, durability = words
    acks = [json.loads(line) for line in Path(log).read_text().splitlines()]
    try:
        with casstore.open(directory, durability) as store:
            _check_items(store, [ack for ack in acks if "digest" in ack])
            _check_rows(store, acks)
            verified = specimen.verify(store)
            if verified and not store.engine.scan_objects(limit=1):
                raise Violation("objects that no scan finds")
            digest = store.put_value({"checked": len(acks)})
            if store.get_value(digest) != {"checked": len(acks)}:
                raise Violation("a new value does not read back")
    except CasstoreError as exc:
        raise Violation(f"{type(exc).__name__}: {exc}") from exc
    return "sound"


def _check_items(store: casstore.Store, acks: list[dict[str, Any]]) -> None:
    found = store.get_many([bytes.fromhex(ack["digest"]) for ack in acks])
    for ack, got in zip(acks, found, strict=True):
        if ack["kind"] == "edit":
            expected = item("value", ack["name"], ack["of"])
            expected["list"].append(ack["number"])
            expected["edited"] = ack["name"]
        else:
            expected = item(ack["kind"], ack["name"], ack["number"])
        if got != expected:
            raise Violation(f"{ack} reads back otherwise")


def _check_rows(store: casstore.Store, acks: list[dict[str, Any]]) -> None:
    rows = dict(store.engine.scan_rows("records", limit=100_000))
    shares = {key: int(value) for key, value in rows.items() if key.startswith(_SHARE)}
    counter = int(rows.get(_COUNTER.key, b"0"))
    if counter != sum(shares.values()):
        raise Violation(f"the counter is {counter}, its shares make {sum(shares.values())}")
    acked: Counter[str] = Counter(ack["name"] for ack in acks if ack["kind"] == "counter")
    for name, number in acked.items():
        # One more write may have happened without an acknowledgement before the kill.
        if shares.get(_SHARE + name.encode(), 0) - number not in (0, 1):
            raise Violation(f"{name} had {number} acknowledged, {shares} are stored")
    partners = {ack["name"]: ack["number"] for ack in acks if ack["kind"] == "partners"}
    for key in [key for key in rows if key.startswith(_PARTNER + b"a/")]:
        other = rows.get(key.replace(_PARTNER + b"a/", _PARTNER + b"b/"))
        if rows[key] != other:
            raise Violation(f"one row of a write says {rows[key]!r}, the other {other!r}")
    for name, number in partners.items():
        row = rows.get(_PARTNER + b"a/" + name.encode())
        if row is None or int(row.split()[-1]) < number:
            raise Violation(f"{name} had row {number} acknowledged, found {row!r}")


if __name__ == "__main__":
    if sys.argv[1] == "check":
        serve(check)
    else:
        _, _, place, how, version, who, many = sys.argv
        write(place, how, int(version), who, int(many))
