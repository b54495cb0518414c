"""Layout 2: the columns of a packed slab are compressed, and say the same as layout 1."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import pytest

import casstore
from casstore.engine.compression import compress_alone
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import NewObject
from casstore.errors import CorruptionError
from casstore.format.digest import DIGEST_BYTES, Digest, plain_hash
from casstore.maintenance import gc
from casstore.maintenance.check import check as check_store
from casstore.store import Store

COUNT = 40
COLUMNS_AT = slabs.HEADER_BYTES + DIGEST_BYTES * COUNT


def both_layouts() -> tuple[bytes, bytes, bytes]:
    """The key of a slab, and its value in layout 1 and in layout 2; two entries are dead."""
    rng = random.Random(3)
    contents = [rng.randbytes(rng.randrange(1, 400)) for _ in range(COUNT)]
    blobs = [NewObject(Digest.of_blob(each), 0, each, ()) for each in contents]
    objects = [blobs[0]]
    for before, item in pairwise(blobs):
        data = item.data + before.digest
        objects.append(NewObject(Digest.of_blob(data), 3, data, (before.digest,)))
    columns = slabs.Columns()
    for own, item in enumerate(objects, 1):
        links = None if own in (7, COUNT) else [own - 1] * len(item.children)
        columns.add_new(own, [item], [links])
    key, one = columns.encode(1, 5, slabs.uncompressed)
    same, two = columns.encode(1, 5, slabs.uncompressed, packed=True)
    assert key == same
    return key, one, two


def sealed(key: bytes, value: bytes, columns: bytes, payload: bytes) -> bytes:
    """The slab with other columns, and a checksum that is right for them."""
    header = value[: slabs.HEADER_BYTES - 8]
    directory = value[slabs.HEADER_BYTES : COLUMNS_AT] + columns
    return header + plain_hash(key + header + directory, 8) + directory + payload


def framed(columns: bytes) -> bytes:
    frame = compress_alone(columns)
    return len(frame).to_bytes(4, "little") + frame


def test_a_packed_directory_equals_the_plain_one_and_is_shorter() -> None:
    key, one, two = both_layouts()
    assert (one[0], two[0]) == (slabs.LAYOUT, slabs.PACKED_LAYOUT)
    assert len(two) < len(one)
    first, second = slabs.read_directory(key, one), slabs.read_directory(key, two)
    assert first._replace(payload_at=0) == second._replace(payload_at=0)
    assert one[first.payload_at :] == two[second.payload_at :]
    dead = [slabs.is_dead_at(one, at) for at in range(COUNT)]
    assert dead == [slabs.is_dead_at(memoryview(two), at) for at in range(COUNT)]
    assert dead.count(True) == 2
    assert [slabs.digest_at(one, at) for at in range(COUNT)] == [
        slabs.digest_at(two, at) for at in range(COUNT)
    ]


def test_a_directory_that_packing_does_not_shorten_stays_plain() -> None:
    blob = NewObject(Digest.of_blob(b"x"), 0, b"x", ())
    columns = slabs.Columns()
    columns.add_new(1, [blob], [[]])
    plain = columns.encode(1, 5, slabs.uncompressed)
    assert columns.encode(1, 5, slabs.uncompressed, packed=True) == plain


def test_a_damaged_packed_directory_is_refused() -> None:
    key, one, two = both_layouts()
    at = slabs.read_directory(key, two).payload_at
    payload = two[at:]
    columns = one[COLUMNS_AT : slabs.read_directory(key, one).payload_at]
    assert sealed(key, two, framed(columns), payload) == two
    hostile = {
        "too short": framed(columns[:-1]),
        "too long": framed(columns + b"\0"),
        "none": framed(b""),
        "no frame": (4).to_bytes(4, "little") + b"abcd",
        "a length over the end": (1 << 31).to_bytes(4, "little"),
        "no length": b"",
        "a claim beyond all bounds": framed(bytes(20 << 20)),
    }
    for why, changed in hostile.items():
        value = sealed(key, two, changed, b"" if why == "no length" else payload)
        for check in (True, False):
            with pytest.raises(CorruptionError):
                slabs.read_directory(key, value, check=check)
            with pytest.raises(CorruptionError):
                slabs.is_dead_at(value, COUNT - 1)
    for place in range(at):
        flipped = bytearray(two)
        flipped[place] ^= 1
        with pytest.raises(CorruptionError):
            slabs.read_directory(key, bytes(flipped))
        with pytest.raises(CorruptionError):
            slabs.read_directory(key, two[:place])


def test_pack_writes_packed_directories_that_read_back(tmp_path: Path) -> None:
    contents = [b"%d" % at * 50 for at in range(200)]
    with casstore.open(tmp_path / "s", "relaxed") as store:
        digests = [store.put_blob(each) for each in contents]
        store.pack(min_age_ms=0)
        engine = store.engine
        assert isinstance(engine, LmdbEngine)
        with engine._env.reading() as txn:
            layouts = [value[0] for _, value in txn.cursor(db=engine._env.slabs)]
        assert layouts == [slabs.PACKED_LAYOUT]
        assert store.get_many(digests) == contents
        assert engine.verify() == 200


def test_a_packed_slab_with_mostly_dead_objects_is_sound(tmp_path: Path) -> None:
    # Its columns take less than a byte for each entry, and there is next to no payload.
    with Store(LmdbEngine(str(tmp_path / "s"), durability="relaxed")) as store:
        digests = store.put_many([b"%d" % at for at in range(500)])
        for at in (0, 490):
            store.tag(f"kept {at}", digests[at])
        gc.collect(store, grace_ms=0)
        store.pack(min_age_ms=0)
        assert store.get_many([digests[0], digests[490]]) == [b"0", b"490"]
        report = check_store(store, level="full")
        assert report.sound, report.findings
