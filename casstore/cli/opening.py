"""Opening a store to read it, also when it was left in the midst of writing."""

from __future__ import annotations

from casstore.errors import UnsettledError
from casstore.store import Store
from casstore.store import open as open_store


def open_to_read(path: str) -> Store:
    """Open a store that must be there, for reading.

    After a crash of the machine somebody has to return it to its last whole state first, and
    whoever looks into it then is the operator who wants to know what is left.
    """
    try:
        return open_store(path, readonly=True, create=False)
    except UnsettledError:
        open_store(path, "any", create=False).close()
        return open_store(path, readonly=True, create=False)
