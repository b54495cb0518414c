"""The command line of casstore.

``main`` has the table of commands and maps errors to exit codes; ``command`` has the common part of
all commands, and ``options`` the options that several have; ``naming`` resolves names. Only this
package reads environment variables and writes to terminals.

A command is in the module of its name. These modules have several commands, or another name:

    sessions     sessions, history, label, fork, adopt, rewind, delete
    tags         tag, pin
    workspace    workspace, bisect
    ui           ui, html
    work         queue, leases, attachments, watch
    objects      put, cat
    check        check, rebuild, salvage, recover
    space        gc, pack, vacuum, compact
    retention    policy, prune
    moving       backup, copy, export, verify
    import_      import
    setup        init, version, completion

This module handles Ctrl-C until the command line is loaded. It imports no other module of casstore,
because an interrupt during an import would end with a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Final, NoReturn

_INTERRUPTED: Final = 130
# What ``main._report`` would write: that module is not loaded yet.
_TEXT: Final = b"error: interrupted\n"
_JSON: Final = (
    b'{"schema": "casstore.error/1", "error": "Interrupted", "message": "interrupted", '
    b'"try": null, "exit_code": 130}\n'
)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """End the process at once: there is nothing to clean up yet."""
    try:
        os.write(2, _JSON if "--json" in sys.argv else _TEXT)
    finally:
        os._exit(_INTERRUPTED)


def end_quietly_while_starting() -> None:
    """Until ``started``, let an interrupt end the process with a message and exit code 130."""
    # The parent process may want interrupts ignored, as a script does for a background job.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def started() -> None:
    """Let an interrupt raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run() -> NoReturn:
    """Load the command line and run it: the installed command ``casstore``."""
    end_quietly_while_starting()
    from casstore.cli.main import main

    main(begin=started)
