"""What stands in files and rows, byte by byte: for canaries."""

from __future__ import annotations

from pathlib import Path

import zstandard

from casstore.engine.protocol import TABLES
from casstore.store import Store


def raw_files(folder: Path) -> bytes:
    """All bytes of all files below a folder, and of every zstd frame in them, inflated."""
    found = [path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()]
    return b"\n".join([part for data in found for part in (data, *_frames(data))])


def _frames(data: bytes) -> list[bytes]:
    """What lies compressed in the bytes, wherever a frame starts."""
    inflated = []
    at = data.find(b"\x28\xb5\x2f\xfd")
    while at >= 0:
        try:
            inflated.append(
                zstandard.ZstdDecompressor().decompressobj().decompress(data[at : at + (1 << 20)])
            )
        except zstandard.ZstdError:
            inflated.append(b"")
        at = data.find(b"\x28\xb5\x2f\xfd", at + 1)
    return inflated


def everything(store: Store) -> bytes:
    """All bytes of all objects and rows that a store still gives."""
    found = [
        item.data
        for info in store.engine.scan_objects(limit=1_000_000)
        for item in store.engine.get_many([info.digest])
        if item is not None
    ]
    for table in TABLES:
        found += [row.key + row.value for row in store.engine.scan_rows(table, limit=1_000_000)]
    return b"\n".join(found)
