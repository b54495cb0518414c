"""A store as the viewer reads it: one runtime and one cache of results for all pages.

A *place* is what a page of a session shows: the session at one revision, up to one leaf.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

from casstore.errors import CorruptionError, NotFoundError, SessionNotFoundError
from casstore.format.digest import KIND_NAMES, Kind
from casstore.format.graph import Manifest, decode_manifest
from casstore.objects import graph
from casstore.objects.node_index import NodeIndex
from casstore.objects.pieces import PieceReader
from casstore.session.attempts import read_again
from casstore.session.state import State, runtime_of
from casstore.store import Store

Found = TypeVar("Found")

#: The most rows that one answer holds.
MAX_ROWS: Final = 300
_KEPT: Final = 32
# The most pins that are searched for tags.
_PINS: Final = 1000
# A result that took t seconds to compute is reused for 10 t seconds at least, so that a slow view
# takes a tenth of the processor at most.
_REUSE_FACTOR: Final = 10


class ViewedPlace(NamedTuple):
    """A session at a revision, with its graph opened."""

    session: str
    #: The revision that is shown, and the newest one.
    state: State
    head: State
    #: Nodes that tombstones hide: digest and id.
    hidden: Mapping[bytes, str]
    #: The graph's nodes, by position and by id.
    nodes: NodeIndex
    #: The positions in ``nodes`` of the path from the root to the leaf, hidden nodes included.
    path: Sequence[int]

    @property
    def revision(self) -> int:
        """The revision that is shown."""
        return self.state.head.revision

    @property
    def is_head(self) -> bool:
        """Is the newest revision shown?"""
        return self.state.head.revision == self.head.head.revision


class Viewed:
    """A store, and what the pages have read of it before. Safe to use from many threads."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.runtime = runtime_of(store)
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[float, float, Any]] = OrderedDict()
        self._making: dict[Hashable, threading.Lock] = {}

    def reader(self) -> PieceReader:
        """A reader of objects."""
        return PieceReader(self.store.engine)

    def now_ms(self) -> int:
        """The time of the store."""
        return self.store.engine.now_ms()

    def place(
        self, session: str, at: int | str | None = None, leaf: str | None = None
    ) -> ViewedPlace:
        """A session, at its head or ``at`` a revision or label, up to its leaf or to ``leaf``.

        The number of a revision that was removed stands for the newest one before it.
        """
        return read_again(lambda: self._place(session, at, leaf))

    def _place(self, session: str, at: int | str | None, leaf: str | None) -> ViewedPlace:
        head = self.runtime.find(session)
        if head is None:
            raise SessionNotFoundError(session)
        state = head if at is None else self._state(session, head, at)
        index = self.runtime.index(state.manifest)
        return ViewedPlace(
            session, state, head, self.runtime.hidden(head.head), index,
            self._path(session, state, index, leaf),
        )  # fmt: skip

    def _state(self, session: str, head: State, at: int | str) -> State:
        if isinstance(at, int):
            if at >= head.head.revision:
                return head
            for entry in self.store.session(session).history(before=at + 1, limit=1):
                return self.runtime.at(session, entry)
        return self.runtime.at(session, at)

    def _path(
        self, session: str, state: State, index: NodeIndex, leaf: str | None
    ) -> Sequence[int]:
        manifest = state.manifest
        if leaf is not None and leaf != manifest.leaf_id:
            [found] = index.find([leaf])
            if found is None:
                raise NotFoundError(f"session {session!r} has no node {leaf!r} at this revision")
            position, digest = found
        elif manifest.leaf is None or manifest.leaf_id is None:
            return ()
        else:
            digest = manifest.leaf
            position = index.position_of(manifest.leaf_id, digest)
        [header] = graph.read_headers(self.reader(), [digest])
        return index.path(position, header.depth)

    def remembered(
        self,
        key: Hashable,
        make: Callable[[], Found],
        *,
        keep_s: float = 0,
        since: float | None = None,
    ) -> Found:
        """The result of ``make``, or its cached result if that is recent enough.

        What took long is kept longer: ten times as long as it took, or ``keep_s``. With ``since``,
        a time of ``time.monotonic``, a cached result must have been begun after it.
        """
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        # One thread computes it; others that need the same wait for it.
        with making:
            now = time.monotonic()
            with self._lock:
                known = self._kept.get(key)
            if known is not None:
                done_at, took_s, kept = known
                is_recent = now < done_at + max(keep_s, _REUSE_FACTOR * took_s)
                if is_recent if since is None else done_at - took_s > since:
                    found: Found = kept
                    return found
            found = make()
            done = time.monotonic()
            with self._lock:
                self._kept[key] = (done, done - now, found)
                self._kept.move_to_end(key)
                while len(self._kept) > _KEPT:
                    old, _ = self._kept.popitem(last=False)
                    self._making.pop(old, None)
            return found

    def known(self, key: Hashable) -> Any:
        """The cached result, however old; None before the first one."""
        with self._lock:
            return self._kept.get(key, (0, 0, None))[2]

    def forget(self) -> None:
        """Clear the cache, after the viewer itself has changed the store."""
        with self._lock:
            self._kept.clear()


def kind_name(kind: int) -> str:
    """The name of a kind of object, as pages show it: a large blob is a blob."""
    return "blob" if kind == Kind.ROPE else KIND_NAMES.get(kind, str(kind))


def tags_of(viewed: Viewed, digest: bytes) -> tuple[str, ...]:
    """The tags that name an object."""
    pins = islice(viewed.store.pins(), _PINS)
    return tuple([pin.name for pin in pins if pin.digest == digest])


def turns_before(viewed: Viewed, place: ViewedPlace, at: int) -> int:
    """The number of turns that begin before position ``at`` of the path."""
    if at == 0:
        return 0
    digest = place.nodes.digests([place.path[at - 1]])
    return graph.read_headers(viewed.reader(), digest)[0].users


def read_manifests(viewed: Viewed, digests: Sequence[bytes]) -> list[Manifest | None]:
    """Manifests, read together; None for one that gc has removed, or that is damaged."""
    found: list[Manifest | None] = []
    for digest, item in zip(digests, viewed.reader().find_many(digests), strict=True):
        try:
            found.append(None if item is None else decode_manifest(digest, item.data))
        except CorruptionError:
            found.append(None)
    return found
