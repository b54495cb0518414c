"""What some names reach of all that was found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from casstore.engine.id_set import IdSet
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.excavation.found_slabs import FoundSlabs
from casstore.engine.lmdb.excavation.naming import find_names
from casstore.engine.lmdb.pages import PageFile
from casstore.errors import CorruptionError


class Marked(NamedTuple):
    """What some roots reach: ids, those of them that a slab holds (and others), and the roots'."""

    ids: IdSet
    held: IdSet
    places: dict[bytes, int]


def mark(file: PageFile, found: FoundSlabs, roots: Iterable[bytes]) -> Marked:
    """Find all ids that the objects of these names are made of."""
    wanted = set(roots)
    while True:
        marked = _mark(found, wanted)
        lost = {each for each in marked.ids if each not in marked.held}
        find_names(file, found, lost - found.lost_names.keys())
        # The same object may have been stored before, or again, under another id.
        more = {found.lost_names[each] for each in lost if each in found.lost_names} - wanted
        if not more:
            return marked
        wanted |= more


def _mark(found: FoundSlabs, wanted: set[bytes]) -> Marked:
    marked = Marked(IdSet(), IdSet(), {})
    for slab in reversed(found):
        try:
            directory = found.directory(slab)
        except CorruptionError:
            # It was there when the file was first read.
            continue
        child_at = len(directory.distances)
        for position in range(directory.objects - 1, -1, -1):
            child_at -= directory.child_counts[position]
            if directory.kinds[position] & ~slabs.KEEPS_LINKS == slabs.DEAD:
                continue
            object_id = directory.first_id + position
            marked.held.add(object_id)
            name = directory.digest(position)
            if name in wanted:
                marked.ids.add(object_id)
                marked.places.setdefault(name, object_id)
            if object_id in marked.ids:
                for child in directory.children(position, child_at):
                    if 0 < child < object_id:
                        marked.ids.add(child)
    return marked
