"""What a worker of the ``sessions`` campaign was about to do, and what it was told.

Each worker process has a journal of its own: a line of JSON before each call, and a line
after it with the answer or the refusal. A line is in the system's cache before the call
begins, so it outlives the process. A line that a kill cut short was never written: the
call before which it stood was not made, or the answer is not known.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from casstore.errors import CasstoreError

Answer = TypeVar("Answer")


class Call(NamedTuple):
    """One call of a worker. Neither an answer nor a refusal: nobody knows what became of it."""

    worker: str
    op: str
    asked: dict[str, Any]
    asked_at_ns: int
    answer: Any = None
    #: The name of the error.
    refused: str | None = None
    answered_at_ns: int | None = None

    @property
    def unknown(self) -> bool:
        """Was the worker killed before it was told?"""
        return self.answered_at_ns is None

    @property
    def done(self) -> bool:
        """Was it acknowledged?"""
        return self.answered_at_ns is not None and self.refused is None


class Journal:
    """Writes down the calls of one process.

    ``tell_nothing`` are errors that leave open what became of a call: the server has gone.
    """

    def __init__(self, path: Path, tell_nothing: tuple[type[CasstoreError], ...] = ()) -> None:
        self._tell_nothing = tell_nothing
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        self._number = 0

    def call(
        self,
        op: str,
        asked: dict[str, Any],
        do: Callable[[], Answer],
        tell: Callable[[Answer], Any] = lambda answer: None,
    ) -> Answer:
        """Do it, between two lines; ``tell`` says what of the answer is written down."""
        self._number += 1
        number = self._number
        self._write({"call": number, "op": op, **asked})
        try:
            answer = do()
        except self._tell_nothing:
            raise
        except CasstoreError as exc:
            self._write({"of": number, "refused": type(exc).__name__, "because": str(exc)})
            raise
        self._write({"of": number, "answer": tell(answer)})
        return answer

    def _write(self, line: dict[str, Any]) -> None:
        # The clock is the same for all processes.
        text = json.dumps({"ns": time.monotonic_ns(), **line}) + "\n"
        os.write(self._file, text.encode())


def path_of(directory: Path, worker: str, life: int) -> Path:
    """The journal of a worker's process; a killed worker lives again with the next number."""
    return directory / f"{worker}.{life:05}.journal"


def read(directory: Path, worker: str = "*") -> list[Call]:
    """All calls of a worker, or of all: by worker, each in order."""
    return [
        call
        for path in sorted(directory.glob(f"{worker}.*.journal"))
        for call in _calls(path.name.partition(".")[0], path.read_bytes())
    ]


def _calls(worker: str, written: bytes) -> list[Call]:
    calls: dict[int, Call] = {}
    # What follows the last line end is a line cut short, or nothing.
    for text in written.split(b"\n")[:-1]:
        line: dict[str, Any] = json.loads(text)
        at_ns = line.pop("ns")
        if "of" in line:
            asked = calls[line["of"]]
            calls[line["of"]] = asked._replace(
                answer=line.get("answer"), refused=line.get("refused"), answered_at_ns=at_ns
            )
        else:
            calls[line.pop("call")] = Call(worker, line.pop("op"), line, at_ns)
    return list(calls.values())
