"""The index holds the beginnings of digests: what it finds is compared, never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest

import casstore
from casstore import Checkpoint, Commit, NodeDraft
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.lookup import PREFIX_BYTES, index_key, read_key
from casstore.engine.protocol import NewObject, Write
from casstore.errors import CorruptionError
from casstore.format.digest import Digest, Kind
from casstore.maintenance import gc
from casstore.maintenance.check import check, rebuild
from casstore.maintenance.compact import compact
from casstore.store import Store
from tests.maintenance.wounds import flip, open_store, wounding

# Found by trying 53 million: the digests of both begin with the same six bytes.
ONE, OTHER = b"23497514", b"42929714"
DIGEST, TWIN = Digest.of_blob(ONE), Digest.of_blob(OTHER)


def engine_of(store: Store) -> LmdbEngine:
    assert isinstance(store.engine, LmdbEngine)
    return store.engine


def test_the_two_test_digests_differ_and_share_the_index_prefix() -> None:
    assert DIGEST != TWIN
    assert DIGEST[:PREFIX_BYTES] == TWIN[:PREFIX_BYTES]


def test_digests_with_a_common_prefix_are_different(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        store.put_blob(ONE)
    with open_store(path) as store:
        assert store.missing([TWIN, DIGEST]) == [TWIN]
        # Only what begins alike has to be compared, and yet it keeps its place.
        absent = Digest.of_blob(b"never stored")
        assert store.missing([TWIN, absent]) == [TWIN, absent]
        assert store.engine.get_many([TWIN]) == [None]
        assert store.put_blob(OTHER) == TWIN
        assert store.get_many([TWIN, DIGEST]) == [OTHER, ONE]
    with open_store(path) as store:
        assert store.missing([TWIN, DIGEST]) == []
        assert store.get_many([TWIN, DIGEST]) == [OTHER, ONE]
        everything = engine_of(store).digests(bytes(32), b"\xff" * 32, limit=10)
        assert everything == sorted([DIGEST, TWIN])
        [larger] = engine_of(store).digests(max(everything), b"\xff" * 32, limit=10)
        assert larger == max(everything)
        assert engine_of(store).verify() == 2
        assert not check(store, level="full").findings


@pytest.mark.parametrize(("gone", "kept"), [(ONE, OTHER), (OTHER, ONE)])
def test_deleting_one_of_two_digests_with_a_common_prefix_keeps_the_other(
    tmp_path: Path, gone: bytes, kept: bytes
) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        store.put_blob(ONE)
        store.put_blob(OTHER)
    with open_store(path) as store:
        store.engine.write(Write(deletes=[Digest.of_blob(gone)]))
        for _ in range(2):
            assert store.missing([DIGEST, TWIN]) == [Digest.of_blob(gone)]
            assert store.get_blob(Digest.of_blob(kept)) == kept
            store.pack(min_age_ms=0)
        # Stored again, it has a new id; the index knows it by that alone.
        store.put_blob(gone)
        assert store.get_many([DIGEST, TWIN]) == [ONE, OTHER]
        assert engine_of(store).verify() == 2


def test_collecting_rebuilding_and_compacting_distinguish_digests_with_a_common_prefix(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        store.tag("kept", store.put_blob(ONE))
        store.put_blob(OTHER)
        report = gc.collect(store, grace_ms=0)
        assert report.objects_swept == 1
        assert store.missing([DIGEST, TWIN]) == [TWIN]
        store.tag("too", store.put_blob(OTHER))
    with wounding(path) as cut:
        cut.drop("index")
    with open_store(path) as store:
        rebuild(store)
        assert store.get_many([DIGEST, TWIN]) == [ONE, OTHER]
    compact(path)
    with open_store(path) as store:
        assert store.get_many([DIGEST, TWIN]) == [ONE, OTHER]
        assert engine_of(store).verify() == 2


def test_a_damaged_directory_is_not_taken_for_another_object(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        store.put_blob(ONE)
    with wounding(path) as cut:
        [(key, value)] = cut.rows("slabs")
        cut.put("slabs", key, flip(value, slabs.HEADER_BYTES + PREFIX_BYTES))
    with open_store(path) as store:
        # It begins as it should, so it might be another; the checksum says that it is not.
        with pytest.raises(CorruptionError, match="damaged directory"):
            store.get_blob(DIGEST)
        with pytest.raises(CorruptionError, match="damaged directory"):
            store.put_blob(ONE)


@pytest.mark.parametrize("own", [1, 2, 3, 7, slabs.MAX_ID])
def test_an_index_row_that_leads_to_a_wrong_id_is_damage_and_not_absence(
    tmp_path: Path, own: int
) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        for content in (b"a", b"b", b"c"):
            store.put_blob(content)
    with wounding(path) as cut:
        cut.put("index", index_key(DIGEST, own), b"")
    with casstore.open(path) as store:
        with pytest.raises(CorruptionError, match=f"leads to id {own}"):
            store.missing([DIGEST])
        with pytest.raises(CorruptionError):
            store.get_many([DIGEST])
        with pytest.raises(CorruptionError):
            store.put_blob(ONE)
        with pytest.raises(CorruptionError):
            engine_of(store).digests(bytes(32), b"\xff" * 32, limit=10)
        with pytest.raises(CorruptionError):
            engine_of(store).verify()


def test_check_and_verify_find_an_object_that_the_index_names_twice(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        store.put_blob(ONE)
        store.engine.write(Write(deletes=[DIGEST]))
        store.put_blob(ONE)
    with wounding(path) as cut:
        assert [key for key, _ in cut.rows("index")] == [index_key(DIGEST, 2)]
        cut.put("index", index_key(DIGEST, 1), b"")
    with open_store(path) as store:
        [finding] = check(store, level="connectivity").findings
        assert finding.where.digest == DIGEST
        with pytest.raises(CorruptionError, match="names 2 objects but holds 1"):
            engine_of(store).verify()
        rebuild(store)
        assert engine_of(store).verify() == 1


@pytest.mark.parametrize("own", [1, 255, 256, 65_535, 65_536, 1 << 40, slabs.MAX_ID])
def test_an_index_key_round_trips(own: int) -> None:
    key = index_key(DIGEST, own)
    assert len(key) == PREFIX_BYTES + (own.bit_length() + 7) // 8
    assert read_key(key) == own


@pytest.mark.parametrize("encoded", [b"", b"\0", b"\0\1", b"\1" * 9])
def test_a_non_canonical_id_in_an_index_key_is_refused(encoded: bytes) -> None:
    with pytest.raises(CorruptionError):
        read_key(DIGEST[:PREFIX_BYTES] + encoded)


def test_a_node_that_is_stored_already_gets_no_second_id(tmp_path: Path) -> None:
    # Writers suppose that nodes and manifests are new, and look when they have the lock.
    path = tmp_path / "s"
    for session in ("one", "two"):
        with open_store(path) as store:
            draft = NodeDraft("a", {"text": "the same in both"}, time=1)
            own = Checkpoint(turn_state={"session": session})
            store.session(session).commit(Commit(append=[draft], checkpoint=own))
            objects = engine_of(store).verify()
    with open_store(path) as store:
        # The node, and a manifest for each.
        assert engine_of(store).verify() == objects == 3
        assert not check(store).findings
        # Nor does a slab hold it a second time, without a name.
        env = engine_of(store)._env
        with env.reading() as txn:
            assert sum(slabs.count_of(value) for _, value in txn.cursor(env.slabs)) == 3


def test_a_verified_digest_is_not_trusted_after_its_object_was_deleted(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        store.put_blob(ONE)
    with open_store(path) as store:
        assert store.missing([DIGEST]) == []
        assert DIGEST in engine_of(store)._batches._proven.ids
        store.engine.write(Write(deletes=[DIGEST]))
        engine_of(store).apply_log()
        assert store.missing([DIGEST]) == [DIGEST]
        store.put_blob(ONE)
        engine_of(store).apply_log()
        assert store.missing([DIGEST]) == []
        assert store.get_blob(DIGEST) == ONE
        assert engine_of(store).verify() == 1


def test_a_slab_that_still_lists_an_object_does_not_make_it_stored(tmp_path: Path) -> None:
    path = tmp_path / "s"
    contents = [b"one", b"two", b"three", b"four"]
    names = [Digest.of_blob(content) for content in contents]
    with open_store(path) as store:
        blobs = [
            NewObject(name, Kind.BLOB, content, ())
            for name, content in zip(names, contents, strict=True)
        ]
        store.engine.write(Write(objects=blobs))
        assert len(engine_of(store).get_many(names)) == 4
        store.engine.write(Write(deletes=names[1:3]))
    with open_store(path) as store:
        # In the order in which they were stored, so that the slab itself is asked first.
        found = store.engine.get_many(names)
        assert [item and item.data for item in found] == [b"one", None, None, b"four"]
        # Stored again, it is found under its new id, behind others or before them.
        store.put_blob(contents[2])
        for order in (names, names[::-1]):
            found = store.engine.get_many(order)
            assert [item and item.data for item in found] == [
                None if name == names[1] else contents[names.index(name)] for name in order
            ]


def test_a_lookup_ignores_matches_that_span_two_adjacent_digests(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        contents = [bytes((at,)) for at in range(3)]
        names = [Digest.of_blob(content) for content in contents]
        blobs = [
            NewObject(name, Kind.BLOB, content, ())
            for name, content in zip(names, contents, strict=True)
        ]
        store.engine.write(Write(objects=blobs))
        listed = b"".join(names)
        across = [listed[at : at + 32] for at in (1, 31, 33)]
        found = store.engine.get_many([names[0], *across, names[2]])
        assert [item and item.data for item in found] == [b"\0", None, None, None, b"\2"]
