"""Progress of long operations: a bar with rate and time left, or a line at intervals.

On a terminal, a bar on stderr; otherwise occasional plain lines. Ctrl-C during stoppable work
requests a stop; a second Ctrl-C interrupts at once.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Self

from casstore.cli.output import is_terminal, wants_colour
from casstore.cli.quantities import duration, size
from casstore.maintenance.progress import Step

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

# The interval of lines without a terminal.
LINE_INTERVAL_S: Final = 5.0
# A rate measured over a shorter time is noise.
_RATE_AFTER_S: Final = 1.0


class Meter:
    """Reports progress while open; call it with each ``Step``."""

    def __init__(
        self, *, silent: bool, stoppable: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._silent = silent
        self._stoppable = stoppable
        self._clock = clock
        self._shown = not silent and is_terminal(sys.stderr)
        self._bars: Bars | None = None
        self._task: TaskID | None = None
        self._phase = ""
        # The start of the phase, and the amount done by then.
        self._began_s = self._printed_s = clock()
        self._began_at = 0
        self._stop = threading.Event()
        self._former: Any = None

    def __enter__(self) -> Self:
        if self._stoppable and threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGINT, self._ask_to_stop)
        return self

    def __exit__(self, *_: object) -> None:
        if self._former is not None:
            signal.signal(signal.SIGINT, self._former)
        if self._bars is not None:
            self._bars.stop()

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        if self._stop.is_set():
            raise KeyboardInterrupt
        self._stop.set()

    def stopped(self) -> bool:
        """Whether a stop was requested."""
        return self._stop.is_set()

    def __call__(self, step: Step) -> None:
        """Record a step and update the display."""
        if self._silent:
            return
        if step.phase != self._phase:
            self._phase = step.phase
            self._began_s = self._clock()
            self._began_at = step.done
            self._task = None
        if self._shown:
            self._move_bar(step)
        elif self._clock() - self._printed_s >= LINE_INTERVAL_S:
            self._printed_s = self._clock()
            try:
                print(f"{step.phase}: {self._figures(step)}", file=sys.stderr, flush=True)
            except OSError:
                # A closed stderr does not stop the command.
                self._silent = True

    def _figures(self, step: Step) -> str:
        # Not rich's own rate: for two steps in quick succession it is meaningless.
        return progress_line(step, self._clock() - self._began_s, self._began_at)

    def _move_bar(self, step: Step) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        if self._bars is None:
            console = Console(stderr=True, no_color=not wants_colour(sys.stderr))
            self._bars = Bars(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[figures]}"),
                console=console,
                transient=True,
                # Otherwise rich would redirect everything printed meanwhile, including stdout, to
                # stderr.
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._bars.start()
        figures = self._figures(step)
        if self._task is None:
            self._task = self._bars.add_task(step.phase, total=step.total, figures=figures)
        self._bars.update(self._task, completed=step.done, total=step.total, figures=figures)


def amount(number: int, unit: str) -> str:
    """A count with its unit."""
    return size(number) if unit == "bytes" else f"{number:,} {unit}"


def progress_line(step: Step, elapsed_s: float, began_at: int = 0) -> str:
    """The amount done, and after a second of work the rate since ``began_at`` and the time left."""
    line = amount(step.done, step.unit)
    if step.total is not None:
        line += f" of {amount(step.total, step.unit)}"
    if elapsed_s >= _RATE_AFTER_S and step.done > began_at:
        rate = (step.done - began_at) / elapsed_s
        line += f", {amount(int(rate), step.unit)}/s"
        if step.total is not None and step.total > step.done:
            line += f", about {duration((step.total - step.done) / rate * 1000)} left"
    return line
