"""The part of the engine contract about objects: storing, reading, scanning, deleting."""

from __future__ import annotations

import random
from typing import Any

import pytest

from casstore.engine.protocol import (
    MAX_KIND,
    MAX_OBJECT_BYTES,
    Engine,
    Listing,
    NewObject,
    ObjectsExist,
    PutRow,
    StoredObject,
    Write,
)
from casstore.errors import InvalidInputError, ObjectNotFoundError
from casstore.format.digest import Digest, Kind
from casstore.testing.engine_fixtures import (
    ABSENT,
    EngineFixtures,
    ManualClock,
    all_objects,
    assert_reads_back,
    find_object,
    find_row,
    info_of,
    new_blob,
    new_object,
    new_parent,
    put_objects,
    put_row,
)

# Around the sizes at which encodings, pages and frames change.
SIZES_BYTES = (0, 1, 31, 32, 33, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 1 << 20, 5 << 20)


class ObjectContract(EngineFixtures):
    """Objects are read as they were stored, after their children, with increasing ids."""

    # --- missing and get_many ---------------------------------------------------

    @pytest.mark.parametrize("name", ["x" * 32, b"short", b"", bytes(33), None, 7])
    def test_an_invalid_digest_is_named_and_refused(self, engine: Engine, name: Any) -> None:
        for ask in (engine.missing, engine.get_many):
            with pytest.raises(InvalidInputError):
                ask([name])
        for write in (
            Write(deletes=[name]),
            Write(conditions=[ObjectsExist([name])]),
            Write(objects=[new_blob(b"a parent")._replace(children=[name])]),
        ):
            with pytest.raises(InvalidInputError):
                engine.write(write)

    def test_an_empty_engine_misses_everything(self, engine: Engine) -> None:
        assert engine.missing([ABSENT]) == [ABSENT]
        assert engine.get_many([ABSENT]) == [None]
        assert engine.scan_objects() == []

    def test_missing_keeps_the_order_asked_and_names_each_once(self, engine: Engine) -> None:
        stored = new_blob(b"stored")
        put_objects(engine, stored)
        # The order asked below, c, a, b, is neither ascending nor descending.
        b, a, c = sorted(Digest.of_blob(bytes([n])) for n in range(3))
        assert engine.missing([c, a, stored.digest, b, a, c, stored.digest]) == [c, a, b]

    def test_missing_of_no_digests_is_empty(self, engine: Engine) -> None:
        assert engine.missing([]) == []

    def test_get_many_keeps_the_order_asked_with_none_for_what_is_absent(
        self, engine: Engine
    ) -> None:
        one, two = new_blob(b"one"), new_blob(b"two")
        put_objects(engine, one, two)
        assert engine.get_many([two.digest, ABSENT, one.digest]) == [
            StoredObject(Kind.BLOB, b"two"),
            None,
            StoredObject(Kind.BLOB, b"one"),
        ]

    def test_get_many_returns_a_repeated_digest_each_time(self, engine: Engine) -> None:
        one = new_blob(b"one")
        put_objects(engine, one)
        found = StoredObject(Kind.BLOB, b"one")
        asked = [one.digest, ABSENT, one.digest, ABSENT, one.digest]
        assert engine.get_many(asked) == [found, None, found, None, found]

    def test_get_many_of_no_digests_is_empty(self, engine: Engine) -> None:
        assert engine.get_many([]) == []

    def test_thousands_of_digests_can_be_asked_for_at_once(self, engine: Engine) -> None:
        blobs = [new_blob(b"%d" % n) for n in range(3000)]
        put_objects(engine, *blobs[::2])
        digests = [blob.digest for blob in blobs]
        assert engine.missing(digests) == digests[1::2]
        found = engine.get_many(digests)
        assert found[::2] == [StoredObject(Kind.BLOB, blob.data) for blob in blobs[::2]]
        assert found[1::2] == [None] * 1500

    # --- bytes in, bytes out ----------------------------------------------------

    @pytest.mark.parametrize("size_bytes", SIZES_BYTES)
    def test_random_bytes_read_back(self, engine: Engine, size_bytes: int) -> None:
        blob = new_blob(random.Random(size_bytes).randbytes(size_bytes))
        put_objects(engine, blob)
        assert_reads_back(engine, blob)
        assert info_of(engine, blob.digest).size_bytes == size_bytes

    @pytest.mark.parametrize("size_bytes", SIZES_BYTES)
    def test_compressible_bytes_read_back(self, engine: Engine, size_bytes: int) -> None:
        blob = new_blob((b"the same again, " * (size_bytes // 16 + 1))[:size_bytes])
        put_objects(engine, blob)
        assert_reads_back(engine, blob)
        assert info_of(engine, blob.digest).size_bytes == size_bytes

    def test_large_and_small_random_and_compressible_share_a_write(self, engine: Engine) -> None:
        rng = random.Random(1)
        objects = [
            new_blob(make)
            for size_bytes in (0, 1, 100, 1 << 20, 7, 3 << 20, 40_000)
            for make in (rng.randbytes(size_bytes), b"a" * size_bytes)
        ]
        put_objects(engine, *objects)
        assert_reads_back(engine, *objects)

    def test_the_largest_object_is_stored_and_one_byte_more_is_refused(
        self, engine: Engine
    ) -> None:
        largest = new_blob(bytes(MAX_OBJECT_BYTES))
        put_objects(engine, largest)
        assert_reads_back(engine, largest)
        with pytest.raises(InvalidInputError):
            put_objects(engine, new_blob(bytes(MAX_OBJECT_BYTES + 1)))

    def test_every_kind_below_the_limit_is_kept(self, engine: Engine) -> None:
        objects = [new_object(b"of a kind", kind=kind) for kind in range(MAX_KIND + 1)]
        assert put_objects(engine, *objects) == MAX_KIND + 1
        assert_reads_back(engine, *objects)
        assert [info.kind for info in all_objects(engine)] == list(reversed(range(MAX_KIND + 1)))

    @pytest.mark.parametrize("kind", [-1, MAX_KIND + 1, 255, 256])
    def test_any_other_kind_is_refused(self, engine: Engine, kind: int) -> None:
        with pytest.raises(InvalidInputError):
            put_objects(engine, new_object(b"x", kind=kind, digest=ABSENT))
        assert engine.missing([ABSENT]) == [ABSENT]

    @pytest.mark.parametrize("size_bytes", [1, 31, 33])
    def test_a_digest_of_another_length_is_refused(self, engine: Engine, size_bytes: int) -> None:
        with pytest.raises(InvalidInputError):
            put_objects(engine, new_object(b"x", digest=b"d" * size_bytes))
        assert engine.scan_objects() == []

    def test_thousands_of_objects_go_into_one_write(self, engine: Engine) -> None:
        rng = random.Random(2)
        objects: list[NewObject] = []
        for n in range(5000):
            children = [rng.choice(objects).digest for _ in range(rng.randrange(3)) if objects]
            data = b"object %d " % n + b"|".join(children) + rng.randbytes(rng.randrange(60))
            objects.append(new_object(data, children))
        assert put_objects(engine, *objects) == 5000
        assert_reads_back(engine, *objects)
        infos = all_objects(engine)
        assert [info.digest for info in infos] == [item.digest for item in reversed(objects)]

    def test_objects_that_were_read_do_not_change_with_later_writes(self, engine: Engine) -> None:
        leaf = new_blob(b"leaf")
        children = [leaf.digest]
        objects = [leaf, new_object(b"root", children)]
        put_objects(engine, *objects)
        digests = [leaf.digest, objects[1].digest]
        found, infos = engine.get_many(digests), engine.scan_objects()
        children.clear()
        again, infos_again = engine.get_many(digests), engine.scan_objects()
        assert (again, infos_again) == (found, infos)
        again.clear()
        infos_again.clear()
        engine.write(Write(deletes=digests[::-1]))
        put_objects(engine, *(new_blob(b"%d" % n) for n in range(100)))
        assert found == [StoredObject(Kind.BLOB, b"leaf"), StoredObject(Kind.VALUE, b"root")]
        assert [(info.digest, len(info.children)) for info in infos] == [
            (digests[1], 1),
            (digests[0], 0),
        ]

    # --- links ------------------------------------------------------------------

    @pytest.mark.parametrize(
        "layout",
        [
            b"{a}",
            b"{a}{b}",
            b"{b}{a}{b}{a}",
            b"before {a}",
            b"{a} after",
            b"before {a} between {b} after",
            b"{a}{a}{a}{a}{a}{a}{a}{a}",
            b"no digest in sight",
            b"",
        ],
    )
    @pytest.mark.parametrize("listed", ["", "a", "ab", "ba", "aab", "abab", "aaaaaaaa"])
    def test_data_reads_back_wherever_it_contains_the_digests_of_its_children(
        self, engine: Engine, layout: bytes, listed: str
    ) -> None:
        # An engine may keep links as ids and put the digests back when it reads, but
        # the list of children may differ from the links in the data.
        a, b = new_blob(b"child a"), new_blob(b"child b")
        data = layout.replace(b"{a}", a.digest).replace(b"{b}", b.digest)
        children = [{"a": a, "b": b}[letter].digest for letter in listed]
        parent = new_object(data, children)
        put_objects(engine, a, b)
        put_objects(engine, parent)
        assert_reads_back(engine, parent, a, b)
        info, ids = (
            info_of(engine, parent.digest),
            [info_of(engine, child).id for child in children],
        )
        assert list(info.children) == ids
        assert info.size_bytes == len(data)

    @pytest.mark.parametrize("size_bytes", [31, 32, 33, 63, 64, 65, 95, 96, 200])
    def test_data_with_overlapping_occurrences_of_a_child_digest_reads_back(
        self, engine: Engine, size_bytes: int
    ) -> None:
        # Hashes do not look like this, but an engine that searches data for digests must cope.
        zeros = new_object(b"named by zeros", digest=bytes(32))
        parent = new_object(bytes(size_bytes), [zeros.digest] * 2)
        put_objects(engine, zeros, parent)
        assert_reads_back(engine, zeros, parent)

    def test_data_may_hold_digests_that_are_not_children(self, engine: Engine) -> None:
        stored, child = new_blob(b"stored"), new_blob(b"child")
        parent = new_object(b"<" + stored.digest + child.digest + ABSENT + b">", [child.digest])
        put_objects(engine, stored, child, parent)
        assert_reads_back(engine, parent)
        child_id = info_of(engine, child.digest).id
        assert set(info_of(engine, parent.digest).children) == {child_id}

    def test_data_may_hold_the_digest_of_its_own_object(self, engine: Engine) -> None:
        child = new_blob(b"child")
        item = new_object(ABSENT + child.digest + ABSENT, [child.digest], digest=ABSENT)
        put_objects(engine, child, item)
        assert_reads_back(engine, item)

    def test_an_object_may_have_thousands_of_children(self, engine: Engine) -> None:
        leaves = [new_blob(b"%d" % n) for n in range(3000)]
        root = new_parent(*leaves)
        put_objects(engine, *leaves, root)
        assert_reads_back(engine, root)
        infos = all_objects(engine)
        assert list(infos[0].children) == [info.id for info in infos[:0:-1]]

    def test_children_stored_in_many_writes_are_found(self, engine: Engine) -> None:
        leaves = [new_blob(b"%d" % n) for n in range(50)]
        for leaf in leaves:
            put_objects(engine, leaf)
        here = new_blob(b"here")
        root = new_parent(*leaves[::3], here, *leaves[::7])
        put_objects(engine, here, root)
        assert_reads_back(engine, root, *leaves)
        ids = {info.digest: info.id for info in all_objects(engine)}
        assert list(info_of(engine, root.digest).children) == [ids[d] for d in root.children]

    # --- listing, for engines that can --------------------------------------------

    def test_digests_are_listed_in_order_from_the_first_to_the_last(self, engine: Engine) -> None:
        if not isinstance(engine, Listing):
            pytest.skip("this engine does not list digests")
        blobs = [new_blob(b"%d" % n) for n in range(60)]
        put_objects(engine, *blobs)
        engine.write(Write(deletes=[blobs[0].digest]))
        there = sorted([blob.digest for blob in blobs[1:]])
        lowest, highest = bytes(32), b"\xff" * 32
        assert engine.digests(lowest, highest, limit=1000) == there
        # Both bounds are inclusive, and need not be digests of stored objects.
        assert engine.digests(there[5], there[20], limit=1000) == there[5:21]
        assert engine.digests(there[5], there[5], limit=1000) == there[5:6]
        between = there[5][:-1] + bytes([(there[5][-1] + 1) % 256])
        assert engine.digests(min(between, there[5]), there[9], limit=9) == [
            one for one in there if min(between, there[5]) <= one <= there[9]
        ]
        assert engine.digests(there[20], there[5], limit=1000) == []
        # If there are more than the limit, the first are returned.
        assert engine.digests(lowest, highest, limit=7) == there[:7]
        for wrong in (b"short", "x" * 32):
            with pytest.raises(InvalidInputError):
                engine.digests(wrong, highest, limit=1)  # type: ignore[arg-type]

    def test_a_missing_child_is_named_and_nothing_is_written(self, engine: Engine) -> None:
        before, orphan, after = new_blob(b"x"), new_object(b"orphan", [ABSENT]), new_blob(b"y")
        with pytest.raises(ObjectNotFoundError) as caught:
            engine.write(
                Write(objects=[before, orphan, after], rows=[PutRow("pins", b"key", b"value")])
            )
        assert caught.value.digest == ABSENT
        digests = [before.digest, orphan.digest, after.digest]
        assert engine.missing(digests) == digests
        assert find_row(engine, "pins", b"key") is None
        assert engine.scan_objects() == []

    def test_a_write_with_a_missing_child_deletes_nothing(self, engine: Engine) -> None:
        old = new_blob(b"old")
        put_objects(engine, old)
        with pytest.raises(ObjectNotFoundError):
            engine.write(Write(objects=[new_object(b"x", [ABSENT])], deletes=[old.digest]))
        assert_reads_back(engine, old)

    def test_a_missing_child_is_found_among_stored_ones(self, engine: Engine) -> None:
        a, b = new_blob(b"a"), new_blob(b"b")
        put_objects(engine, a, b)
        with pytest.raises(ObjectNotFoundError) as caught:
            put_objects(engine, new_object(b"parent", [a.digest, ABSENT, b.digest]))
        assert caught.value.digest == ABSENT

    def test_a_child_may_come_earlier_in_the_same_write(self, engine: Engine) -> None:
        child = new_blob(b"child")
        parent = new_parent(child)
        root = new_parent(parent, child)
        assert put_objects(engine, child, parent, root) == 3
        assert_reads_back(engine, child, parent, root)

    def test_a_child_later_in_the_same_write_is_refused(self, engine: Engine) -> None:
        child = new_blob(b"child")
        parent = new_parent(child)
        with pytest.raises(ObjectNotFoundError) as caught:
            put_objects(engine, parent, child)
        assert caught.value.digest == child.digest
        assert engine.missing([parent.digest, child.digest]) == [parent.digest, child.digest]

    def test_an_object_cannot_be_its_own_child(self, engine: Engine) -> None:
        with pytest.raises(ObjectNotFoundError):
            put_objects(engine, new_object(b"self", [ABSENT], digest=ABSENT))
        assert engine.missing([ABSENT]) == [ABSENT]

    def test_a_parent_of_a_deleted_child_is_refused(self, engine: Engine) -> None:
        # This rule protects a commit from a concurrent collector (P3, P6).
        child = new_blob(b"child")
        put_objects(engine, child)
        engine.write(Write(deletes=[child.digest]))
        with pytest.raises(ObjectNotFoundError) as caught:
            put_objects(engine, new_parent(child))
        assert caught.value.digest == child.digest

    # --- what is stored already -------------------------------------------------

    def test_an_object_that_is_stored_already_is_not_new(self, engine: Engine) -> None:
        blob = new_blob(b"again")
        assert put_objects(engine, blob) == 1
        infos = engine.scan_objects()
        assert put_objects(engine, blob) == 0
        assert engine.scan_objects() == infos
        assert_reads_back(engine, blob)

    def test_a_write_of_known_objects_still_changes_its_rows(self, engine: Engine) -> None:
        child = new_blob(b"child")
        parent = new_parent(child)
        put_objects(engine, child, parent)
        change = PutRow("heads", b"s", b"1")
        result = engine.write(Write(objects=[child, parent], rows=[change]))
        assert result.new_objects == 0
        assert find_row(engine, "heads", b"s") == b"1"
        assert len(engine.scan_objects()) == 2

    def test_known_and_new_objects_mix_in_one_write(self, engine: Engine) -> None:
        a, b, c = (new_blob(name) for name in (b"a", b"b", b"c"))
        put_objects(engine, b)
        parent = new_parent(c, b, a)
        assert put_objects(engine, a, b, c, b, parent) == 3
        assert_reads_back(engine, a, b, c, parent)
        digests = [info.digest for info in all_objects(engine)]
        assert digests == [parent.digest, c.digest, a.digest, b.digest]

    def test_the_same_digest_twice_in_one_write_is_stored_once(self, engine: Engine) -> None:
        blob, other = new_blob(b"twice"), new_blob(b"other")
        assert put_objects(engine, blob, other, blob, blob) == 2
        assert [info.digest for info in all_objects(engine)] == [other.digest, blob.digest]
        assert_reads_back(engine, blob, other)

    @pytest.mark.parametrize("together", [False, True])
    def test_the_object_stored_under_a_digest_never_changes(
        self, engine: Engine, *, together: bool
    ) -> None:
        # P2. An engine cannot know which of the two contents has this digest; the first one stays.
        child = new_blob(b"child")
        first = new_object(b"first", [child.digest], kind=5, digest=ABSENT)
        second = new_object(b"second", kind=6, digest=ABSENT)
        if together:
            assert put_objects(engine, child, first, second) == 2
        else:
            assert put_objects(engine, child, first) == 2
            assert put_objects(engine, second) == 0
        assert_reads_back(engine, first)
        info = info_of(engine, ABSENT)
        assert (info.kind, info.size_bytes, len(info.children)) == (5, 5, 1)

    def test_the_children_of_a_known_object_are_not_looked_for(self, engine: Engine) -> None:
        known = new_blob(b"known")
        put_objects(engine, known)
        claim = new_object(b"known", [ABSENT], digest=known.digest)
        assert put_objects(engine, claim) == 0
        assert_reads_back(engine, known)

    # --- ids and scans ----------------------------------------------------------

    def test_an_objects_info_has_its_metadata_and_time(
        self, clocked: Engine, clock: ManualClock
    ) -> None:
        child = new_object(b"four", kind=9)
        put_objects(clocked, child)
        stored_first = clock.now_ms
        clock.now_ms += 5000
        parent = new_object(b"parent", [child.digest], kind=77)
        # The child is stored already, so it keeps the time at which it was stored first.
        put_objects(clocked, child, parent)
        newest, oldest = clocked.scan_objects()
        assert newest.digest == parent.digest
        assert (newest.kind, newest.size_bytes) == (77, 6)
        assert newest.children == (oldest.id,)
        assert newest.stored_at_ms == clock.now_ms
        assert oldest.digest == child.digest
        assert (oldest.kind, oldest.size_bytes, oldest.children) == (9, 4, ())
        assert oldest.stored_at_ms == stored_first
        assert type(newest.digest) is bytes

    def test_the_time_of_an_object_is_the_time_of_its_write(self, engine: Engine) -> None:
        result = engine.write(Write(objects=[new_blob(b"now")]))
        assert engine.scan_objects()[0].stored_at_ms == result.now_ms

    def test_every_child_has_a_lower_id_than_its_parent(self, engine: Engine) -> None:
        rng = random.Random(3)
        objects: list[NewObject] = []
        for step in range(60):
            batch: list[NewObject] = []
            for n in range(rng.randrange(1, 8)):
                known = objects + batch
                links = [rng.choice(known) for _ in range(rng.randrange(4)) if known]
                batch.append(new_object(b"%d.%d" % (step, n), [link.digest for link in links]))
            put_objects(engine, *batch)
            objects += batch
        infos = all_objects(engine)
        ids = {info.digest: info.id for info in infos}
        assert len(ids) == len(set(ids.values())) == len(objects)
        by_digest = {item.digest: item for item in objects}
        for info in infos:
            assert set(info.children) == {ids[d] for d in by_digest[info.digest].children}
            assert all(child < info.id for child in info.children)

    def test_a_scan_gives_the_highest_id_first(self, engine: Engine) -> None:
        blobs = [new_blob(b"%d" % n) for n in range(20)]
        put_objects(engine, *blobs[:7])
        put_objects(engine, *blobs[7:8])
        put_objects(engine, *blobs[8:])
        infos = engine.scan_objects()
        assert [info.digest for info in infos] == [blob.digest for blob in reversed(blobs)]
        ids = [info.id for info in infos]
        assert ids == sorted(ids, reverse=True)

    @pytest.mark.parametrize("limit", [1, 2, 3, 7, 10, 64, 65, 1000])
    def test_paging_by_before_covers_each_object_exactly_once(
        self, engine: Engine, limit: int
    ) -> None:
        rng = random.Random(4)
        blobs = [new_blob(b"%d" % n) for n in range(65)]
        stored = 0
        while stored < len(blobs):
            batch = blobs[stored : stored + rng.randrange(1, 12)]
            put_objects(engine, *batch)
            stored += len(batch)
        engine.write(Write(deletes=[blob.digest for blob in blobs[20:40]]))
        left = [blob.digest for blob in blobs[:20] + blobs[40:]]
        paged = [info.digest for info in all_objects(engine, limit=limit)]
        assert paged == left[::-1]

    def test_a_scan_before_an_id_leaves_that_id_out(self, engine: Engine) -> None:
        put_objects(engine, *(new_blob(b"%d" % n) for n in range(9)))
        infos = engine.scan_objects()
        for position, info in enumerate(infos):
            assert engine.scan_objects(before=info.id) == infos[position + 1 :]
            assert engine.scan_objects(before=info.id + 1) == infos[position:]
        assert engine.scan_objects(before=0) == []
        assert engine.scan_objects(before=infos[0].id + 1_000_000) == infos

    @pytest.mark.parametrize("limit", [0, -1])
    def test_an_object_scan_for_no_objects_is_refused(self, engine: Engine, limit: int) -> None:
        # An empty page means the end, so a page that must be empty would end every scan.
        with pytest.raises(InvalidInputError):
            engine.scan_objects(limit=limit)

    # --- deleting ---------------------------------------------------------------

    def test_a_deleted_object_is_gone_and_the_others_are_not(self, engine: Engine) -> None:
        blobs = [new_blob(b"blob %d" % n) for n in range(10)]
        put_objects(engine, *blobs)
        kept, gone = blobs[::2], blobs[1::2]
        result = engine.write(Write(deletes=[blob.digest for blob in gone]))
        assert result.new_objects == 0
        assert engine.missing([blob.digest for blob in blobs]) == [blob.digest for blob in gone]
        assert engine.get_many([blob.digest for blob in gone]) == [None] * 5
        assert [info.digest for info in all_objects(engine)] == [b.digest for b in kept[::-1]]
        assert_reads_back(engine, *kept)

    def test_deleting_a_missing_object_is_not_an_error(self, engine: Engine) -> None:
        blob = new_blob(b"blob")
        put_objects(engine, blob)
        engine.write(Write(deletes=[ABSENT]))
        engine.write(Write(deletes=[ABSENT, blob.digest, ABSENT, blob.digest]))
        assert engine.missing([blob.digest]) == [blob.digest]
        engine.write(Write(deletes=[blob.digest]))
        assert engine.scan_objects() == []

    def test_a_deleted_object_can_be_put_again_and_reads_right(self, engine: Engine) -> None:
        a, b, c = (new_blob(name * 100) for name in (b"a", b"b", b"c"))
        put_objects(engine, a, b, c)
        for _ in range(3):
            engine.write(Write(deletes=[b.digest]))
            assert put_objects(engine, b) == 1
            assert_reads_back(engine, a, b, c)
            digests = [info.digest for info in all_objects(engine)]
            assert digests == [b.digest, c.digest, a.digest]

    def test_a_deleted_digest_may_be_put_again_with_other_bytes(self, engine: Engine) -> None:
        first, second = (new_object(data, digest=ABSENT) for data in (b"first", b"the second"))
        put_objects(engine, first)
        engine.write(Write(deletes=[ABSENT]))
        put_objects(engine, second)
        assert_reads_back(engine, second)

    def test_deletes_come_after_objects_and_rows(self, engine: Engine) -> None:
        blob, known = new_blob(b"short life"), new_blob(b"known")
        put_objects(engine, known)
        result = engine.write(
            Write(
                objects=[blob, known, new_parent(known)],
                rows=[PutRow("pins", b"key", blob.digest)],
                deletes=[blob.digest, known.digest],
            )
        )
        assert result.new_objects == 2
        assert engine.missing([blob.digest, known.digest]) == [blob.digest, known.digest]
        assert find_row(engine, "pins", b"key") == blob.digest
        assert_reads_back(engine, new_parent(known))

    def test_a_parent_outlives_its_deleted_child(self, engine: Engine) -> None:
        # Collectors delete parents first. An engine need not check that, but P1 holds in any case.
        child, other = new_blob(b"child"), new_blob(b"other")
        parent = new_parent(child, other)
        put_objects(engine, child, other, parent)
        engine.write(Write(deletes=[child.digest]))
        assert_reads_back(engine, parent, other)
        put_objects(engine, child)
        assert_reads_back(engine, parent, other, child)

    def test_parents_and_children_can_be_deleted_in_one_write(self, engine: Engine) -> None:
        child, kept = new_blob(b"child"), new_blob(b"kept")
        parent = new_parent(child, kept)
        root = new_parent(parent)
        put_objects(engine, child, kept, parent, root)
        engine.write(Write(deletes=[root.digest, parent.digest, child.digest]))
        assert [info.digest for info in all_objects(engine)] == [kept.digest]
        assert_reads_back(engine, kept)

    def test_thousands_of_objects_can_be_deleted_in_one_write(self, engine: Engine) -> None:
        blobs = [new_blob(b"%d" % n) for n in range(4000)]
        put_objects(engine, *blobs)
        engine.write(Write(deletes=[blob.digest for blob in blobs[500:][::-1]]))
        assert len(all_objects(engine)) == 500
        assert_reads_back(engine, *blobs[:500])

    def test_an_id_is_never_reused(self, engine: Engine) -> None:
        # A collector marks ids: with a reused id, it would take a new object for a dead one.
        seen: set[int] = set()
        highest = 0
        blobs = [new_blob(b"%d" % n) for n in range(6)]
        doomed = [blob.digest for blob in blobs]
        for round_ in range(12):
            put_objects(engine, *blobs)
            fresh = {info.id for info in all_objects(engine)} - seen
            assert len(fresh) == len(doomed)
            assert min(fresh) > highest
            highest = max(fresh)
            seen |= fresh
            newest_first = [info.digest for info in all_objects(engine)]
            # By turns the newest, the oldest, the newest half, and everything.
            doomed = [newest_first[:1], newest_first[-1:], newest_first[:3], newest_first][
                round_ % 4
            ]
            engine.write(Write(deletes=doomed))
            # Neither this last write nor the stored objects show the highest id used.
            put_row(engine, "records", b"between", b"%d" % round_)

    def test_an_id_stays_with_its_object(self, engine: Engine) -> None:
        blobs = [new_blob(b"%d" % n) for n in range(30)]
        put_objects(engine, *blobs)
        before = {info.digest: info for info in all_objects(engine)}
        engine.write(Write(deletes=[blob.digest for blob in blobs[::3]]))
        put_objects(engine, *blobs)
        after = {info.digest: info for info in all_objects(engine)}
        for n, blob in enumerate(blobs):
            same = after[blob.digest] == before[blob.digest]
            assert same == (n % 3 != 0)

    def test_after_a_failed_write_a_child_still_gets_a_lower_id_than_its_parent(
        self, engine: Engine
    ) -> None:
        put_objects(engine, new_blob(b"first"))
        with pytest.raises(ObjectNotFoundError):
            put_objects(engine, new_blob(b"lost"), new_object(b"orphan", [ABSENT]))
        child = new_blob(b"child")
        put_objects(engine, child, new_parent(child))
        infos = all_objects(engine)
        assert len(infos) == len({info.id for info in infos}) == 3
        assert infos[0].children == (infos[1].id,)
        assert infos[0].id > infos[1].id > infos[2].id

    def test_an_empty_write_does_nothing(self, clocked: Engine, clock: ManualClock) -> None:
        assert clocked.write(Write()) == (clock.now_ms, 0)
        assert clocked.scan_objects() == []

    def test_a_deleted_object_is_not_returned_from_a_cache(self, engine: Engine) -> None:
        # An engine that caches what it read must forget it with the object.
        blob = new_blob(b"cached?")
        put_objects(engine, blob)
        assert_reads_back(engine, blob)
        engine.write(Write(deletes=[blob.digest]))
        assert find_object(engine, blob.digest) is None
