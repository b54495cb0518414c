"""The journal of a worker of the ``sessions`` campaign: its calls and their answers.

Each worker process has its own journal: a line of JSON before each call, and a line after it with
the answer or the error. A line is in the system's cache before the call begins, so it survives the
process. A truncated line counts as not written: the call was not made, or its answer is unknown.
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
    """One call of a worker. Without an answer and an error its outcome is unknown."""

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
        """True if the worker was killed before it got an answer."""
        return self.answered_at_ns is None

    @property
    def done(self) -> bool:
        """True if the call was acknowledged."""
        return self.answered_at_ns is not None and self.refused is None


class Journal:
    """Writes the calls of one process to its journal.

    ``tell_nothing`` are errors after which the outcome is unknown: the server is gone.
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
        """Make a call between two lines; ``tell`` extracts the recorded part of the answer."""
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
        # All processes share this clock.
        text = json.dumps({"ns": time.monotonic_ns(), **line}) + "\n"
        os.write(self._file, text.encode())


def path_of(directory: Path, worker: str, life: int) -> Path:
    """The journal of a worker process; a restarted worker has the next ``life``."""
    return directory / f"{worker}.{life:05}.journal"


def read(directory: Path, worker: str = "*") -> list[Call]:
    """All calls of one worker or all workers: by worker, each in order."""
    return [
        call
        for path in sorted(directory.glob(f"{worker}.*.journal"))
        for call in _calls(path.name.partition(".")[0], path.read_bytes())
    ]


def _calls(worker: str, written: bytes) -> list[Call]:
    calls: dict[int, Call] = {}
    # The text after the last line end is a truncated line, or empty.
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
