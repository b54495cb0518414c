"""Run one server for as long as somebody holds the other end of our standard input.

A program of its own, started by ``servers.keeping``: a test run that is killed cannot tidy up
after itself, but the kernel closes its pipes, and that this process sees. It stands in a session of
its own, where no Ctrl-C reaches it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys

# How long a server may take to go before it is killed.
_PATIENCE_S = 20.0
_LOOK_S = 0.2


def main() -> int:
    """Run what the first line of the input orders; the answer is the server's exit code."""
    # Unbuffered: what follows the order is looked for with select.
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
            # A byte is an order to end in good order; the end of the input is a parent that died.
            server.send_signal(signal.Signals(order["stop" if told else "abandon"]))
        elif told is not None:
            try:
                server.wait(_PATIENCE_S)
            except subprocess.TimeoutExpired:
                server.kill()
    if told is None:
        # The server went by itself. What it left belongs to the parent, if there still is one.
        told = os.read(0, 1)
    if not told:
        shutil.rmtree(order["remove"], ignore_errors=True)
    return server.returncode if server.returncode >= 0 else 128 - server.returncode


if __name__ == "__main__":
    sys.exit(main())
