"""Slabs and dictionaries that were found, and the objects in them, proven by their digests."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final, NamedTuple

from casstore.engine.compression import Compressor
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.dictionaries import open_dictionary
from casstore.engine.lmdb.excavation.ranks import NEWEST, STRAY
from casstore.engine.lmdb.pages import Entry, PageFile
from casstore.engine.lmdb.slab import Directory, Slab
from casstore.engine.protocol import NewObject, StoredObject
from casstore.errors import CorruptionError
from casstore.format.hashing import DIGEST_BYTES, check_object

_ID_BYTES: Final = 8
_NUMBER_BYTES: Final = 4
# Inflated slabs that are kept: neighbours are asked for one after the other.
_KEPT_BYTES: Final = 32 << 20
_KEPT_DIRECTORIES: Final = 64


class FoundSlab(NamedTuple):
    """A slab and where it lies. Ordered by its last id, then by how much it counts."""

    last_id: int
    rank: int
    objects: int
    page: int
    #: The position in its leaf, or -1: it lies in a run of its own, of ``size`` bytes.
    entry: int
    size: int


class FoundSlabs:
    """The slabs of a damaged file. ``sort`` them before objects are asked for."""

    def __init__(self, file: PageFile) -> None:
        self._file = file
        self._found: list[FoundSlab] = []
        self._logged: list[bytes] = []
        self._dictionaries: dict[int, bytes] = {}
        self._compressor = Compressor(self._dictionary)
        self._decoded: OrderedDict[FoundSlab, Slab] = OrderedDict()
        self._decoded_bytes = 0
        self._directories: OrderedDict[FoundSlab, Directory] = OrderedDict()
        #: Names of lost objects, by id, as the index tells.
        self.lost_names: dict[int, bytes] = {}

    def __iter__(self) -> Iterator[FoundSlab]:
        return iter(self._found)

    def __reversed__(self) -> Iterator[FoundSlab]:
        return reversed(self._found)

    # --- taking in ------------------------------------------------------------------------

    def take(self, page: int, entry: Entry, rank: int) -> bool:
        """Take in an entry of a page if it is a slab that can be proven."""
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

    def _position_of(self, number: int, entry: Entry) -> int:
        page = self._file.page(number)
        return -1 if page is None else page.entries.index(entry)

    def take_logged(self, key: bytes, value: bytes) -> None:
        """Take in a slab of a commit in the log, which was proven with its record."""
        self._logged.append(value)
        last_id = int.from_bytes(key, "big")
        # A negative page says where in the list it stands.
        found = FoundSlab(
            last_id, NEWEST, slabs.count_of(value), -len(self._logged), -1, len(value)
        )
        self._found.append(found)

    def add(self, found: FoundSlab) -> None:
        """Take in a slab of which it was found out where it belongs."""
        self._found.append(found)

    def take_dictionary(self, entry: Entry) -> bool:
        """Take in an entry of a page if it is a dictionary that can be proven."""
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
        """Put them in the order of ids."""
        self._found.sort()

    def runs(self) -> set[int]:
        """The first pages of those that lie in runs of their own."""
        return {found.page for found in self._found if found.entry < 0 <= found.page}

    @property
    def stray_count(self) -> int:
        """How many were found in pages to which no tree leads."""
        return sum(found.rank == STRAY for found in self._found)

    # --- dictionaries -----------------------------------------------------------------------

    def needy(self) -> dict[int, list[FoundSlab]]:
        """The dictionaries that are lost, and the slabs that need them."""
        found: dict[int, list[FoundSlab]] = {}
        for one in self._found:
            number = self.directory(one).dictionary
            if number and number not in self._dictionaries:
                found.setdefault(number, []).append(one)
        return found

    def lost_dictionaries(self) -> list[int]:
        """Dictionaries that slabs of the newest tree name and that are gone."""
        named = {self.directory(found).dictionary for found in self._found if found.rank == NEWEST}
        return sorted(number for number in named if number and number not in self._dictionaries)

    def adopt_dictionary(self, number: int, content: bytes, users: list[FoundSlab]) -> bool:
        """Take a dictionary in under a number if one of these slabs comes out right with it."""
        self._dictionaries[number] = content
        # One of its own: a compressor keeps what it has loaded.
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

    def directory(self, found: FoundSlab) -> Directory:
        """What a slab says of its objects; CorruptionError if it cannot be read any more."""
        decoded = self._decoded.get(found)
        if decoded is not None:
            return decoded.directory
        known = self._directories.get(found)
        if known is None:
            known = slabs.read_directory(slabs.slab_key(found.last_id), self._value(found))
            self._directories[found] = known
            if len(self._directories) > _KEPT_DIRECTORIES:
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
            # A slab that was found without its leaf is not known to the byte.
            own = payload[:raw_bytes] if directory.codec == slabs.CODEC_RAW else payload
            return self._compressor.inflate(directory.codec, directory.dictionary, own, raw_bytes)

        slab = Slab(directory, inflate)
        self._decoded[found] = slab
        self._decoded_bytes += slab.size_bytes
        while self._decoded_bytes > _KEPT_BYTES and len(self._decoded) > 2:
            _, dropped = self._decoded.popitem(last=False)
            self._decoded_bytes -= dropped.size_bytes
        return slab

    def _holders(self, object_id: int) -> list[FoundSlab]:
        """The slabs that hold an id, those first that count more."""
        at = bisect_left(self._found, (object_id,))
        found: list[FoundSlab] = []
        while at < len(self._found) and self._found[at].last_id < object_id + slabs.MAX_OBJECTS:
            one = self._found[at]
            if one.last_id - one.objects < object_id:
                found.append(one)
            at += 1
        return sorted(found, key=lambda one: one.rank)

    def digest_of(self, object_id: int) -> bytes:
        """The name of an object, from a directory, or from what names it beside."""
        for found in self._holders(object_id):
            directory = self.directory(found)
            return directory.digest(object_id - directory.first_id)
        name = self.lost_names.get(object_id)
        if name is None:
            raise CorruptionError(f"object {object_id} is lost, and its name with it")
        return name

    def children_of(self, object_id: int) -> tuple[int, ...]:
        """The ids that an object links to, whether or not its bytes are there."""
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
        """An object, proven by its digest; or why it cannot be had."""
        why = "it is gone"
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
        """An object that cannot be proven because names of what it links to are lost.

        ``stand_in`` stands for these. Only to be looked at. None if that is not what it lacks.
        """
        if all(map(self._has_name, self.children_of(object_id))):
            return None
        for found in self._holders(object_id):
            try:
                slab = self._slab(found)
                position = object_id - slab.first_id
                if slab.kind(position) != slabs.DEAD:
                    data = slab.data(position, self._name_or_stand_in)
                    return StoredObject(slab.kind(position), data)
            except CorruptionError:
                continue
        return None

    def stand_in(self, object_id: int) -> bytes:
        """What stands for the lost name of an object in a sketch."""
        return object_id.to_bytes(DIGEST_BYTES, "big")

    def _name_or_stand_in(self, object_id: int) -> bytes:
        return self.digest_of(object_id) if self._has_name(object_id) else self.stand_in(object_id)

    def _has_name(self, object_id: int) -> bool:
        try:
            self.digest_of(object_id)
        except CorruptionError:
            return False
        return True

    def arriving(self, object_id: int, item: StoredObject) -> NewObject:
        """An object that was found, in the form in which a store takes it in."""
        children = [self.digest_of(child) for child in self.children_of(object_id)]
        return NewObject(self.digest_of(object_id), item.kind, item.data, children)
