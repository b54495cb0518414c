"""Runs in a store that another is copied into again and again: what they have moved on from.

A copy goes row by row and removes nothing, because the target may have rows of its own. But a
thread or run that changes takes another place in its order, a decision takes an approval out of
those that wait, and a request or intent is gone once somebody has seen to it. The rows that were
copied before then contradict those that came now. Such are removed here, and none beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Final

from casstore.records.runs import layout
from casstore.records.runs.data import PENDING
from casstore.records.runs.layout import Tables
from casstore.records.runs.names import number_text
from casstore.session.attempts import transact
from casstore.session.records import Draft, Record, Table
from casstore.store import Store

_PAGE: Final = 256

#: The row that contradicts an entry, if one does.
_Judge = Callable[[Record], Record | None]


def tidy(source: Store, target: Store) -> int:
    """Remove what the runs in the target have moved on from; how many rows that were."""
    there, here = Tables(source), Tables(target)

    def moved(owners: Table, order_of: Callable[[Record], int], what: str) -> _Judge:
        def judge(entry: Record) -> Record | None:
            owner = owners.find(layout.read_text(entry, what))
            is_old = owner is not None and number_text(order_of(owner)) != entry.key[0]
            return owner if is_old else None

        return judge

    def resolved(entry: Record) -> Record | None:
        approval = here.approvals.find(layout.read_text(entry, "approval"))
        if approval is None or layout.read_approval(approval).approval.status == PENDING:
            return None
        return approval

    def seen_to(table: Table) -> _Judge:
        def judge(entry: Record) -> Record | None:
            if table.find(*entry.key) is not None:
                return None
            run = here.runs.find(*entry.key)
            if run is None:
                return None
            thread = layout.read_run(run).run.thread
            own, others = here.threads.find(thread), there.threads.find(thread)
            # Whatever changes below a thread changes its row: so nobody has put it here since.
            is_same = own is not None and others is not None and own.row == others.row
            return own if is_same else None

        return judge

    places = moved(here.threads, _thread_order, "thread")
    run_places = moved(here.runs, _run_order, "run")
    return (
        _remove(target, here.thread_order, here.threads, places)
        + _remove(target, here.run_order, here.runs, run_places)
        + _remove(target, here.pending, here.approvals, resolved)
        + _remove(target, here.requests, here.threads, seen_to(there.requests))
        + _remove(target, here.intents, here.threads, seen_to(there.intents))
    )


def _thread_order(record: Record) -> int:
    return layout.read_thread(record).order


def _run_order(record: Record) -> int:
    return layout.read_run(record).order


def _remove(store: Store, table: Table, owners: Table, judge: _Judge) -> int:
    """Remove the entries of a table that a row of their owners contradicts."""

    def attempt(page: list[Record]) -> int:
        draft = Draft(store)
        stale = 0
        for entry in table.find_many([listed.key for listed in page]):
            owner = None if entry is None else judge(entry)
            if entry is not None and owner is not None:
                # Somebody may be at work here, too, and put another entry of this name.
                draft.expect(owners, owner.key, owner)
                draft.delete(table, entry.key)
                stale += 1
        if stale:
            draft.commit()
        return stale

    removed = 0
    entries = table.scan()
    while page := list(islice(entries, _PAGE)):
        removed += transact("the runs of this store", partial(attempt, page))
    return removed
