"""Forked children of a test: what they do, and what became of it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

# How long a forked child may take; it does a few reads and one write.
CHILD_PATIENCE_S = 20
PATIENCE_S = 60


Started = TypeVar("Started", subprocess.Popen[str], subprocess.Popen[bytes])


@contextmanager
def killed_at_the_end(process: Started) -> Iterator[Started]:
    """A process that does not outlive the test, whether or not the test gets to its end."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


class Child:
    """A forked child that starts its work on request."""

    def __init__(self, work: Callable[[], str]) -> None:
        self._reading, writing = os.pipe()
        waiting, self._start = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                # Otherwise both would wait for each other if the request never comes.
                os.close(self._start)
                answer = work() if os.read(waiting, 1) else "told nothing"
            except BaseException as exc:  # the parent judges it
                answer = f"{type(exc).__name__}: {exc}"
            os.write(writing, answer.encode())
            os._exit(0)
        os.close(writing)
        os.close(waiting)

    def answer(self) -> str:
        """Let it work; what it says.

        A child that uses what it inherited may well hang; that is an answer too.
        """
        os.write(self._start, b"1")
        os.close(self._start)
        with os.fdopen(self._reading) as pipe:
            answered, _, _ = select.select([pipe], [], [], CHILD_PATIENCE_S)
            if not answered:
                os.kill(self._pid, signal.SIGKILL)
            said = pipe.read()
        _, status = os.waitpid(self._pid, 0)
        return said if status == 0 else f"{said} (status {status})"


def in_child(work: Callable[[], str]) -> str:
    """Fork, run ``work`` in the child, and return what it returned."""
    return Child(work).answer()


def in_children(*works: Callable[[], str]) -> list[str]:
    """Fork a child for each, and run them at the same time; what they returned."""
    children = [Child(work) for work in works]
    with ThreadPoolExecutor(len(children)) as pool:
        return list(pool.map(Child.answer, children))


@contextmanager
def held(lock: Any) -> Iterator[None]:
    """Have another thread hold a lock."""
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            holding.set()
            release.wait(PATIENCE_S)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(PATIENCE_S)
    try:
        yield
    finally:
        release.set()
        thread.join()
