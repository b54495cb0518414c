"""Runs one server until its parent closes our standard input or dies.

A separate program, started by ``servers.keeping``. A killed test run cannot clean up, but the
kernel closes its pipes, and this process notices that. It has its own session, so Ctrl-C does not
reach it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys

# How long a server may take to stop before it is killed.
_PATIENCE_S = 20.0
_LOOK_S = 0.2


def main() -> int:
    """Run the command in the first line of the input; returns the server's exit code."""
    # Unbuffered: select must see the input after the first line.
    with os.fdopen(0, "rb", buffering=0, closefd=False) as orders:
        order = json.loads(orders.readline())
    with open(order["log"], "ab") as log:
        server = subprocess.Popen(
            order["argv"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=order["env"],
            cwd=order["cwd"], user=order["user"],
            extra_groups=None if order["user"] is None else (),
        )  # fmt: skip
    print(server.pid, flush=True)
    told: bytes | None = None
    while server.poll() is None:
        if told is None and select.select([0], [], [], _LOOK_S)[0]:
            told = os.read(0, 1)
            # A byte requests a clean shutdown; the end of the input means that the parent died.
            server.send_signal(signal.Signals(order["stop" if told else "abandon"]))
        elif told is not None:
            try:
                server.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                server.kill()
    if told is None:
        # The server ended by itself. Its files belong to the parent, if it still runs.
        told = os.read(0, 1)
    if not told:
        shutil.rmtree(order["remove"], ignore_errors=True)
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


if __name__ == "__main__":
    sys.exit(main())
