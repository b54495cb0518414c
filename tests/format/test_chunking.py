"""Cutting long bytes: frozen cut points, edits that stay local, and ropes that read back."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from casstore.format import chunking, tree
from casstore.format.digest import Kind, check_object, digest_of, plain_hash

PROFILE = settings(deadline=None, max_examples=25, database=None)

MIB = 1 << 20
GOLDEN = blake3(b"casstore golden").digest(length=MIB)

# Frozen with the profile "fastcdc-2020-16k-1".
GOLDEN_LENGTHS = [
    24_369, 19_718, 31_781, 23_631, 17_868, 14_985, 10_444, 29_308, 17_345, 18_027, 16_117, 12_782,
    31_242, 4_990, 11_540, 16_508, 16_354, 13_518, 20_765, 23_177, 23_638, 11_366, 22_526, 9_534,
    7_645, 17_508, 25_225, 17_319, 18_622, 28_418, 24_942, 20_357, 25_113, 18_539, 18_015, 16_533,
    24_725, 13_006, 8_104, 24_503, 21_678, 19_456, 17_862, 21_615, 19_398, 34_870, 29_433, 12_252,
    18_365, 28_685, 18_536, 11_472, 17_677, 24_578, 2_592,
]  # fmt: skip


def lengths(chunks: Iterator[bytes]) -> list[int]:
    return [len(chunk) for chunk in chunks]


def test_the_chunk_boundaries_of_the_golden_input_are_unchanged() -> None:
    assert chunking.PROFILE == "fastcdc-2020-16k-1"
    assert lengths(chunking.cut(GOLDEN)) == GOLDEN_LENGTHS


def test_chunks_put_together_are_the_input() -> None:
    assert b"".join(chunking.cut(GOLDEN)) == GOLDEN


@pytest.mark.parametrize("size", [0, 1, 4_095, 4_096, 4_097, 65_535, 65_536, 65_537, 200_000])
def test_every_chunk_except_the_last_is_within_the_size_bounds(size: int) -> None:
    for content in (GOLDEN[:size], bytes(size), b"ab" * (size // 2)):
        cut = list(chunking.cut(content))
        assert b"".join(cut) == content
        assert all(4_096 <= len(chunk) <= 65_536 for chunk in cut[:-1])
        assert all(0 < len(chunk) <= 65_536 for chunk in cut)


def test_an_empty_input_has_no_chunks() -> None:
    assert list(chunking.cut(b"")) == []
    assert list(chunking.cut_stream(io.BytesIO(b""))) == []


def test_the_average_is_near_sixteen_kibibytes() -> None:
    assert 12_000 < MIB / len(GOLDEN_LENGTHS) < 24_000


@pytest.mark.parametrize("at", [0, 1, 4_096, 100_000, 500_000, MIB - 1, MIB])
@pytest.mark.parametrize("edit", ["insert", "delete", "replace"])
def test_one_changed_byte_changes_few_chunks(at: int, edit: str) -> None:
    if edit == "insert":
        changed = GOLDEN[:at] + b"!" + GOLDEN[at:]
    elif edit == "delete":
        changed = GOLDEN[:at] + GOLDEN[at + 1 :]
    else:
        changed = GOLDEN[:at] + b"!" + GOLDEN[at + 1 :]
    new = set(chunking.cut(changed)) - set(chunking.cut(GOLDEN))
    assert len(new) <= 3


class Reluctant(io.RawIOBase):
    """Returns at most this many bytes at a time, as pipes and sockets do."""

    def __init__(self, content: bytes, sizes: list[int]) -> None:
        self._content = content
        self._sizes = sizes
        self._at = 0
        self._turn = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        allowed = self._sizes[self._turn % len(self._sizes)]
        self._turn += 1
        part = self._content[self._at : self._at + min(allowed, len(buffer))]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


@pytest.mark.parametrize(
    "sizes", [[1], [1, 70_000], [4_096], [65_536], [65_537], [3, 1, 100_000], [MIB]], ids=str
)
def test_a_stream_is_cut_like_its_content(sizes: list[int]) -> None:
    content = GOLDEN[:250_000]
    expected = list(chunking.cut(content))
    raw = Reluctant(content, sizes)
    assert list(chunking.cut_stream(raw)) == expected  # type: ignore[arg-type]
    buffered = io.BufferedReader(Reluctant(content, sizes))
    assert list(chunking.cut_stream(buffered)) == expected


@PROFILE
@given(st.integers(0, 300_000), st.lists(st.integers(1, 90_000), min_size=1, max_size=5))
def test_a_stream_is_cut_like_its_content_whatever_its_read_sizes(
    size: int, sizes: list[int]
) -> None:
    content = GOLDEN[:size]
    source = io.BufferedReader(Reluctant(content, sizes))
    assert list(chunking.cut_stream(source)) == list(chunking.cut(content))


# --- ropes ----------------------------------------------------------------------------------


class Sink:
    """Everything that was emitted, by digest."""

    def __init__(self) -> None:
        self.objects: dict[bytes, tuple[int, bytes]] = {}

    def emit(self, kind: int, data: bytes, children: list[bytes]) -> bytes:
        assert all(child in self.objects for child in children)
        digest = digest_of(kind, data)
        self.objects[digest] = (kind, data)
        return digest


def build(chunks: list[bytes]) -> tuple[Sink, bytes, list[bytes]]:
    sink = Sink()
    builder = chunking.RopeBuilder(sink.emit)
    for chunk in chunks:
        builder.add(chunk)
    sealed, links = builder.finish()
    return sink, sealed, links


def read_back(sink: Sink, body: bytes, level: int | None = None) -> bytes:
    branch = tree.decode_branch(Kind.CHUNKS, body)
    assert level is None or branch.level == level
    parts: list[bytes] = []
    for digest, size in zip(branch.digests, branch.sizes, strict=True):
        kind, data = sink.objects[digest]
        check_object(digest, kind, data)
        assert kind == (Kind.BLOB if branch.level == 1 else Kind.CHUNKS)
        part = data if branch.level == 1 else read_back(sink, data, branch.level - 1)
        assert len(part) == size
        parts.append(part)
    return b"".join(parts)


def assert_reads_back(chunks: list[bytes]) -> int:
    sink, sealed, links = build(chunks)
    content = b"".join(chunks)
    check_object(plain_hash(content), Kind.ROPE, sealed)
    body = tree.open_rope(sealed)
    assert read_back(sink, body) == content
    branch = tree.decode_branch(Kind.CHUNKS, body)
    assert branch.digests == links
    assert sum(branch.sizes) == len(content)
    return branch.level


def test_a_blob_of_a_few_chunks_reads_back_through_its_rope() -> None:
    assert assert_reads_back([GOLDEN[:4_096], GOLDEN[4_096:9_000]]) == 1
    assert_reads_back(list(chunking.cut(GOLDEN)))


def test_a_rope_of_one_chunk_reads_back() -> None:
    assert assert_reads_back([b"only"]) == 1


def test_a_blob_of_many_chunks_has_a_rope_of_more_levels() -> None:
    chunks = [GOLDEN[start : start + 64] for start in range(0, 300 * 64, 64)]
    assert assert_reads_back(chunks) >= 2


@pytest.mark.parametrize("boundary", [False, True])
def test_chunks_that_are_all_or_never_branch_boundaries_still_make_a_rope(boundary: bool) -> None:
    chunks: list[bytes] = []
    number = 0
    while len(chunks) < 129:
        chunk = number.to_bytes(4, "big")
        if (plain_hash(chunk)[0] % 16 == 0) == boundary:
            chunks.append(chunk)
        number += 1
    # 65 pairs, then 33 and so on up to one; or one full branch and one of a single chunk.
    assert assert_reads_back(chunks) >= 2


def test_the_same_chunk_many_times_makes_a_rope() -> None:
    # Like every run of equal children, it is cut by the cap or by the floor.
    sink, _, _ = build([bytes(65_536)] * 1_000)
    assert len([kind for kind, _ in sink.objects.values() if kind == Kind.BLOB]) == 1
    assert_reads_back([bytes(65_536)] * 1_000)


def test_an_insertion_changes_few_pieces_of_a_rope() -> None:
    content = blake3(b"casstore rope").digest(length=8 * MIB)
    before, _, _ = build(list(chunking.cut(content)))
    middle = len(content) // 2
    after, _, _ = build(list(chunking.cut(content[:middle] + b"!" + content[middle:])))
    new = after.objects.keys() - before.objects.keys()
    # Two chunks or three, and a branch or two a level.
    assert len(new) <= 8
    assert sum(len(after.objects[digest][1]) for digest in new) < 300_000
