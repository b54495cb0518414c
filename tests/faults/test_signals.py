"""The tests hear signals also where they were started to ignore them: ``nohup tools/check &``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

SCRIPT = """
import signal, subprocess, sys
ignored = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT)
for number in ignored:
    signal.signal(number, signal.SIG_IGN)
from tests.conftest import pytest_configure
pytest_configure(None)
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
signal.raise_signal(signal.SIGHUP)
code = "import sys; from signal import *\\n"
code += "print([getsignal(int(one)) == SIG_IGN for one in sys.argv[1:]])"
child = [sys.executable, "-S", "-c", code, *[str(int(one)) for one in ignored]]
print(subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip())
"""


def test_the_test_session_restores_signals_that_were_ignored_when_it_started() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    answer = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, env=env
    )
    assert (answer.returncode, answer.stdout) == (0, "[False, False, False, False]\n"), answer
