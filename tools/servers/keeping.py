"""Starts a server that cannot outlive this process, and stops it cleanly or kills it."""

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
# How long a server may take to end; the keeper kills it long before.
_END_S = 60.0


class Order(NamedTuple):
    """The command to run, and how to stop it."""

    argv: Sequence[str]
    log: Path
    cwd: Path
    # Removed by the keeper if this process dies.
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
        encoded = {
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
        self._keeper.stdin.write(json.dumps(encoded).encode() + b"\n")
        answer = self._keeper.stdout.readline()
        if not answer:
            raise RuntimeError(f"{order.argv[0]} could not be started as user {order.user}")
        self.pid = int(answer)

    @property
    def running(self) -> bool:
        """True while the server runs."""
        return Path(f"/proc/{self.pid}").exists() and not _is_zombie(self.pid)

    def stop(self) -> None:
        """Shut the server down cleanly; do nothing if it was stopped before."""
        if self._keeper.stdin is None or self._keeper.stdin.closed:
            return
        # The keeper may have died, for example for lack of memory.
        try:
            self._keeper.stdin.write(b".")
        except BrokenPipeError:
            pass
        self._keeper.wait(_END_S)
        self._keeper.stdin.close()
        assert self._keeper.stdout is not None
        self._keeper.stdout.close()

    def kill(self) -> None:
        """Kill the server and all its processes at once, as in a power loss."""
        # Stopped first, so that it starts no further processes.
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
