"""Sessions to move about: one with everything in it, random ones, and what is seen of one."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from casstore import Checkpoint, Commit, Digest, Link, NodeDraft, Store, Usage
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import TABLES, Row, Write, WriteResult
from casstore.session import keys
from casstore.testing.engine_fixtures import all_rows

MakeStore = Callable[[], Store]

LONG_TEXT = "a long text, " * 200


class Watched(MemoryEngine):
    """Calls ``before`` with each write from the time on that it is set."""

    before: Callable[[Write], None] | None = None

    def write(self, write: Write) -> WriteResult:
        if self.before is not None:
            self.before(write)
        return super().write(write)

    def at_write(self, number: int, happen: Callable[[], object]) -> None:
        """Let something happen once, before the so-manieth write; ``before`` is None then."""
        left = number

        def count(write: Write) -> None:
            nonlocal left
            left -= 1
            if not left:
                self.before = None
                happen()

        self.before = count


def message(node_id: str, text: str | None = None, **fields: Any) -> NodeDraft:
    """A node that says something."""
    payload = {"role": "user", "text": f"this is {node_id}" if text is None else text}
    return NodeDraft(node_id, payload, **fields)


def noise(seed: str, size: int) -> bytes:
    """Bytes that do not compress, always the same."""
    return random.Random(seed).randbytes(size)


def fill(store: Store, name: str = "s") -> None:
    """Make a session with everything in it: branches, rewinds, labels, hidden nodes, blobs."""
    session = store.session(name)
    store.create_session(name, name="a name", model="m", extra={"x": [1, 2.5, None]})
    content = noise("image", 150_000)
    image = session.attachments.put(content)
    session.attachments.intend("away", uri="s3://bucket/away")
    first = [message("a"), message("b", LONG_TEXT), message("c", parent="a")]
    state = Checkpoint(
        turn_state={"step": 1},
        tool_state={"files": {f"file {n}": "x" * n for n in range(80)}},
        plugin_snapshot=[{"n": n, "text": "item " * 20} for n in range(200)],
        execution_state=noise("state", 90_000),
        config={"deep": [[[["value"]]]]},
    )
    step(store, name, *first, checkpoint=state, usage=[Usage("main", "m", 10, 5)], turn="t1")
    shown = NodeDraft("d", {"image": Link(Digest.of_blob(content)), "text": "€" * 90_000})
    step(store, name, shown, attachments=[image.id, "away"], label="shown", turn="t2")
    session.rewind(1, label="back")
    step(store, name, message("e"), message("f", parent=None), usage=[Usage("main", "m", 1, 1)])
    session.tombstone(["b"])
    step(store, name, message("g"), leaf="a")
    session.queue.enqueue(["work"])


def step(store: Store, name: str, *nodes: NodeDraft, **fields: Any) -> None:
    """Commit nodes without a lease."""
    store.session(name).commit(Commit(append=nodes, **fields))


def grow(store: Store, rng: random.Random, names: list[str], steps: int, prefix: str = "") -> None:
    """Do random things to sessions: commits on any branch, rewinds, forks, replacing, hiding."""
    made = 0
    for _ in range(steps):
        name = rng.choice(names)
        session = store.session(name)
        head = session.head()
        revisions = [] if head is None else [entry.revision for entry in session.history()]
        way = rng.random()
        if head is None or way < 0.6:
            nodes = [] if head is None else [node.id for node in session.nodes("full")]
            drafts = []
            for _ in range(rng.choice((0, 1, 1, 2, 5))):
                made += 1
                draft = message(f"{prefix}n{made}", rng.choice((None, LONG_TEXT, "short")))
                if nodes and rng.random() < 0.3:
                    draft = draft._replace(parent=rng.choice(nodes))
                drafts.append(draft)
                nodes.append(draft.id)
            label = rng.choice((None, None, f"{prefix}label {made}"))
            change = Commit(append=drafts, label=label)
            if nodes and rng.random() < 0.2:
                change = change._replace(leaf=rng.choice(nodes))
            session.commit(change)
        elif way < 0.75:
            session.rewind(rng.choice(revisions))
        elif way < 0.85:
            new = f"{name}/{prefix}{made}-{len(names)}"
            at = rng.choice(revisions)
            nodes = [node.id for node in session.nodes("full", at=at)]
            node = rng.choice([None, *nodes])
            store.fork(name, new, at=at, node=node)
            names.append(new)
        elif way < 0.92:
            made += 1
            drafts = [message(f"{prefix}r{made}"), message(f"{prefix}r{made}x", parent=None)]
            session.commit(Commit(replace=drafts))
        else:
            nodes = [node.id for node in session.nodes("full")]
            if nodes:
                session.tombstone([rng.choice(nodes)])


def seen(store: Store, name: str) -> dict[str, Any]:
    """Everything that a reader sees of a session, in every revision, but its id."""
    session = store.session(name)
    head = session.head()
    assert head is not None
    revisions = []
    for entry in session.history():
        state = session.load(entry.revision, scope="full")
        assert state is not None
        revisions.append(
            {
                "entry": entry._replace(session=""),
                "state": (state.head._replace(session=""), state.leaf, state.healed),
                "full": list(state.nodes),
                "path": list(session.nodes(at=entry.revision)),
                "checkpoint": session.checkpoint(entry.revision, hydrate=True),
                "usage": session.usage(entry.revision),
                "by id": [session.node(node.id, at=entry.revision) for node in state.nodes],
            }
        )
    info = session.info()
    return {
        "head": head._replace(session=""),
        "meta": info.meta._replace(session="", name=info.meta.name.replace(name, "")),
        "picked": info[2:],
        "revisions": revisions,
        "attachments": [
            one._replace(session="") for one in session.attachments.list(state="committed")
        ],
    }


def rows_of(store: Store) -> dict[str, list[Row]]:
    """All rows but the one that tells stores apart."""
    return {
        table: [row for row in all_rows(store.engine, table) if (table, row.key) != keys.sign()]
        for table in TABLES
    }
