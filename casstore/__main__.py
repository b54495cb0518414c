"""``python -m casstore``: the command line, where the installed command is not on the path."""

from __future__ import annotations

if __name__ == "__main__":
    from casstore.cli import run

    run()
