"""What a reader can see of sessions, and whether what is stored below it is right."""

from __future__ import annotations

from typing import Any

from casstore.format.digest import Digest
from casstore.objects import graph as objects
from casstore.objects.pieces import PieceReader
from casstore.session import messages
from casstore.session.data import Commit
from casstore.session.session import Session
from casstore.store import Store


def seen(session: Session, turns: dict[str, Commit] | None = None) -> dict[str, Any]:
    """All that vacuum must leave as it is: everything but digests, places and counts of nodes.

    A node's parent is taken from its path: the nearest one that can be seen.
    """
    head = session.head()
    assert head is not None
    info = session.info()
    return {
        "head": (head.revision, head.created_at_ms, head.committed_at_ms, head.turn, head.origin),
        "info": (info.meta, info.first_user_message, info.user_message_count),
        "history": [entry._replace(manifest=Digest(bytes(32))) for entry in session.history()],
        "revisions": [_revision(session, entry.revision) for entry in session.history()],
        "labels": {
            label: session.entry(label).revision
            for entry in session.history()
            for label in entry.labels
        },
        "queue": session.queue.batches(),
        "attachments": list(session.attachments.list()),
        "turns": {
            turn: session.commit(change)._replace(manifest=Digest(bytes(32)))
            for turn, change in (turns or {}).items()
        },
    }


def _revision(session: Session, at: int) -> Any:
    state = session.load(at, scope="full")
    assert state is not None
    nodes = list(state.nodes)
    assert len(state.nodes) == len(nodes)
    paths = {node.id: [one.id for one in session.nodes(leaf=node.id, at=at)] for node in nodes}
    shown = []
    for node in nodes:
        path = paths[node.id]
        assert path[-1] == node.id
        assert session.node(node.id, at=at) == node
        parent = path[-2] if len(path) > 1 else None
        shown.append((node.id, node.payload, node.cause, node.frame, node.time, parent))
    active = session.load(at)
    assert active is not None
    assert active.leaf == state.leaf
    active_ids = [node.id for node in active.nodes]
    assert active_ids == ([] if state.leaf is None else paths[state.leaf])
    return (at, shown, paths, state.leaf, state.checkpoint, state.usage)


def check_graphs(store: Store, session: Session) -> None:
    """Every revision of a session without hidden nodes: counts, ends, parents, table."""
    reader = PieceReader(store.engine)
    for entry in session.history():
        at = entry.revision
        state = session.load(at, scope="full")
        assert state is not None
        nodes = list(state.nodes)
        manifest = objects.read_manifest(reader, entry.manifest)
        assert not state.healed
        assert state.head.leaf == state.leaf == manifest.leaf_id
        assert state.head.node_count == manifest.nodes == len(nodes)
        assert [node.seq for node in nodes] == sorted({node.seq for node in nodes})
        assert all(node.seq < manifest.next_seq for node in nodes)
        parents = {node.parent for node in nodes}
        ends = {node.id: node.digest for node in nodes if node.id not in parents}
        if manifest.tips.data == b"\xc0":
            assert set(ends) <= {manifest.leaf_id}
        else:
            [tips] = objects.load_encoded(reader, (manifest.tips,))
            assert {name: link.digest for name, link in tips.items()} == ends
            assert set(ends) != {manifest.leaf_id}
        by_id = {node.id: node for node in nodes}
        for node in nodes:
            path = [node]
            while path[-1].parent is not None:
                path.append(by_id[path[-1].parent])
            path.reverse()
            assert [one.id for one in session.nodes(leaf=node.id, at=at)] == [
                one.id for one in path
            ]
            assert node.depth == len(path)
            [header] = objects.read_headers(reader, [node.digest])
            users = [one for one in path if messages.is_user_message(one.payload)]
            assert header.users == len(users)
            if node.id == manifest.leaf_id:
                info = session.info() if at is None else None
                assert info is None or info.user_message_count == len(users)
                assert manifest.leaf == node.digest


def all_bytes(store: Store) -> bytes:
    """The bytes of all objects, end to end."""
    infos = store.engine.scan_objects(limit=10_000_000)
    found = store.engine.get_many([info.digest for info in infos])
    return b"\0".join([item.data for item in found if item is not None])


def exact(session: Session) -> Any:
    """All of a session, digests and places too."""
    history = list(session.history())
    return session.head(), history, [list(session.nodes("full", at=at)) for at in history]
