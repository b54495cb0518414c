"""The command line: what a person or a script can do with a store without writing Python.

``main`` is the group and turns errors into exit codes; ``command`` is what all commands
have; ``naming`` says what a name means; each family of commands has a module of its own.
Only here are environment variables read and terminals written to.

This module says what Ctrl-C does until the command line is loaded. It imports nothing of
casstore: an interrupt in the middle of an import ends with a traceback.
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


def run() -> NoReturn:
    """Load the command line and run it: the installed command ``casstore``."""
    end_quietly_while_starting()
    from casstore.cli.main import main

    main(begin=started)
