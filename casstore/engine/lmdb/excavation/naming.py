"""Names of objects that are lost themselves: from indexes and copies of any time."""

from __future__ import annotations

from collections.abc import Iterator

from casstore.engine.lmdb.excavation.found_slabs import FoundSlabs
from casstore.engine.lmdb.index import PREFIX_BYTES, read_key
from casstore.engine.lmdb.pages import PageFile
from casstore.errors import CorruptionError


def index_rows(file: PageFile) -> Iterator[tuple[bytes, int]]:
    """How a digest begins, and an id: whatever names an object, of any time.

    What only looks so may be among them: proven where it is used.
    """
    for page in file.pages():
        for entry in page.entries:
            if entry.value is not None and not entry.size:
                try:
                    yield entry.key[:PREFIX_BYTES], read_key(entry.key)
                except CorruptionError:
                    continue


def find_names(file: PageFile, found: FoundSlabs, unknown: set[int]) -> None:
    """Learn the names of lost objects where the same is stored again."""
    begins: dict[bytes, list[int]] = {}
    for name, object_id in index_rows(file) if unknown else ():
        if object_id in unknown:
            begins.setdefault(name, []).append(object_id)
    for slab in found if begins else ():
        try:
            directory = found.directory(slab)
        except CorruptionError:
            continue
        for position in range(directory.objects):
            name = directory.digest(position)
            # One that only begins alike does no harm: whatever links to it is proven.
            for object_id in begins.get(name[:PREFIX_BYTES], ()):
                found.lost_names.setdefault(object_id, name)
