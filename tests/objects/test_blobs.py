"""Bytes of any length: in whole or as a stream, out whole or as a file, always verified."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

import casstore
from casstore import Digest, Store
from casstore.engine.memory import MemoryEngine
from casstore.errors import CorruptionError, InvalidInputError, LimitError
from casstore.format.digest import Kind
from casstore.format.tree import decode_branch, open_rope
from tests.objects.specimens import CountingEngine, all_digests, put_rope, reachable

PROFILE = settings(deadline=None, max_examples=40, derandomize=True, database=None)

SIZES = [0, 1, 4_095, 4_096, 65_535, 65_536, 65_537, 131_072, 300_000]
LONG = random.Random(1).randbytes(6 << 20)


@pytest.fixture(scope="module", params=["memory", "lmdb"])
def store(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Store]:
    if request.param == "memory":
        made = Store(MemoryEngine())
    else:
        made = casstore.open(tmp_path_factory.mktemp("blobs") / "store", "relaxed")
    with made:
        yield made


def same(got: bytes, expected: bytes) -> bool:
    """Compared apart from the assert: a failure must not print megabytes."""
    return type(got) is bytes and got == expected


class Dripping(io.RawIOBase):
    """A source that gives a little at a time, and may fail or change its mind."""

    def __init__(self, content: bytes, parts: Iterator[int], end: Any = b"") -> None:
        self._content = content
        self._parts = parts
        self._at = 0
        self._end = end

    def read(self, size: int = -1) -> Any:
        if self._at == len(self._content):
            if isinstance(self._end, Exception):
                raise self._end
            return self._end
        step = min(next(self._parts), size if size >= 0 else len(self._content))
        part = self._content[self._at : self._at + step]
        self._at += len(part)
        return part


def dripping(content: bytes, parts: Iterator[int], end: Any = b"") -> BinaryIO:
    return cast(BinaryIO, Dripping(content, parts, end))


def every(size: int) -> Iterator[int]:
    while True:
        yield size


def uneven(seed: int) -> Iterator[int]:
    source = random.Random(seed)
    while True:
        yield source.choice((1, 2, 100, 4_096, 50_000))


# --- in and out ------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("filling", ["zeros", "random"])
def test_a_blob_of_any_size_reads_back_through_every_read_call(
    store: Store, size: int, filling: str
) -> None:
    content = bytes(size) if filling == "zeros" else random.Random(size).randbytes(size)
    digest = store.put_blob(content)
    assert digest == blake3(content).digest() == Digest.of_blob(content)
    assert same(store.get_blob(digest), content)
    assert same(store.get_many([digest])[0], content)
    with store.open_blob(digest) as source:
        assert same(source.read(), content)


@pytest.mark.parametrize("size", SIZES)
def test_a_stream_is_stored_as_the_same_objects_as_its_content(size: int) -> None:
    content = random.Random(size).randbytes(size)
    whole, streamed = MemoryEngine(), MemoryEngine()
    digest = Store(whole).put_blob(content)
    assert Store(streamed).put_stream(io.BytesIO(content)) == digest
    assert all_digests(streamed) == all_digests(whole)
    assert same(Store(streamed).get_blob(digest), content)


def test_a_blob_with_several_levels_of_branches_comes_back(store: Store) -> None:
    digest = store.put_blob(LONG)
    [item] = store.engine.get_many([digest])
    assert item is not None
    assert item.kind == Kind.ROPE
    assert decode_branch(Kind.CHUNKS, open_rope(item.data)).level > 1
    assert len(reachable(store.engine, digest)) > 128
    assert digest == blake3(LONG).digest()
    assert same(store.get_blob(digest), LONG)
    assert store.put_stream(io.BytesIO(LONG)) == digest
    with store.open_blob(digest) as source:
        assert same(b"".join(iter(lambda: source.read(100_001), b"")), LONG)


def test_a_stream_longer_than_one_batch_is_stored_as_the_same_objects() -> None:
    content = random.Random(2).randbytes(9 << 20)
    whole, streamed = MemoryEngine(), MemoryEngine()
    digest = Store(whole).put_blob(content)
    assert Store(streamed).put_stream(io.BytesIO(content)) == digest
    assert all_digests(streamed) == all_digests(whole)


def test_a_blob_of_zeros_stores_its_repeated_chunk_once() -> None:
    engine = MemoryEngine()
    digest = Store(engine).put_blob(bytes(4 << 20))
    assert len(reachable(engine, digest)) <= 5
    assert same(Store(engine).get_blob(digest), bytes(4 << 20))


def test_a_blob_longer_than_max_bytes_is_refused(store: Store) -> None:
    for size in (0, 1, 65_535, 65_536, 65_537, 300_000):
        digest = store.put_blob(bytes(size))
        assert len(store.get_blob(digest, max_bytes=size)) == size
        assert len(store.get_many([digest], max_bytes=size)[0]) == size
        if size:
            with pytest.raises(LimitError, match=str(size)):
                store.get_blob(digest, max_bytes=size - 1)


def test_editing_the_middle_of_a_long_blob_stores_few_new_bytes(store: Store) -> None:
    old = LONG[: 5 << 20]
    store.put_blob(old)
    before = all_digests(store.engine)
    new = old[: len(old) // 2] + b"an inserted sentence" + old[len(old) // 2 :]
    digest = store.put_blob(new)
    added = [info for name, info in reachable(store.engine, digest).items() if name not in before]
    # Two or three chunks of at most 64 KiB, and the branches above them.
    assert sum(info.size_bytes for info in added) < 250_000
    assert same(store.get_blob(digest), new)


def test_appending_to_a_long_blob_stores_few_new_bytes() -> None:
    engine = MemoryEngine()
    store = Store(engine)
    store.put_blob(LONG[: 5 << 20])
    before = all_digests(engine)
    digest = store.put_blob(LONG[: 5 << 20] + b"an appended sentence")
    added = [info for name, info in reachable(engine, digest).items() if name not in before]
    assert sum(info.size_bytes for info in added) < 200_000


# --- streams that misbehave -------------------------------------------------------------


@pytest.mark.parametrize("size", [10, 65_536, 70_000])
def test_a_stream_may_give_one_byte_at_a_time(store: Store, size: int) -> None:
    content = random.Random(size).randbytes(size)
    assert store.put_stream(dripping(content, every(1))) == Digest.of_blob(content)
    assert same(store.get_blob(Digest.of_blob(content)), content)


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_may_return_less_than_requested(seed: int) -> None:
    content = random.Random(seed).randbytes(400_000)
    whole, streamed = MemoryEngine(), MemoryEngine()
    digest = Store(whole).put_blob(content)
    assert Store(streamed).put_stream(dripping(content, uneven(seed))) == digest
    assert all_digests(streamed) == all_digests(whole)


@pytest.mark.parametrize("size", [0, 10, 65_535, 65_536, 300_000])
def test_a_stream_that_raises_leaves_no_object(store: Store, size: int) -> None:
    class Unplugged(Exception):
        pass

    content = random.Random(f"failing {size}").randbytes(size)
    before = all_digests(store.engine)
    with pytest.raises(Unplugged, match="in the middle"):
        store.put_stream(dripping(content, every(10_000), Unplugged("in the middle")))
    assert all_digests(store.engine) == before
    if size:
        assert Digest.of_blob(content) not in store
    assert same(store.get_blob(store.put_stream(io.BytesIO(content))), content)


def test_a_long_stream_that_fails_leaves_no_blob_behind() -> None:
    """What was flushed on the way are chunks that nothing names; the blob itself is not there."""
    store = Store(MemoryEngine())
    content = random.Random(3).randbytes(10 << 20)
    with pytest.raises(OSError, match="gone"):
        store.put_stream(dripping(content, every(1 << 20), OSError("gone")))
    assert Digest.of_blob(content) not in store
    assert same(store.get_blob(store.put_blob(content)), content)


def test_a_stream_in_text_mode_is_refused(store: Store) -> None:
    before = all_digests(store.engine)
    for text in ("", "short", "x" * 100_000):
        with pytest.raises(InvalidInputError, match="binary"):
            store.put_stream(cast(BinaryIO, io.StringIO(text)))
    assert all_digests(store.engine) == before


@pytest.mark.parametrize("end", ["text", None])
def test_a_stream_that_returns_something_other_than_bytes_is_refused(
    store: Store, end: Any
) -> None:
    for size in (10, 100_000):
        with pytest.raises(InvalidInputError):
            store.put_stream(dripping(bytes(size), every(5_000), end))


class Gushing(io.BytesIO):
    """Gives a little more than it was asked for, from some place on."""

    def __init__(self, content: bytes, start: int) -> None:
        super().__init__(content)
        self.start = start

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(size if size is None or self.tell() < self.start else size + 1)


@pytest.mark.parametrize("start", [0, 65_536, 70_000])
def test_a_stream_that_returns_more_than_requested_is_refused(store: Store, start: int) -> None:
    before = all_digests(store.engine)
    with pytest.raises(InvalidInputError, match="returned"):
        store.put_stream(Gushing(bytes(1_000_000), start))
    assert all_digests(store.engine) == before


def test_put_stream_leaves_the_stream_open_and_positioned_at_its_end(store: Store) -> None:
    source = io.BytesIO(bytes(100_000))
    store.put_stream(source)
    assert source.tell() == 100_000
    assert not source.closed


def test_a_stream_is_stored_from_its_current_position(store: Store) -> None:
    source = io.BytesIO(LONG[:200_000])
    source.seek(1_000)
    assert store.put_stream(source) == Digest.of_blob(LONG[1_000:200_000])


# --- a blob as a file ---------------------------------------------------------------------

operations = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.one_of(st.integers(-1, 100), st.integers(0, 200_000))),
        st.tuples(st.just("read1"), st.integers(0, 1_000)),
        st.tuples(st.just("set"), st.integers(-5, 330_000)),
        st.tuples(st.just("cur"), st.integers(-100_000, 100_000)),
        st.tuples(st.just("end"), st.integers(-310_000, 1_000)),
        st.tuples(st.just("tell"), st.just(0)),
    ),
    max_size=25,
)


WHENCE = {"set": io.SEEK_SET, "cur": io.SEEK_CUR, "end": io.SEEK_END}


@pytest.mark.parametrize("size", [0, 1, 1_000, 65_536, 300_000])
@PROFILE
@given(operations=operations)
def test_an_open_blob_behaves_like_a_file_in_memory(size: int, operations: list[Any]) -> None:
    content = LONG[:size]
    store = Store(MemoryEngine())
    with store.open_blob(store.put_blob(content)) as source, io.BytesIO(content) as model:
        for name, number in operations:
            if name == "read1":
                # It may give less; what it gives is right, and the place moves by that much.
                part = source.read1(number)
                assert same(part, model.read(len(part)))
                continue
            if name == "read":
                assert same(source.read(number), model.read(number))
            elif name in WHENCE:
                target = number + {"set": 0, "cur": model.tell(), "end": size}[name]
                if target < 0:
                    # BytesIO goes to the start instead, unlike files on disk.
                    with pytest.raises(ValueError, match="seek"):
                        source.seek(number, WHENCE[name])
                else:
                    assert source.seek(number, WHENCE[name]) == model.seek(target)
            assert source.tell() == model.tell()


def test_seek_supports_all_three_whence_values(store: Store) -> None:
    content = LONG[:300_000]
    with store.open_blob(store.put_blob(content)) as source:
        assert (source.seekable(), source.readable(), source.writable()) == (True, True, False)
        assert source.seek(100) == 100
        assert source.seek(50, io.SEEK_CUR) == 150
        assert source.read(2) == content[150:152]
        assert source.seek(-10, io.SEEK_END) == 299_990
        assert source.read() == content[-10:]
        assert source.read() == b""
        assert source.seek(10, io.SEEK_END) == 300_010
        assert source.read(5) == b""
        with pytest.raises(ValueError, match="-1"):
            source.seek(-1)
        with pytest.raises(ValueError, match="7"):
            source.seek(0, 7)
        assert source.seek(0) == 0
        assert same(source.read(), content)
    with pytest.raises(ValueError, match="closed"):
        source.read()


def test_reading_a_little_of_a_long_blob_reads_few_pieces() -> None:
    engine = CountingEngine()
    store = Store(engine)
    digest = store.put_blob(LONG)
    engine.forget()
    with store.open_blob(digest) as source:
        source.seek(3 << 20)
        assert source.read(10) == LONG[3 << 20 : (3 << 20) + 10]
    # The root, a branch or two, and one run of chunks read ahead.
    assert engine.objects_read <= 40


# --- a rope that is not what it says --------------------------------------------------------


@pytest.fixture
def false_rope() -> tuple[Store, Digest, bytes]:
    """Each chunk is sound and so is the rope, but it stands under another blob's name."""
    store = Store(MemoryEngine())
    chunks = [LONG[:50_000], LONG[50_000:90_000], LONG[90_000:91_000]]
    digest = Digest.of_blob(b"something else")
    put_rope(store.engine, digest, chunks)
    return store, digest, b"".join(chunks)


def test_a_rope_stored_under_a_wrong_digest_cannot_be_read_to_its_end(
    false_rope: tuple[Store, Digest, bytes],
) -> None:
    store, digest, _ = false_rope
    for read in (
        lambda: store.get_blob(digest),
        lambda: store.get_many([digest]),
        lambda: store.open_blob(digest).read(),
    ):
        with pytest.raises(CorruptionError, match=digest.hex()):
            read()


@pytest.mark.parametrize("step", [1_000, 8_192, 70_000])
def test_reading_a_rope_with_a_wrong_digest_in_steps_raises_before_the_last_bytes(
    false_rope: tuple[Store, Digest, bytes], step: int
) -> None:
    store, digest, content = false_rope
    got: list[bytes] = []
    source = store.open_blob(digest)
    with pytest.raises(CorruptionError, match=digest.hex()):
        got.extend(iter(lambda: source.read(step), b""))
    assert sum(map(len, got)) < len(content)


def test_repeated_reads_of_a_rope_with_a_wrong_digest_keep_raising(
    false_rope: tuple[Store, Digest, bytes],
) -> None:
    """Asking again after the error must not give the bytes that the error held back."""
    store, digest, content = false_rope
    source = store.open_blob(digest)
    for _ in range(3):
        with pytest.raises(CorruptionError, match=digest.hex()):
            source.read()
    source = store.open_blob(digest)
    got = b""
    for _ in range(200):
        try:
            got += source.read(1_000)
        except CorruptionError:
            continue
    assert len(got) < len(content)


def test_a_rope_whose_chunk_differs_from_its_recorded_length_is_damage() -> None:
    from casstore.engine.protocol import NewObject, Write
    from casstore.format.tree import Child, encode_branch, seal_rope

    store = Store(MemoryEngine())
    chunk = store.put_blob(b"x" * 1_000)
    digest = Digest.of_blob(b"anything")
    for size in (999, 1_001):
        body = encode_branch(Kind.CHUNKS, 1, [Child(chunk, size, size, "")] * 2)
        item = NewObject(digest, Kind.ROPE, seal_rope(body), [chunk, chunk])
        store.engine.write(Write(deletes=[digest]))
        store.engine.write(Write(objects=[item]))
        with pytest.raises(CorruptionError):
            store.get_blob(digest)
        with pytest.raises(CorruptionError):
            store.open_blob(digest).read()
