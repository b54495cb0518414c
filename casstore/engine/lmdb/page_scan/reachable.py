"""Marks the ids that some roots reach among the slabs that were found."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from casstore.engine.id_set import IdSet
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.lookup import PREFIX_BYTES, read_key
from casstore.engine.lmdb.page_scan.found_slabs import FoundSlabs
from casstore.engine.lmdb.page_scan.pages import PageFile
from casstore.errors import CorruptionError


class Marked(NamedTuple):
    """The result of ``mark``."""

    #: The ids that the roots reach.
    ids: IdSet
    #: Every id that a slab holds, reached or not.
    held: IdSet
    #: The id of each root that a slab holds, by its digest.
    places: dict[bytes, int]


def mark(file: PageFile, found: FoundSlabs, roots: Iterable[bytes]) -> Marked:
    """Mark every id that the objects with the digests ``roots`` reach."""
    wanted = set(roots)
    while True:
        marked = _mark(found, wanted)
        lost = {each for each in marked.ids if each not in marked.held}
        _find_digests(file, found, lost - found.lost_digests.keys())
        # The same object may also be stored under another id.
        more = {found.lost_digests[each] for each in lost if each in found.lost_digests} - wanted
        if not more:
            return marked
        wanted |= more


def _mark(found: FoundSlabs, wanted: set[bytes]) -> Marked:
    marked = Marked(IdSet(), IdSet(), {})
    for slab in reversed(found):
        try:
            directory = found.directory(slab)
        except CorruptionError:
            # The page was readable during the scan and has become unreadable since.
            continue
        child_at = len(directory.distances)
        for position in range(directory.objects - 1, -1, -1):
            child_at -= directory.child_counts[position]
            if directory.kinds[position] & ~slabs.KEEPS_LINKS == slabs.DEAD:
                continue
            object_id = directory.first_id + position
            marked.held.add(object_id)
            digest = directory.digest(position)
            if digest in wanted:
                marked.ids.add(object_id)
                marked.places.setdefault(digest, object_id)
            if object_id in marked.ids:
                for child in directory.children(position, child_at):
                    if 0 < child < object_id:
                        marked.ids.add(child)
    return marked


def index_rows(file: PageFile) -> Iterator[tuple[bytes, int]]:
    """The digest prefix and the id of each index row on any page, current or outdated.

    An entry of another table may look like an index row, so the caller must verify the object.
    """
    for page in file.pages():
        for entry in page.entries:
            if entry.value is not None and not entry.size:
                try:
                    yield entry.key[:PREFIX_BYTES], read_key(entry.key)
                except CorruptionError:
                    continue


def _find_digests(file: PageFile, found: FoundSlabs, unknown: set[int]) -> None:
    """Find the digests of lost objects: index row → prefix → a stored copy of the object."""
    ids_by_prefix: dict[bytes, list[int]] = {}
    for prefix, object_id in index_rows(file) if unknown else ():
        if object_id in unknown:
            ids_by_prefix.setdefault(prefix, []).append(object_id)
    for slab in found if ids_by_prefix else ():
        try:
            directory = found.directory(slab)
        except CorruptionError:
            continue
        for position in range(directory.objects):
            digest = directory.digest(position)
            # Another object with the same prefix does no harm: the digest of each parent is
            # verified, and fails if it was computed with the wrong child.
            for object_id in ids_by_prefix.get(digest[:PREFIX_BYTES], ()):
                found.lost_digests.setdefault(object_id, digest)
