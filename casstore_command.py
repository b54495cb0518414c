"""The installed command ``casstore``: what Ctrl-C does until the command line is loaded.

A module of its own, outside of the package: importing anything of ``casstore`` imports a good
part of it, and an interrupt in the middle of that ends with a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Final, NoReturn

_INTERRUPTED: Final = 130
# As the command line reports it, which is not there yet.
_TEXT: Final = b"error: interrupted\n"
_JSON: Final = (
    b'{"schema": "casstore.error/1", "error": "Interrupted", "message": "interrupted", '
    b'"try": null, "exit_code": 130}\n'
)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """End at once: nothing was begun that would have to be cleaned up."""
    try:
        os.write(2, _JSON if "--json" in sys.argv else _TEXT)
    finally:
        os._exit(_INTERRUPTED)


def end_quietly_while_starting() -> None:
    """Until ``started``, let an interrupt end the process with a message and exit code 130."""
    # Whoever started this may want interrupts ignored, as nohup does.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def started() -> None:
    """From now on an interrupt raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> NoReturn:
    """Load the command line and run it."""
    end_quietly_while_starting()
    from casstore.cli.main import main as run

    run(begin=started)
