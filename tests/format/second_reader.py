"""A second reader, written from docs/internals/format.md alone, without casstore's code.

It reads a store that no process has open, closed or killed: any object under its digest, any
value, and a session's nodes by its head. It refuses what the document says must be refused on the
way; it is no verifier, and holds in memory whatever it is asked for.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import lmdb
import zstandard
from blake3 import blake3

TABLES = (
    "attachments", "heads", "history", "leases", "pins", "queue", "receipts",
    "records", "retention", "sessions", "tombstones",
)  # fmt: skip
CONTEXTS = {
    2: "chunks v1", 3: "value v1", 4: "list v1", 5: "map v1", 6: "node v1", 7: "manifest v4",
    8: "index v1",
}  # fmt: skip
BLOB, ROPE, CHUNKS, VALUE, LIST, MAP, NODE, MANIFEST, INDEX = range(9)
WIDTHS = {0: 1, 1: 2, 2: 4, 3: 8}
FIRST_OFFSET, ALIGNMENT = 4096, 64
MAX_BODY_BYTES = 16 << 20


class Refused(Exception):
    """These bytes break a rule."""


class Link(NamedTuple):
    """Extension type 1: a role and a digest."""

    role: int
    digest: bytes


class Object(NamedTuple):
    """An object, proven."""

    kind: int
    data: bytes


class Record(NamedTuple):
    """A record of the log that matches its own checksum."""

    log_id: bytes
    lsn: int
    flushed_lsn: int
    before: bytes
    checksum: bytes
    body: bytes
    #: Where the next record begins, unless it begins at the first offset.
    end: int


class Slab(NamedTuple):
    """The directory of a slab and its payload as it stands."""

    layout: int
    first: int
    digests: list[bytes]
    kinds: bytes
    lengths: list[int]
    child_counts: list[int]
    distances: list[int]
    gap_width: int
    codec: int
    dictionary: int
    payload: bytes
    #: Where the bytes of each object begin behind the gaps, and its links and gaps, as numbers.
    starts: list[int]
    links_at: list[int]
    gaps_at: list[int]


def require(is_so: bool, what: str) -> None:
    """Refuse unless it is so."""
    if not is_so:
        raise Refused(what)


# --- canonical encoding -----------------------------------------------------------------------


def decode(data: bytes) -> Any:
    """One value in its canonical encoding."""
    value, at = _decode(data, 0, 0)
    require(at == len(data), "something follows the value")
    return value


def _number(data: bytes, at: int, size: int) -> int:
    require(at + size <= len(data), "cut off")
    return int.from_bytes(data[at : at + size], "big")


def _decode(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    require(at < len(data), "cut off")
    head, at = data[at], at + 1
    if head < 0x80:
        return head, at
    if head >= 0xE0:
        return head - 0x100, at
    if head in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[head], at
    if 0xCC <= head <= 0xCF:
        size = 1 << (head - 0xCC)
        number = _number(data, at, size)
        require(number >= (0x80 if size == 1 else 1 << (4 * size)), "not the shortest integer")
        return number, at + size
    if 0xD0 <= head <= 0xD3:
        size = 1 << (head - 0xD0)
        number = _number(data, at, size) - (1 << (8 * size))
        require(number < (-32 if size == 1 else -(1 << (4 * size - 1))), "not the shortest")
        require(number >= -(1 << (8 * size - 1)), "a positive integer in a signed form")
        return number, at + size
    if head == 0xCB:
        require(at + 8 <= len(data), "cut off")
        number_ = struct.unpack(">d", data[at : at + 8])[0]
        require(abs(number_) != float("inf") and number_ == number_, "no finite float")
        return number_, at + 8
    if 0xA0 <= head <= 0xBF or 0xD9 <= head <= 0xDB:
        count, at = _count(data, head, at, 0xA0, 0xD9, 32)
        require(at + count <= len(data), "cut off")
        return data[at : at + count].decode(), at + count
    if 0xC4 <= head <= 0xC6:
        count, at = _count(data, head, at, None, 0xC4, 0)
        require(at + count <= len(data), "cut off")
        return data[at : at + count], at + count
    if head == 0xC7:
        size, kind, role = data[at], data[at + 1], data[at + 2]
        require(kind == 1 and role <= 4 and size == (35 if role == 4 else 33), "no link")
        end = at + 2 + size
        require(end <= len(data), "cut off")
        return Link(role, data[end - 32 : end]), end
    require(depth < 64, "too deep")
    if 0x90 <= head <= 0x9F or head in (0xDC, 0xDD):
        count, at = _count(data, head, at, 0x90, 0xDC, 16, 2)
        items = []
        for _ in range(count):
            item, at = _decode(data, at, depth + 1)
            items.append(item)
        return items, at
    if 0x80 <= head <= 0x8F or head in (0xDE, 0xDF):
        count, at = _count(data, head, at, 0x80, 0xDE, 16, 2)
        found: dict[str, Any] = {}
        last: bytes | None = None
        for _ in range(count):
            key, at = _decode(data, at, depth + 1)
            require(type(key) is str, "a key that is no string")
            require(last is None or last < key.encode(), "keys out of order")
            last = key.encode()
            found[key], at = _decode(data, at, depth + 1)
        return found, at
    raise Refused(f"a header of {head:02x}")


def _count(
    data: bytes, head: int, at: int, short: int | None, first: int, fewer: int, size: int = 1
) -> tuple[int, int]:
    """A length by its header: ``short`` with the number in it, or 1 to 4 bytes behind it."""
    if short is not None and head < first:
        return head - short, at
    size <<= head - first
    number = _number(data, at, size)
    least = {1: fewer, 2: fewer if first >= 0xDC else 1 << 8, 4: 1 << 16}[size]
    require(number >= least, "not the shortest header")
    return number, at + size


# --- the store --------------------------------------------------------------------------------


class SecondReader:
    """A store's file, read as of one moment."""

    def __init__(self, path: str) -> None:
        self._env = lmdb.open(path, readonly=True, lock=False, max_dbs=64)
        self._txn = self._env.begin()
        self._databases: dict[str, Any] = {}
        meta = {key: self._get("meta", key) for key in (b"family", b"format")}
        require(meta == {b"family": b"casstore", b"format": b"6"}, f"{meta}")
        self._slabs: dict[bytes, Slab] = {}
        self._payloads: dict[int, bytes] = {}
        self._rows: dict[tuple[str, bytes], bytes | None] = {}
        self._ids: dict[bytes, int | None] = {}
        # Objects of the log: digest, kind and bytes by id.
        self._recent: dict[int, tuple[bytes, int, bytes]] = {}
        # What a test may want to know: that it met all there is to meet.
        self.log_offsets: list[int] = []
        self.layouts: set[int] = set()
        self.used_dictionary = False
        self._read_log(f"{path}/redo.log")

    def close(self) -> None:
        """Let go of it."""
        self._txn.abort()
        self._env.close()

    def _database(self, name: str) -> Any:
        if name not in self._databases:
            self._databases[name] = self._env.open_db(name.encode(), self._txn, create=False)
        return self._databases[name]

    def _get(self, database: str, key: bytes) -> bytes | None:
        found: bytes | None = self._txn.get(key, db=self._database(database))
        return found

    # --- the log --------------------------------------------------------------------------

    def _read_log(self, path: str) -> None:
        row: bytes = self._txn.get(b"log", b"")
        require(len(row) == 49, "no row that says which log is needed")
        require(blake3(row[:41]).digest()[:8] == row[41:], "a damaged row log")
        in_use, log_id, lsn, offset, checksum = struct.unpack("<B8sQQ16s", row[:41])
        require(in_use in (0, 1), "a log that is neither in use nor not")
        if not in_use:
            return
        try:
            with open(path, "rb") as file:
                content = file.read()
        except FileNotFoundError:
            raise Refused("the log is missing") from None
        require(len(content) >= FIRST_OFFSET and content[:8] == b"casslog1", "no log")
        require(blake3(content[:16]).digest()[:8] == content[16:24], "a damaged header of the log")
        require(content[8:16] == log_id, "the log of another store")
        flushed_lsn, applying_lsn = struct.unpack_from("<QQ", content, 72)
        require(applying_lsn >= lsn, "a log that is older than the tables")
        more = True
        while more:
            more = False
            for at in (offset, FIRST_OFFSET):
                record = _read_record(content, at)
                if record is not None and (record.log_id, record.lsn, record.before) == (
                    log_id, lsn + 1, checksum,
                ):  # fmt: skip
                    self.log_offsets.append(at)
                    self._apply(record.body)
                    lsn, offset, checksum, more = record.lsn, record.end, record.checksum, True
                    break
        for at in range(FIRST_OFFSET, len(content), ALIGNMENT):
            record = _read_record(content, at)
            if record is not None and record.log_id == log_id:
                flushed_lsn = max(flushed_lsn, record.flushed_lsn)
        require(flushed_lsn <= lsn, f"commit {lsn + 1} was flushed, and is damaged")

    def _apply(self, body: bytes) -> None:
        _, first, objects, rows, unnamed, _ = decode(body)
        for at in range(0, len(rows), 3):
            require(rows[at] in TABLES, f"a row of table {rows[at]}")
            self._rows[rows[at], rows[at + 1]] = rows[at + 2]
        for digest, _ in _names(unnamed):
            self._ids[digest] = None
        for at in range(0, len(objects), 5):
            digest, kind, data, children, ids = objects[at : at + 5]
            self._recent[first + at // 5] = digest, kind, data
            if ids is not None:
                self._ids[digest] = first + at // 5
                require(
                    [self._digest_of(own) for own in ids] == (_cut(children) if ids else []),
                    "other links",
                )

    # --- rows -----------------------------------------------------------------------------

    def row(self, table: str, key: bytes) -> bytes | None:
        """The value of a row."""
        if (table, key) in self._rows:
            return self._rows[table, key]
        stored = self._get(table, key)
        return None if stored is None else _proven(table, key, stored)

    def rows(self, table: str) -> Iterator[tuple[bytes, bytes]]:
        """All rows of a table, in order."""
        found: dict[bytes, bytes | None] = {
            key: _proven(table, key, stored)
            for key, stored in self._txn.cursor(db=self._database(table))
        }
        found.update({key: value for (name, key), value in self._rows.items() if name == table})
        for key, value in sorted(found.items()):
            if value is not None:
                yield key, value

    def sum_is_right(self) -> bool:
        """Is ``rows_sum`` the sum over all rows of the tables?"""
        total = 0
        for table in TABLES:
            for key, stored in self._txn.cursor(db=self._database(table)):
                total += int.from_bytes(_row_hash(table, key, stored[:-8]), "big")
        stored = self._txn.get(b"rows_sum", bytes(32))
        return int.from_bytes(stored, "big") == total % (1 << 256)

    # --- objects --------------------------------------------------------------------------

    def digests(self) -> list[bytes]:
        """The names of all objects."""
        found = set()
        for key, _ in self._txn.cursor(db=self._database("index")):
            own = int.from_bytes(key[6:], "big")
            digest = self._digest_of(own)
            require(digest[:6] == key[:6], "the index and a directory disagree")
            found.add(digest)
        for digest, recent in self._ids.items():
            found.discard(digest) if recent is None else found.add(digest)
        return sorted(found)

    def _find(self, digest: bytes) -> int | None:
        if digest in self._ids:
            return self._ids[digest]
        cursor = self._txn.cursor(db=self._database("index"))
        more = cursor.set_range(digest[:6])
        while more and cursor.key()[:6] == digest[:6]:
            own = int.from_bytes(cursor.key()[6:], "big")
            if self._digest_of(own) == digest:
                return own
            more = cursor.next()
        return None

    def _slab(self, own: int) -> Slab:
        cursor = self._txn.cursor(db=self._database("slabs"))
        require(cursor.set_range(own.to_bytes(8, "big")), f"no slab holds {own}")
        key = cursor.key()
        if key not in self._slabs:
            self._slabs[key] = _read_slab(key, cursor.value())
        slab = self._slabs[key]
        self.layouts.add(slab.layout)
        require(slab.first <= own, f"no slab holds {own}")
        return slab

    def _digest_of(self, own: int) -> bytes:
        if own in self._recent:
            return self._recent[own][0]
        slab = self._slab(own)
        return slab.digests[own - slab.first]

    def get(self, digest: bytes) -> Object:
        """The object under a digest; KeyError if it is not stored."""
        own = self._find(digest)
        if own is None:
            raise KeyError(digest.hex())
        if own in self._recent:
            _, kind, data = self._recent[own]
            self._prove(digest, kind, data)
            return Object(kind, data)
        slab = self._slab(own)
        position = own - slab.first
        if slab.first not in self._payloads:
            self._payloads[slab.first] = self._inflate(slab)
        payload = self._payloads[slab.first]
        gaps_bytes = slab.gaps_at[-1] * slab.gap_width
        at = gaps_bytes + slab.starts[position]
        data = payload[at : at + slab.lengths[position]]
        distances = slab.distances[slab.links_at[position] : slab.links_at[position + 1]]
        if not slab.kinds[position] & 0x80:
            first, last = (each * slab.gap_width for each in slab.gaps_at[position : position + 2])
            gaps = _column(payload[first:last], slab.gap_width)
            parts, done = [], 0
            for gap, far in zip(gaps, distances, strict=True):
                parts += [data[done : done + gap], self._digest_of(own - far)]
                done += gap
            data = b"".join([*parts, data[done:]])
        kind = slab.kinds[position] & 0x7F
        self._prove(digest, kind, data)
        return Object(kind, data)

    def _inflate(self, slab: Slab) -> bytes:
        size = slab.gaps_at[-1] * slab.gap_width + slab.starts[-1]
        if slab.codec == 0:
            require(len(slab.payload) == size, "a raw payload of another size")
            return slab.payload
        require(zstandard.frame_content_size(slab.payload) == size, "a frame of another size")
        dictionary = None
        if slab.dictionary:
            stored = self._get("dictionaries", slab.dictionary.to_bytes(4, "big"))
            require(stored is not None, "a dictionary is missing")
            assert stored is not None
            content = zstandard.ZstdDecompressor().decompress(stored[8:])
            require(blake3(content).digest()[:8] == stored[:8], "a damaged dictionary")
            dictionary = zstandard.ZstdCompressionDict(content)
            self.used_dictionary = True
        return zstandard.ZstdDecompressor(dict_data=dictionary).decompress(slab.payload)

    def _prove(self, digest: bytes, kind: int, data: bytes) -> None:
        if kind == BLOB:
            proof = blake3(data).digest()
        elif kind == ROPE:
            seal = blake3(data[32:], derive_key_context="casstore 2026-11 rope v1").digest()
            require(seal == data[:32], "a rope with a broken seal")
            return
        else:
            require(kind in CONTEXTS, f"an object of kind {kind}")
            context = f"casstore 2026-11 {CONTEXTS[kind]}"
            proof = blake3(data, derive_key_context=context).digest()
        require(proof == digest, f"object {digest.hex()} is damaged")

    # --- values ---------------------------------------------------------------------------

    def blob(self, digest: bytes) -> bytes:
        """The content of a blob, from one object or from its chunks."""
        kind, data = self.get(digest)
        if kind == BLOB:
            return data
        require(kind == ROPE, "no blob")
        content = b"".join(self._chunks(decode(data[32:])))
        require(blake3(content).digest() == digest, "a rope of other content")
        return content

    def _chunks(self, branch: list[Any]) -> Iterator[bytes]:
        level, digests, _ = branch
        for child in _cut(digests):
            found = self.get(child)
            if level == 1:
                require(found.kind == BLOB, "a chunk of another kind")
                yield found.data
            else:
                require(found.kind == CHUNKS, "a branch of another kind")
                below = decode(found.data)
                require(below[0] == level - 1, "a branch of another level")
                yield from self._chunks(below)

    def value(self, digest: bytes) -> Any:
        """The value under a digest, whole; links of the user's own stay links."""
        kind, data = self.get(digest)
        if kind == VALUE:
            return self.encoded(decode(data))
        require(kind in (LIST, MAP), "no value")
        leaves = list(self._leaves(kind, decode(data)))
        if kind == LIST:
            return [item for leaf in leaves for item in leaf]
        return {key: item for leaf in leaves for key, item in leaf.items()}

    def _leaves(self, kind: int, branch: list[Any]) -> Iterator[Any]:
        level, digests, counts, _, *keys = branch
        for at, child in enumerate(_cut(digests)):
            found = self.get(child)
            if level == 1:
                require(found.kind == VALUE, "a leaf of another kind")
                leaf = self.encoded(decode(found.data))
                require(len(leaf) == counts[at], "a leaf of another length")
                if keys:
                    require(list(leaf)[-1] == keys[0][at], "a leaf with another last key")
                yield leaf
            else:
                require(found.kind == kind, "a branch of another kind")
                below = decode(found.data)
                require(below[0] == level - 1, "a branch of another level")
                require(sum(below[2]) == counts[at], "a branch of another length")
                yield from self._leaves(kind, below)

    def encoded(self, value: Any) -> Any:
        """A decoded value with what has left it put back."""
        if isinstance(value, Link):
            if value.role == 0:
                return value
            if value.role in (1, 2):
                content = self.blob(value.digest)
                return content.decode() if value.role == 1 else content
            return self.value(value.digest)
        if isinstance(value, list):
            return [self.encoded(item) for item in value]
        if isinstance(value, dict):
            return {key: self.encoded(item) for key, item in value.items()}
        return value

    # --- sessions -------------------------------------------------------------------------

    def sessions(self) -> Iterator[tuple[str, bytes]]:
        """The ids of sessions, and the head of each."""
        for key, head in self.rows("heads"):
            fields = _padded(decode(head[56:]), 7)
            yield fields[6] or key[:-1].decode(), head

    def manifest(self, head: bytes) -> list[Any]:
        """The seven fields of the manifest that a head, or a row of history, names."""
        kind, data = self.get(head[24:56])
        require(kind == MANIFEST, "no manifest")
        fields: list[Any] = decode(data)
        require(len(fields) == 7, "no manifest")
        return fields

    def path(self, head: bytes, revision: bytes | None = None) -> list[tuple[str, Any]]:
        """The active path: ids and payloads, the first node first, hidden ones left out.

        ``revision``: as a row of history says it was; what is hidden, the head says.
        """
        leaf = self.manifest(revision or head)[3]
        hidden_in = _padded(decode(head[56:]), 7)[2]
        hidden = set() if hidden_in is None else set(self.value(hidden_in))
        found: list[tuple[str, Any]] = []
        depth = None
        while leaf is not None:
            kind, data = self.get(leaf.digest)
            require(kind == NODE, "no node")
            name, _, own_depth, _, _, _, parent_id, parent, _, payload = decode(data)
            require((parent_id is None) == (parent is None), "half a parent")
            require(depth is None or own_depth == depth - 1, "a wrong depth")
            depth = own_depth
            if leaf.digest.hex() not in hidden:
                found.append((name, self.encoded(payload)))
            leaf = parent
        require(depth in (None, 1), "a path without its beginning")
        return found[::-1]

    # --- node indexes ---------------------------------------------------------------------

    def listed(self, head: bytes) -> list[tuple[bytes, int, bytes]]:
        """The nodes that the index of a head lists: digest, distance, and the hash of the id."""
        fields = self.manifest(head)
        count, index = fields[1], fields[5]
        require((index is None) == (count == 0), "nodes without an index")
        if index is None:
            return []
        spine, hashes, distances, links = index
        found: list[tuple[bytes, int]] = []
        known = b""
        require((spine is None) == (count < 16), "a spine too many, or none")
        if spine is not None:
            tag, loose, *levels = self._part(spine.digest)
            require(tag == 6 and len(levels) == 5, "no spine")
            for level, runs in zip((4, 3, 2, 1, 0), levels, strict=True):
                require(level == 4 or len(runs) < 8, "runs that were not merged")
                for run in runs:
                    below, own = self._run(run.digest, level)
                    found += below
                    known += own
            known += loose
        require(len(distances) == len(links) == count % 16, "a tail of another length")
        found += [(link.digest, far) for link, far in zip(links, distances, strict=True)]
        known += hashes
        require(len(found) == count and len(known) == 4 * count, "not all nodes are listed")
        return [(*one, known[4 * at : 4 * at + 4]) for at, one in enumerate(found)]

    def _part(self, digest: bytes) -> list[Any]:
        kind, data = self.get(digest)
        require(kind == INDEX, "no part of an index")
        fields: list[Any] = decode(data)
        return fields

    def _run(self, digest: bytes, level: int) -> tuple[list[tuple[bytes, int]], bytes]:
        """The nodes of a run or page, and of a run the hashes of their ids."""
        tag, known, parts = self._part(digest)
        require(tag == level, "a part of another level")
        if level == 0:
            require(len(known) == len(parts) == 16, "a page of another length")
            return [(one.digest, far) for one, far in zip(parts, known, strict=True)], b""
        found: list[tuple[bytes, int]] = []
        below = b""
        require(len(parts) == 8, "a run of another length")
        for part in parts:
            nodes, own = self._run(part.digest, level - 1)
            found += nodes
            below += own
        if level >= 3:
            require(self._in_buckets(known, level) == below, "buckets that hold other nodes")
            return found, below
        require(level == 1 or known == below, "a run of other nodes than its parts have")
        return found, known

    def _in_buckets(self, buckets: list[Any], level: int) -> bytes:
        """The hashes in the buckets of a large run, by position."""
        found: dict[int, bytes] = {}
        require(len(buckets) == 16, "too few buckets")
        for number, link in enumerate(buckets):
            tag, *parts = self._part(link.digest)
            require(tag == 5 and len(parts) == 8 ** (level - 3), "no bucket")
            for part_number, part in enumerate(parts):
                for at in range(0, len(part), 6):
                    own = part[at : at + 4]
                    require(own[0] >> 4 == number, "a hash in another bucket")
                    offset = int.from_bytes(part[at + 4 : at + 6], "big")
                    found[8192 * part_number + offset] = own
        require(sorted(found) == list(range(len(found))), "positions are left out")
        return b"".join([found[position] for position in range(len(found))])

    def history(self, session: str) -> Iterator[tuple[int, bytes]]:
        """The revisions of a session with a short id, and each as its head row was."""
        start = session.encode() + b"\0"
        for key, row in self.rows("history"):
            if key.startswith(start) and len(key) == len(start) + 8 and key[len(start)] != 0xFF:
                yield int.from_bytes(key[len(start) :], "big"), row


def _padded(fields: list[Any], count: int) -> list[Any]:
    """A list whose nulls at the end were left out."""
    return fields + [None] * (count - len(fields))


def _read_record(content: bytes, at: int) -> Record | None:
    """The record at an offset of a log, if it matches its own checksum."""
    head = content[at : at + 64]
    if len(head) < 64 or head[:4] != b"rec1":
        return None
    size, log_id, lsn, flushed_lsn, before, checksum = struct.unpack("<I8sQQ16s16s", head[4:])
    body = content[at + 64 : at + 64 + size]
    if size > MAX_BODY_BYTES or len(body) < size:
        return None
    if blake3(head[:48] + body).digest()[:16] != checksum:
        return None
    end = at + 64 + size
    return Record(log_id, lsn, flushed_lsn, before, checksum, body, end + -end % ALIGNMENT)


def _names(joined: bytes) -> Iterator[tuple[bytes, int]]:
    for at in range(0, len(joined), 40):
        yield joined[at : at + 32], int.from_bytes(joined[at + 32 : at + 40], "big")


def _cut(digests: bytes) -> list[bytes]:
    require(digests != b"" and len(digests) % 32 == 0, "a column of digests that is cut off")
    return [digests[at : at + 32] for at in range(0, len(digests), 32)]


def _row_hash(table: str, key: bytes, value: bytes) -> bytes:
    name = table.encode()
    return blake3(
        bytes([len(name)]) + name + len(key).to_bytes(2, "big") + key + value
    ).digest()  # fmt: skip


def _proven(table: str, key: bytes, stored: bytes) -> bytes:
    value = stored[:-8]
    require(_row_hash(table, key, value)[:8] == stored[-8:], f"a damaged row of {table}")
    return value


def _column(data: bytes, width: int) -> list[int]:
    return [
        int.from_bytes(data[at : at + width], "little") for at in range(0, len(data), width)
    ]  # fmt: skip


def _sums(numbers: list[int]) -> list[int]:
    """Where each begins, and where the last ends, if they follow each other."""
    return [0, *accumulate(numbers)]


def _read_slab(key: bytes, stored: bytes) -> Slab:
    layout, codec, first_widths, last_widths, count, dictionary, _ = struct.unpack(
        "<BBBBIIQ", stored[:20]
    )
    require(layout in (1, 2) and codec in (0, 1) and count >= 1, "no slab")
    widths = [WIDTHS[code] for code in (
        first_widths & 15, first_widths >> 4, last_widths & 15, last_widths >> 4,
    )]  # fmt: skip
    digests = [stored[at : at + 32] for at in range(28, 28 + 32 * count, 32)]
    at = 28 + 32 * count
    if layout == 1:
        columns, start = stored, at
    else:
        size = int.from_bytes(stored[at : at + 4], "little")
        frame = stored[at + 4 : at + 4 + size]
        require(zstandard.frame_content_size(frame) <= 17 << 20, "columns that are too long")
        columns, start = zstandard.ZstdDecompressor().decompress(frame), 0
    kinds = columns[start : start + count]
    lengths = _column(columns[start + count :][: count * widths[0]], widths[0])
    start += count * (1 + widths[0])
    child_counts = _column(columns[start : start + count * widths[1]], widths[1])
    start += count * widths[1]
    links = sum(child_counts)
    distances = _column(columns[start : start + links * widths[2]], widths[2])
    start += links * widths[2]
    if layout == 1:
        end = start
    else:
        require(start == len(columns), "columns with something behind them")
        end = at + 4 + size
    require(end <= len(stored) and len(distances) == links, "a directory that is cut off")
    checksum = blake3(key + stored[:20] + stored[28:end]).digest()[:8]
    require(checksum == stored[20:28], "a damaged directory")
    first = int.from_bytes(key, "big") - count + 1
    # Objects that keep their links have no gaps.
    gaps = [0 if kind & 0x80 else of for kind, of in zip(kinds, child_counts, strict=True)]
    return Slab(
        layout, first, digests, kinds, lengths, child_counts, distances, widths[3], codec,
        dictionary, stored[end:], _sums(lengths), _sums(child_counts), _sums(gaps),
    )  # fmt: skip
