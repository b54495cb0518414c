"""The timeline of a session: a window of the nodes on its path, grouped by turns.

A turn begins with a message of the user. Every node stores the number of such messages on its
path, so a window numbers its turns without reading earlier nodes. A window has at most ``PAGE``
nodes, and fewer if they are long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any, Final, NamedTuple

from casstore.cli.payloads import (
    CALL,
    JSON,
    RESULT,
    TEXT,
    Block,
    ParsedPayload,
    as_json,
    read_message,
    without_bytes,
)
from casstore.objects import graph
from casstore.objects.stored import Stored
from casstore.session.attempts import read_again
from casstore.ui.views.commits import Created, TokenCounts, commits_of, tokens_of
from casstore.ui.views.viewed import Viewed, ViewedPlace, turns_before

#: The most nodes in a window.
PAGE: Final = 80
#: The most bytes that the texts of a window take, escaped.
WEIGHT_BYTES: Final = 110_000
# The most characters that are read of a payload, and that are shown of each text in it.
_PAYLOAD_CHARACTERS: Final = 9_000
TEXT_CHARACTERS: Final = 1_500
_WHOLE_CHARACTERS: Final = 8 << 20
_MAX_BLOCKS: Final = 24
# The size of a row of the page without its texts, and of a block: both count against the limit.
_ROW_BYTES: Final = 650
_BLOCK_BYTES: Final = 160
_EVENTS: Final = 40


class TimelineEvent(NamedTuple):
    """A revision between two nodes that created none: a rewind, a fork, a change of the state."""

    kind: str
    revision: int
    text: str
    session: str
    at_ms: int
    labels: tuple[str, ...]
    #: Another session that the event names.
    other: str | None = None


class CommitMark(NamedTuple):
    """The commit that created a node and those after it."""

    session: str
    revision: int
    turn: str | None
    labels: tuple[str, ...]
    at_ms: int
    tokens: TokenCounts | None
    operation: str
    other: str | None


class TimelineRow(NamedTuple):
    """A node on the path."""

    #: Its position on the path, from 0 on.
    at: int
    id: str
    digest: str
    depth: int
    is_hidden: bool
    role: str
    blocks: tuple[Block, ...]
    is_compaction: bool
    usage: str
    time: str
    #: The number of its turn; it begins one if ``begins_turn``.
    turn: int
    begins_turn: bool
    #: The commit that created it; None if the row before shows it, or if it is not known.
    commit: CommitMark | None
    events: tuple[TimelineEvent, ...]
    forks: tuple[str, ...]
    #: Whether the shown revision created it.
    is_new: bool
    is_cut: bool


class Timeline(NamedTuple):
    """A window of a path."""

    rows: tuple[TimelineRow, ...]
    first: int
    stop: int
    total: int
    #: Events after the last node of the path.
    events: tuple[TimelineEvent, ...]


def timeline(
    viewed: Viewed,
    place: ViewedPlace,
    *,
    before: int | None = None,
    start: int | None = None,
    forks: Mapping[str, Sequence[str]] | None = None,
    page: int = PAGE,
    whole: Callable[[Any], Any] | None = None,
) -> Timeline:
    """The nodes below ``before``, or from ``start`` on; by default the last ones.

    With ``whole``, payloads are read whole, for a file, and ``whole`` is called with each: it
    returns what is shown of it.
    """
    return read_again(
        lambda: _timeline(viewed, place, before, start, forks or {}, page, whole=whole)
    )


def _timeline(
    viewed: Viewed,
    place: ViewedPlace,
    before: int | None,
    start: int | None,
    forks: Mapping[str, Sequence[str]],
    page: int,
    *,
    whole: Callable[[Any], Any] | None,
) -> Timeline:
    total = len(place.path)
    if start is not None:
        first = min(max(start, 0), total)
        stop = min(first + page, total)
    else:
        stop = total if before is None else min(max(before, 0), total)
        first = max(0, stop - page)
    positions = place.path[first:stop]
    digests = place.nodes.digests(list(positions))
    nodes = graph.stored_nodes(viewed.reader(), digests)
    drafts = [
        _draft(node, digest, first + at, place, whole=whole)
        for at, (node, digest) in enumerate(zip(nodes, digests, strict=True))
    ]
    if whole is None:
        kept = _fitting(drafts, from_end=start is None)
        if start is None:
            first += len(drafts) - len(kept)
        else:
            stop = first + len(kept)
        drafts = kept
    drafts = _named_results(drafts)
    turns = turns_before(viewed, place, first)
    rows, events = _joined(viewed, place, drafts, turns, forks, is_end=stop == total)
    return Timeline(tuple(rows), first, stop, total, tuple(events))


class _Draft(NamedTuple):
    at: int
    header: Any
    digest: bytes
    is_hidden: bool
    message: ParsedPayload
    is_cut: bool
    weight: int


def _draft(
    node: Any, digest: bytes, at: int, place: ViewedPlace, *, whole: Callable[[Any], Any] | None
) -> _Draft:
    is_hidden = digest in place.hidden
    message, is_cut = ParsedPayload("", ()), False
    if not is_hidden:
        if whole is not None:
            message = _whole_message(node.payload, whole)
        else:
            message, is_cut = brief_message(node.payload)
    weight = _ROW_BYTES + sum(
        [_BLOCK_BYTES + len(escape(one.text).encode(errors="replace")) for one in message.blocks]
    )
    return _Draft(at, node.header, digest, is_hidden, message, is_cut, weight)


def _whole_message(payload: Any, whole: Callable[[Any], Any]) -> ParsedPayload:
    """A payload without anything cut off: one that is too long is left out."""
    value = without_bytes(begun(payload, _WHOLE_CHARACTERS, _WHOLE_CHARACTERS))
    if len(as_json(value)) >= _WHOLE_CHARACTERS:
        return ParsedPayload("", (Block(TEXT, "(too long for this file)"),))
    return read_message(whole(value))


def begun(payload: Any, size: int, text_size: int) -> Any:
    """The beginning of a payload as a plain value; see ``Stored.beginning``."""
    return payload.beginning(size, text_size) if isinstance(payload, Stored) else payload


def brief_message(payload: Any) -> tuple[ParsedPayload, bool]:
    """A payload as a row shows it, and whether a part of it is left out."""
    message = read_message(begun(payload, _PAYLOAD_CHARACTERS, TEXT_CHARACTERS + 1))
    is_cut = len(message.blocks) > _MAX_BLOCKS
    blocks: list[Block] = []
    left = _PAYLOAD_CHARACTERS
    for block in message.blocks[:_MAX_BLOCKS]:
        room = min(TEXT_CHARACTERS, max(left, 0))
        if len(block.text) > room:
            is_cut = True
            block = block._replace(text=block.text[:room] + "…")
        left -= len(block.text)
        blocks.append(block)
    read = sum([len(block.text) for block in blocks])
    # JSON that was read only in part has the full length that was asked for.
    is_cut = is_cut or (read * 2 > _PAYLOAD_CHARACTERS and blocks[-1].kind == JSON)
    return message._replace(blocks=tuple(blocks)), is_cut


def _named_results(drafts: list[_Draft]) -> list[_Draft]:
    """Results with the names of their tools, as far as the calls are in the window."""
    names = {
        block.call: block.name
        for draft in drafts
        for block in draft.message.blocks
        if block.kind == CALL and block.call
    }
    found: list[_Draft] = []
    for draft in drafts:
        blocks = [
            block._replace(name=names[block.call])
            if block.kind == RESULT and block.call in names
            else block
            for block in draft.message.blocks
        ]
        found.append(draft._replace(message=draft.message._replace(blocks=tuple(blocks))))
    return found


def _fitting(drafts: list[_Draft], *, from_end: bool) -> list[_Draft]:
    """As many rows as fit, at least one."""
    kept: list[_Draft] = []
    left = WEIGHT_BYTES
    for draft in reversed(drafts) if from_end else drafts:
        if kept and draft.weight > left:
            break
        kept.append(draft)
        left -= draft.weight
    return kept[::-1] if from_end else kept


def _joined(
    viewed: Viewed,
    place: ViewedPlace,
    drafts: list[_Draft],
    users: int,
    forks: Mapping[str, Sequence[str]],
    *,
    is_end: bool,
) -> tuple[list[TimelineRow], list[TimelineEvent]]:
    """Rows with the commits and events between them."""
    number = drafts[0].header.seq if drafts else 0
    walked = commits_of(viewed, place).down_to(number)
    created = [one for one in walked if one.stop > number or (one.first >= number)][::-1]
    rows: list[TimelineRow] = []
    known: Created | None = None
    waiting = iter(created)
    following = next(waiting, None)
    for draft in drafts:
        seq = draft.header.seq
        events: list[TimelineEvent] = []
        commit: Created | None = None
        while following is not None and following.stop <= seq:
            if following.first == following.stop and (rows or following.first >= number):
                events.append(_event(following))
            following = next(waiting, None)
        if following is not None and following.first <= seq:
            commit = following
        mark = None
        if commit is not None and commit is not known:
            mark = _mark(viewed, commit)
        known = commit
        begins = draft.header.users > users
        users = draft.header.users
        message = draft.message
        rows.append(
            TimelineRow(
                at=draft.at,
                id=draft.header.id,
                digest=draft.digest.hex(),
                depth=draft.header.depth,
                is_hidden=draft.is_hidden,
                role=message.role,
                blocks=message.blocks,
                is_compaction=message.is_compaction,
                usage=message.usage,
                time=node_time(draft.header.time),
                turn=draft.header.users,
                begins_turn=begins,
                commit=mark,
                events=_collapsed(events),
                forks=tuple(forks.get(draft.header.id, ())),
                is_new=commit is not None
                and commit.entry.session == place.session
                and commit.entry.revision == place.revision,
                is_cut=draft.is_cut,
            )
        )
    if not is_end:
        return rows, []
    rest: list[Created] = [] if following is None else [following, *waiting]
    return rows, list(_collapsed([_event(one) for one in rest if one.first == one.stop]))


def _mark(viewed: Viewed, created: Created) -> CommitMark:
    entry = created.entry
    other = entry.adopted or created.origin
    return CommitMark(
        entry.session, entry.revision, entry.turn, entry.labels, entry.committed_at_ms,
        tokens_of(viewed, created), entry.operation, None if other is None else other.session,
    )  # fmt: skip


def _event(created: Created) -> TimelineEvent:
    entry = created.entry
    text, other = "changed the state", None
    if entry.operation == "rewind":
        text = f"rewound to revision {entry.rewound_to}"
    elif entry.operation == "fork" and created.origin is not None:
        origin = created.origin
        text, other = f"forked from revision {origin.revision} of", origin.session
    elif entry.operation == "adopt" and entry.adopted is not None:
        text, other = f"adopted revision {entry.adopted.revision} of", entry.adopted.session
    return TimelineEvent(
        entry.operation, entry.revision, text, entry.session, entry.committed_at_ms, entry.labels,
        other,
    )  # fmt: skip


def _collapsed(events: Sequence[TimelineEvent]) -> tuple[TimelineEvent, ...]:
    """The last events, in order; consecutive changes of the state are joined into one."""
    found: list[TimelineEvent] = []
    first = 0
    for event in events:
        last = found[-1] if found else None
        if (
            last is not None
            and (last.kind, event.kind) == ("commit", "commit")
            and not last.labels
            and not event.labels
        ):
            text = f"changed the state (revisions {first}–{event.revision})"
            found[-1] = event._replace(text=text)
        else:
            first = event.revision
            found.append(event)
    return tuple(found[-_EVENTS:])


def node_time(time: Any) -> str:
    """The time that the runtime gave a node, as it is shown."""
    if time is None:
        return ""
    if isinstance(time, str):
        return time[:19].replace("T", " ") if len(time) >= 19 and time[10:11] == "T" else time[:40]
    seconds = time / 1000 if time > 1e11 else time
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return str(time)
