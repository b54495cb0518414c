"""Runs after a copy into a store that has an older copy of them: rows that are now stale.

A copy puts rows and deletes none, because the target may have rows of its own. But since the older
copy, a thread or run may have moved to another key of its order index, an approval may have been
resolved, and a request or intent deleted. Rows of the older copy then contradict the rows copied
now. ``tidy`` deletes exactly those.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any, Final

from casstore.records.runs.layout import RunTables
from casstore.records.schema import IndexTable, RowTable
from casstore.session.attempts import transact
from casstore.session.records import Draft, Record, Table
from casstore.store import Store

_PAGE: Final = 256

#: The row that contradicts a record; None: no row does.
_Judge = Callable[[Record], Record | None]


def tidy(source: Store, target: Store) -> int:
    """Delete the rows of the target that its newer rows contradict; returns how many."""
    there, here = RunTables(source), RunTables(target)

    def stale(index: IndexTable[Any], table: RowTable[Any]) -> _Judge:
        def judge(entry: Record) -> Record | None:
            owner = table.find(*index.leads_to(entry))
            is_stale = owner is not None and entry.key not in index.keys_of(table.decode(owner))
            return owner if is_stale else None

        return judge

    def deleted(table: Table) -> _Judge:
        def judge(entry: Record) -> Record | None:
            if table.find(*entry.key) is not None:
                return None
            run = here.runs.get(*entry.key)
            if run is None:
                return None
            own, others = here.threads.find(run.run.thread), there.threads.find(run.run.thread)
            # Every write in a thread changes the thread's row. If that is the same in both stores,
            # no writer in the target has put this record since the copy.
            is_same = own is not None and others is not None and own.row == others.row
            return own if is_same else None

        return judge

    threads, runs, approvals = here.threads, here.runs, here.approvals
    return (
        _remove(target, here.thread_order, threads, stale(here.thread_order, threads))
        + _remove(target, here.run_order, runs, stale(here.run_order, runs))
        + _remove(target, here.pending, approvals, stale(here.pending, approvals))
        + _remove(target, here.requests, threads, deleted(there.requests))
        + _remove(target, here.intents, threads, deleted(there.intents))
    )


def _remove(store: Store, table: Table, owners: Table, judge: _Judge) -> int:
    """Delete the records of a table that a row of ``owners`` contradicts; returns how many."""

    def attempt(page: list[Record]) -> int:
        draft = Draft(store)
        count = 0
        for entry in table.find_many([listed.key for listed in page]):
            owner = None if entry is None else judge(entry)
            if entry is not None and owner is not None:
                # A writer in the target that puts another record under this key changes the owner.
                draft.expect(owners, owner.key, owner)
                draft.delete(table, entry.key)
                count += 1
        if count:
            draft.commit()
        return count

    removed = 0
    entries = table.scan()
    while page := list(islice(entries, _PAGE)):
        removed += transact("the runs of this store", partial(attempt, page))
    return removed
