"""casstore: an embedded, content-addressed blob and graph store for agent sessions.

``open`` a store, ``put`` and ``get`` blobs and values by digest, ``edit`` a large
value by path, ``diff`` two. Every error is a ``CasstoreError``; ``casstore.errors``
has them all. ``casstore.aio`` is the same for asyncio.
"""

from casstore.errors import CasstoreError
from casstore.format.canonical import Link
from casstore.format.digest import Digest
from casstore.objects.diff import Change
from casstore.objects.edit import Append, Delete, Insert, Set
from casstore.objects.view import View
from casstore.store import Store, open
from casstore.version import __version__

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
