"""The slabs and dictionaries that the scan found, and the objects in them."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, NamedTuple

from casstore.engine.compression import Compressor
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.dictionaries import open_dictionary
from casstore.engine.lmdb.page_scan.pages import LeafEntry, PageFile
from casstore.engine.lmdb.page_scan.trees import NEWEST, STRAY
from casstore.engine.lmdb.slab import Slab, SlabDirectory
from casstore.engine.protocol import NewObject, StoredObject
from casstore.errors import CorruptionError
from casstore.format.digest import DIGEST_BYTES, check_object

_ID_BYTES: Final = 8
_NUMBER_BYTES: Final = 4
# Limits of the caches: callers read neighbouring objects one after the other.
_CACHED_BYTES: Final = 32 << 20
_CACHED_DIRECTORIES: Final = 64


class FoundSlab(NamedTuple):
    """The location of a slab. Ordered by its last id, then by its rank."""

    last_id: int
    rank: int
    objects: int
    #: The page of its leaf or the first page of its run; ``-n``: the n-th slab of the log.
    page: int
    #: The position in its leaf, or -1: it has its own run of pages, or is in the log.
    entry: int
    size: int


class FoundSlabs:
    """The slabs of a damaged file. Call ``sort`` after the last slab, before reading objects."""

    def __init__(self, file: PageFile) -> None:
        self._file = file
        self._found: list[FoundSlab] = []
        self._logged: list[bytes] = []
        self._dictionaries: dict[int, bytes] = {}
        self._compressor = Compressor(self._dictionary)
        self._decoded: OrderedDict[FoundSlab, Slab] = OrderedDict()
        self._decoded_bytes = 0
        self._directories: OrderedDict[FoundSlab, SlabDirectory] = OrderedDict()
        #: Digests of lost objects, by id, found through index rows.
        self.lost_digests: dict[int, bytes] = {}

    def __iter__(self) -> Iterator[FoundSlab]:
        return iter(self._found)

    def __reversed__(self) -> Iterator[FoundSlab]:
        return reversed(self._found)

    # --- adding ---------------------------------------------------------------------------

    def add_entry(self, page: int, entry: LeafEntry, rank: int) -> bool:
        """Add an entry of a page; False if it is not a valid slab."""
        if len(entry.key) != _ID_BYTES:
            return False
        value = self._file.value(entry)
        try:
            directory = slabs.read_directory(entry.key, value or b"")
        except CorruptionError:
            return False
        last_id = directory.first_id + directory.objects - 1
        if directory.first_id < 1:
            return False
        if entry.value is None:
            found = FoundSlab(last_id, rank, directory.objects, entry.run, -1, entry.size)
        else:
            at = self._position_of(page, entry)
            found = FoundSlab(last_id, rank, directory.objects, page, at, entry.size)
        self._found.append(found)
        return True

    def _position_of(self, number: int, entry: LeafEntry) -> int:
        page = self._file.page(number)
        return -1 if page is None else page.entries.index(entry)

    def add_logged(self, key: bytes, value: bytes) -> None:
        """Add a slab of a commit in the log; the checksum of its record was verified."""
        self._logged.append(value)
        last_id = int.from_bytes(key, "big")
        found = FoundSlab(
            last_id, NEWEST, slabs.count_of(value), -len(self._logged), -1, len(value)
        )
        self._found.append(found)

    def add(self, found: FoundSlab) -> None:
        """Add a slab whose ids were determined by ``keyless``."""
        self._found.append(found)

    def add_dictionary(self, entry: LeafEntry) -> bool:
        """Add an entry of a page; False if it is not a valid dictionary."""
        if len(entry.key) != _NUMBER_BYTES:
            return False
        number = int.from_bytes(entry.key, "big")
        try:
            content = open_dictionary(number, self._file.value(entry), self._file.path)
        except CorruptionError:
            return False
        self._dictionaries.setdefault(number, content)
        return True

    def sort(self) -> None:
        """Sort the slabs by id, as the lookups need."""
        self._found.sort()

    def runs(self) -> set[int]:
        """The first pages of the slabs that have their own runs of pages."""
        return {found.page for found in self._found if found.entry < 0 <= found.page}

    @property
    def stray_count(self) -> int:
        """How many slabs were found on stray pages."""
        return sum(found.rank == STRAY for found in self._found)

    # --- dictionaries -----------------------------------------------------------------------

    def missing_dictionaries(self) -> dict[int, list[FoundSlab]]:
        """The numbers of the missing dictionaries, each with the slabs that need it."""
        found: dict[int, list[FoundSlab]] = {}
        for one in self._found:
            number = self.directory(one).dictionary
            if number and number not in self._dictionaries:
                found.setdefault(number, []).append(one)
        return found

    def lost_dictionaries(self) -> list[int]:
        """The numbers of the missing dictionaries that slabs of the newest tree need."""
        named = {self.directory(found).dictionary for found in self._found if found.rank == NEWEST}
        return sorted(number for number in named if number and number not in self._dictionaries)

    def adopt_dictionary(self, number: int, content: bytes, users: list[FoundSlab]) -> bool:
        """Add a dictionary under ``number`` if an object of ``users`` can be read with it."""
        self._dictionaries[number] = content
        # A temporary compressor: a compressor caches the dictionaries that it has loaded.
        kept, self._compressor = self._compressor, Compressor(self._dictionary)
        fits = False
        try:
            fits = any(
                not isinstance(self.find(object_id), str)
                for found in users
                for object_id in range(found.last_id - found.objects + 1, found.last_id + 1)
            )
            return fits
        finally:
            self._compressor = kept
            self._decoded.clear()
            self._decoded_bytes = 0
            if not fits:
                del self._dictionaries[number]

    def _dictionary(self, number: int) -> bytes:
        found = self._dictionaries.get(number)
        if found is None:
            raise CorruptionError(f"dictionary {number} is lost")
        return found

    def _value(self, found: FoundSlab) -> bytes:
        if found.page < 0:
            return self._logged[-found.page - 1]
        if found.entry < 0:
            pages = self._file.run_length(found.size)
            data = self._file.read(found.page, pages)
            if data is None:
                raise CorruptionError(f"page {found.page} cannot be read")
            return data[self._file.header_bytes : self._file.header_bytes + found.size]
        page = self._file.page(found.page)
        value = None if page is None else page.entries[found.entry].value
        if value is None:
            raise CorruptionError(f"page {found.page} cannot be read")
        return value

    def directory(self, found: FoundSlab) -> SlabDirectory:
        """The directory of a slab; CorruptionError if its page has become unreadable."""
        decoded = self._decoded.get(found)
        if decoded is not None:
            return decoded.directory
        known = self._directories.get(found)
        if known is None:
            known = slabs.read_directory(slabs.slab_key(found.last_id), self._value(found))
            self._directories[found] = known
            if len(self._directories) > _CACHED_DIRECTORIES:
                self._directories.popitem(last=False)
        return known

    def _slab(self, found: FoundSlab) -> Slab:
        known = self._decoded.get(found)
        if known is not None:
            self._decoded.move_to_end(found)
            return known
        value = self._value(found)
        directory = slabs.read_directory(slabs.slab_key(found.last_id), value)
        payload = value[directory.payload_at :]

        def inflate(raw_bytes: int) -> bytes:
            # The exact length of a slab without its leaf is not known: the rest of the last page
            # follows it.
            own = payload[:raw_bytes] if directory.codec == slabs.CODEC_RAW else payload
            return self._compressor.inflate(directory.codec, directory.dictionary, own, raw_bytes)

        slab = Slab(directory, inflate)
        self._decoded[found] = slab
        self._decoded_bytes += slab.size_bytes
        while self._decoded_bytes > _CACHED_BYTES and len(self._decoded) > 2:
            _, dropped = self._decoded.popitem(last=False)
            self._decoded_bytes -= dropped.size_bytes
        return slab

    def _holders(self, object_id: int) -> list[FoundSlab]:
        """The slabs that hold an id, lowest rank first."""
        at = bisect_left(self._found, (object_id,))
        found: list[FoundSlab] = []
        while at < len(self._found) and self._found[at].last_id < object_id + slabs.MAX_OBJECTS:
            one = self._found[at]
            if one.last_id - one.objects < object_id:
                found.append(one)
            at += 1
        return sorted(found, key=lambda one: one.rank)

    def digest_of(self, object_id: int) -> bytes:
        """The digest of an object: from a slab that holds it, else from an index row."""
        for found in self._holders(object_id):
            directory = self.directory(found)
            return directory.digest(object_id - directory.first_id)
        digest = self.lost_digests.get(object_id)
        if digest is None:
            raise CorruptionError(f"object {object_id} is lost, and so is its digest")
        return digest

    def children_of(self, object_id: int) -> tuple[int, ...]:
        """The ids that an object links to; empty if no slab holds the object."""
        for found in self._holders(object_id):
            directory = self.directory(found)
            position = object_id - directory.first_id
            if directory.kinds[position] & ~slabs.KEEPS_LINKS == slabs.DEAD:
                continue
            decoded = self._decoded.get(found)
            if decoded is not None:
                return decoded.children(position)
            return directory.children(position, sum(directory.child_counts[:position]))
        return ()

    def find(self, object_id: int) -> StoredObject | str:
        """An object that matches its digest, or the reason why it cannot be read."""
        why = "no slab holds it"
        for found in self._holders(object_id):
            try:
                slab = self._slab(found)
                position = object_id - slab.first_id
                kind = slab.kind(position)
                if kind == slabs.DEAD:
                    continue
                item = StoredObject(kind, slab.data(position, self.digest_of))
                check_object(slab.directory.digest(position), *item)
                return item
            except CorruptionError as exc:
                why = str(exc)
        return why

    def sketch(self, object_id: int) -> StoredObject | None:
        """An object with ``stand_in`` in place of the lost digests of its children.

        It cannot be verified, and must not be stored. None if no digest of a child is lost.
        """
        if all(map(self._has_digest, self.children_of(object_id))):
            return None
        for found in self._holders(object_id):
            try:
                slab = self._slab(found)
                position = object_id - slab.first_id
                if slab.kind(position) != slabs.DEAD:
                    data = slab.data(position, self._digest_or_stand_in)
                    return StoredObject(slab.kind(position), data)
            except CorruptionError:
                continue
        return None

    def stand_in(self, object_id: int) -> bytes:
        """The placeholder for the lost digest of an object in a sketch."""
        return object_id.to_bytes(DIGEST_BYTES, "big")

    def _digest_or_stand_in(self, object_id: int) -> bytes:
        if self._has_digest(object_id):
            return self.digest_of(object_id)
        return self.stand_in(object_id)

    def _has_digest(self, object_id: int) -> bool:
        try:
            self.digest_of(object_id)
        except CorruptionError:
            return False
        return True

    def arriving(self, object_id: int, item: StoredObject) -> NewObject:
        """A found object in the form that ``Write`` takes."""
        children = [self.digest_of(child) for child in self.children_of(object_id)]
        return NewObject(self.digest_of(object_id), item.kind, item.data, children)
