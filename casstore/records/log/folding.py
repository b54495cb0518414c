"""Messages folded into a note: the exact set, in one commit, and the originals stay.

    log.folds   session, number → [note, [first, last …], before, after, round, written at]

The row is for whoever wants to know what became of a message; what is shown follows from the
state of the session alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from casstore.errors import InvalidInputError
from casstore.records.log.data import NOTE_NAME, NOTE_ROLE, Fold, NewMessage
from casstore.records.log.ground import At, Change, Ground, LeaseGiven, digits
from casstore.records.log.messages import check_number, payload_of
from casstore.records.log.state import LogState
from casstore.records.log.view import runs_of
from casstore.session.arguments import check_flag, list_of
from casstore.session.data import UNFENCED, NodeDraft
from casstore.session.records import Draft, Record


def fold(
    ground: Ground,
    session: str,
    messages: Iterable[int],
    note: Any,
    *,
    before_tokens: int | None,
    after_tokens: int | None,
    round_index: int | None,
    meta: dict[str, Any],
    keep_notes: bool,
    lease: LeaseGiven = UNFENCED,
) -> Fold:
    """Let a note stand for messages, where the first of them stands."""
    given = list_of(messages, "messages")
    for number in given:
        check_number(number, "a message")
    numbers = sorted(set(given))
    check_flag(keep_notes, "whether notes are kept")
    for count in (before_tokens, after_tokens):
        if count is not None:
            check_number(count, "a number of tokens")

    def decide(at: At) -> tuple[Change, Fold]:
        return _folded(ground, at, numbers, note, counts, round_index, meta, keep_notes)

    counts = (before_tokens, after_tokens)
    return ground.change(session, decide, lease=lease)


def _folded(
    ground: Ground,
    at: At,
    numbers: list[int],
    note: Any,
    counts: tuple[int | None, int | None],
    round_index: int | None,
    meta: dict[str, Any],
    keep_notes: bool,
) -> tuple[Change, Fold]:
    state, number = at.state, at.last + 1
    view = state.view.folded(numbers, number)
    left = tuple(each for each in state.notes if view.shows(each))
    if left and not keep_notes:
        raise InvalidInputError(
            f"message {left[0]} is a note, and a session has one: fold it as well, and let the "
            "new note tell what it told"
        )
    if state.calling in numbers:
        raise InvalidInputError(
            f"message {state.calling} waits for the results of its tool calls: resume or abort "
            "them before it is folded"
        )
    now_ms = ground.now_ms()
    made = Fold(state.folds + 1, number, tuple(runs_of(numbers)), *counts, round_index, now_ms)
    told = {
        **meta,
        "compacted_at_round": round_index,
        "from_seq": made.first,
        "to_seq": made.last,
        "original_tokens": counts[0],
        "summary_tokens": counts[1],
    }
    payload = payload_of(NewMessage(NOTE_ROLE, note, NOTE_NAME, round=round_index, meta=told))
    draft = Draft(ground.store)
    runs = [each for run in made.runs for each in run]
    key = (at.session, digits(made.number))
    draft.put(ground.folds, key, [number, runs, *counts, round_index, now_ms])
    changed = state._replace(folds=made.number, view=view, notes=(*left, number))
    drafts = [NodeDraft(str(number), payload, time=now_ms)]
    return Change(changed, drafts, draft.as_write()), made


def folds(ground: Ground, session: str) -> Iterator[Fold]:
    """Every fold of a session, oldest first."""
    return folds_of(ground, session, ground.at(session).state)


def folds_of(ground: Ground, session: str, state: LogState) -> Iterator[Fold]:
    """Those that there were when the session was in this state."""
    rows = ground.folds.scan(session, before=digits(state.folds + 1))
    return ground.folds.read_each(rows, decode)


def decode(row: Record) -> Fold:
    """A fold as its row has it."""
    note, flat, *rest = row.value
    runs = tuple(zip(flat[::2], flat[1::2], strict=True))
    return Fold(int(row.key[1]), note, runs, *rest)
