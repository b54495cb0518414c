"""Runs a tool of this checkout with a Python that has casstore's dependencies."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
# The modules that casstore needs.
_NEEDED: Final = ("blake3", "click", "lmdb", "msgpack", "pyfastcdc", "rich", "zstandard")


def use_checkout() -> None:
    """Import casstore from this checkout; switch to ``.venv`` if this Python lacks a dependency.

    ``tools/demo`` and ``tools/check`` create ``.venv``. If it lacks one too, print what to do.
    """
    sys.path.insert(0, str(ROOT))
    from casstore.cli import end_quietly_while_starting

    end_quietly_while_starting()
    lacking = [name for name in _NEEDED if find_spec(name) is None]
    if not lacking:
        return
    own = ROOT / ".venv" / "bin" / "python"
    if own.exists() and Path(sys.prefix).resolve() != (ROOT / ".venv").resolve():
        os.execv(own, [str(own), *sys.argv])
    sys.stderr.write(
        f"{Path(sys.argv[0]).name}: {sys.executable} has no {', '.join(lacking)}\n"
        f"try: python3 -m venv {ROOT}/.venv && {ROOT}/.venv/bin/pip install {ROOT}\n"
    )
    raise SystemExit(2)
