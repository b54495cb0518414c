"""The counts and findings of a fault campaign: one report format for all campaigns."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

KEPT_PER_KIND = 5

# Called occasionally with the number of finished trials and the total.
Progress = Callable[[int, int], None]


def silent(done: int, total: int) -> None:
    """Report no progress."""


class Finding(NamedTuple):
    """A broken guarantee: the trial, which can be repeated, and what happened."""

    trial: str
    what: str


class Report(NamedTuple):
    """The outcome of a campaign. ``broken_count`` includes findings that were not recorded."""

    campaign: str
    trials: int
    counts: Mapping[str, int]
    broken_count: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    def kept(self) -> bool:
        """True if there was a trial and no guarantee was broken."""
        return self.trials > 0 and self.broken_count == 0

    def total(self, word: str) -> int:
        """The sum of all counts whose label contains ``word``."""
        return sum(number for label, number in self.counts.items() if word in label)

    def as_json(self) -> dict[str, object]:
        """The report as JSON data."""
        return {
            **self._asdict(),
            "counts": dict(sorted(self.counts.items())),
            "findings": [finding._asdict() for finding in self.findings],
            "notes": list(self.notes),
        }


class Tally:
    """Collects outcomes from the threads of a campaign."""

    def __init__(self, campaign: str, *, total: int = 0, progress: Progress = silent) -> None:
        self._campaign = campaign
        self._lock = threading.Lock()
        self._trials = 0
        self._counts: Counter[str] = Counter()
        self._broken_count = 0
        self._kinds: Counter[str] = Counter()
        self._findings: list[Finding] = []
        self._notes: list[str] = []
        self._total = total
        self._progress = progress

    def tried(self, number: int = 1) -> None:
        """Count a trial, or several."""
        with self._lock:
            self._trials += number
            done = self._trials
        self._progress(done, self._total)

    def count(self, label: str, number: int = 1) -> None:
        """Count an outcome."""
        with self._lock:
            self._counts[label] += number

    def broke(self, trial: str, what: str) -> None:
        """Record a broken guarantee."""
        kind = what.split(":")[0]
        with self._lock:
            self._broken_count += 1
            # A frequent kind must not displace a rare one.
            self._kinds[kind] += 1
            if self._kinds[kind] <= KEPT_PER_KIND:
                self._findings.append(Finding(trial, what))

    def note(self, text: str) -> None:
        """Record a fact for the reader of the report, such as a part that could not run."""
        with self._lock:
            self._notes.append(text)

    def report(self) -> Report:
        """Everything so far."""
        with self._lock:
            return Report(
                self._campaign,
                self._trials,
                dict(self._counts),
                self._broken_count,
                tuple(self._findings),
                tuple(self._notes),
            )
