"""Folds: a note replaces an exact set of messages, in one commit; the messages stay.

The row of a fold records its messages. The messages that are shown follow from the state of the
session alone. ``prune`` hides folded messages permanently, and vacuum reclaims their space.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from casstore.errors import HeadConflictError, InvalidInputError
from casstore.records.log.data import NOTE_NAME, NOTE_ROLE, Fold, NewMessage, check_number
from casstore.records.log.messages import opened, payload_of
from casstore.records.log.state import LogState, runs_of
from casstore.records.log.tables import At, FoldRow, LeaseGiven, LogChange, LogTables
from casstore.records.schema import number_text
from casstore.session import tombstones
from casstore.session.arguments import check_count, check_flag, list_of
from casstore.session.attempts import ChangedMeanwhile, transaction
from casstore.session.data import NodeDraft
from casstore.session.records import Draft


def fold(
    tables: LogTables,
    session: str,
    messages: Iterable[int],
    note: Any,
    *,
    before_tokens: int | None,
    after_tokens: int | None,
    round_index: int | None,
    meta: dict[str, Any],
    keep_notes: bool,
    lease: LeaseGiven = None,
) -> Fold:
    """Replace messages by a note, at the position of the first of them."""
    given = list_of(messages, "messages")
    for number in given:
        check_number(number, "a message number")
    numbers = sorted(set(given))
    check_flag(keep_notes, "keep_notes")
    for count in (before_tokens, after_tokens):
        if count is not None:
            check_number(count, "before_tokens and after_tokens")

    def decide(at: At) -> tuple[LogChange, Fold]:
        state, number = at.state, at.last + 1
        view = state.view.folded(numbers, number)
        left = tuple(each for each in state.notes if view.shows(each))
        if left and not keep_notes:
            raise InvalidInputError(
                f"message {left[0]} is a note of an earlier fold: fold it as well and let the new "
                "note include its content, or pass keep_notes=True to show both"
            )
        if state.calling in numbers:
            raise InvalidInputError(
                f"message {state.calling} waits for the results of its tool calls: resume or abort "
                "them before it is folded"
            )
        runs, now_ms = tuple(runs_of(numbers)), tables.now_ms()
        counts = (before_tokens, after_tokens, round_index)
        made = Fold(state.folds + 1, number, runs, *counts, now_ms)
        note_meta = {
            **meta,
            "compacted_at_round": round_index,
            "from_seq": made.first,
            "to_seq": made.last,
            "original_tokens": before_tokens,
            "summary_tokens": after_tokens,
        }
        payload = payload_of(
            NewMessage(NOTE_ROLE, note, NOTE_NAME, round=round_index, meta=note_meta)
        )
        draft = Draft(tables.store)
        tables.folds.put(draft, FoldRow(at.session, *made))
        changed = state._replace(folds=made.number, view=view, notes=(*left, number))
        drafts = [NodeDraft(str(number), payload, time=now_ms)]
        return LogChange(changed, drafts, draft.as_write()), made

    return tables.change(session, decide, lease=lease)


def folds(tables: LogTables, session: str) -> Iterator[Fold]:
    """Every fold of a session, oldest first."""
    return folds_of(tables, session, tables.at(session).state)


def folds_of(tables: LogTables, session: str, state: LogState) -> Iterator[Fold]:
    """The folds that existed when the session was in this state."""
    rows = tables.folds.rows(session, before=number_text(state.folds + 1))
    return (row.public() for row in rows)


# --- pruning --------------------------------------------------------------------------------------


@transaction("session {session!r}")
def prune(tables: LogTables, session: str, keep_recent: int, older_than_ms: int | None) -> int:
    """Hide folded messages; returns how many.

    The ``keep_recent`` newest stay, and those younger than ``older_than_ms``. This cannot be
    undone. If another writer moves the head meanwhile, the messages are chosen again: after a
    rewind to before a fold, its messages are shown.
    """
    check_count(keep_recent, "keep_recent")
    if older_than_ms is not None:
        check_count(older_than_ms, "older_than_ms")
    at, going = _choose(tables, session, keep_recent, older_than_ms)
    if not going:
        return 0
    try:
        hidden = tombstones.hide(tables.runtime, session, going, at.revision.head.revision)
    except HeadConflictError as exc:
        raise ChangedMeanwhile from exc
    return len(hidden.hidden)


def _choose(
    tables: LogTables, session: str, keep_recent: int, older_than_ms: int | None
) -> tuple[At, list[str]]:
    """The revision, and the node ids of its folded messages to hide, oldest first."""
    at, nodes = opened(tables, session, payloads=False)
    limit_ms = None if older_than_ms is None else tables.now_ms() - older_than_ms
    shown = at.state.view.shown(at.last)
    folded: list[str] = []
    ascending = sorted(shown)
    start = 1
    for first, last in [*ascending, (at.last + 1, at.last + 1)]:
        for node in nodes.between(start, first - 1) if start < first else ():
            young = limit_ms is not None and (type(node.time) is not int or node.time > limit_ms)
            # An empty id: the message is too young to hide, and counts as one of ``keep_recent``.
            folded.append("" if young else node.id)
        start = last + 1
    kept = folded[: max(0, len(folded) - keep_recent)]
    return at, [node_id for node_id in kept if node_id]
