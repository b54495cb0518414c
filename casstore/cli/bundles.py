"""An exported file looked into as if it were a store."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from typing import NamedTuple

from casstore.maintenance.importing import import_session
from casstore.maintenance.progress import Progress
from casstore.store import Store
from casstore.store import open as open_store


class Opened(NamedTuple):
    """A bundle in a store of its own, and the session that it holds."""

    store: Store
    session: str


def open_bundle(stack: ExitStack, path: str, progress: Progress | None) -> Opened:
    """Prove a bundle and bring it into a store that goes away with ``stack``.

    On the disk, not in memory: a bundle may be of any length.
    """
    place = stack.enter_context(tempfile.TemporaryDirectory(prefix="casstore-bundle-"))
    store = stack.enter_context(open_store(place, durability="relaxed", auto_train=False))
    return Opened(store, import_session(store, path, progress=progress).session)
