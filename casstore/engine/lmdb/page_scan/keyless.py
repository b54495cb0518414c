"""Finds the keys of slabs and dictionaries whose leaf page is lost.

A long slab is in overflow pages, its key in a leaf. If the leaf is lost, index rows give the ids
of the slab's objects, and with them its key. The checksum of the slab covers the key and so
confirms it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.dictionaries import open_dictionary
from casstore.engine.lmdb.lookup import PREFIX_BYTES
from casstore.engine.lmdb.page_scan.found_slabs import FoundSlab, FoundSlabs
from casstore.engine.lmdb.page_scan.pages import DecodedPage, PageFile
from casstore.engine.lmdb.page_scan.reachable import index_rows
from casstore.engine.lmdb.page_scan.trees import STRAY
from casstore.engine.lmdb.slab import SlabDirectory
from casstore.errors import CorruptionError

_ID_BYTES: Final = 8
# How many objects of a slab are looked up in the index.
_LOOKED_UP: Final = 8
# How many first ids are tried for slabs that no index row knows.
_MAX_TRIES: Final = 1 << 20
# How many slabs are tried to see whether a dictionary fits.
_TRIED_SLABS: Final = 3


class _Keyless(NamedTuple):
    """A slab in a run of overflow pages that no leaf refers to."""

    page: DecodedPage
    directory: SlabDirectory


def place_slabs(file: PageFile, found: FoundSlabs, runs: Sequence[DecodedPage]) -> None:
    """Add the slabs in ``runs``, with the ids that their checksums confirm."""
    opened = [(page, _open(file, page)) for page in runs]
    keyless = [_Keyless(page, directory) for page, directory in opened if directory is not None]
    wanted: dict[bytes, list[tuple[int, int]]] = {}
    for number, (_, directory) in enumerate(keyless):
        alive = [at for at, kind in enumerate(directory.kinds) if kind & 0x7F != slabs.DEAD]
        for at in alive[:_LOOKED_UP]:
            prefix = directory.digest(at)[:PREFIX_BYTES]
            wanted.setdefault(prefix, []).append((number, at))
    placed: set[int] = set()
    for prefix, object_id in index_rows(file):
        for number, position in wanted.get(prefix, ()):
            first_id = object_id - position
            if number not in placed and _place(file, found, keyless[number], first_id):
                placed.add(number)
    # For the others, try every range of ids that no known slab covers.
    tries = 0
    rest = [one for number, one in enumerate(keyless) if number not in placed]
    for one in rest:
        for first_id in _free_first_ids(found, one.directory.objects):
            tries += 1
            if tries > _MAX_TRIES:
                return
            if _place(file, found, one, first_id):
                break


def _open(file: PageFile, page: DecodedPage) -> SlabDirectory | None:
    value = file.run_content(page)
    try:
        return slabs.read_directory(bytes(_ID_BYTES), value or b"", check=False)
    except CorruptionError:
        return None


def _place(file: PageFile, found: FoundSlabs, one: _Keyless, first_id: int) -> bool:
    last_id = first_id + one.directory.objects - 1
    if first_id < 1 or last_id > slabs.MAX_ID:
        return False
    value = file.run_content(one.page)
    try:
        slabs.read_directory(slabs.slab_key(last_id), value or b"")
    except CorruptionError:
        return False
    size = 0 if value is None else len(value)
    found.add(FoundSlab(last_id, STRAY, one.directory.objects, one.page.number, -1, size))
    return True


def _free_first_ids(found: FoundSlabs, count: int) -> Iterator[int]:
    """The first ids with which a slab of ``count`` objects overlaps no known slab."""
    next_id = 1
    for slab in sorted(found):
        first_id = slab.last_id - slab.objects + 1
        yield from range(next_id, first_id - count + 1)
        next_id = max(next_id, slab.last_id + 1)
    # The slabs after the last known one were in the same lost leaf: only a few ids.
    yield from range(next_id, next_id + slabs.MAX_OBJECTS)


def place_dictionaries(file: PageFile, found: FoundSlabs, runs: Sequence[DecodedPage]) -> None:
    """Add the dictionaries in ``runs``, each under the number whose slabs it can decompress."""
    missing = found.missing_dictionaries()
    for page in runs:
        if not missing:
            return
        content = _open_dictionary(file, page)
        for number, users in list(missing.items()):
            if content is not None and found.adopt_dictionary(
                number, content, users[:_TRIED_SLABS]
            ):
                del missing[number]
                break


def _open_dictionary(file: PageFile, page: DecodedPage) -> bytes | None:
    """The dictionary in a run of pages. Its frame records its own length."""
    try:
        return open_dictionary(0, file.run_content(page), file.path)
    except CorruptionError:
        return None
