"""casstore: an embedded, content-addressed blob and graph store for agent sessions.

``open`` a store and ``append`` to a ``session`` of it; ``fork``, ``diff`` and ``adopt`` sessions;
``put`` and ``get`` blobs and values by digest, and ``edit`` a large value by path. Every error is a
``CasstoreError``; ``casstore.errors`` has them all. ``casstore.aio`` is the same for asyncio.

The examples in docstrings use these names as they are (``from casstore import …``), those of
their module, and ``store``, an open store with ``session``: a question, and its answer. The
docstring of a class names what else its examples use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from casstore import aio as aio
    from casstore import errors as errors
    from casstore import maintenance as maintenance
    from casstore.errors import CasstoreError
    from casstore.format.canonical import Link
    from casstore.format.digest import Digest
    from casstore.objects.diff import Change
    from casstore.objects.edit import Append, Delete, Insert, Set
    from casstore.objects.view import View
    from casstore.session.data import (
        LAST,
        LEAF,
        Checkpoint,
        Commit,
        CommitResult,
        Entry,
        Head,
        Lease,
        Node,
        NodeDraft,
        Usage,
    )
    from casstore.session.holding import HeldSession
    from casstore.session.session import Session
    from casstore.store import Store, open
    from casstore.version import __version__

# Loaded when first used, so that importing the package takes no time.
_LOADED_WHEN_USED = {
    "casstore.errors": ("CasstoreError",),
    "casstore.format.canonical": ("Link",),
    "casstore.format.digest": ("Digest",),
    "casstore.objects.diff": ("Change",),
    "casstore.objects.edit": ("Append", "Delete", "Insert", "Set"),
    "casstore.objects.view": ("View",),
    "casstore.session.data": (
        "LAST", "LEAF", "Checkpoint", "Commit", "CommitResult", "Entry", "Head",
        "Lease", "Node", "NodeDraft", "Usage",
    ),
    "casstore.session.holding": ("HeldSession",),
    "casstore.session.session": ("Session",),
    "casstore.store": ("Store", "open"),
    "casstore.version": ("__version__",),
}  # fmt: skip
#: Packages that need no import of their own: ``casstore.errors`` works after ``import casstore``.
_PACKAGES = ("aio", "errors", "maintenance")


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return __import__(f"casstore.{name}", fromlist=("__doc__",))
    for module, names in _LOADED_WHEN_USED.items():
        if name in names:
            # Not through importlib: imported for the first time by two threads at once, it was
            # seen to fail (NameError in its own code, Python 3.11).
            globals()[name] = getattr(__import__(module, fromlist=(name,)), name)
            return globals()[name]
    raise AttributeError(f"module 'casstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    special = [name for name in globals() if name.startswith("__")]
    return sorted({*special, *_PACKAGES, *__all__})


__all__ = [
    "LAST",
    "LEAF",
    "Append",
    "CasstoreError",
    "Change",
    "Checkpoint",
    "Commit",
    "CommitResult",
    "Delete",
    "Digest",
    "Entry",
    "Head",
    "HeldSession",
    "Insert",
    "Lease",
    "Link",
    "Node",
    "NodeDraft",
    "Session",
    "Set",
    "Store",
    "Usage",
    "View",
    "__version__",
    "open",
]
