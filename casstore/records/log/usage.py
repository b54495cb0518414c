"""Token usage: a row for each round of each send, and a row with the totals of a session.

Recording a round again corrects its row and the totals. Rounds may be pruned; the totals stay.
"""

from __future__ import annotations

from collections.abc import Iterator

from casstore.errors import InvalidInputError, SessionNotFoundError
from casstore.records.log.data import RoundUsage, Tokens, UsageTotals, check_number
from casstore.records.log.tables import At, LogTables, TotalsRow, UsageRow
from casstore.records.schema import RowPlace, number_text
from casstore.session.arguments import check_count, check_kind
from casstore.session.attempts import ChangedMeanwhile, transaction
from casstore.session.records import Draft, find_records


def note(
    tables: LogTables, draft: Draft, at: At, send: int, round_index: int | None, tokens: Tokens
) -> None:
    """Add the tokens of a round, by default the current one, and the new totals to a draft."""
    number = at.state.round if round_index is None else round_index
    check_number(number, "round")
    check_number(send, "send")
    check_tokens(tokens)
    key = (at.session, number_text(send), number_text(number))
    places: list[RowPlace] = [(tables.usage, key), (tables.totals, (at.session,))]
    row, totals = find_records(tables.store, places)
    known = UsageTotals() if totals is None else tables.totals.decode(totals).public()
    before = Tokens() if row is None else tables.usage.decode(row).tokens
    draft.expect(tables.usage, key, row)
    draft.expect(tables.totals, (at.session,), totals)
    used = RoundUsage(send, number, tokens, tables.now_ms())
    tables.usage.put(draft, UsageRow.of(at.session, used))
    summed = [
        total + (new or 0) - (old or 0)
        for total, new, old in zip(known[1:], tokens[:3], before[:3], strict=True)
    ]
    tables.totals.put(draft, TotalsRow(at.session, known.rounds + (row is None), *summed))


@transaction("the usage of session {session!r}")
def record(
    tables: LogTables, session: str, tokens: Tokens, send: int | None, round_index: int | None
) -> None:
    """As ``note``, in a write of its own."""
    at = tables.load(session)
    row = tables.sessions.find(session)
    if row is None:
        raise SessionNotFoundError(session)
    draft = Draft(tables.store)
    # Closing deletes this row, and usage must not be recorded for a closed session.
    draft.expect(tables.sessions, (session,), row)
    note(tables, draft, at, at.state.send if send is None else send, round_index, tokens)
    draft.commit()


def check_tokens(tokens: Tokens) -> None:
    """Refuse invalid token counts."""
    check_kind(tokens, "tokens", Tokens)
    for count in tokens[:3]:
        if count is not None:
            check_number(count, "a field of tokens")
    if tokens.model is not None and type(tokens.model) is not str:
        raise InvalidInputError(f"model must be a str, got {type(tokens.model).__name__}")


def rounds(tables: LogTables, session: str) -> Iterator[RoundUsage]:
    """The tokens of each round, in order of sends and rounds."""
    tables.at(session)
    return (row.public() for row in tables.usage.rows(session))


def totals(tables: LogTables, session: str) -> UsageTotals:
    """The total tokens of a session."""
    tables.at(session)
    return _totals(tables, session)


def _totals(tables: LogTables, session: str) -> UsageTotals:
    row = tables.totals.get(session)
    return UsageTotals() if row is None else row.public()


@transaction("the usage of session {session!r}")
def both(tables: LogTables, session: str) -> tuple[list[RoundUsage], UsageTotals]:
    """The tokens of each round and in total, from the same moment."""
    # Recording usage changes the totals whenever it changes the sum of the rounds. So if the totals
    # are the same after the rounds were read, both agree.
    known = _totals(tables, session)
    used = [row.public() for row in tables.usage.rows(session)]
    tables.load(session)  # raises if the session was deleted
    if _totals(tables, session) != known:
        raise ChangedMeanwhile
    return used, known


def prune(tables: LogTables, session: str, keep_recent: int) -> int:
    """Remove all but the ``keep_recent`` newest rounds; returns how many. The totals stay."""
    check_count(keep_recent, "keep_recent")
    tables.at(session)
    rows = list(tables.usage.scan(session))
    old = rows[: len(rows) - keep_recent]
    draft = Draft(tables.store)
    for row in old:
        draft.delete(tables.usage, row.key)
    if old:
        draft.commit()
    return len(old)
