"""docs/internals/format.md says what the code does: its tables and examples are recomputed here."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from blake3 import blake3

from casstore.engine.lmdb import slab
from casstore.engine.lmdb.directory import StoreDirectory
from casstore.engine.lmdb.memtable import BatchEntry, decode_entry, encode_entry
from casstore.engine.protocol import (
    MAX_OBJECT_BYTES,
    MAX_ROW_KEY_BYTES,
    MAX_ROW_VALUE_BYTES,
    TABLES,
    NewObject,
)
from casstore.format import canonical, chunking, header, limits, splitting, tree
from casstore.format.canonical import Link, encode
from casstore.format.digest import KIND_NAMES, Digest, Kind, digest_of, plain_hash

TEXT = (Path(__file__).parent.parent.parent / "docs" / "internals" / "format.md").read_text()

EXAMPLE_VALUE = {"role": "user", "text": "Hello", "n": [1, -1, 1.5, True, None]}


def section(title: str) -> str:
    """The text under a heading, up to the next of the same or a higher level."""
    level, start = next(
        (len(found[1]), found.end())
        for found in re.finditer(r"^(#+) (.+)$", TEXT, re.M)
        if found[2] == title
    )
    end = re.search(rf"^#{{1,{level}}} ", TEXT[start:], re.M)
    return TEXT[start : start + end.start()] if end else TEXT[start:]


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows, headings and rules left out."""
    found = []
    for line in text.splitlines():
        if line.startswith("|") and not line.startswith("|---"):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            found.append([cell.strip().strip("`") for cell in cells])
    return found


def example_bytes(title: str) -> bytes:
    """The bytes of an example's table, with its offsets checked."""
    data = b""
    for offset, encoded, _ in rows(section(title))[1:]:
        assert int(offset) == len(data)
        data += bytes.fromhex(encoded)
    return data


def stated(title: str, name: str) -> str:
    found = re.search(rf"^{name}: `([^`]+)`", section(title), re.M)
    assert found, name
    return found[1]


def test_the_example_value_has_these_bytes_and_this_digest() -> None:
    title = "Example 1: a value"
    data = example_bytes(title)
    assert data == encode(EXAMPLE_VALUE)
    assert stated(title, "Bytes") == data.hex()
    assert stated(title, "Digest") == digest_of(Kind.VALUE, data).hex()
    digest = splitting.split(EXAMPLE_VALUE, lambda kind, data, _: digest_of(kind, data))
    assert stated(title, "Digest") == digest.hex()
    assert stated(title, "As a blob") == Digest.of_blob(data).hex()


def example_slab() -> tuple[bytes, bytes]:
    content = b"Hello, blob"
    blob = digest_of(Kind.BLOB, content)
    value = encode({"at": Link(Digest(blob))})
    objects = [
        NewObject(blob, Kind.BLOB, content, ()),
        NewObject(digest_of(Kind.VALUE, value), Kind.VALUE, value, [blob]),
    ]
    return slab.encode(objects, [[], [1]], 1, 1_700_000_000_000, slab.uncompressed)


def test_the_example_slab_has_these_bytes() -> None:
    title = "Example 2: a slab"
    key, value = example_slab()
    assert stated(title, "Key") == key.hex()
    assert example_bytes(title) == value


def test_the_example_slab_reads_back_by_the_steps_of_the_document() -> None:
    key = bytes.fromhex(stated("Example 2: a slab", "Key"))
    data = example_bytes("Example 2: a slab")
    directory_end = 28 + 2 * 32 + 2 + 2 + 2 + 1
    assert data[20:28] == plain_hash(key + data[:20] + data[28:directory_end])[:8]
    digests = [data[28:60], data[60:92]]
    assert data[92:94] == bytes((Kind.BLOB, Kind.VALUE))
    lengths, counts, distances = data[94:96], data[96:98], data[98:99]
    assert list(counts) == [0, 1]
    child = 2 - distances[0]
    gap, payload = data[99], data[100:]
    assert len(payload) == sum(lengths)
    blob, stripped = payload[: lengths[0]], payload[lengths[0] :]
    rebuilt = stripped[:gap] + digests[child - 1] + stripped[gap:]
    assert plain_hash(blob) == digests[0]
    assert digest_of(Kind.VALUE, rebuilt) == digests[1]
    assert canonical.decode(rebuilt) == {"at": Link(Digest(digests[0]))}
    directory = slab.read_directory(key, data)
    assert (directory.first_id, directory.objects, directory.payload_at) == (1, 2, directory_end)


EXAMPLE_LOG_ID = bytes.fromhex("6c6f67206f6e652e")


def example_entry() -> BatchEntry:
    blob = NewObject(plain_hash(b"Hello, blob"), Kind.BLOB, b"Hello, blob", ())
    text = encode({"at": Link(Digest(blob.digest))})
    value = NewObject(digest_of(Kind.VALUE, text), Kind.VALUE, text, [blob.digest])
    rows = [("heads", b"s\0", b"head"), ("receipts", b"old", None)]
    return BatchEntry(1_700_000_000_000, 7, [blob, value], [[], [7]], rows, [], [5])


def test_the_example_record_of_the_log_has_these_bytes(tmp_path: Path) -> None:
    title = "Example 3: a record of the redo log"
    redo = StoreDirectory(str(tmp_path)).open_log(1 << 20, create=True)
    assert redo is not None
    start = redo.begin(EXAMPLE_LOG_ID, 2)
    assert start == (2, 4096, EXAMPLE_LOG_ID + bytes(8))
    end = redo.append(start, start.offset, encode_entry(example_entry()), flush=True)
    content = (tmp_path / "redo.log").read_bytes()
    assert stated(title, "Header") == content[:24].hex()
    assert example_bytes(title) == content[4096 : end.offset]
    assert f"{4096 + len(example_bytes(title))}, and has `{end.chain.hex()}`" in section(title)
    record = redo.read_next(start)
    assert record is not None
    assert encode_entry(decode_entry(3, record.body)) == record.body
    assert decode_entry(3, record.body).slab() == example_entry().slab()
    redo.close()


def test_the_limits_are_those_of_the_code() -> None:
    stated_limits = {name: int(value) for name, value, _ in rows(section("Limits"))[1:]}
    named = {
        name: value
        for name, value in vars(limits).items()
        if name.isupper() and name != "DEFAULT_MAX_BYTES"
    }
    assert stated_limits == named
    assert (MAX_OBJECT_BYTES, MAX_ROW_KEY_BYTES, MAX_ROW_VALUE_BYTES) == (16 << 20, 511, 16 << 20)
    assert tree.MAX_LEVEL == 64


def test_the_kinds_and_contexts_are_those_of_the_code() -> None:
    found = rows(section("Kinds and digests"))[1:]
    assert {int(number): name for number, name, _, _ in found} == KIND_NAMES
    for number, name, _, digest in found:
        if name in ("blob", "rope"):
            continue
        context = re.search(r"`(casstore [^`]+)`?", digest)
        assert context
        encoded = blake3(b"data", derive_key_context=context[1]).digest()
        assert encoded == digest_of(int(number), b"data")
    seal = re.search(r'derive-key "([^"]+)"', section("Blobs, chunks and ropes"))
    assert seal
    assert blake3(b"data", derive_key_context=seal[1]).digest() == digest_of(Kind.ROPE, b"data")


def test_the_roles_are_those_of_the_code() -> None:
    digest = bytes(range(32))
    found = {int(role): encoded for role, encoded, _ in rows(section("Links"))[1:]}
    assert sorted(found) == list(range(canonical.LAST_ROLE + 1))
    for role in range(4):
        encoded = canonical.link_bytes(role, digest)
        assert encoded == bytes.fromhex(found[role].split("`")[0]) + digest
    start = bytes.fromhex(found[4].split("`")[0])
    assert canonical.item_link_bytes(300, digest) == start + b"\x01\x2c" + digest


def test_the_databases_and_meta_rows_are_those_of_the_code() -> None:
    text = section("LMDB databases")
    assert " ".join(f"`{name}`" for name in TABLES) in text
    for key in (*header.header_rows(0), b"current_dictionary"):
        assert f"| `{key.decode()}` |" in text
    assert header.STORE_FORMAT == 6
    assert TEXT.startswith("# The casstore format, version 6\n")


def documented_cuts(content: bytes) -> list[int]:
    """Chunk lengths by the steps of the document, with the masks it prints."""
    text = section("The profile `fastcdc-2020-16k-1`")
    before, after = (int(mask, 16) for mask in re.findall(r"`([0-9a-f]{16})`", text))
    gear = [int.from_bytes(hashlib.md5(bytes((b,)) * 64).digest()[:8], "big") for b in range(256)]
    lengths = []
    at = 0
    while at < len(content):
        lengths.append(_next_length(content[at : at + 65_536], gear, before, after))
        at += lengths[-1]
    return lengths


def _next_length(window: bytes, gear: list[int], before: int, after: int) -> int:
    if len(window) <= 4096:
        return len(window)
    end, middle = len(window) & ~1, min(len(window), 16_384) & ~1
    hashed = 0
    for at in range(4096, end):
        hashed = (2 * hashed + gear[window[at]]) & 0xFFFF_FFFF_FFFF_FFFF
        if not hashed & (before if at < middle else after):
            return at
    return len(window)


def test_chunks_are_cut_as_the_format_document_specifies() -> None:
    stream = blake3(b"casstore golden").digest(length=600_000)
    samples = [stream, stream[7:100_001], b"\x00" * 150_000, stream[:4097], stream[:65_535], b""]
    for content in samples:
        assert documented_cuts(content) == [len(chunk) for chunk in chunking.cut(content)]
    assert chunking.PROFILE in TEXT
