"""The cache of decoded slabs: bounded in bytes, least recently used first, never stale."""

from __future__ import annotations

from pathlib import Path

from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.reader import SlabCache
from casstore.engine.protocol import NewObject, Write
from casstore.format.digest import Kind, digest_of


def decoded(first_id: int, *contents: bytes) -> slabs.Slab:
    objects = [NewObject(digest_of(Kind.BLOB, data), Kind.BLOB, data, ()) for data in contents]
    links = [list[int]() for _ in objects]
    key, value = slabs.encode(objects, links, first_id, 0, slabs.uncompressed)
    directory = slabs.read_directory(key, value)
    return slabs.Slab(directory, lambda size: value[directory.payload_at :])


def test_the_least_recently_used_slab_goes_first() -> None:
    slab = decoded(1, bytes(1000))
    cache = SlabCache(3 * slab.size_bytes)
    for last_id in (1, 2, 3):
        cache.put(last_id, decoded(last_id, bytes(1000)))
    assert cache.find(1, 1) is not None
    cache.put(4, decoded(4, bytes(1000)))
    assert cache.find(2, 2) is None
    assert [cache.find(last_id, last_id) is not None for last_id in (1, 3, 4)] == [True] * 3


def test_the_cache_never_exceeds_its_limit() -> None:
    cache = SlabCache(10_000)
    for last_id in range(1, 200):
        cache.put(last_id, decoded(last_id, bytes(last_id * 37 % 4000)))
        assert cache.used_bytes <= 10_000
    cache.put(500, decoded(500, bytes(20_000)))
    assert cache.find(500, 500) is None
    cache.clear()
    assert cache.used_bytes == 0


def test_a_slab_put_twice_counts_once() -> None:
    cache = SlabCache(100_000)
    cache.put(1, decoded(1, b"one"))
    once = cache.used_bytes
    cache.put(1, decoded(1, b"one"))
    assert cache.used_bytes == once


def test_a_cached_slab_does_not_match_a_slab_with_a_lower_first_id() -> None:
    cache = SlabCache(100_000)
    cache.put(3, decoded(2, b"two", b"three"))
    assert cache.find(3, 2) is not None
    assert cache.find(3, 1) is None


def test_an_engine_reads_more_than_its_cache_holds(tmp_path: Path) -> None:
    with_small_cache = LmdbEngine(str(tmp_path / "s"), durability="relaxed", cache_bytes=50_000)
    contents = [number.to_bytes(2, "big") * 3000 for number in range(60)]
    objects = [NewObject(digest_of(Kind.BLOB, data), Kind.BLOB, data, ()) for data in contents]
    for item in objects:
        with_small_cache.write(Write(objects=[item]))
    for _ in range(2):
        found = with_small_cache.get_many([item.digest for item in objects])
        assert [item.data for item in found if item is not None] == contents
        assert with_small_cache._cache.used_bytes <= 50_000
    with_small_cache.close()
