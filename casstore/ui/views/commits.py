"""Which commit created a node: the revisions of a session walked back from one of them.

Nodes are numbered in insertion order, and a manifest has the next number. So a revision created
the nodes from the next number of the revision before it up to its own. After a rewind the walk
continues at the revision that was restored, after the first revision of a fork in its source. It
reads only as far back as it is asked for, and remembers what it has read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Final, NamedTuple

from casstore.errors import CasstoreError
from casstore.format.graph import Manifest
from casstore.format.splitting import Encoded
from casstore.objects.node_index import common_prefix
from casstore.session.checkpoint import ledger_of, read_usage
from casstore.session.data import Entry, Origin
from casstore.ui.views.viewed import Viewed, ViewedPlace, read_manifests

_PAGE: Final = 64
# The most revisions that are walked. Nodes before them are shown without their commits.
_MAX_ENTRIES: Final = 20_000


class Created(NamedTuple):
    """A revision, and the numbers of the nodes that it created: from ``first``, below ``stop``."""

    first: int
    stop: int
    entry: Entry
    #: Of the first revision of a fork: the place that was forked.
    origin: Origin | None
    ledger: Encoded
    ledger_before: Encoded | None


class TokenCounts(NamedTuple):
    """The tokens that one commit added to the usage of its session."""

    input: int
    output: int

    def __str__(self) -> str:
        return f"{self.input:,} tokens in · {self.output:,} out"


class Commits:
    """The revisions that lead to a place, newest first."""

    def __init__(self, viewed: Viewed, session: str, revision: int) -> None:
        self._viewed = viewed
        self._found: list[Created] = []
        self._walk = self._walked(session, revision)
        self._lock = threading.Lock()
        self._is_done = False

    def down_to(self, number: int) -> list[Created]:
        """Walk back to the revision that created node ``number``; all revisions read so far."""
        with self._lock:
            while not self._is_done and (not self._found or self._found[-1].first > number):
                following = next(self._walk, None)
                if following is None:
                    self._is_done = True
                else:
                    self._found.append(following)
            return list(self._found)

    def _walked(self, session: str, revision: int) -> Iterator[Created]:
        left = _MAX_ENTRIES
        before = revision + 1
        while left > 0:
            entries = list(self._entries(session, before))
            if not entries:
                return
            manifests = read_manifests(self._viewed, [entry.manifest for entry in entries])
            moved: tuple[str, int] | None = None
            for at, (entry, manifest) in enumerate(zip(entries, manifests, strict=True)):
                is_last = at + 1 == len(entries)
                if is_last and len(entries) == _PAGE:
                    # It needs the entry before it: read it again as the first of the next page.
                    moved = session, entry.revision + 1
                    break
                left -= 1
                if manifest is None:
                    continue
                if entry.operation == "rewind" and entry.rewound_to is not None:
                    yield _created(entry, manifest, manifest, None)
                    moved = session, entry.rewound_to + 1
                    break
                if is_last:
                    origin = self._origin(session)
                    yield self._first(entry, manifest, origin)
                    if origin is None:
                        return
                    moved = origin.session, origin.revision + 1
                    break
                earlier = manifests[at + 1]
                yield _created(entry, manifest, self._grown_from(entry, manifest, earlier), None)
            if moved is None:
                return
            session, before = moved

    def _entries(self, session: str, before: int) -> Iterator[Entry]:
        try:
            yield from self._viewed.store.session(session).history(before=before, limit=_PAGE)
        except CasstoreError:
            # The session is the source of a fork, and it was deleted or is being deleted.
            return

    def _origin(self, session: str) -> Origin | None:
        state = self._viewed.runtime.find(session)
        return None if state is None else state.head.origin

    def _first(self, entry: Entry, manifest: Manifest, origin: Origin | None) -> Created:
        """The oldest revision that is kept: of a fork, without what its source had."""
        if origin is None:
            return _created(entry, manifest, Manifest(), None)
        try:
            earlier = self._viewed.runtime.at(origin.session, origin.revision).manifest
        except CasstoreError:
            earlier = manifest
        if earlier.next_seq > manifest.next_seq:
            earlier = manifest
        return _created(entry, manifest, earlier, origin)

    def _grown_from(self, entry: Entry, manifest: Manifest, earlier: Manifest | None) -> Manifest:
        """The manifest of the revision before, with the number of nodes that both share."""
        if earlier is None:
            return manifest
        if entry.operation == "adopt" or manifest.next_seq < earlier.next_seq:
            index = self._viewed.runtime.index
            shared = common_prefix(index(manifest), index(earlier))
            return earlier._replace(next_seq=shared)
        return earlier


def _created(entry: Entry, manifest: Manifest, earlier: Manifest, origin: Origin | None) -> Created:
    first = min(earlier.next_seq, manifest.next_seq)
    return Created(first, manifest.next_seq, entry, origin, ledger_of(manifest), ledger_of(earlier))


def commits_of(viewed: Viewed, place: ViewedPlace) -> Commits:
    """The revisions that lead to a place."""
    key = ("commits", place.session, place.revision, place.state.head.manifest)
    return viewed.remembered(
        key, lambda: Commits(viewed, place.session, place.revision), keep_s=3600
    )


def tokens_of(viewed: Viewed, created: Created) -> TokenCounts | None:
    """The tokens that a commit added; None if it added none."""
    if created.ledger_before is None or created.ledger == created.ledger_before:
        return None
    reader = viewed.reader()
    totals = [
        [sum([getattr(one, name) for one in read_usage(reader, ledger)])
         for name in ("input", "output")]
        for ledger in (created.ledger, created.ledger_before)
    ]  # fmt: skip
    (input_now, output_now), (input_then, output_then) = totals
    if (input_now, output_now) == (input_then, output_then):
        return None
    return TokenCounts(input_now - input_then, output_now - output_then)
