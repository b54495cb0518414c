"""The tools that read: sessions, nodes, state, history and comparisons, in bounded pages.

Every function returns plain data. No function takes a digest or a path to a file, so an agent
reaches exactly what the sessions of the store show. Nodes that a tombstone hides are left out.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import islice
from typing import Any, Final

from casstore.errors import (
    InvalidInputError,
    NodeNotFoundError,
    PathNotFoundError,
    SessionNotFoundError,
    render_time,
)
from casstore.format.canonical import Link
from casstore.format.digest import Digest
from casstore.mcp.values import MAX_CHARACTERS, begin, page
from casstore.objects import graph
from casstore.objects.pieces import PieceReader
from casstore.objects.stored import Stored, open_stored
from casstore.session.attempts import read_again
from casstore.session.data import Entry, SessionInfo
from casstore.session.found import Hit
from casstore.session.session import Session
from casstore.session.state import runtime_of
from casstore.store import Store

#: The most entries of a list in one answer.
MAX_ROWS: Final = 100
_NAME_CHARACTERS: Final = 300
_LEAST_CHARACTERS: Final = 100

Document = dict[str, Any]
At = int | str | None


def list_sessions(store: Store, prefix: str, after: str | None, limit: int) -> Document:
    """Sessions in order of id, after ``after``."""
    count = _rows(limit)
    found = list(islice(store.sessions(after=after, limit=count + 1, prefix=prefix), count + 1))
    return {
        "sessions": [_session(info) for info in found[:count]],
        "next_after": found[count - 1].meta.session if len(found) > count else None,
    }


def _session(info: SessionInfo) -> Document:
    first = info.first_user_message
    return {
        "session": info.meta.session,
        "name": info.meta.name[:_NAME_CHARACTERS],
        "forked_from": info.meta.parent,
        "revision": None if info.head is None else info.head.revision,
        "committed_at": None if info.head is None else render_time(info.head.committed_at_ms),
        "user_messages": info.user_message_count,
        "first_user_message": None if first is None else first[:_NAME_CHARACTERS],
    }


def read_session(
    store: Store, session: str, at: At, start: int, limit: int, characters: int
) -> Document:
    """The nodes of a session's path from position ``start``; a negative one counts from the end."""
    found = _known(store, session)
    count, each = _rows(limit), _size(characters)
    # Resolved once, so that everything below is read from the same revision.
    revision = found.entry(at)
    nodes = found.nodes(at=revision, payloads=False)
    first = max(0, len(nodes) + start) if start < 0 else start
    chosen = list(nodes[first : first + count])
    shown = _bounded_nodes(
        store, [(node.id, node.parent, node.digest) for node in chosen], each, first
    )
    stop = first + len(shown)
    return {
        "session": session,
        "revision": revision.revision,
        "total_nodes": len(nodes),
        "nodes": shown,
        "next_start": stop if stop < len(nodes) else None,
    }


def read_node(
    store: Store,
    session: str,
    node: str,
    at: At,
    path: Sequence[str | int],
    offset: int,
    characters: int,
) -> Document:
    """The payload of a node, or the part at ``path``, from ``offset`` on."""
    found = _known(store, session).node(node, at=at)
    if found is None:
        raise NodeNotFoundError(session, node)
    [stored] = graph.stored_nodes(PieceReader(store.engine), [found.digest])
    document = {"session": session, "node": node, "parent": found.parent}
    return document | _part(stored.payload, path, offset, characters)


def read_state(
    store: Store,
    session: str,
    at: At,
    component: str | None,
    path: Sequence[str | int],
    offset: int,
    characters: int,
) -> Document:
    """All components of a session, shortened, or a part of the one named ``component``."""
    found = _known(store, session)
    revision = found.entry(at)
    components = dict(_components(store, found, revision))
    document: Document = {"session": session, "revision": revision.revision}
    if component is not None:
        if component not in components:
            raise InvalidInputError(
                f"session {session!r} has no component {component!r} at revision "
                f"{revision.revision}; it has {', '.join(components) or 'none'}"
            )
        document["component"] = component
        return document | _part(components[component], path, offset, characters)
    stop = _check_offset(offset) + MAX_ROWS
    each = max(_LEAST_CHARACTERS, _size(characters) // max(len(components), 1))
    chosen = islice(components.items(), offset, stop)
    begun = {name: begin(value, each) for name, value in chosen}
    document["components"] = {name: one.value for name, one in begun.items()}
    document["incomplete"] = [name for name, one in begun.items() if one.is_cut]
    document["next_offset"] = stop if stop < len(components) else None
    return document


def list_revisions(store: Store, session: str, before: int | None, limit: int) -> Document:
    """Revisions of a session with numbers below ``before``, newest first."""
    count = _rows(limit)
    found = list(_known(store, session).history(before=before, limit=count + 1))
    return {
        "session": session,
        "revisions": [_revision(entry) for entry in found[:count]],
        "next_before": found[count - 1].revision if len(found) > count else None,
    }


def _revision(entry: Entry) -> Document:
    return {
        "revision": entry.revision,
        "operation": entry.operation,
        "committed_at": render_time(entry.committed_at_ms),
        "turn": entry.turn,
        "labels": list(entry.labels),
    }


def compare_sessions(
    store: Store,
    old: tuple[str, At],
    new: tuple[str, At],
    start: int,
    limit: int,
    characters: int,
) -> Document:
    """What turns one session or revision into another: nodes and components."""
    if start < 0:
        raise InvalidInputError(f"start must be 0 or more, got {start}")
    count, each = _rows(limit), _size(characters)
    found = store.compare(old, new)
    hidden = [_hidden(store, session) for session in {old[0], new[0]}]

    def shown(nodes: Sequence[Any]) -> tuple[list[Document], int, int]:
        """The nodes of this page, how many of its entries fit the answer, the number of all."""
        kept = [node for node in nodes if not any(node.digest in each for each in hidden)]
        part = [(node.id, node.parent, node.digest) for node in kept[start : start + count]]
        made = _bounded_nodes(store, part, each, None)
        return made, count if len(made) == len(part) else len(made), len(kept)

    details = [one for several in found.details.values() for one in several]
    plain = [one for one in found.changes if one.path[0] not in found.details]
    changes: list[Any] = [*[one.summary for one in details], *plain]
    added, added_fit, added_total = shown(found.added)
    dropped, dropped_fit, dropped_total = shown(found.dropped)
    fit = min(added_fit, dropped_fit)
    stop = start + fit
    more = stop < max(added_total, dropped_total, len(changes))
    return {
        "equal": found.equal,
        "last_common_node": None if found.ancestor is None else found.ancestor.id,
        "added": added[:fit],
        "added_total": added_total,
        "dropped": dropped[:fit],
        "dropped_total": dropped_total,
        "changes": [str(one)[:each] for one in changes[start:stop]],
        "changes_total": len(changes),
        "next_start": stop if more else None,
    }


def search_sessions(store: Store, words: str, sessions: Sequence[str], limit: int) -> Document:
    """The texts with all words, best first, each with its session and node or component."""
    hits = store.search(words, sessions=list(sessions) or None, limit=_rows(limit))
    return {"hits": [_hit(hit) for hit in hits]}


def _hit(hit: Hit) -> Document:
    return {
        "kind": hit.kind,
        "session": hit.session,
        "revision": hit.revision,
        "node": hit.node,
        "component": hit.component,
        "entry": hit.entry,
        "position": hit.position,
        "snippet": hit.snippet[:_NAME_CHARACTERS],
        "sessions": list(hit.sessions),
    }


# --- shared by the tools ----------------------------------------------------------------


def _known(store: Store, session: str) -> Session:
    """A session that has a revision; SessionNotFoundError if it has none."""
    found = store.session(session)
    if found.head() is None:
        raise SessionNotFoundError(session)
    return found


def _rows(limit: int) -> int:
    if not 1 <= limit <= MAX_ROWS:
        raise InvalidInputError(f"limit must be from 1 to {MAX_ROWS}, got {limit}")
    return limit


def _size(characters: int) -> int:
    if not _LEAST_CHARACTERS <= characters <= MAX_CHARACTERS:
        raise InvalidInputError(
            f"characters must be from {_LEAST_CHARACTERS} to {MAX_CHARACTERS:,}, got {characters}"
        )
    return characters


def _check_offset(offset: int) -> int:
    if offset < 0:
        raise InvalidInputError(f"offset must be 0 or more, got {offset}")
    return offset


def _hidden(store: Store, session: str) -> Container[bytes]:
    runtime = runtime_of(store)
    state = read_again(lambda: runtime.find(session))
    return () if state is None else runtime.hidden(state.head)


def _bounded_nodes(
    store: Store,
    nodes: Sequence[tuple[str, str | None, Digest]],
    characters: int,
    first: int | None,
) -> list[Document]:
    """Nodes with payloads cut to ``characters``, until the answer is full; at least one.

    ``first`` is the position of the first node, None to leave positions out.
    """
    found: list[Document] = []
    left = MAX_CHARACTERS
    stored = graph.stored_nodes(PieceReader(store.engine), [digest for _, _, digest in nodes])
    for at, ((node_id, parent, _), node) in enumerate(zip(nodes, stored, strict=True)):
        begun = begin(node.payload, characters)
        left -= begun.characters
        if left < 0 and found:
            break
        document: Document = {"node": node_id, "parent": parent}
        if first is not None:
            document["position"] = first + at
        found.append(document | {"payload": begun.value, "incomplete": begun.is_cut})
    return found


def _part(
    value: Stored | None, path: Sequence[str | int], offset: int, characters: int
) -> Document:
    _check_offset(offset)
    if path:
        if value is None:
            raise PathNotFoundError(path[:1])
        value = value.at(path)
    shown = page(value, offset, _size(characters))
    return {
        "path": list(path),
        "value": shown.value,
        "incomplete": shown.is_cut,
        "next_offset": shown.next_offset,
    }


def _components(
    store: Store, session: Session, revision: Entry
) -> Iterator[tuple[str, Stored | None]]:
    reader = PieceReader(store.engine)
    fields = session.checkpoint(revision)._asdict()
    for name, value in (fields | dict(fields.pop("others") or {})).items():
        if value is None or (name == "frames" and not value):
            continue
        if isinstance(value, Link):
            [item] = reader.follow((value.digest,))
            yield name, open_stored(reader, value.digest, item)
        else:
            yield name, Stored(reader, value)
