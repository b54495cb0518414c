"""A new session from any place of another: one row that shares everything.

The fork's head names the same manifest, and its lineage goes on from the source's, so
nothing is copied and nothing ties the two together afterwards: deleting the source takes
its rows away, never what the fork reaches.
"""

from __future__ import annotations

from collections.abc import Sequence

from casstore.engine.protocol import Condition, RowChange, RowIs, RowKey, Write
from casstore.errors import (
    ConditionFailedError,
    NodeNotFoundError,
    SessionDeletedError,
    SessionExistsError,
    SessionNotFoundError,
)
from casstore.format.digest import Digest
from casstore.format.manifest import NOTHING
from casstore.objects import graph as objects
from casstore.objects.pieces import PieceWriter
from casstore.session import heads, keys, lineage, marks, subjects
from casstore.session.attempts import attempts, settled
from casstore.session.data import Head, Origin
from casstore.session.heads import Base, HeadRow, head_key, put_head
from casstore.session.loading import At, head_of
from casstore.session.picking import find_first_user
from casstore.session.state import Runtime, State, meta_key, tombstone_key


def fork(
    runtime: Runtime,
    source: str,
    target: str,
    at: At,
    node: str | None,
    about: Sequence[str] | None = None,
) -> Head:
    """Make ``target`` a session that stands where ``source`` does, or did.

    It is about whom ``source`` is about, or about those in ``about``.
    """
    told = None if about is None else subjects.checked(about)
    return settled(lambda: _fork(runtime, source, target, at, node, told))


def _fork(
    runtime: Runtime,
    source: str,
    target: str,
    at: At,
    node: str | None,
    told: tuple[str, ...] | None,
) -> Head:
    key, target_key = keys.session_key(source), keys.session_key(target)
    for _ in attempts(f"session {source!r}"):
        row, about_row = runtime.rows(source, [keys.subjects(key)])
        if row is None:
            raise SessionNotFoundError(source)
        current = runtime.state_of(key, row)
        state = current if at is None else runtime.at(source, at)
        writer = PieceWriter()
        base, digest, stands = _base(runtime, source, current, state, node, writer)
        head = HeadRow(
            revision=state.head.revision,
            created_at_ms=0,
            committed_at_ms=0,
            manifest=digest,
            lineage=lineage.new_lineage(),
            base=base,
            hidden=current.head.hidden,
            operation=heads.FORK,
            turn=None,
            rewound_to=None,
            origin=Origin(source, state.head.revision, node),
            long_id=target if keys.is_cut(target) else None,
        )
        put = put_head(target_key, head, new=True)
        conditions: list[Condition] = [
            RowIs(*head_key(target_key), None),
            RowIs(*meta_key(target_key), None),
            RowIs(*tombstone_key(target_key), None),
            # What the fork shares must still be reachable when its row is written, and not by
            # a row that a deleted session has yet to lose.
            RowIs(*_where(key, current, state), state.row),
            RowIs(*tombstone_key(key), None),
        ]
        if state.row != current.row and head.hidden is not None:
            # The hidden nodes are those of the source's head, whatever revision it shares.
            conditions.append(RowIs(*head_key(key), current.row))
        changes: list[RowChange] = [put]
        if told is None:
            conditions.append(RowIs(*keys.subjects(key), about_row))
        taken = subjects.decode(about_row) if told is None else told
        if taken:
            changes += subjects.changes(target, target_key, (), taken)
        if state.row != current.row:
            changes.append(marks.put_mark(key, state.head.revision))
        try:
            done = runtime.engine.write(Write(writer.objects, conditions, changes))
        except ConditionFailedError as exc:
            if exc.index < 2:
                raise SessionExistsError(target) from exc
            if exc.index == 2:
                raise SessionDeletedError(target) from exc
            continue
        row, head = heads.written_at(head, put, done.now_ms)
        made = stands._replace(row=row, head=head)
        # Who forks goes on from there, and need not read what is at hand.
        runtime.remember(target_key, made)
        return head_of(target, made)
    raise AssertionError("attempts raises at its end")


def _where(key: bytes, current: State, state: State) -> RowKey:
    if state.row == current.row:
        return head_key(key)
    return RowKey("history", keys.history(key, state.head.revision))


def _base(
    runtime: Runtime,
    source: str,
    current: State,
    state: State,
    node: str | None,
    writer: PieceWriter,
) -> tuple[Base | None, bytes, State]:
    """What the fork's lineage goes on from, its manifest, and where it stands, but for its head.

    Its own lineage has no page, and its lease has no row.
    """
    if node is None:
        base = lineage.successor(state.head, state.manifest.next_seq)
        return base, state.head.manifest, state.on_a_new_lineage()._replace(lease=None)
    chain = runtime.chain(state)
    hidden = runtime.hidden(current.head)
    place = chain.find([keys.part(node, "a node id")])[0]
    if place is None or place.digest in hidden:
        raise NodeNotFoundError(source, node)
    header = objects.read_headers(runtime.reader(), [place.digest])[0]
    owner = next(one for one in chain.segments if one.start <= place.seq < one.stop)
    # If the path has as many nodes as there are numbers, it is everything below the limit.
    path = None if header.depth == header.seq + 1 else header.seq
    manifest = state.manifest._replace(
        leaf_id=node,
        leaf=place.digest,
        first_user=find_first_user(runtime, chain, header),
        nodes=header.depth,
        next_seq=place.seq + 1,
        tips=NOTHING,
    )
    digest = objects.write_manifest(manifest, writer.emit)
    base = Base(owner.lineage, place.seq + 1, path)
    older = tuple([one.lineage for one in chain.segments if one.start <= place.seq])
    return base, Digest(digest), State(state.row, state.head, manifest, header, None, older)
