"""Reads everything from a damaged specimen, in a process that may die of it.

As a program it serves ``replay``'s verifier protocol; instead of acknowledgements it gets the way
to open the store (``plain`` or ``verify``) and the seed of the specimen. The verdict on an image is
one of

    right              everything was read and right, and a write succeeded
    refused <Error>: … something raised this class of error; the rest was right
    wrong <what>: …    a read returned other bytes than were written (P1 is broken): an
                       object, a row, the absence of an existing row, a scan of rows
    untyped …          an exception that is not a CasstoreError
    died <signal>      or, without an answer: hung
"""

from __future__ import annotations

import functools
import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

if __name__ == "__main__":
    # When run as a program, only its own folder is on the import path.
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import casstore
from campaigns.replay import Verifier, Violation, serve
from campaigns.specimen import TABLES, Contents, contents
from casstore.engine.protocol import PutRow, RowKey, Write
from casstore.errors import CasstoreError

PLAIN, VERIFY = "plain", "verify"
RIGHT, REFUSED, WRONG, UNTYPED, DIED, HUNG = (
    "right", "refused", "wrong", "untyped", "died", "hung",
)  # fmt: skip

# No image needs more memory; a process that allocates more gets a MemoryError, which is untyped.
_DATA_LIMIT_BYTES = 1 << 30
_NEW_ROW = PutRow("records", b"written after the damage", b"new")


class _WrongBytes(Exception):
    """A read returned something else than was written."""


class _Reading:
    """One pass over a store; records the first refusal and continues."""

    def __init__(self, expected: Contents) -> None:
        self._expected = expected
        self.refused: str | None = None

    def attempt(self, step: Callable[[], None]) -> bool:
        try:
            step()
        except CasstoreError as exc:
            self.refused = self.refused or f"{type(exc).__name__}: {exc}"
            return False
        return True

    def objects(self, store: casstore.Store) -> None:
        digests = list(self._expected.items)
        if not self.attempt(lambda: self._compare(store, digests)):
            # A damaged object must not hide a wrong one after it.
            for digest in digests:
                self.attempt(functools.partial(self._compare, store, [digest]))

    def _compare(self, store: casstore.Store, digests: list[casstore.Digest]) -> None:
        for digest, got in zip(digests, store.get_many(digests), strict=True):
            if _spelling(got) != _spelling(self._expected.items[digest]):
                raise _WrongBytes(f"object: {digest}")

    def rows(self, store: casstore.Store) -> None:
        for place in self._expected.rows:
            self.attempt(functools.partial(self._row, store, place))
        for table in TABLES:
            self.attempt(functools.partial(self._table, store, table))

    def _table(self, store: casstore.Store, table: str) -> None:
        expected = {
            place.key: value for place, value in self._expected.rows.items() if place.table == table
        }
        found = dict(store.engine.scan_rows(table, limit=10_000))
        found.pop(_NEW_ROW.key, None)
        if found != expected:
            raise _WrongBytes(f"scan: the rows of {table}")

    def _row(self, store: casstore.Store, place: RowKey) -> None:
        found = store.engine.get_rows([place])[0]
        if found is None:
            raise _WrongBytes(f"absence: of row {place.table}/{place.key.decode()}")
        if found != self._expected.rows[place]:
            raise _WrongBytes(f"row: {place.table}/{place.key.decode()}")


def _spelling(value: Any) -> str:
    """A text that distinguishes 1, 1.0 and True, unlike ==; maps are in key order."""
    return repr(sorted(value.items()) if isinstance(value, dict) else value)


def examine(directory: Path, mode: str, expected: Contents) -> str:
    """The verdict on a store with any damage; reads, writes, reopens, reads."""
    reading = _Reading(expected)
    try:
        for verify in (mode == VERIFY, False):
            if not reading.attempt(functools.partial(_pass, reading, directory, verify=verify)):
                break
    except _WrongBytes as exc:
        # Both passes count: a write into a damaged file must not corrupt other data.
        return f"{WRONG} {exc}"
    except Exception as exc:
        return f"{UNTYPED} {type(exc).__name__}: {exc}{_raised_at(exc.__traceback__)}"
    return f"{REFUSED} {reading.refused}" if reading.refused else RIGHT


def _pass(reading: _Reading, directory: Path, *, verify: bool) -> None:
    with casstore.open(directory, verify=verify) as store:
        reading.objects(store)
        reading.rows(store)
        reading.attempt(lambda: _write(store))


def _write(store: casstore.Store) -> None:
    value = {"written": "after the damage", "list": list(range(50))}
    digest = store.put_value(value)
    store.engine.write(Write(rows=[_NEW_ROW]))
    row = store.engine.get_rows([RowKey(_NEW_ROW.table, _NEW_ROW.key)])[0]
    if store.get_value(digest) != value or row != _NEW_ROW.value:
        raise _WrongBytes("write: it does not read back")


def _raised_at(trace: TracebackType | None) -> str:
    """Where in casstore an exception was raised."""
    place = ""
    while trace is not None:
        code = trace.tb_frame.f_code
        if "casstore" in code.co_filename and "campaigns" not in code.co_filename:
            place = f" at {Path(code.co_filename).name}:{trace.tb_lineno} {code.co_name}"
        trace = trace.tb_next
    return place


class Verdict(NamedTuple):
    """The verdict on an image: one of the words above, and details."""

    word: str
    detail: str

    def label(self) -> str:
        """The word, with the class or signal if that is counted separately."""
        if self.word in (WRONG, UNTYPED, REFUSED, DIED):
            return f"{self.word} {self.detail.split(':')[0]}"
        return self.word


class Examiner:
    """Gives one image after another to an examining process, and restarts it when it dies."""

    def __init__(self, scratch: Path, seed: int, *, timeout_s: float = 20) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        self.scratch = scratch
        self._place = scratch / "store"
        self._seed = seed
        self._errors = scratch / "examiner.stderr"
        self._timeout_s = timeout_s
        self._worker = self._start()

    def _start(self) -> Verifier:
        argv = [sys.executable, str(Path(__file__).resolve())]
        return Verifier(argv, self._errors, timeout_s=self._timeout_s)

    def close(self) -> None:
        """End the process."""
        self._worker.__exit__(None, None, None)

    def examine(self, data: bytes | None, mode: str) -> Verdict:
        """The verdict on a store with this data file; None: without a data file.

        A bad verdict is checked again in a new process, because a damaged map may have corrupted
        the memory of the old one; the second verdict counts.
        """
        verdict = self._ask(data, mode)
        if verdict.word in (RIGHT, REFUSED):
            return verdict
        self.close()
        self._worker = self._start()
        return self._ask(data, mode)

    def _ask(self, data: bytes | None, mode: str) -> Verdict:
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir(parents=True)
        if data is not None:
            (self._place / "data.mdb").write_bytes(data)
        return _parse(self._worker.ask(self._place, [mode, str(self._seed)]))


def _parse(answer: str) -> Verdict:
    for opening, word in (("the verifier died of ", DIED), ("the verifier gave no ", HUNG)):
        if answer.startswith(opening):
            detail = answer.removeprefix(opening)
            return Verdict(word, detail.split(":")[0] if word == DIED else detail)
    said = answer.removeprefix("ok ").removeprefix("violated: ")
    word, _, detail = said.partition(" ")
    if word not in (RIGHT, REFUSED, WRONG, UNTYPED):
        # It ended without a signal: it called exit, or failed to start.
        return Verdict(DIED, answer.split(":")[0])
    return Verdict(word, detail)


@functools.lru_cache(maxsize=4)
def _contents(seed: int) -> Contents:
    return contents(seed)


def _check(directory: Path, words: Sequence[str]) -> str:
    mode, seed = words
    verdict = examine(directory, mode, _contents(int(seed)))
    if verdict.startswith((WRONG, UNTYPED)):
        raise Violation(verdict)
    return verdict


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_DATA, (_DATA_LIMIT_BYTES, _DATA_LIMIT_BYTES))
    # A core dump of every death would fill the disk.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(_check)
