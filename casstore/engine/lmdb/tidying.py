"""Tidying: rewrites a small table whose pages are half empty, in key order.

Rows inserted out of order split pages, and leave both halves with free space that may never be
used. LMDB fills pages completely only if rows are appended in key order, so a table cannot be
tidied in parts. It is rewritten as a whole, in one transaction, if it is short enough not to delay
writers; compacting rewrites longer ones. Keys and values do not change.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from casstore.engine.lmdb.environment import Environment
from casstore.engine.lmdb.page_arithmetic import PageCount, when_full
from casstore.engine.protocol import PackReport
from casstore.errors import CorruptionError

# The longest table that is rewritten: some tens of thousands of rows, which takes a few hundredths
# of a second, most of it for the flush.
MAX_TABLE_BYTES: Final = 4 << 20
# A table is rewritten if that saves at least one leaf page in this many. (Random inserts alone
# leave an index about two thirds full.)
_MIN_GAIN: Final = 5
_MIN_PAGES: Final = 8


def tidy(env: Environment) -> PackReport:
    """Rewrite each table that becomes shorter by it; returns what was saved."""
    report = PackReport(0, 0, 0, 0, 0)
    for database in (env.index, *env.tables.values()):
        if _is_untidy(env, database):
            report = report.plus(_rewrite(env, database))
    return report


def count_pages(stat: Mapping[str, Any]) -> PageCount:
    """The pages of a table as LMDB counts them."""
    return PageCount(stat["branch_pages"], stat["leaf_pages"], stat["overflow_pages"])


def _is_untidy(env: Environment, database: Any) -> bool:
    with env.reading() as txn:
        stat = txn.stat(database)
        pages = count_pages(stat)
        if pages.leaf < _MIN_PAGES or pages.total * stat["psize"] > MAX_TABLE_BYTES:
            return False
        rows = ((len(key), len(value)) for key, value in txn.cursor(db=database))
        tidied = when_full(rows, stat["psize"], env.page_header_bytes)
    return (pages.leaf - tidied.leaf) * _MIN_GAIN >= pages.leaf


def _rewrite(env: Environment, database: Any) -> PackReport:
    with env.writing() as txn:
        started = time.perf_counter()
        before = count_pages(txn.stat(database)).total
        rows = list(txn.cursor(db=database))
        txn.drop(database, delete=False)
        _, added = txn.cursor(db=database).putmulti(rows, append=True)
        saved = before - count_pages(txn.stat(database)).total
        if added != len(rows):
            # py-lmdb skips a row whose key is not above the one before.
            raise CorruptionError(f"the keys of a table of {env.path} are out of order")
        if saved <= 0:
            txn.abort()
    if saved <= 0:
        return PackReport(0, 0, 0, 0, 0)
    locked_s = time.perf_counter() - started
    return PackReport(0, 0, 0, 0, 0, pages_saved=saved, longest_lock_s=locked_s)
