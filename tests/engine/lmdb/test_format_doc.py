"""docs/internals/format.md has the fields and sizes of the redo log and of slabs."""

from __future__ import annotations

import re
import struct

from casstore.engine.lmdb import log, slab
from casstore.engine.lmdb.log import Position, RecoveryPoint
from casstore.engine.lmdb.recent import MAX_LOGGED_BYTES
from casstore.format.digest import plain_hash
from tests.format.test_document import section


def fields(diagram: str) -> list[tuple[int, int]]:
    """Offsets and sizes of the fields in a diagram, as far as both are numbers."""
    found = re.findall(r"^ +(\d+) +(\d+)  \S", diagram, re.M)
    return [(int(offset), int(size)) for offset, size in found]


def test_the_diagrams_of_the_log_have_the_fields_of_the_code() -> None:
    row, head, record = re.findall(r"^```\n(.*?)^```$", section("The redo log"), re.M | re.S)
    assert fields(row) == [(0, 1), (1, 8), (9, 8), (17, 8), (25, 16), (41, 8)]
    state = RecoveryPoint(True, b"id of it", Position(258, 4352, b"checksum of it.."))
    packed = b"\x01id of it" + struct.pack("<QQ", 258, 4352) + b"checksum of it.."
    assert state.encode() == packed + plain_hash(packed)[:8]
    closed = bytes(9) + struct.pack("<QQ", 258, 4096) + bytes(16)
    assert state.retired().encode() == closed + plain_hash(closed)[:8]
    shared = [(at, 8) for at in (0, 8, 16, 64, 72, 80, 88)]
    assert fields(head) == shared
    numbers_at = [log._PUBLISHED_AT, log._FLUSHED_AT, log._APPLYING_AT, log._GENERATION_AT]
    assert numbers_at == [64, 72, 80, 88]
    sizes = [4, 4, 8, 8, 8, 16, 16]
    assert fields(record) == [(sum(sizes[:n]), size) for n, size in enumerate(sizes)]
    assert log._RECORD.size == log._ALIGNMENT == sum(sizes)


def test_the_sizes_of_the_log_are_those_of_the_code() -> None:
    text = section("The redo log")
    assert log._FIRST_OFFSET == 4096
    assert f"The file is {log.FIRST_LOG_BYTES >> 10} KiB long at first" in text
    assert f"has at most {log.MAX_LOG_BYTES >> 20} MiB" in text
    assert f"A body has at most {MAX_LOGGED_BYTES >> 20} MiB" in text


def test_the_slab_diagram_has_the_offsets_of_the_header() -> None:
    fields = re.findall(r"^ +(\d+) +(\S+)  \S", section("Slabs"), re.M)
    assert [int(offset) for offset, _ in fields] == [0, 1, 2, 3, 4, 8, 12, 20, 28]
    assert slab.HEADER_BYTES == 28
    assert (slab.LAYOUT, slab.CODEC_RAW, slab.CODEC_ZSTD) == (1, 0, 1)
    assert (slab.PACKED_LAYOUT, slab._MAX_RAW_BYTES) == (2, 17 << 20)
    assert (slab.DEAD, slab.KEEPS_LINKS) == (127, 128)
