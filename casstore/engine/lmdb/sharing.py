"""One engine for each store and process, shared by all handles that the program opens on it.

LMDB forbids a second environment of a file in one process, and a program may open the same store in
two places. They share an engine; releasing it for the last time closes the files. Each handle has a
durability of its own.
"""

from __future__ import annotations

import os
import threading
from typing import Any

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.errors import BusyError


class _Shared:
    """An open engine, the options it was opened with, and how many handles use it."""

    __slots__ = ("engine", "options", "users")

    def __init__(self, engine: LmdbEngine, options: dict[str, Any]) -> None:
        self.engine = engine
        self.options = options
        self.users = 1


_lock = threading.Lock()
# By the real path of the store's directory.
_shared: dict[str, _Shared] = {}


def acquire(
    path: str, *, durability: str, verify: bool, cache_bytes: int, **options: Any
) -> LmdbEngine:
    """The engine of the store at ``path``, opened or shared; call ``release`` when done.

    BusyError if the store is open in this process with other ``options``, or with ``verify``.
    """
    real_path = os.path.realpath(path)
    with _lock:
        held = _shared.get(real_path)
        if held is None:
            engine = LmdbEngine(
                path, durability=durability, verify=verify, cache_bytes=cache_bytes, **options
            )
            _shared[real_path] = _Shared(engine, options)
            return engine
        if verify:
            raise BusyError(f"{path} is open in this process; it can be verified only when closed")
        for name, value in options.items():
            if name not in ("create", "lmdb_version") and held.options[name] != value:
                raise BusyError(
                    f"{path} is open in this process with {name}={held.options[name]!r}, "
                    f"not {value!r}"
                )
        held.users += 1
        return held.engine.with_durability(durability)


def release(engine: LmdbEngine) -> None:
    """Release an acquired engine; the last release closes it."""
    with _lock:
        for real_path, held in _shared.items():
            if held.engine.shares_files_with(engine):
                held.users -= 1
                if held.users:
                    return
                del _shared[real_path]
                held.engine.close()
                return
        engine.close()


def _forget() -> None:
    """Reset in a forked child: its copies of the engines are closed already."""
    global _lock
    _lock = threading.Lock()
    _shared.clear()


os.register_at_fork(after_in_child=_forget)
