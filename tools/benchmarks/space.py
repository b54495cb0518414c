"""Measures space against git, before and after packing; reading packed data; compaction.

The same sessions are given to git in two ways, one commit a step: a repository with one file
for each session, which grows by a line, and one with a file for each message. Both are
brought in without loose objects and then packed with ``git gc --aggressive``. Git is taken at
its best: the smaller of the two, its pack and its index alone, without bitmaps, the graph of
commits or anything else in the repository; commits have no message and the shortest of authors.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import msgpack

import casstore
from benchmarks.measuring import Goal, at_least, at_most, messages, seconds, side_by_side
from benchmarks.store import used_bytes
from casstore import Commit, NodeDraft
from casstore.maintenance import gc
from casstore.maintenance.compact import compact

Sessions = dict[str, list[Any]]


def sessions(quick: bool) -> tuple[str, Sessions]:
    """Sessions by name, from the directory or file that CASSTORE_CORPUS names, or made up.

    Each line of a file is an entry of one session; or, if it has ``messages``, a session.
    """
    given = os.environ.get("CASSTORE_CORPUS")
    if not given:
        count, length = (20, 60) if quick else (60, 120)
        made = messages(count * length)
        return (
            f"{count} made-up sessions of {length} messages",
            {f"s{at}": made[at * length : (at + 1) * length] for at in range(count)},
        )
    found: Sessions = {}
    place = Path(given)
    for file in sorted(place.glob("*.jsonl")) if place.is_dir() else [place]:
        for number, text in enumerate(file.read_text().splitlines()):
            entry = json.loads(text)
            if isinstance(entry, dict) and isinstance(entry.get("messages"), list):
                found[f"{file.stem}-{number}"] = entry["messages"]
            else:
                found.setdefault(file.stem, []).append(entry)
    if quick:
        found = {name: entries[:200] for name, entries in list(found.items())[:20]}
    return f"{len(found)} sessions of a real corpus", found


def fill(place: str, given: Sessions) -> None:
    """A store with a commit for each entry."""
    with casstore.open(place, "relaxed") as store:
        for name, entries in given.items():
            session = store.session(name)
            for at, entry in enumerate(entries):
                session.commit(Commit(append=[NodeDraft(f"{at:06}", entry)]))


# --- git ---------------------------------------------------------------------------------


def git_bytes(given: Sessions, *, file_a_message: bool) -> int:
    """The length of git's pack and its index, one commit for each entry."""
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(["git", "init", "--quiet", "--bare", place], check=True)
        git = ["git", "-C", place]
        with subprocess.Popen([*git, "fast-import", "--quiet"], stdin=subprocess.PIPE) as importer:
            assert importer.stdin is not None
            number = 0
            for name, entries in given.items():
                whole = b""
                for at, entry in enumerate(entries):
                    number += 1
                    encoded = json.dumps(entry, ensure_ascii=False, separators=(",", ":"))
                    whole += encoded.encode() + b"\n"
                    path, content = f"{name}.jsonl", whole
                    if file_a_message:
                        path, content = f"{name}/{at:06}.json", encoded.encode()
                    importer.stdin.write(
                        b"commit refs/heads/main\ncommitter a <a> %d +0000\ndata 0\n"
                        b"M 100644 inline %s\ndata %d\n%s\n"
                        % (1_700_000_000 + number, path.encode(), len(content), content)
                    )
            importer.stdin.close()
            if importer.wait():
                raise RuntimeError("git fast-import failed")
        # In one thread: several share the objects out and miss a sixth of what there is to gain.
        alone = ["-c", "pack.threads=1"]
        subprocess.run([*git, *alone, "gc", "--aggressive", "--quiet", "--prune=now"], check=True)
        packs = Path(place, "objects", "pack")
        return sum(
            file.stat().st_size for file in packs.iterdir() if file.suffix in (".pack", ".idx")
        )


def against_git(quick: bool) -> list[Goal]:
    """Used bytes before and after packing, against git's best pack; reading both."""
    what, given = sessions(quick)
    steps = sum(len(entries) for entries in given.values())
    raw = sum(len(json.dumps(entry)) for entries in given.values() for entry in entries)
    goals: list[Goal] = []
    with tempfile.TemporaryDirectory() as scratch:
        loose, packed = f"{scratch}/loose", f"{scratch}/packed"
        fill(loose, given)
        shutil.copytree(loose, packed)
        with casstore.open(loose) as store:
            before = used_bytes(store)
        with casstore.open(packed, "relaxed") as store:
            report = store.pack(min_age_ms=0)
            after = used_bytes(store)
        if shutil.which("git") is not None:
            by_file = git_bytes(given, file_a_message=False)
            by_message = git_bytes(given, file_a_message=True)
            git = min(by_file, by_message)
            detail = (
                f"{after:,} bytes for {raw:,} of JSON; git {by_file:,} with a file for each "
                f"session, {by_message:,} with one for each message"
            )
            goals += [
                at_most(
                    f"{what}, a checkpoint after each of {steps} entries, packed: used bytes "
                    "against git's pack and index after gc --aggressive",
                    after / git, 0.85, detail=detail,
                ),
                at_most(
                    "the same before packing", before / git, 1.6, detail=f"{before:,} bytes"
                ),
            ]  # fmt: skip
        reading = side_by_side(
            lambda: _read_all(packed, given), lambda: _read_all(loose, given), 3 if quick else 7
        )
        goals += [
            at_most(
                "reading all sessions end to end, packed, against not packed",
                reading.ratio, 1,
                detail=f"{1e6 * reading.ours_s / steps:.1f} µs an entry, "
                f"{1e6 * reading.theirs_s / steps:.1f} before",
            ),
            at_most(
                "the longest that a step of packing kept writers waiting",
                1000 * report.longest_lock_s, 50, "ms",
                detail=f"{report.slabs_before:,} slabs became {report.slabs_after:,}",
            ),
        ]  # fmt: skip
    return goals


def _read_all(place: str, given: Sessions) -> float:
    with casstore.open(place, readonly=True) as store:

        def read() -> None:
            for name, entries in given.items():
                if len(list(store.session(name).nodes())) != len(entries):
                    raise RuntimeError(f"{name} is not whole")

        return seconds(read)


# --- compacting ----------------------------------------------------------------------------


def compacting(quick: bool) -> list[Goal]:
    """Half of a store is collected and the file compacted: its size against its content."""
    ways: Sequence[tuple[str, Callable[[str, bool], None]]] = (
        ("half of all sessions", _drop_sessions),
        ("every other of many blobs", _drop_blobs),
    )
    goals: list[Goal] = []
    for what, drop in ways:
        with tempfile.TemporaryDirectory() as place:
            drop(place, quick)
            report = compact(place)
            goals.append(
                at_most(
                    f"{what}, chosen at random, collected; compacted: the file against the live "
                    "compressed bytes in it (keys and values of slabs, index and rows)",
                    report.overhead, 1.15,
                    detail=f"{report.file_bytes_before:,} bytes became "
                    f"{report.file_bytes_after:,}; {report.content_bytes:,} live",
                )
            )  # fmt: skip
    return [*goals, _compacting_rate(quick)]


def _compacting_rate(quick: bool) -> Goal:
    """How many bytes of content a second are rewritten, verified and put in place."""
    length = 100
    made_up = messages((60 if quick else 400) * length)
    content = sum(len(msgpack.packb(message)) for message in made_up)
    rates: list[float] = []
    stored = 0
    with tempfile.TemporaryDirectory() as scratch:
        made = f"{scratch}/made"
        fill(made, {f"s{at}": made_up[at : at + length] for at in range(0, len(made_up), length)})
        for number in range(3 if quick else 5):
            # As committed each time: a store that was compacted has nothing left to do.
            place = f"{scratch}/{number}"
            shutil.copytree(made, place)
            started = perf_counter()
            stored = compact(place).content_bytes
            rates.append(content / (perf_counter() - started) / 1e6)
            shutil.rmtree(place)
    return at_least(
        f"compacting {content / 1e6:.1f} MB of messages, as committed: bytes of content a second",
        median(rates), 16, "MB",
        detail=f"stored in {stored:,} bytes, keys and rows included; runs gave "
        f"{min(rates):.1f} to {max(rates):.1f}",
    )  # fmt: skip


def _drop_sessions(place: str, quick: bool) -> None:
    count, length = (50, 80) if quick else (100, 100)
    made = messages(count * length)
    given = {f"s{at}": made[at * length : (at + 1) * length] for at in range(count)}
    fill(place, given)
    with casstore.open(place, "relaxed") as store:
        for name in random.Random(1).sample(sorted(given), count // 2):
            store.delete_session(name)
        gc.collect(store, grace_ms=0)


def _drop_blobs(place: str, quick: bool) -> None:
    count = 5_000 if quick else 20_000
    contents = [json.dumps(message).encode() for message in messages(count)]
    chosen = random.Random(2).sample(range(count), count // 2)
    with casstore.open(place, "relaxed") as store:
        digests = store.put_many(contents)
        for at in chosen:
            store.tag(f"t{at}", digests[at])
        gc.collect(store, grace_ms=0)


ALL: dict[str, Callable[[bool], list[Goal]]] = {
    "space": against_git,
    "compacting": compacting,
}
