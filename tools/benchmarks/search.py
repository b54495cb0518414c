"""The claims of full-text search: a query against bare FTS5, indexing against writing, and forks.

CASSTORE_SEARCH_NODES sets another number of nodes than a million.
"""

from __future__ import annotations

import os
import random
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import casstore
from benchmarks.measuring import Goal, at_most, seconds, side_by_side
from casstore.search import SearchIndexReport, update
from casstore.store import Store

_NODES = 1_000_000
_QUICK_NODES = 20_000
_SESSION_NODES = 1000
_FORKS = 1000
_VOCABULARY = 20_000
_HITS = 20
# Positions in the vocabulary, by frequency: each word is in one text of about 50 to 100.
_ASKED = ((25, 40), (60, 80), (30, 120))


def _words(source: random.Random) -> list[str]:
    letters = "abcdefghijklmnopqrstuvwxyz"
    return ["".join(source.choices(letters, k=source.randint(3, 9))) for _ in range(_VOCABULARY)]


def _texts(source: random.Random, vocabulary: list[str], count: int) -> Iterator[list[str]]:
    """Texts of 30 words each, whose frequencies fall as in prose, a turn of two at a time."""
    weights: list[float] = []
    total = 0.0
    for place in range(_VOCABULARY):
        total += 1 / (place + 10)
        weights.append(total)
    for _ in range(count // 2):
        words = source.choices(vocabulary, cum_weights=weights, k=60)
        yield [" ".join(words[:30]), " ".join(words[30:])]


def searching(quick: bool) -> Iterator[Goal]:
    """Write sessions, index them, and ask."""
    count = _QUICK_NODES if quick else int(os.environ.get("CASSTORE_SEARCH_NODES", _NODES))
    source = random.Random(1)
    vocabulary = _words(source)
    turns = list(_texts(source, vocabulary, count))
    with (
        tempfile.TemporaryDirectory() as place,
        casstore.open(Path(place) / "store", "relaxed") as store,
    ):
        writing_s = seconds(lambda: _write(store, turns))
        reports: list[SearchIndexReport] = []
        indexing_s = seconds(lambda: reports.append(update(store)))
        yield at_most(
            f"search: index {count:,} nodes, against writing them in turns of two at `relaxed`",
            indexing_s / writing_s, 1.0,
            detail=f"{indexing_s:.1f} s, writing {writing_s:.1f} s; the index has "
            f"{reports[0].size_bytes:,} bytes",
        )  # fmt: skip
        bare = _bare(Path(place) / "bare.sqlite", turns)
        try:
            yield from _queries(store, bare, vocabulary, 5 if quick else 9, count)
        finally:
            bare.close()
        yield _forks(store, reports[0])


def _write(store: Store, turns: list[list[str]]) -> None:
    for number, (question, answer) in enumerate(turns):
        store.session(f"s{number * 2 // _SESSION_NODES}").append(
            {"role": "user", "text": question}, {"role": "assistant", "text": answer}
        )


def _bare(path: Path, turns: list[list[str]]) -> sqlite3.Connection:
    bare = sqlite3.connect(path)
    bare.execute(
        'CREATE VIRTUAL TABLE texts USING fts5(text, tokenize="unicode61 remove_diacritics 2")'
    )
    with bare:
        texts = [[text] for turn in turns for text in turn]
        bare.executemany("INSERT INTO texts (text) VALUES (?)", texts)
    return bare


def _queries(
    store: Store, bare: sqlite3.Connection, vocabulary: list[str], repeats: int, count: int
) -> Iterator[Goal]:
    """Both with a snippet, ranked, the best twenty."""
    statement = (
        "SELECT rowid, rank, snippet(texts, 0, '[', ']', '…', 24) FROM texts "
        f"WHERE texts MATCH ? ORDER BY rank LIMIT {_HITS}"
    )
    for first, second in _ASKED:
        words = f"{vocabulary[first]} {vocabulary[second]}"
        [[matches]] = bare.execute("SELECT count(*) FROM texts WHERE texts MATCH ?", (words,))
        hits = store.search(words, limit=_HITS)
        assert len(hits) == min(matches, _HITS), "the two must find the same"

        def ours(words: str = words) -> float:
            return seconds(lambda: store.search(words, limit=_HITS))

        def theirs(words: str = words) -> float:
            return seconds(lambda: bare.execute(statement, (words,)).fetchall())

        pair = side_by_side(ours, theirs, repeats)
        yield at_most(
            f"search: two words that {matches:,} of {count:,} nodes have, against bare FTS5",
            pair.ratio, 2.0,
            detail=f"{pair.ours_s * 1e3:.1f} ms, bare {pair.theirs_s * 1e3:.1f} ms; {pair.spread}",
        )  # fmt: skip


def _forks(store: Store, before: SearchIndexReport) -> Goal:
    for number in range(_FORKS):
        store.fork("s0", f"fork-{number}")
    after = update(store)
    assert after.texts_added == 0, "forks must share their texts"
    return at_most(
        f"search: growth of the index by {_FORKS:,} forks of a session of {_SESSION_NODES:,} nodes",
        100 * (after.size_bytes - before.size_bytes) / before.size_bytes, 1.0, "%",
        detail=f"{after.size_bytes - before.size_bytes:,} bytes",
    )  # fmt: skip


ALL: dict[str, Callable[[bool], Iterator[Goal]]] = {"search": searching}
