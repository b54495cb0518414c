"""A demonstration of the main features: growth, fork, comparison, a lost race, deletion.

Run by ``tools/demo``. Everything printed is measured while it runs. On a terminal it pauses after
each chapter, about half a minute in all.
"""

from __future__ import annotations

import random
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

import casstore
from casstore import Checkpoint, Commit, Lease, NodeDraft, Session, Store, Usage
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.errors import HeadConflictError
from casstore.format import canonical
from casstore.maintenance import gc

TURNS = 300
MORE_TURNS = 60
TTL_MS = 60_000
READING_S = 3.5
DEFAULT_PLACE = "demo-store"
ASKS = (
    "the test of {0} fails since this morning; find out why",
    "please split {0} into two functions, and keep its name for the outer one",
    "what does {0} do if the file is empty?",
    "run the tests again and tell me what is left",
    "document {0}; one paragraph, no examples",
)
WORDS = (
    "read the file and look at what it says before you change anything then run the tests again "
    "because the last commit broke them and nobody noticed until the agent tried to resume its "
    "work with the old state and found a name that does not exist any more in this module"
).split()
NAMES = "load store split merge parse render check plan apply verify open close count scan".split()


def size(number: float) -> str:
    """A number of bytes in readable units."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:,.0f} {unit}" if unit == "bytes" else f"{number:,.1f} {unit}"
        number /= 1024
    raise AssertionError


def chapter(text: str) -> None:
    """Print a headline, after a pause to read the chapter before."""
    if not text.startswith("1."):
        if sys.stdout.isatty():
            time.sleep(READING_S)
        print()
    print(text, flush=True)


def line(text: str, figure: object) -> None:
    """Print one line with a figure at its end."""
    print(f"   {text:46} {figure!s:>12}")


def shown(value: Any) -> str:
    """A value, shortened."""
    text = repr(value)
    return text if len(text) <= 16 else f"{text[:15]}…"


def engine_of(store: Store) -> LmdbEngine:
    """The LMDB engine of a store."""
    assert isinstance(store.engine, LmdbEngine)
    return store.engine


def used(store: Store) -> int:
    """The space that the store takes, in whole pages."""
    return engine_of(store).used_bytes()


# --- an agent, made up ----------------------------------------------------------------------


class Agent:
    """Generates the turns of a coding agent: a request, a tool call, its result, an answer."""

    def __init__(self, session: Session, seed: int) -> None:
        self.session = session
        self._random = random.Random(seed)
        state = session.load()
        tools = {} if state is None else state.checkpoint.tool_state
        self._files: dict[str, Any] = dict(tools.get("files", {}))

    def _prose(self, words: int) -> str:
        return " ".join(self._random.choice(WORDS) for _ in range(words))

    def _code(self, name: str) -> str:
        lines = [f"def {name}(state):", f'    """{self._prose(8).capitalize()}."""']
        for _ in range(self._random.randint(8, 45)):
            one, other = self._random.choices(NAMES, k=2)
            number = self._random.randint(1, 99)
            lines.append(f"    {one} = state.{other}({self._random.choice(WORDS)!r}, {number})")
        return "\n".join([*lines, "    return state", ""])

    def turn(self, number: int, branch: str, lease: Lease) -> Commit:
        """The commit of one turn."""
        name = self._random.choice(NAMES)
        path = f"src/{name}_{self._random.randint(1, 9)}.py"
        code = self._code(name)
        self._files[path] = {"lines": code.count("\n"), "read_in_turn": number}
        payloads: list[dict[str, Any]] = [
            {"role": "user", "text": self._random.choice(ASKS).format(name)},
            {"role": "assistant", "text": self._prose(30), "call": {"tool": "read", "path": path}},
            {"role": "tool", "path": path, "text": code},
            {"role": "assistant", "text": self._prose(self._random.randint(40, 160))},
        ]
        return Commit(
            append=[
                NodeDraft(f"{branch}-{number}-{at}", payload) for at, payload in enumerate(payloads)
            ],
            checkpoint=Checkpoint(
                turn_state={"turn": number},
                tool_state={"cwd": "/repo", "branch": branch, "files": dict(self._files)},
                config={"model": "made-up-1", "temperature": 0.2},
            ),
            usage=[Usage("agent", "made-up-1", input=900 + number, output=200)],
            lease=lease,
            turn=f"{branch}-{number}",
        )


def grow(agent: Agent, branch: str, first: int, turns: int) -> tuple[list[float], int, Commit]:
    """Commit turns; returns their durations, the size of full copies, and the last turn."""
    session = agent.session
    state = session.load()
    # The whole state as bytes: all nodes so far, and the checkpoint.
    nodes = 0 if state is None else sum(len(canonical.encode(node.payload)) for node in state.nodes)
    lease = session.claim_lease("demo worker", TTL_MS)
    assert lease is not None
    seconds: list[float] = []
    copies = 0
    for number in range(first, first + turns):
        change = agent.turn(number, branch, lease)
        began = time.perf_counter()
        session.commit(change)
        seconds.append(time.perf_counter() - began)
        nodes += sum(len(canonical.encode(draft.payload)) for draft in change.append)
        copies += nodes + len(canonical.encode(list(change.checkpoint or ())))
        if number % 50 == 0:
            lease = session.renew_lease(lease, TTL_MS)
    session.release_lease(lease)
    return seconds, copies, change


# --- the story --------------------------------------------------------------------------------


def tell(store: Store) -> None:
    """Run all chapters."""
    main, other = store.session("main"), store.session("other")

    chapter(
        f"1. A session of {TURNS} turns: each one durable commit, under a lease, with a turn id."
    )
    seconds, copies, last = grow(Agent(main, 1), "main", 0, TURNS)
    head = main.head()
    assert head is not None
    line("nodes in its graph", f"{head.node_count:,}")
    line("the whole state, once", size(whole_state(main)))
    line(f"{TURNS} full copies, one after each turn", size(copies))
    line("this store, all revisions kept", size(used(store)))
    line("one commit, median", f"{statistics.median(seconds) * 1000:.2f} ms")

    chapter("2. It forks. The fork shares everything and costs one row.")
    before, began = used(store), time.perf_counter()
    store.fork("main", "other")
    line("time", f"{(time.perf_counter() - began) * 1000:.2f} ms")
    line("pages added", size(used(store) - before))

    chapter(f"3. Both continue for {MORE_TURNS} turns, and are compared.")
    before = used(store)
    copies = grow(Agent(main, 2), "main", TURNS, MORE_TURNS)[1]
    copies += grow(Agent(other, 3), "other", TURNS, MORE_TURNS)[1]
    line(f"{2 * MORE_TURNS} full copies", size(copies))
    line("added to this store", size(used(store) - before))
    began = time.perf_counter()
    found = store.compare("main", "other")
    line("comparing took", f"{(time.perf_counter() - began) * 1000:.1f} ms")
    assert found.ancestor is not None
    line("their last common node", found.ancestor.id)
    line("nodes only in main, only in other", f"{len(found.dropped)}, {len(found.added)}")
    line("changes in components", len(found.changes))
    for change in found.changes[:3]:
        where = ".".join(map(str, change.path))
        print(f"      {change.op:8} {where:46} {shown(change.before)} → {shown(change.after)}")

    chapter("4. Two writers start from the same revision. One wins, the other gets an error.")
    race(other)

    chapter(
        "5. A worker repeats a committed turn, with an expired lease. It gets the first result."
    )
    ids = [f"made-anew-{at}" for at in range(len(last.append))]
    again = [NodeDraft(name, draft.payload) for name, draft in zip(ids, last.append, strict=True)]
    answer = main.commit(last._replace(append=again))
    line("a replay: nothing was written", answer.replayed)
    line("the revision it made the first time", answer.revision)
    line("its first node, by its first id", answer.nodes[0])
    now = main.head()
    assert now is not None
    line("the session is at revision", now.revision)


def race(session: Session) -> None:
    """Two threads commit on top of the same revision."""
    head = session.head()
    assert head is not None
    start = threading.Barrier(2)
    lines: list[str] = []

    def write(name: str) -> None:
        change = Commit(
            append=[NodeDraft(f"race-{name}", {"role": "user", "text": f"{name} was here"})],
            expected=head.revision,
        )
        start.wait()
        try:
            lines.append(f"{name}: now at revision {session.commit(change).revision}")
        except HeadConflictError as exc:
            lines.append(f"{name}: HeadConflictError: {exc}")

    writers = [threading.Thread(target=write, args=(name,)) for name in ("ann", "bob")]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    for told in lines:
        print(f"   {told}")


def whole_state(session: Session) -> int:
    """The canonical size of the whole state of a session's head."""
    state = session.load()
    assert state is not None
    payloads = sum(len(canonical.encode(node.payload)) for node in state.nodes)
    return payloads + len(canonical.encode(list(state.checkpoint)))


def drop(store: Store) -> None:
    """The last chapters: one branch is deleted, and its space is reclaimed."""
    chapter("6. Small commits are packed. Nothing else changes.")
    before, report = used(store), store.pack(min_age_ms=0)
    line("slabs joined, into", f"{report.slabs_before:,} → {report.slabs_after:,}")
    line("this store, before and after", f"{size(before)} → {size(used(store))}")

    chapter("7. One branch is deleted, and its space is reclaimed.")
    before = used(store)
    store.delete_session("other")
    collected = gc.collect(store, grace_ms=0)
    store.pack(min_age_ms=0)
    line("objects that only it could reach", f"{collected.objects_swept:,}")
    line("objects that stay", f"{collected.objects_kept:,}")
    line("this store, before", f"{before:,} bytes")
    line("this store, after", f"{used(store):,} bytes")
    line("given back", size(before - used(store)))

    chapter(f"8. Every digest recomputed: {engine_of(store).verify():,} objects are sound.")


def main() -> None:
    """Prepare the directory, run the demonstration, and leave the store for inspection."""
    place = Path(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_PLACE)
    if place.exists() and any(place.iterdir()):
        # Only the store of an earlier run is replaced, never another one.
        if str(place) != DEFAULT_PLACE or not (place / "data.mdb").exists():
            print(f"{place} is not empty; name another directory", file=sys.stderr)
            raise SystemExit(2)
        shutil.rmtree(place)
    try:
        with casstore.open(place) as store:
            tell(store)
            drop(store)
    except KeyboardInterrupt:
        shutil.rmtree(place, ignore_errors=True)
        print("\ninterrupted; the store was removed", file=sys.stderr)
        raise SystemExit(130) from None
    command = Path(sys.executable).with_name("casstore")
    casstore_command = str(command) if command.exists() else f"{sys.executable} -m casstore"
    print(f"\nThe store is in {place}/. Look into it:")
    for what in ("log main", "diff main@100 main@200 --stat", "stats"):
        print(f"   {casstore_command} {what} --store {place}")


if __name__ == "__main__":
    main()
