"""Tokens used: one row for each round of each send, and what they come to, apart.

    log.usage    session, send, round → [prompt, completion, total, model, written at]
    log.totals   session → [rounds, prompt, completion, total]

A round that is noted again is corrected, and so are the totals. Rounds may be pruned; the
totals stay.
"""

from __future__ import annotations

from collections.abc import Iterator

from casstore.errors import (
    InvalidInputError,
    SessionNotFoundError,
)
from casstore.records.log.data import RoundUsage, Tokens, UsageTotals
from casstore.records.log.ground import At, Ground, digits
from casstore.records.log.messages import check_number
from casstore.session.arguments import check_count
from casstore.session.attempts import Attempts, transact
from casstore.session.records import Draft, Record, Table, find_records


def note(
    ground: Ground, draft: Draft, at: At, send: int, round_index: int | None, tokens: Tokens
) -> None:
    """Let a write note down what a round has used, and add it to the totals."""
    number = at.state.round if round_index is None else round_index
    check_number(number, "a round")
    check_number(send, "a send")
    check_tokens(tokens)
    key = (at.session, digits(send), digits(number))
    places: list[tuple[Table, tuple[str, ...]]] = [
        (ground.usage, key),
        (ground.totals, (at.session,)),
    ]
    row, totals = find_records(ground.store, places)
    known = UsageTotals() if totals is None else UsageTotals(*totals.value)
    before = Tokens() if row is None else Tokens(*row.value[:4])
    draft.expect(ground.usage, key, row)
    draft.expect(ground.totals, (at.session,), totals)
    draft.put(ground.usage, key, [*tokens, ground.now_ms()])
    summed = [
        total + (new or 0) - (old or 0)
        for total, new, old in zip(known[1:], tokens[:3], before[:3], strict=True)
    ]
    draft.put(ground.totals, (at.session,), [known.rounds + (row is None), *summed])


def record(
    ground: Ground, session: str, tokens: Tokens, send: int | None, round_index: int | None
) -> None:
    """Note down what a round has used, by itself."""

    def attempt() -> None:
        at = ground.at(session)
        row = ground.sessions.find(session)
        if row is None:
            raise SessionNotFoundError(session)
        draft = Draft(ground.store)
        # Closing takes the row away, and nothing may be noted of a session that is closed.
        draft.expect(ground.sessions, (session,), row)
        note(ground, draft, at, at.state.send if send is None else send, round_index, tokens)
        draft.commit()

    transact(f"the usage of session {session!r}", attempt)


def check_tokens(tokens: Tokens) -> None:
    """Refuse what no round has used."""
    if not isinstance(tokens, Tokens):
        raise InvalidInputError(f"usage is given as Tokens, not {type(tokens).__name__}")
    for count in tokens[:3]:
        if count is not None:
            check_number(count, "a number of tokens")
    if tokens.model is not None and type(tokens.model) is not str:
        raise InvalidInputError(f"a model is a str, not {type(tokens.model).__name__}")


def rounds(ground: Ground, session: str) -> Iterator[RoundUsage]:
    """What each round has used, in order of sends and rounds."""
    ground.at(session)
    return ground.usage.read_each(ground.usage.scan(session), decode)


def decode(row: Record) -> RoundUsage:
    """What a round has used, as its row has it."""
    *tokens, created_at_ms = row.value
    return RoundUsage(int(row.key[1]), int(row.key[2]), Tokens(*tokens), created_at_ms)


def totals(ground: Ground, session: str) -> UsageTotals:
    """What a session has used in all."""
    ground.at(session)
    row = ground.totals.find(session)
    return UsageTotals() if row is None else UsageTotals(*row.value)


def both(ground: Ground, session: str) -> tuple[list[RoundUsage], UsageTotals]:
    """What each round has used, and what a session has used in all, of one moment."""
    attempts = Attempts(f"the usage of session {session!r}")
    while True:
        attempts.begin()
        # Whatever is noted changes the totals, or nothing of what the rounds come to.
        known = totals(ground, session)
        used = list(rounds(ground, session))
        if totals(ground, session) == known:
            return used, known


def prune(ground: Ground, session: str, keep_recent: int) -> int:
    """Remove all rounds but the newest; how many went. The totals stay."""
    check_count(keep_recent, "how many rounds to keep")
    ground.at(session)
    rows = list(ground.usage.scan(session))
    old = rows[: len(rows) - keep_recent]
    draft = Draft(ground.store)
    for row in old:
        draft.delete(ground.usage, row.key)
    if old:
        draft.commit()
    return len(old)
