"""The index: from the first bytes of a digest to the id of the object.

    key      first 6 bytes of the digest ‖ id, big-endian, without zeros in front
    value    none

The whole digest is in the directory of the object's slab, where links and reads need it anyway;
a second copy here would be most of the index. So a lookup finds a candidate, rarely several,
and compares the digest in its slab. Two digests with the same prefix are two rows: no answer
depends on a prefix alone, even if an attacker chose the content. If a candidate does not match,
its directory must pass its checksum, or damage would look like absence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, TypeAlias

import lmdb

from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.memtable import MemtableView, Unchanged
from casstore.errors import CorruptionError

if TYPE_CHECKING:
    from casstore.engine.lmdb.environment import Environment

PREFIX_BYTES: Final = 6
_MAX_PROVEN: Final = 4096

AnyTransaction: TypeAlias = "lmdb.Transaction[bytes] | lmdb.Transaction[memoryview]"
AnyCursor: TypeAlias = "lmdb.Cursor[bytes] | lmdb.Cursor[memoryview]"


def index_key(digest: bytes, object_id: int) -> bytes:
    """The row that names an object."""
    return digest[:PREFIX_BYTES] + object_id.to_bytes((object_id.bit_length() + 7) >> 3, "big")


def read_key(key: bytes) -> int:
    """The id that a row of the index leads to."""
    encoded = key[PREFIX_BYTES:]
    if not 0 < len(encoded) <= slabs.ID_BYTES or not encoded[0]:
        raise CorruptionError(f"row {key.hex()} of the index is damaged")
    return int.from_bytes(encoded, "big")


class Proven:
    """Ids whose digests were compared with their slabs.

    No id is given twice, so an entry stays true; whether an object still has its name is looked
    up every time. A session links to the same objects again and again.
    """

    __slots__ = ("ids",)

    def __init__(self) -> None:
        self.ids: dict[bytes, int] = {}

    def note(self, digest: bytes, object_id: int) -> None:
        """The slab lists this digest under this id."""
        if len(self.ids) >= _MAX_PROVEN:
            self.ids = {}
        self.ids[digest] = object_id


class DigestIndex:
    """Looks digests up within one transaction."""

    __slots__ = ("_digest_of", "_env", "_names", "_proven", "_slabs", "_txn", "has_row")

    def __init__(
        self,
        env: Environment,
        txn: AnyTransaction,
        digest_of: Callable[[int], bytes] | None = None,
        proven: Proven | None = None,
    ) -> None:
        """``digest_of`` returns the digest that a slab lists under an id, for callers that read
        slabs anyway.
        """
        self._proven = proven
        self._env = env
        self._txn = txn
        self._names: AnyCursor = txn.cursor(db=env.index)
        #: Does this row exist (see ``index_key``)? For callers that know the id already.
        self.has_row: Callable[[bytes], bool] = self._names.set_key
        self._slabs: AnyCursor | None = None
        self._digest_of = digest_of

    def find(self, digest: bytes) -> int | None:
        """The id of an object; None if it is certainly not named."""
        prefix = digest[:PREFIX_BYTES]
        names, proven = self._names, self._proven
        # The common case: a new object, and no digest in the index has its prefix.
        if not names.set_range(prefix) or names.key()[:PREFIX_BYTES] != prefix:
            return None
        if proven is not None:
            known = proven.ids.get(digest)
            if known is not None and names.set_key(index_key(digest, known)):
                return known
            names.set_range(prefix)
        more = True
        while more:
            key = bytes(names.key())
            if key[:PREFIX_BYTES] != prefix:
                break
            object_id = read_key(key)
            if self._listed(object_id) == digest:
                if proven is not None:
                    proven.note(digest, object_id)
                return object_id
            # Another digest with this prefix, or a damaged directory? They look the same.
            self._require_prefix(object_id, prefix)
            more = names.next()
        return None

    def between(self, first: bytes, last: bytes) -> Iterator[tuple[bytes, int]]:
        """The digests from ``first`` to ``last`` in order, each with its id."""
        names = self._names
        more = names.set_range(first[:PREFIX_BYTES])
        alike: list[tuple[bytes, int]] = []
        prefix = b""
        while more:
            key = bytes(names.key())
            if key[:PREFIX_BYTES] != prefix:
                yield from sorted(alike)
                alike, prefix = [], key[:PREFIX_BYTES]
                if prefix > last[:PREFIX_BYTES]:
                    return
            object_id = read_key(key)
            digest = self._listed(object_id)
            if digest[:PREFIX_BYTES] != prefix:
                self._require_prefix(object_id, prefix)
            if first <= digest <= last:
                alike.append((digest, object_id))
            more = names.next()
        yield from sorted(alike)

    def _listed(self, object_id: int) -> bytes:
        """The digest that a slab lists under an id, unchecked."""
        if self._digest_of is not None:
            return self._digest_of(object_id)
        _, value, position = self._seek(object_id)
        return slabs.digest_at(value, position)

    def _require_prefix(self, object_id: int, prefix: bytes) -> None:
        """Raise unless a directory with a valid checksum lists such a digest under this id."""
        key, value, position = self._seek(object_id)
        if slabs.read_directory(key, value).digest(position)[:PREFIX_BYTES] != prefix:
            raise self._astray(object_id)

    def _seek(self, object_id: int) -> tuple[bytes | memoryview, bytes | memoryview, int]:
        """The slab that holds this id, and the position in it."""
        cursor = self._slabs
        if cursor is None:
            cursor = self._slabs = self._txn.cursor(db=self._env.slabs)
        if cursor.set_range(slabs.slab_key(object_id)):
            key, value = cursor.item()
            position = object_id - int.from_bytes(key, "big") + slabs.count_of(value) - 1
            if position >= 0:
                return key, value, position
        raise self._astray(object_id)

    def _astray(self, object_id: int) -> CorruptionError:
        return CorruptionError(
            f"the index of {self._env.path} leads to id {object_id}, which is not what it names"
        )


def find_id(env: Environment, txn: AnyTransaction, digest: bytes) -> int | None:
    """The id that the index has for a digest; None if it has none."""
    return DigestIndex(env, txn).find(digest)


def is_named(
    txn: AnyTransaction, env: Environment, view: MemtableView | None, digest: bytes, object_id: int
) -> bool:
    """True if this id names the object with this digest. Without a view, by the index alone."""
    if view is not None:
        recent = view.find_id(digest)
        if not isinstance(recent, Unchanged):
            return recent == object_id
    return 0 < object_id <= slabs.MAX_ID and (
        txn.get(index_key(digest, object_id), None, env.index) is not None
    )
