"""Slabs: whatever the numbers of a slab are, its objects come back, in each way to write one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import pytest

from casstore.engine.lmdb import slab as slabs
from casstore.engine.protocol import NewObject
from casstore.format.digest import Digest

FIRST_ID = 1 << 33
Encode = Callable[[Sequence[NewObject], Mapping[int, list[int]]], tuple[bytes, bytes]]


def fresh(objects: Sequence[NewObject], children: Mapping[int, list[int]]) -> tuple[bytes, bytes]:
    links = [children[own] for own in range(FIRST_ID, FIRST_ID + len(objects))]
    return slabs.encode(objects, links, FIRST_ID, 7, slabs.uncompressed)


def packed(objects: Sequence[NewObject], children: Mapping[int, list[int]]) -> tuple[bytes, bytes]:
    key, value = fresh(objects, children)
    columns = slabs.Columns()
    slab = read(key, value)
    for position in range(len(objects)):
        columns.add_stored(slab, position, alive=True)
    return columns.encode(FIRST_ID, 7, slabs.uncompressed, packed=True)


def read(key: bytes, value: bytes) -> slabs.Slab:
    directory = slabs.read_directory(key, value)
    payload = value[directory.payload_at :]

    def inflate(raw_bytes: int) -> bytes:
        assert len(payload) == raw_bytes
        return payload

    return slabs.Slab(directory, inflate)


def name_of(object_id: int) -> bytes:
    """The digest of an object in another slab."""
    return Digest.of_blob(b"%d" % object_id)


def new(data: bytes, children: Sequence[bytes] = ()) -> NewObject:
    return NewObject(Digest.of_blob(data), 3, data, tuple(children))


@pytest.fixture(params=[fresh, packed])
def encode(request: pytest.FixtureRequest) -> Encode:
    chosen: Encode = request.param
    return chosen


def assert_comes_back(
    encode: Encode, objects: Sequence[NewObject], children: Mapping[int, list[int]]
) -> None:
    key, value = encode(objects, children)
    assert slabs.count_of(value) == len(objects)
    assert slabs.stored_at_ms(value) == 7
    slab = read(key, value)

    def digest_of_id(object_id: int) -> bytes:
        inside = object_id - FIRST_ID
        return objects[inside].digest if inside >= 0 else name_of(object_id)

    assert (slab.first_id, slab.last_id) == (FIRST_ID, FIRST_ID + len(objects) - 1)
    for position, item in enumerate(objects):
        own = FIRST_ID + position
        assert slabs.digest_at(value, position) == item.digest
        assert not slabs.is_dead_at(value, position)
        assert slab.kind(position) == item.kind
        assert list(slab.children(position)) == children[own]
        assert slab.data(position, digest_of_id) == item.data


# The last number of each width, and the first of the next.
@pytest.mark.parametrize("edge", [0, 1, 0xFF, 0x100, 0xFFFF, 0x1_0000])
def test_a_slab_column_holds_numbers_at_every_width_boundary(encode: Encode, edge: int) -> None:
    far = FIRST_ID - max(edge, 1)
    name = name_of(far)
    objects = [
        new(bytes(edge)),
        # As far from the beginning, and from itself, as the number says.
        new(bytes(edge) + name, [name]),
        new(name + bytes(edge) + name + b"end", [name, name]),
    ]
    children = {FIRST_ID: [], FIRST_ID + 1: [far], FIRST_ID + 2: [far, far]}
    assert_comes_back(encode, objects, children)


@pytest.mark.parametrize("edge", [0xFF, 0x100, 0xFFFF, 0x1_0000])
def test_a_slab_column_holds_link_counts_at_every_width_boundary(encode: Encode, edge: int) -> None:
    name = name_of(5)
    many = new(b"-" + name * edge, [name] * edge)
    assert_comes_back(encode, [many], {FIRST_ID: [5] * edge})


@pytest.mark.parametrize("distance", [0xFFFF_FFFF, 0x1_0000_0000])
def test_the_id_distance_to_a_child_may_exceed_32_bits(encode: Encode, distance: int) -> None:
    far = FIRST_ID - distance
    assert_comes_back(encode, [new(name_of(far), [name_of(far)])], {FIRST_ID: [far]})


def test_objects_with_and_without_stored_links_mix_in_one_slab(encode: Encode) -> None:
    """Links that are not in the data, or in another order than it has them, cannot be cut out."""
    one, two = name_of(1), name_of(2)
    first = new(b"first")
    objects = [
        first,
        new(b"a" + one + b"b" + two, [one, two]),
        new(b"neither is here", [one, two]),
        new(b"c" + two + b"d" + one, [one, two]),
        new(b"to a neighbour " + first.digest, [first.digest]),
        new(b"e" + one + b"f" + two + b"g", [one, two]),
        new(b"and one that is not here", [first.digest]),
        new(first.digest + b" and to both " + one, [first.digest, one]),
    ]
    children = {FIRST_ID + at: [1, 2] for at in (1, 2, 3, 5)}
    children |= {FIRST_ID: [], FIRST_ID + 4: [FIRST_ID], FIRST_ID + 6: [FIRST_ID]}
    children[FIRST_ID + 7] = [FIRST_ID, 1]
    assert_comes_back(encode, objects, children)


def test_an_object_stored_by_another_process_meanwhile_keeps_its_slot_and_is_dead() -> None:
    one = name_of(1)
    objects = [new(b"a" + one, [one]), new(b"not here", [one]), new(b"alive " + one, [one])]
    key, value = slabs.encode(objects, [None, None, [1]], FIRST_ID, 7, slabs.uncompressed)
    slab = read(key, value)
    assert [slabs.is_dead_at(value, at) for at in range(3)] == [True, True, False]
    assert [slab.kind(at) for at in range(3)] == [slabs.DEAD, slabs.DEAD, 3]
    # They link to themselves, which no object does that counts.
    assert slab.children(0) == (FIRST_ID,)
    assert slab.children(1) == (FIRST_ID + 1,)
    assert slab.data(2, name_of) == objects[2].data
