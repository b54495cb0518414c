"""Slabs and dictionaries in runs of pages that no leaf leads to: where do they belong?

A long slab lies apart from its key. If the leaf that held the key is gone, the index says
where the slab's objects belong, and the checksum, which covers the key, confirms it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.dictionaries import open_dictionary
from casstore.engine.lmdb.excavation.found_slabs import FoundSlab, FoundSlabs
from casstore.engine.lmdb.excavation.naming import index_rows
from casstore.engine.lmdb.excavation.ranks import STRAY
from casstore.engine.lmdb.index import PREFIX_BYTES
from casstore.engine.lmdb.pages import Page, PageFile
from casstore.engine.lmdb.slab import Directory
from casstore.errors import CorruptionError

_ID_BYTES: Final = 8
# How many of a slab's objects are looked for in the index to learn where it belongs.
_WANTED_NAMES: Final = 8
# How many places are tried for slabs that the index does not know either.
_MAX_TRIES: Final = 1 << 20
# How many slabs are tried to see whether a dictionary is theirs.
_TRIED_SLABS: Final = 3


class _Keyless(NamedTuple):
    """A slab in a run of pages that no leaf leads to."""

    page: Page
    directory: Directory


def place_slabs(file: PageFile, found: FoundSlabs, runs: Sequence[Page]) -> None:
    """Find out which ids belong to slabs whose leaf is gone."""
    opened = [(page, _open(file, page)) for page in runs]
    keyless = [_Keyless(page, directory) for page, directory in opened if directory is not None]
    wanted: dict[bytes, list[tuple[int, int]]] = {}
    for number, (_, directory) in enumerate(keyless):
        alive = [at for at, kind in enumerate(directory.kinds) if kind & 0x7F != slabs.DEAD]
        for at in alive[:_WANTED_NAMES]:
            prefix = directory.digest(at)[:PREFIX_BYTES]
            wanted.setdefault(prefix, []).append((number, at))
    placed: set[int] = set()
    for name, object_id in index_rows(file):
        for number, position in wanted.get(name[:PREFIX_BYTES], ()):
            first_id = object_id - position
            if number not in placed and _place(file, found, keyless[number], first_id):
                placed.add(number)
    # Those left may fit where no slab is known.
    tries = 0
    rest = [one for number, one in enumerate(keyless) if number not in placed]
    for one in rest:
        for first_id in _free_places(found, one.directory.objects):
            tries += 1
            if tries > _MAX_TRIES:
                return
            if _place(file, found, one, first_id):
                break


def _open(file: PageFile, page: Page) -> Directory | None:
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


def _free_places(found: FoundSlabs, count: int) -> Iterator[int]:
    """First ids at which a slab of ``count`` objects would overlap no known one."""
    next_id = 1
    for slab in sorted(found):
        first_id = slab.last_id - slab.objects + 1
        yield from range(next_id, first_id - count + 1)
        next_id = max(next_id, slab.last_id + 1)
    # Behind the last there may be more, but not many: one leaf's worth.
    yield from range(next_id, next_id + slabs.MAX_OBJECTS)


def place_dictionaries(file: PageFile, found: FoundSlabs, runs: Sequence[Page]) -> None:
    """Find out which numbers belong to dictionaries whose leaf is gone."""
    needy = found.needy()
    for page in runs:
        if not needy:
            return
        content = _open_dictionary(file, page)
        for number, users in list(needy.items()):
            if content is not None and found.adopt_dictionary(
                number, content, users[:_TRIED_SLABS]
            ):
                del needy[number]
                break


def _open_dictionary(file: PageFile, page: Page) -> bytes | None:
    """The dictionary in a run of pages; where its frame ends, the frame itself says."""
    try:
        return open_dictionary(0, file.run_content(page), file.path)
    except CorruptionError:
        return None
