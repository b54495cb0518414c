"""casstore: an embedded, content-addressed blob and graph store for agent sessions.

``open`` a store, ``put`` and ``get`` blobs and values by digest, ``edit`` a large
value by path, ``diff`` two. Every error is a ``CasstoreError``; ``casstore.errors``
has them all. ``casstore.aio`` is the same for asyncio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from casstore.errors import CasstoreError
from casstore.format.canonical import Link
from casstore.format.digest import Digest
from casstore.store import Store, open
from casstore.version import __version__

if TYPE_CHECKING:
    from casstore.objects.diff import Change
    from casstore.objects.edit import Append, Delete, Insert, Set
    from casstore.objects.view import View


def __getattr__(name: str) -> Any:
    # Viewing, editing and comparing are loaded when first used: a program that only puts
    # and gets starts a third faster without them.
    if name in ("Append", "Delete", "Insert", "Set"):
        from casstore.objects import edit

        globals()[name] = getattr(edit, name)
    elif name == "Change":
        from casstore.objects import diff

        globals()[name] = diff.Change
    elif name == "View":
        from casstore.objects import view

        globals()[name] = view.View
    else:
        raise AttributeError(f"module 'casstore' has no attribute {name!r}")
    return globals()[name]


__all__ = [
    "Append",
    "CasstoreError",
    "Change",
    "Delete",
    "Digest",
    "Insert",
    "Link",
    "Set",
    "Store",
    "View",
    "__version__",
    "open",
]
