"""Proves crash consistency: records a writer, then checks the possible states after a power loss.

``run`` records a workload once and gives thousands of crash images to verifiers. A verifier is a
separate process, because a damaged store may kill it (reading past the end of a truncated file
raises SIGBUS). It checks many images, because starting a process takes longer than checking an
image.

The verifier's protocol, one line each way, fields separated by tabs:

    in:   number of acknowledgements, directory, the acknowledgements as a JSON list
    out:  ``ok``, or ``ok`` and a note to be counted, or the reason why it is invalid

``serve`` is the verifier's side. If a verifier dies or times out, its image fails, and the next
image gets a new verifier.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from campaigns.crash_images import Image, images
from campaigns.disk_events import Trace
from campaigns.recording import record
from campaigns.strace_log import TraceError

__all__ = [
    "Failure",
    "Image",
    "Report",
    "Trace",
    "TraceError",
    "Verifier",
    "Violation",
    "images",
    "record",
    "replay",
    "run",
    "serve",
]

MAX_PARALLEL = 2
KEPT_FAILURES = 5


class Violation(Exception):
    """Raised by a check: the image is invalid, or lacks an acknowledged commit."""


class Failure(NamedTuple):
    """An image that failed, and the path of a copy of it."""

    image: str
    reason: str
    kept: Path


class Report(NamedTuple):
    """The result of a campaign."""

    events: int
    acknowledged: int
    images: int
    failures: int
    first_failures: tuple[Failure, ...]
    notes: Mapping[str, int]

    def sound(self) -> bool:
        """True if there was something to check, and all of it passed."""
        return self.images > 0 and self.acknowledged > 0 and self.failures == 0


def serve(check: Callable[[Path, Sequence[str]], str]) -> None:
    """Answer requests on standard input until it ends.

    ``check`` gets a directory and the acknowledgements. It returns a note, "" for none, or
    raises ``Violation``. Any other exception ends the verifier, which fails the image too.
    """
    for line in sys.stdin:
        _, directory, acknowledged = line.rstrip("\n").split("\t")
        try:
            answer = f"ok {check(Path(directory), json.loads(acknowledged))}".rstrip()
        except Violation as violation:
            answer = f"violated: {violation}"
        print(" ".join(answer.split()), flush=True)


class Verifier:
    """A verifier process, started on demand and restarted after it died."""

    def __init__(self, argv: Sequence[str], errors: Path, *, timeout_s: float) -> None:
        self._argv = argv
        self._errors = errors
        self._timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Verifier:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._process is not None:
            self._stop(self._process)

    def ask(self, directory: Path, acknowledged: Sequence[str]) -> str:
        """The answer for a directory, or how the verifier ended without an answer."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        request = f"{len(acknowledged)}\t{directory}\t{json.dumps(list(acknowledged))}\n"
        try:
            process.stdin.write(request.encode())
        except BrokenPipeError:
            return f"the verifier {self._stop(process)}"
        answering, _, _ = select.select([process.stdout], [], [], self._timeout_s)
        if not answering:
            self._stop(process)
            return f"the verifier gave no answer in {self._timeout_s} s"
        answer = process.stdout.readline().decode()
        # Without a line end the verifier died, perhaps while answering.
        return answer.rstrip() if answer.endswith("\n") else f"the verifier {self._stop(process)}"

    def _start(self) -> subprocess.Popen[bytes]:
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                self._argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
            )
        return self._process

    def _stop(self, process: subprocess.Popen[bytes]) -> str:
        """End the process if it runs; returns how it ended, and its last output."""
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = None
        process.stdin.close()
        try:
            # A healthy verifier ends at the end of its input.
            status = process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        process.stdout.close()
        ending = f"died of {signal.Signals(-status).name}" if status < 0 else f"exited {status}"
        words = self._errors.read_text(errors="replace").strip().splitlines()
        return f"{ending}: {words[-1]}" if words else ending


class _Tally:
    """The images still to check and the results, shared by the threads."""

    def __init__(self, source: Iterator[Image], keep: Path) -> None:
        self._lock = threading.Lock()
        self._source = source
        self._keep = keep
        self.images = 0
        self.failures: list[Failure] = []
        self.failure_count = 0
        self.notes: Counter[str] = Counter()

    def next_image(self) -> Image | None:
        with self._lock:
            return next(self._source, None)

    def add(self, image: Image, answer: str) -> None:
        verdict, _, note = answer.partition(" ")
        with self._lock:
            self.images += 1
            if verdict == "ok":
                self.notes.update([note] if note else [])
                return
            self.failure_count += 1
            if len(self.failures) < KEPT_FAILURES:
                kept = self._keep / f"failure-{len(self.failures)}"
                # Written again: the verifier may have changed its directory.
                image.materialise(kept)
                self.failures.append(Failure(image.describe(), answer, kept))

    def work(self, verifier: Verifier, directory: Path) -> None:
        with verifier:
            while (image := self.next_image()) is not None:
                image.materialise(directory)
                self.add(image, verifier.ask(directory, image.acknowledged))


def replay(
    trace: Trace,
    verify_argv: Sequence[str],
    scratch: Path,
    *,
    seed: int,
    count: int,
    strict_entries: bool = False,
    parallel: int = MAX_PARALLEL,
    timeout_s: float = 60,
) -> Report:
    """Check ``count`` crash images of a trace, at most two at a time.

    Images, the verifiers' stderr and copies of the first failures go to ``scratch``, best on a
    memory file system.
    """
    if not 1 <= parallel <= MAX_PARALLEL:
        raise ValueError(f"parallel must be 1 to {MAX_PARALLEL}, not {parallel}")
    tally = _Tally(images(trace, seed, count, strict_entries=strict_entries), scratch)
    with ThreadPoolExecutor(parallel) as pool:
        workers = [
            pool.submit(
                tally.work,
                Verifier(verify_argv, scratch / f"verifier-{n}.stderr", timeout_s=timeout_s),
                scratch / f"image-{n}",
            )
            for n in range(parallel)
        ]
        for worker in workers:
            worker.result()
    return Report(
        events=len(trace.events),
        acknowledged=trace.acknowledged(),
        images=tally.images,
        failures=tally.failure_count,
        first_failures=tuple(tally.failures),
        notes=dict(tally.notes),
    )


def run(
    workload_argv: Sequence[str],
    verify_argv: Sequence[str],
    scratch: Path,
    *,
    seed: int,
    count: int,
    strict_entries: bool = False,
    parallel: int = MAX_PARALLEL,
) -> Report:
    """Record a workload in an empty directory below ``scratch`` and check its crash images.

    ``{dir}`` in ``workload_argv`` is replaced by that directory.
    """
    directory = scratch.resolve() / "recorded"
    directory.mkdir(parents=True)
    argv = [argument.replace("{dir}", str(directory)) for argument in workload_argv]
    trace = record(argv, directory, scratch / "strace.log")
    return replay(
        trace,
        verify_argv,
        scratch,
        seed=seed,
        count=count,
        strict_entries=strict_entries,
        parallel=parallel,
    )
