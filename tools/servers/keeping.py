"""Start a server that cannot outlive us, and end it: in good order, or as a power cut would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

_KEEPER = Path(__file__).with_name("keeper.py")
# How long a kept server may take to end; its keeper has killed it long before.
_END_S = 60.0


class Order(NamedTuple):
    """What to run, and how to end it."""

    argv: Sequence[str]
    log: Path
    cwd: Path
    # Removed by the keeper if we die without a word.
    remove: Path
    env: Mapping[str, str]
    user: str | None = None
    stop: signal.Signals = signal.SIGINT
    abandon: signal.Signals = signal.SIGQUIT


class Kept:
    """One running server process."""

    def __init__(self, order: Order) -> None:
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_KEEPER)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, bufsize=0,
        )  # fmt: skip
        spelled = {
            **order._asdict(),
            "argv": list(order.argv),
            "log": str(order.log),
            "cwd": str(order.cwd),
            "remove": str(order.remove),
            "env": dict(order.env),
            "stop": int(order.stop),
            "abandon": int(order.abandon),
        }
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.write(json.dumps(spelled).encode() + b"\n")
        answer = self._keeper.stdout.readline()
        if not answer:
            raise RuntimeError(f"{order.argv[0]} could not be started as user {order.user}")
        self.pid = int(answer)

    @property
    def running(self) -> bool:
        """Whether the server is there; false as soon as it has ended."""
        return Path(f"/proc/{self.pid}").exists() and not _is_zombie(self.pid)

    def stop(self) -> None:
        """End the server in good order, or what is left of it; nothing if that was done."""
        if self._keeper.stdin is None or self._keeper.stdin.closed:
            return
        # The keeper may be gone already, if the machine was short of something.
        try:
            self._keeper.stdin.write(b".")
        except BrokenPipeError:
            pass
        self._keeper.wait(_END_S)
        self._keeper.stdin.close()
        assert self._keeper.stdout is not None
        self._keeper.stdout.close()

    def kill(self) -> None:
        """End the server and all its processes at once, as if its machine had gone."""
        # Held first, so that it starts no process that we have not seen.
        os.kill(self.pid, signal.SIGSTOP)
        for pid in [*_children(self.pid), self.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.stop()


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
