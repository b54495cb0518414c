"""Exports a session as a sequence of plain entries, and imports such a sequence.

    {"log": 1, "session": {…}, "state": {…}}
    {"message": [number, payload, created at]}           in order of arrival
    {"fold": [number, note, [first, last …], before, after, round, created at]}
    {"usage": [send, round, prompt, completion, total, model, created at]}
    {"totals": [rounds, prompt, completion, total]}
    {"end": how many entries came before}

Entries are values; whether they can be written as JSON depends on the messages. An imported session
is a root: its parent is not exported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from casstore.errors import FormatError, InvalidInputError
from casstore.records.log import folding, tree, usage
from casstore.records.log.data import ROOT, Fold, RoundUsage, Tokens, UsageTotals, check_number
from casstore.records.log.intake import Arrived, Intake, Rest
from casstore.records.log.messages import Numbered, check_payload, opened
from casstore.records.log.state import LogState, pack, unpack
from casstore.records.log.tables import LogSessionRow, LogTables
from casstore.session.attempts import read_again
from casstore.session.records import Draft

VERSION: Final = 1
# Messages per commit of an import; a shorter session is imported in one commit.
_BATCH: Final = 1000
_CARRIED: Final = (
    "created_at_ms", "updated_at_ms", "status", "lifecycle", "spawn_call", "prompt", "model",
    "config", "metadata",
)  # fmt: skip


def export(tables: LogTables, session: str) -> Iterator[dict[str, Any]]:
    """All entries of a session; its messages are those of the current revision."""
    at, nodes = read_again(lambda: opened(tables, session))
    row = tree.get_row(tables, session)
    return _entries(tables, session, row.as_of(at.revision.head), at.state, nodes)


def _entries(
    tables: LogTables, session: str, row: LogSessionRow, state: LogState, numbered: Numbered
) -> Iterator[dict[str, Any]]:
    known = {name: getattr(row, name) for name in _CARRIED}
    yield {"log": VERSION, "session": known, "state": pack(state)}
    count = 1
    for node in numbered.nodes:
        yield {"message": [int(node.id), node.payload, node.time]}
        count += 1
    for fold in folding.folds_of(tables, session, state):
        flat = [each for run in fold.runs for each in run]
        yield {"fold": [fold.number, fold.note, flat, *fold[3:]]}
        count += 1
    rounds, totals = usage.both(tables, session)
    for used in rounds:
        yield {"usage": [used.send, used.round, *used.tokens, used.created_at_ms]}
        count += 1
    yield {"totals": list(totals)}
    yield {"end": count + 1}


def bring_in(tables: LogTables, entries: Iterable[Any], session: str) -> None:
    """Create a session from the entries of ``export``; InvalidInputError if they are invalid.

    FormatError if the export is of another version, SessionExistsError if the id is taken.
    """
    if not isinstance(entries, Iterable):
        raise InvalidInputError(
            f"entries must be the entries of an export, got {type(entries).__name__}"
        )
    source = iter(entries)
    row, state = _opened(session, next(source, None))
    intake = Intake(tables, session)
    waiting: list[Arrived] = []
    folds: list[Fold] = []
    used: list[RoundUsage] = []
    totals = UsageTotals()
    count, ended = 1, False
    for entry in source:
        kind, body = _parted(entry, count)
        try:
            if ended:
                raise ValueError("an entry follows the end entry")
            if kind == "message":
                waiting.append(_arrived(*body))
                if len(waiting) > _BATCH:
                    intake.add(waiting[:-1])
                    del waiting[:-1]
            elif kind == "fold":
                folds.append(Fold(body[0], body[1], _runs(body[2]), *body[3:]))
            elif kind == "usage":
                used.append(RoundUsage(body[0], body[1], Tokens(*body[2:6]), body[6]))
            elif kind == "totals":
                rounds, prompt, completion, total = body
                totals = UsageTotals(rounds, prompt, completion, total)
            elif kind == "end":
                if body != count:
                    raise ValueError(f"{body!r:.40} entries must come before the end entry")
                ended = True
            else:
                raise ValueError(f"there is no kind of entry {kind!r:.40}")
        except (TypeError, ValueError, LookupError) as exc:
            raise InvalidInputError(f"entry {count} of the export is damaged: {exc}") from exc
        count += 1
    if not ended:
        raise InvalidInputError(f"the export is cut short, or lacks entries: {count} were read")
    intake.require_none_behind(waiting[-1].number if waiting else 0)
    intake.finish(waiting, Rest(row, state, folds, used, totals), Draft(tables.store))


def _parted(entry: Any, count: int) -> tuple[str, Any]:
    if type(entry) is not dict or len(entry) != 1:
        raise InvalidInputError(
            f"entry {count} of the export must be a dict of one item: {entry!r:.80}"
        )
    [(kind, body)] = entry.items()
    if kind != "end" and type(body) is not list:
        raise InvalidInputError(f"entry {count} of the export must hold a list: {entry!r:.80}")
    return kind, body


def _opened(session: str, first: Any) -> tuple[LogSessionRow, LogState]:
    if type(first) is not dict or type(first.get("log")) is not int:
        raise InvalidInputError("the entries are not an export of a session log")
    if first["log"] != VERSION:
        raise FormatError(
            f"the export has version {first['log']}, this release reads {VERSION}: upgrade casstore"
        )
    try:
        known = {name: first["session"][name] for name in _CARRIED}
        state = unpack(session, first["state"])
    except (TypeError, KeyError) as exc:
        raise InvalidInputError("the export's first entry is damaged") from exc
    if not state.whole:
        raise InvalidInputError(
            "the session was exported before its own import was finished; finish it, export again"
        )
    row = LogSessionRow(
        session=session, kind=ROOT, parent=None, place=0, depth=0, children=0, **known
    )
    return row, state


def _arrived(number: Any, payload: Any, created_at_ms: Any) -> Arrived:
    check_number(number, "a message number", least=1)
    check_payload(payload)
    return Arrived(number, payload, created_at_ms)


def _runs(flat: Any) -> tuple[tuple[int, int], ...]:
    return tuple(zip(flat[::2], flat[1::2], strict=True))
