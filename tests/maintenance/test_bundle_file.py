"""What is no sound bundle is refused by name, and nothing of it reaches a store."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from casstore import Store
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import TABLES
from casstore.errors import (
    BundleError,
    BundleLimitError,
    CasstoreError,
    ForeignBundleError,
    InvalidInputError,
    SourceNotFoundError,
)
from casstore.format import bundle as layout
from casstore.format import canonical, splitting, tree
from casstore.format.bundle import BundleHeader, Totals
from casstore.format.canonical import ROLE_PART, ROLE_TEXT, link_bytes
from casstore.format.digest import BlobHasher, Digest, Kind, digest_of, plain_hash
from casstore.format.graph import (
    NIL,
    Manifest,
    NodeHeader,
    encode_components,
    encode_manifest,
    encode_node,
    linked,
    open_node,
)
from casstore.format.node_index import NO_NODES, Tail, id_hash
from casstore.format.splitting import Encoded
from casstore.maintenance.bundle_file import BundleReader, BundleWriter
from casstore.maintenance.export import export_session
from casstore.maintenance.import_ import import_session
from casstore.maintenance.verify import BundleLimits, verify_bundle
from casstore.testing.engine_fixtures import all_objects, all_rows
from tests.maintenance import sessions

ROOT = Path(__file__).parent.parent.parent
GOLDEN = Path(__file__).parent / "golden-bundle-4.hex"
HEADER = BundleHeader(layout.VERSION, layout.SESSION, thin=False)


class Draft:
    """A bundle put together by hand, however wrong."""

    def __init__(self) -> None:
        self.header = HEADER
        self.objects: list[tuple[int, bytes, bytes]] = []
        self.rows: list[list[Any]] = [["session", "s"]]

    def put(self, kind: int, data: bytes, name: bytes | None = None) -> bytes:
        digest = digest_of(kind, data) if name is None else name
        self.objects.append((kind, digest, data))
        return digest

    def node(self, node_id: str, parent: tuple[NodeHeader, bytes] | None, **fields: Any) -> bytes:
        payload = fields.pop("payload", NIL)
        plain = {"seq": 0, "depth": 1, "users": 0, "frame": None, "time": None}
        header = NodeHeader(
            node_id,
            **(plain | fields),
            parent_id=None if parent is None else parent[0].id,
            parent=None if parent is None else parent[1],
        )
        return self.put(Kind.NODE, encode_node(header, NIL, payload)[0])

    def revision(self, manifest: Manifest, number: int = 1) -> bytes:
        if manifest.nodes and manifest.node_index == NO_NODES:
            nodes = [open_node(name, data)[0].header for kind, name, data in self.objects
                     if kind == Kind.NODE]  # fmt: skip
            names = [name for kind, name, _ in self.objects if kind == Kind.NODE]
            tail = Tail(
                None,
                b"".join([id_hash(node.id) for node in nodes[: manifest.nodes]]),
                tuple([min(1, at) for at in range(manifest.nodes)]),
                tuple((names or [manifest.leaf or b""])[: manifest.nodes]),
            )
            manifest = manifest._replace(node_index=tail)
        digest = self.put(Kind.MANIFEST, encode_manifest(manifest)[0])
        self.rows.append(["revision", number, 1, 1, digest, "commit", None, None, None, None, None])
        return digest

    def hang(self, component: bytes) -> None:
        """Make an object part of the session."""
        self.revision(Manifest(components=encode_components({"tool_state": linked(component)})))

    def write(self, path: Path) -> Path:
        with BundleWriter(str(path), self.header, replace=True, compress=False) as writer:
            for kind, name, data in self.objects:
                writer.add_object(kind, name, data)
            for row in self.rows:
                writer.add_row(row)
        return path


def everything(store: Store) -> object:
    rows = {table: all_rows(store.engine, table) for table in TABLES}
    return rows, [info.digest for info in all_objects(store.engine)]


def refused(
    path: Path, error: type[CasstoreError] = BundleError, match: str | None = None
) -> CasstoreError:
    """Neither verified nor imported, for the same reason; nothing of it is stored."""
    with pytest.raises(error, match=match) as caught:
        verify_bundle(path)
    assert str(path) in str(caught.value)
    store = Store(MemoryEngine())
    with pytest.raises(error, match=match):
        import_session(store, path)
    assert everything(store) == everything(Store(MemoryEngine()))
    return caught.value


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "bundle"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("sound") / "bundle"
    store = Store(MemoryEngine())
    sessions.fill(store)
    export_session(store, "s", path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("small") / "bundle"
    store = Store(MemoryEngine())
    sessions.step(store, "s", sessions.message("a"), sessions.message("b", "long " * 500))
    export_session(store, "s", path)
    return path.read_bytes()


# --- damage --------------------------------------------------------------------------------------


def test_a_bundle_truncated_at_any_length_is_refused_with_the_offset(
    small: bytes, file: Path
) -> None:
    for length in range(len(layout.MAGIC), len(small)):
        file.write_bytes(small[:length])
        with pytest.raises(BundleError) as caught:
            verify_bundle(file)
        assert caught.value.offset <= length
    file.write_bytes(small + b"\0")
    assert refused(file, match="follows the trailer").offset == len(small)  # type: ignore[attr-defined]


def test_every_flipped_bit_is_noticed(small: bytes, file: Path) -> None:
    for at in range(len(small)):
        file.write_bytes(small[:at] + bytes([small[at] ^ (1 << (at % 8))]) + small[at + 1 :])
        with pytest.raises((BundleError, ForeignBundleError)):
            verify_bundle(file)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_no_mutated_bundle_imports_different_content(
    sound: bytes, file: Path, data: st.DataObject
) -> None:
    raw = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        way = data.draw(st.sampled_from(("set", "cut", "insert", "copy")))
        if way == "set":
            raw[at] = data.draw(st.integers(0, 255))
        elif way == "cut":
            del raw[at : at + data.draw(st.integers(1, 5000))]
        elif way == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=40))
        else:
            start = data.draw(st.integers(0, len(raw) - 1))
            raw[at:at] = raw[start : start + data.draw(st.integers(1, 5000))]
        if not raw:
            break
    file.write_bytes(raw)
    store = Store(MemoryEngine())
    before = everything(store)
    try:
        import_session(store, file)
    except CasstoreError:
        assert everything(store) == before
    else:
        assert bytes(raw) == sound


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_a_mutated_bundle_with_valid_checksums_is_refused_or_imports_a_readable_session(
    small: bytes, file: Path, data: st.DataObject
) -> None:
    """Somebody who can compute checksums changes objects and rows: a typed error, or a session."""
    draft = taken_apart(small, file)
    way = data.draw(st.sampled_from(("object", "row", "order", "drop")))
    if way == "row":
        row = data.draw(st.sampled_from(draft.rows))
        at = data.draw(st.integers(0, len(row) - 1))
        row[at] = data.draw(
            st.none() | st.integers(-2, 9) | st.text(max_size=3) | st.binary(max_size=32)
            | st.sampled_from([item for other in draft.rows for item in other])
            | st.sampled_from([name for _, name, _ in draft.objects])
        )  # fmt: skip
    elif way == "object":
        index = data.draw(st.integers(0, len(draft.objects) - 1))
        kind, _, content = draft.objects[index]
        at = data.draw(st.integers(0, len(content) - 1))
        changed = content[:at] + data.draw(st.binary(max_size=3)) + content[at + 1 :]
        draft.objects[index] = kind, digest_of(kind, changed), changed
    elif way == "order":
        draft.objects = data.draw(st.permutations(draft.objects))
    else:
        del draft.objects[data.draw(st.integers(0, len(draft.objects) - 1))]
    try:
        draft.write(file)
    except CasstoreError:
        return  # not even spelled
    store = Store(MemoryEngine())
    try:
        import_session(store, file)
    except CasstoreError:
        assert everything(store) == everything(Store(MemoryEngine()))
        with pytest.raises(CasstoreError):
            verify_bundle(file)
    else:
        verify_bundle(file)
        for info in store.sessions():
            sessions.seen(store, info.meta.session)


def taken_apart(raw: bytes, scratch: Path) -> Draft:
    scratch.write_bytes(raw)
    draft = Draft()
    draft.rows = []
    with BundleReader(str(scratch)) as reader:
        for block in reader.blocks():
            if block.type == layout.OBJECTS:
                for item in reader.objects(block):
                    draft.put(item.kind, item.data, item.name)
            else:
                draft.rows += reader.rows(block)
    return draft


# --- made up -------------------------------------------------------------------------------------


def test_a_file_that_is_not_a_bundle_is_refused(file: Path, tmp_path: Path) -> None:
    for content in (b"", b"PK\x03\x04 a zip", layout.MAGIC[:-1], b"\0" * 100_000):
        file.write_bytes(content)
        refused(file, ForeignBundleError)
    with pytest.raises(SourceNotFoundError, match="there is no file"):
        verify_bundle(tmp_path / "nothing there")
    with pytest.raises(InvalidInputError, match="is a directory"):
        verify_bundle(tmp_path)


def test_a_bundle_of_another_version_or_kind_is_refused_by_name(file: Path) -> None:
    draft = Draft()
    draft.revision(Manifest())
    verify_bundle(draft.write(file))
    draft.header = HEADER._replace(version=2)
    refused(draft.write(file), ForeignBundleError, "version 2")
    draft.header = HEADER._replace(kind="store")
    refused(draft.write(file), ForeignBundleError, "'store'")


def block(offset: int, type_: int, count: int, raw_bytes: int, payload: bytes, codec: int) -> bytes:
    return layout.encode_block(offset, type_, codec, count, raw_bytes, payload)


def framed(blocks: Iterable[tuple[int, int, int, bytes, int]]) -> bytes:
    """A file of these blocks (type, count, raw size, payload, codec), with a true trailer."""
    out = io.BytesIO()
    out.write(layout.MAGIC)
    head = layout.encode_header(HEADER)
    out.write(block(out.tell(), layout.HEADER, 1, len(head), head, 0))
    for type_, count, raw_bytes, payload, codec in blocks:
        out.write(block(out.tell(), type_, count, raw_bytes, payload, codec))
    hasher = BlobHasher()
    hasher.update(out.getvalue())
    totals = layout.encode_totals(Totals(1, 1, 1, bytes(hasher.digest())))
    out.write(block(out.tell(), layout.TRAILER, 1, len(totals), totals, 0))
    return out.getvalue()


def test_declared_sizes_and_counts_of_a_block_are_verified(file: Path) -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 30))
    assert len(bomb) < 1 << 17
    for raw_bytes in (len(bomb), 1 << 20, layout.MAX_BLOCK_BYTES, 1 << 30):
        file.write_bytes(framed([(layout.OBJECTS, 1, raw_bytes, bomb, 1)]))
        refused(file, match="claims|damaged zstd")
    one = layout.encode_object(Kind.BLOB, b"", b"x")
    for count, raw in ((2, one), (1, one + b"x"), (0, one), ((1 << 32) - 1, one), (1, one[:-1])):
        file.write_bytes(framed([(layout.OBJECTS, count, len(raw), raw, 0)]))
        refused(file)
    long = b"\0\xff\xff\xff\xff" + b"x"
    file.write_bytes(framed([(layout.OBJECTS, 1, len(long), long, 0)]))
    refused(file, match="ends within an object")
    file.write_bytes(framed([(layout.OBJECTS, 1, len(one), one, 9)]))
    refused(file, match="codec 9")
    file.write_bytes(framed([(7, 1, len(one), one, 0)]))
    refused(file, match="type 7")


def test_the_checksum_in_the_trailer_covers_the_whole_bundle(small: bytes, file: Path) -> None:
    totals = layout.encode_totals(Totals(0, 0, 0, bytes(32)))
    head = layout.encode_header(HEADER)
    start = len(layout.MAGIC)
    first = block(start, layout.HEADER, 1, len(head), head, 0)
    last = block(start + len(first), layout.TRAILER, 1, len(totals), totals, 0)
    file.write_bytes(layout.MAGIC + first + last)
    refused(file, match="checksum in its trailer")


def test_blocks_out_of_order_are_refused(file: Path) -> None:
    rows = layout.encode_rows([canonical.encode(["session", "s"])])
    one = layout.encode_object(Kind.BLOB, b"", b"x")
    blocks = [(layout.ROWS, 1, len(rows), rows, 0), (layout.OBJECTS, 1, len(one), one, 0)]
    file.write_bytes(framed(blocks))
    refused(file, match="after one of type")
    head = layout.encode_header(HEADER)
    file.write_bytes(framed([(layout.HEADER, 1, len(head), head, 0)]))
    refused(file, match="after one of type")


def test_bundle_limits_are_enforced(file: Path) -> None:
    draft = Draft()
    parts = [draft.put(Kind.BLOB, bytes([n]) * 60_000) for n in range(20)]
    data = canonical.encode({"links": [canonical.Link(Digest(part)) for part in parts]})
    draft.hang(draft.put(Kind.VALUE, data))
    draft.write(file)
    assert verify_bundle(file).objects == 22
    for limits in (
        BundleLimits(max_objects=21),
        BundleLimits(max_object_bytes=1_000_000),
        BundleLimits(max_rows=1),
    ):
        with pytest.raises(BundleLimitError):
            verify_bundle(file, limits=limits)


def shared_parts(draft: Draft, levels: int, core: bytes = b"\x90") -> bytes:
    """A list that has the next one twice, and so on down."""
    digest = draft.put(Kind.VALUE, core)
    for _ in range(levels):
        digest = draft.put(Kind.VALUE, b"\x92" + 2 * link_bytes(ROLE_PART, digest))
    return digest


def test_a_value_that_expands_through_shared_parts_is_refused(file: Path) -> None:
    """Thirty objects, two links each: 1.4 KB that took gigabytes when they were read."""
    payload, component, long_core = Draft(), Draft(), Draft()
    part = shared_parts(payload, 30)
    linked = Encoded(link_bytes(ROLE_PART, part), [part])
    node = payload.node("n", None, payload=linked)
    payload.revision(Manifest(leaf_id="n", nodes=1, next_seq=1, leaf=node))
    component.hang(shared_parts(component, 30))
    long_core.hang(shared_parts(long_core, 17, canonical.encode(["word"] * 200)))
    for draft in (payload, component, long_core):
        refused(draft.write(file), BundleLimitError, "268,435,456.*max_repeated_bytes")
    small = Draft()
    small.hang(shared_parts(small, 12))
    assert verify_bundle(small.write(file)).objects == 14
    with pytest.raises(BundleLimitError):
        verify_bundle(file, limits=BundleLimits(max_repeated_bytes=100_000))


def test_a_node_that_has_one_large_value_at_many_places_is_refused(file: Path) -> None:
    """Each part alone is within the limit."""
    draft = Draft()
    part = link_bytes(ROLE_PART, shared_parts(draft, 15))
    inner = [draft.put(Kind.VALUE, b"\x92" + encoded + part) for encoded in (b"\x01", b"\x02")]
    payload = b"\x9f" + b"".join([link_bytes(ROLE_PART, inner[at % 2]) for at in range(15)])
    node = draft.node("n", None, payload=Encoded(payload, inner))
    draft.revision(Manifest(leaf_id="n", nodes=1, next_seq=1, leaf=node))
    refused(draft.write(file), BundleLimitError, "repeat")


def test_a_thin_bundle_that_expands_parts_in_the_store_is_refused(file: Path) -> None:
    store = Store(MemoryEngine())
    first, second = Draft(), Draft()
    first.hang(shared_parts(first, 12))
    import_session(store, first.write(file))
    have = len(first.objects) - 1
    second.hang(shared_parts(second, 30))
    second.objects = second.objects[have:]
    second.rows[0] = ["session", "t"]
    second.header = HEADER._replace(thin=True)
    second.write(file)
    before = everything(store)
    with pytest.raises(BundleLimitError, match="repeat"):
        import_session(store, file)
    assert everything(store) == before
    third = Draft()
    third.hang(shared_parts(third, 14))
    third.objects = third.objects[have:]
    third.rows[0] = ["session", "t"]
    third.header = HEADER._replace(thin=True)
    import_session(store, third.write(file))


def test_a_block_of_rows_full_of_small_lists_is_refused(file: Path) -> None:
    rows = b"\x91\x92" + canonical.encode("session") + canonical.list_header(1 << 22)
    rows += b"\x90" * (1 << 22)
    packed = zstandard.ZstdCompressor().compress(rows)
    file.write_bytes(framed([(layout.ROWS, 1, len(rows), packed, 1)]))
    refused(file, match="too many lists and maps")


def test_an_invalid_ledger_or_frames_component_in_a_bundle_is_refused(file: Path) -> None:
    row = ["agent", "model", 1, 2, 0, 0]
    for field, sound, odd in (
        ("usage", [[], [row]], [7, "x", {"a": 1}, [1], [[1]], [[*row, 1]], [["a", "b", "c"]]]),
        ("frames", [[], [{"id": "f"}]], [5, "abc", {"a": 1}]),
    ):
        for value in (*sound, *odd):
            draft = Draft()
            encoded = Encoded(canonical.encode(value), [])
            draft.revision(Manifest(components=encode_components({field: encoded})))
            draft.write(file)
            if value in sound:
                verify_bundle(file)
            else:
                refused(file, match="of a checkpoint")


def test_a_rope_that_describes_an_enormous_blob_is_refused_by_max_work_bytes(file: Path) -> None:
    """Twelve branches over one chunk describe 128 to the power of twelve chunks."""
    draft = Draft()
    digest, size = draft.put(Kind.BLOB, b"x" * 100), 100
    for level in range(1, 9):
        children = [tree.Child(digest, size, size, "")] * 128
        body = tree.encode_branch(Kind.CHUNKS, level, children)
        size *= 128
        if level < 8:
            digest = draft.put(Kind.CHUNKS, body)
    rope = draft.put(Kind.ROPE, tree.seal_rope(body), name=plain_hash(b"whatever"))
    draft.hang(rope)
    draft.write(file)
    with pytest.raises(BundleLimitError):
        verify_bundle(file, limits=BundleLimits(max_work_bytes=2 << 20))


def test_the_digest_of_a_rope_is_the_digest_of_its_whole_content(file: Path) -> None:
    for truth in (True, False):
        draft = Draft()
        chunks = [b"x" * 5000, b"y" * 5000]
        children = [tree.Child(draft.put(Kind.BLOB, chunk), 5000, 5000, "") for chunk in chunks]
        body = tree.encode_branch(Kind.CHUNKS, 1, children)
        name = plain_hash(b"".join(chunks)) if truth else plain_hash(b"something else")
        draft.hang(draft.put(Kind.ROPE, tree.seal_rope(body), name=name))
        draft.write(file)
        if truth:
            verify_bundle(file)
        else:
            refused(file, match="does not match its digest")


def text_link(draft: Draft, content: bytes) -> bytes:
    return link_bytes(ROLE_TEXT, draft.put(Kind.BLOB, content))


def deep(draft: Draft, levels: int) -> bytes:
    """A value that nests in one object less deep than all of it does."""
    digest = draft.put(Kind.VALUE, b"\x91" * 40 + b"\xc0")
    for _ in range(levels):
        digest = draft.put(Kind.VALUE, b"\x91" * 40 + link_bytes(ROLE_PART, digest))
    return digest


def test_a_bundle_with_objects_that_do_not_match_their_links_is_refused(file: Path) -> None:
    def wrong(name: str) -> Draft:
        draft = Draft()
        if name == "over-deep":
            draft.hang(deep(draft, 1))
        elif name == "not text":
            draft.hang(draft.put(Kind.VALUE, text_link(draft, b"\xff" * 600)))
        elif name == "text that is a value":
            part = draft.put(Kind.VALUE, canonical.encode(["x"]))
            draft.hang(draft.put(Kind.VALUE, link_bytes(ROLE_TEXT, part)))
        elif name == "part that is none":
            part = draft.put(Kind.VALUE, canonical.encode(7))
            draft.hang(draft.put(Kind.VALUE, link_bytes(ROLE_PART, part)))
        elif name == "not canonical":
            draft.hang(draft.put(Kind.VALUE, b"\xcc\x01"))
        elif name == "wrong count":
            leaf = draft.put(Kind.VALUE, canonical.encode([1, 2]))
            body = tree.encode_branch(Kind.LIST, 1, [tree.Child(leaf, 3, 2, "")])
            draft.hang(draft.put(Kind.LIST, body))
        elif name == "wrong last key":
            leaf = draft.put(Kind.VALUE, canonical.encode({"a": 1}))
            body = tree.encode_branch(Kind.MAP, 1, [tree.Child(leaf, 1, 3, "b")])
            draft.hang(draft.put(Kind.MAP, body))
        elif name == "unknown kind":
            draft.objects.append((9, plain_hash(b"x"), b"x"))
            draft.hang(plain_hash(b"x"))
        elif name == "twice":
            draft.hang(draft.put(Kind.BLOB, b"x"))
            draft.objects.insert(0, draft.objects[0])
        elif name == "missing":
            draft.hang(plain_hash(b"not there"))
        elif name == "parent first":
            draft.hang(draft.put(Kind.BLOB, b"x"))
            draft.objects.reverse()
        elif name == "stowaway":
            draft.hang(draft.put(Kind.BLOB, b"x"))
            draft.put(Kind.BLOB, b"nobody asked for this")
            draft.objects.sort(key=lambda item: item[0])
        elif name == "component that is a node":
            draft.hang(draft.node("n", None))
        elif name == "leaf by another name":
            leaf = draft.node("n", None)
            draft.revision(Manifest("m", 1, 1, leaf=leaf))
        elif name == "leaf that is a blob":
            draft.revision(Manifest("m", 1, 1, leaf=draft.put(Kind.BLOB, b"x")))
        elif name == "depth that is a lie":
            top = draft.node("a", None)
            header = NodeHeader("a", 0, 1, 0, None, None, None, None)
            liar = draft.node("b", (header, top), seq=5, depth=4)
            # Beside the graph, where nothing but the two of them would tell.
            also = canonical.encode([canonical.Link(Digest(liar))])
            draft.hang(draft.put(Kind.VALUE, also))
        elif name == "nodes that are not counted":
            draft.revision(Manifest("n", 0, 1, leaf=draft.node("n", None)))
        elif name == "numbers that are missing":
            draft.revision(Manifest("n", 1, 3, leaf=draft.node("n", None)))
        elif name == "two of one id":
            header = NodeHeader("n", 0, 1, 0, None, None, None, None)
            top = draft.node("n", None)
            leaf = draft.node("n", (header, top), seq=1, depth=2)
            draft.revision(Manifest("n", 2, 2, leaf=leaf))
        elif name == "tips that are no map":
            tips = Encoded(canonical.encode(["x"]), [])
            draft.revision(Manifest("n", 1, 1, leaf=draft.node("n", None), tips=tips))
        elif name == "revision of a blob":
            blob = draft.put(Kind.BLOB, b"x")
            draft.rows.append(["revision", 1, 1, 1, blob, "commit", None, None, None, None, None])
        elif name == "hidden that is no map":
            draft.revision(Manifest())
            draft.rows[-1][7] = draft.put(Kind.VALUE, canonical.encode(["x"]))
        elif name == "hidden that names nothing":
            draft.revision(Manifest())
            draft.rows[-1][7] = draft.put(Kind.VALUE, canonical.encode({"x": "y"}))
        else:
            raise AssertionError(name)
        return draft

    names = [
        "over-deep", "not text", "text that is a value", "part that is none", "not canonical",
        "wrong count", "wrong last key", "unknown kind", "twice", "missing", "parent first",
        "stowaway", "component that is a node", "leaf by another name", "leaf that is a blob",
        "depth that is a lie", "nodes that are not counted", "numbers that are missing",
        "two of one id", "tips that are no map", "revision of a blob", "hidden that is no map",
        "hidden that names nothing",
    ]  # fmt: skip
    for name in names:
        try:
            refused(wrong(name).write(file))
        except pytest.fail.Exception as exc:
            raise AssertionError(f"{name} was taken") from exc
    draft = Draft()
    draft.hang(deep(draft, 0))
    verify_bundle(draft.write(file))


def test_a_bundle_whose_rows_do_not_form_one_session_is_refused(file: Path) -> None:
    def rows(*more: list[Any]) -> Draft:
        draft = Draft()
        digest = draft.put(Kind.MANIFEST, encode_manifest(Manifest())[0])
        draft.rows = [[digest if item == "manifest" else item for item in row] for row in more]
        return draft

    one = ["revision", 1, 1, 1, "manifest", "commit", None, None, None, None, None]
    turn = [*one[:6], "t", *one[7:]]
    receipt = ["receipt", "t", 1, bytes(32), 1, 0, 0]
    verify_bundle(rows(["session", "s"], one).write(file))
    verify_bundle(rows(["session", "s"], turn, receipt).write(file))
    verify_bundle(rows(["session", "s"], turn, [*receipt, [[0, "x"]], "x"]).write(file))
    for wrong in (
        [],
        [one],
        [["session", "s"]],
        [["session", "s"], ["session", "t"], one],
        [["session", ""], one],
        [["session", 7], one],
        [["session", "s"], one, one],
        [["session", "s"], one, ["meta", {"name": "n", "created_at_ms": 1}]],
        [["session", "s"], ["meta", {"name": "n"}], one],
        [["session", "s"], ["meta", {"created_at_ms": 1}], one],
        [["session", "s"], ["meta", []], one],
        [["session", "s"], one[:-1]],
        [["session", "s"], [*one[:5], "guess", *one[6:]]],
        [["session", "s"], [*one[:2], 1 << 63, *one[3:]]],
        [["session", "s"], [*one[:2], -1, *one[3:]]],
        [["session", "s"], one, ["label", "l", 2]],
        [["session", "s"], one, ["label", "l", 1], ["label", "l", 1]],
        [["session", "s"], one, ["receipt", "t", 1, bytes(32), 1, 0, 0]],
        [["session", "s"], turn, [*receipt, [[0, "x"]]]],
        [["session", "s"], turn, [*receipt, [[1, "x"]], None]],
        [["session", "s"], turn, [*receipt, [[0, "x"], [0, "y"]], None]],
        [["session", "s"], turn, receipt, receipt],
        [["session", "s"], one, ["attachment", "a", None, b"short", None, 1, 1]],
        [["session", "s"], one, *[["attachment", "a", None, None, None, 1, 1]] * 2],
        [["session", "s"], one, ["unheard of", 1]],
    ):
        refused(rows(*wrong).write(file))
    strange = {"name": "n", "created_at_ms": 1, "from the future": 1}
    refused_meta = rows(["session", "s"], ["meta", strange], one).write(file)
    with pytest.raises(ForeignBundleError, match="from the future"):
        verify_bundle(refused_meta)


# --- for ever ------------------------------------------------------------------------------------


def golden() -> Draft:
    """A session whose bytes are known: two nodes, a long text, a label."""
    draft = Draft()
    text = b"a long text, " * 50
    payload = Encoded(*_encoded({"text": text.decode() * 4}, draft))
    first = draft.node("a", None, time=1, frame="f")
    header = NodeHeader("a", 0, 1, 0, "f", 1, None, None)
    leaf = draft.node("b", (header, first), seq=1, depth=2, payload=payload)
    draft.revision(Manifest("a", 1, 1, leaf=first), 1)
    components = encode_components({"current_frame": Encoded(canonical.encode("f"), [])})
    draft.revision(Manifest("b", 2, 2, leaf=leaf, components=components), 2)
    draft.rows += [["label", "the end", 2]]
    return draft


def _encoded(value: Any, draft: Draft) -> tuple[bytes, list[bytes]]:
    encoded = splitting.encode_split(value, 63, lambda kind, data, links: draft.put(kind, data))
    return encoded.data, encoded.links


def test_the_encoding_of_a_bundle_is_unchanged(file: Path) -> None:
    assert golden().write(file).read_bytes().hex() == GOLDEN.read_text().strip()


def test_a_bundle_of_this_version_is_read_by_every_later_release(file: Path) -> None:
    file.write_bytes(bytes.fromhex(GOLDEN.read_text()))
    report = verify_bundle(file)
    assert (report.session, report.revisions, report.objects) == ("s", 2, 5)
    store = Store(MemoryEngine())
    import_session(store, file)
    assert store.session("s").entry("the end").revision == 2
    assert [node.id for node in store.session("s").nodes()] == ["a", "b"]
    assert json.dumps(list(store.session("s").nodes())[1].payload).count("a long text") == 200


# --- killed, no room -----------------------------------------------------------------------------


def test_a_full_disk_leaves_no_file_and_no_session(tmp_path: Path) -> None:
    code = """if True:
        import resource, signal, sys
        import casstore
        from casstore.errors import StorageError, StorageFullError
        from casstore.maintenance.export import export_session
        from casstore.maintenance.import_ import import_session
        from tests.maintenance import sessions
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        place = sys.argv[1]
        with casstore.open(place + "/a", auto_train=False) as store:
            sessions.fill(store)
            export_session(store, "s", place + "/whole")
            for limit in (0, 1000, 100_000):
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                try:
                    export_session(store, "s", place + "/part")
                except StorageFullError:
                    print("full")
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        with casstore.open(place + "/b", auto_train=False) as store:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
            try:
                import_session(store, place + "/whole")
            except StorageError:  # LMDB calls a short write an input/output error
                print("full")
            print(list(store.sessions()))
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            import_session(store, place + "/whole")
    """
    answer = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, check=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert answer.stdout.splitlines() == ["full"] * 4 + ["[]"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "whole"]


def test_a_pipe_is_refused_by_name() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    try:
        with pytest.raises(InvalidInputError, match="pipe"):
            BundleReader(f"/dev/fd/{reading}")
    finally:
        os.close(reading)
