"""Golden vectors of the format: what they are made from, and how they are measured.

Run ``python tools/golden.py`` to write ``tests/format/golden.json`` anew. That is
right only for a new format version: the vectors exist to show that a change to the
code did not change a byte of what is stored. A vector may be added at any time; one
that no longer matches means that old stores and new code disagree.

A value is described in JSON. Numbers, strings, booleans, null and lists are
themselves; an object with one key makes what JSON cannot say:

    {"map": [[key, description], …]}   entries in this insertion order
    {"bytes": hex}  {"link": hex}
    {"text": [unit, n]}                a string repeated
    {"random": [seed, n]}              n bytes of BLAKE3's output for the seed
    {"repeat": [description, n]}       a list of n equal items
    {"count": n}                       the list 0 … n-1
    {"counted": [prefix, n]}           the map prefix0 … prefix<n-1> to its number
    {"messages": n}                    a list of n small maps with growing texts
    {"nest": [description, n]}         n lists around it
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from casstore.format import chunking, node_index, splitting
from casstore.format.canonical import Link, encode
from casstore.format.digest import KIND_NAMES, Digest, Kind, digest_of, plain_hash
from casstore.format.header import STORE_FORMAT
from casstore.format.limits import CHUNKED_BLOB_MIN_BYTES
from casstore.objects.node_index import IndexCache, empty_index
from casstore.objects.pieces import PieceReader

PATH: Final = Path(__file__).parent.parent / "tests" / "format" / "golden.json"

# Longer encodings are given by their hash alone.
_MAX_SPELLED_BYTES: Final = 256

_DIGEST_HEX: Final = bytes(range(32)).hex()

VALUES: Final[dict[str, Any]] = {
    "null": None,
    "true": True,
    "false": False,
    "zero": 0,
    "one": 1,
    "minus one": -1,
    "127": 127,
    "128": 128,
    "minus 32": -32,
    "minus 33": -33,
    "two to the 16th": 65_536,
    "two to the 32nd": 4_294_967_296,
    "largest integer": 18_446_744_073_709_551_615,
    "smallest integer": -9_223_372_036_854_775_808,
    "one as a float": 1.0,
    "minus zero": -0.0,
    "smallest float": 5e-324,
    "largest float": 1.7976931348623157e308,
    "empty string": "",
    "composed and decomposed": ["\u00e9", "e\u0301"],
    "beyond the basic plane": "\U0001f600",
    "32 characters": {"text": ["x", 32]},
    "string of 511 bytes": {"text": ["x", 511]},
    "string of 512 bytes": {"text": ["x", 512]},
    "string of 512 bytes, two each": {"text": ["\u00e9", 256]},
    "string of 513 bytes, three each": {"text": ["\u20ac", 171]},
    "string of 516 bytes, four each": {"text": ["\U0001f600", 129]},
    "empty bytes": {"bytes": ""},
    "some bytes": {"bytes": "00ff80c7"},
    "512 bytes": {"random": ["512", 512]},
    "a link": {"link": _DIGEST_HEX},
    "empty list": [],
    "empty map": {"map": []},
    "list of 15": {"count": 15},
    "list of 16": {"count": 16},
    "keys out of order": {"map": [["\U00010000", 1], ["\uffff", 2], ["b", 3], ["aa", 4], ["", 5]]},
    "map of 16": {"counted": ["k", 16]},
    "the example of the document": {
        "map": [["role", "user"], ["text", "Hello"], ["n", [1, -1, 1.5, True, None]]]
    },
    "nested 64 deep": {"nest": [None, 64]},
    "a part of its own": {"map": [["part", {"repeat": ["twelve bytes", 60]}], ["rest", 1]]},
    "list just in one piece": {"repeat": [{"text": ["x", 409]}, 4]},
    "list of 2000": {"count": 2000},
    "list of 100000": {"count": 100_000},
    "10000 equal items": {"repeat": ["same", 10_000]},
    "10000 equal maps": {"repeat": [{"map": [["k", {"text": ["v", 100]}]]}, 10_000]},
    "map of 5000": {"counted": ["key ", 5000]},
    "map with a long key": {"map": [[3000 * "k", 1]]},
    "2000 messages": {"messages": 2000},
    "messages in a map in a list": [{"map": [["messages", {"messages": 50}]]}, "end"],
    "long text and bytes": [{"text": ["long ", 40_000]}, {"random": ["long", 100_000]}],
}

BLOBS: Final[dict[str, Any]] = {
    "nothing": {"bytes": ""},
    "abc": {"bytes": "616263"},
    "65535 bytes": {"random": ["65535", 65_535]},
    "65536 bytes": {"random": ["65536", 65_536]},
    "one mebibyte": {"random": ["casstore golden", 1 << 20]},
    "eight mebibytes": {"random": ["casstore golden", 8 << 20]},
    "a mebibyte of zeros": {"text": ["\x00", 1 << 20]},
}


def _random(seed: str, count: int) -> bytes:
    return blake3(seed.encode()).digest(length=count)


def _nest(description: Any, count: int) -> Any:
    value = build(description)
    for _ in range(count):
        value = [value]
    return value


def _message(number: int) -> dict[str, Any]:
    return {
        "id": number,
        "role": "user" if number % 2 else "tool",
        "text": "word " * (number % 150),
    }


_MAKERS: Final[dict[str, Callable[[Any], Any]]] = {
    "map": lambda entries: {key: build(inner) for key, inner in entries},
    "bytes": bytes.fromhex,
    "link": lambda text: Link(Digest.from_hex(text)),
    "text": lambda given: given[0] * given[1],
    "random": lambda given: _random(*given),
    "repeat": lambda given: [build(given[0]) for _ in range(given[1])],
    "count": lambda count: list(range(count)),
    "counted": lambda given: {f"{given[0]}{number}": number for number in range(given[1])},
    "messages": lambda count: [_message(number) for number in range(count)],
    "nest": lambda given: _nest(*given),
}


def build(description: Any) -> Any:
    """The value that a description defines."""
    if type(description) is list:
        return [build(inner) for inner in description]
    if type(description) is dict:
        ((maker, given),) = description.items()
        return _MAKERS[maker](given)
    return description


def measure_value(description: Any) -> dict[str, Any]:
    """The facts that a vector of a value fixes."""
    value = build(description)
    pieces: dict[bytes, tuple[int, bytes]] = {}

    def emit(kind: int, data: bytes, children: list[bytes]) -> bytes:
        digest = digest_of(kind, data)
        pieces[digest] = (kind, data)
        return digest

    root = splitting.split(value, emit)
    encoding = encode(value)
    measured = {
        "description": description,
        "encoding_bytes": len(encoding),
        "encoding_hash": plain_hash(encoding).hex(),
        "root": root.hex(),
        "root_kind": KIND_NAMES[pieces[root][0]],
        "pieces": len(pieces),
        "pieces_bytes": sum(len(data) for _, data in pieces.values()),
    }
    if len(encoding) <= _MAX_SPELLED_BYTES:
        measured["encoding"] = encoding.hex()
    return measured


def measure_blob(description: Any) -> dict[str, Any]:
    """The facts that a vector of a blob fixes: its digest, and its stored object."""
    built = build(description)
    content: bytes = built.encode() if type(built) is str else built
    chunks = list(chunking.cut(content)) if len(content) >= CHUNKED_BLOB_MIN_BYTES else [content]
    kind, data = Kind.BLOB, content
    branches: set[bytes] = set()
    if len(chunks) > 1:

        def emit(kind: int, data: bytes, children: list[bytes]) -> bytes:
            branches.add(digest_of(kind, data))
            return digest_of(kind, data)

        rope = chunking.RopeBuilder(emit)
        for chunk in chunks:
            rope.add(chunk)
        kind, data = Kind.ROPE, rope.finish()[0]
    return {
        "description": description,
        "digest": Digest.of_blob(content).hex(),
        "object_kind": KIND_NAMES[kind],
        "object_bytes": len(data),
        "object_hash": plain_hash(data).hex(),
        "chunks": len(chunks),
        "pieces": len(branches) + 1,
    }


#: Numbers of nodes at which the shape of a node index changes.
INDEXES: Final = (1, 15, 16, 17, 127, 128, 1023, 1024, 1160, 8191, 8192, 9400, 65_536, 74_900)


def measure_index(count: int) -> dict[str, Any]:
    """The facts that a vector of a node index fixes.

    Node k has the id ``n<k>``; its digest is that of a blob with the id as content. Every third
    node from the sixth on has the fifth node before it as its parent, all others the one before.
    """
    pieces: dict[bytes, int] = {}

    def emit(kind: int, data: bytes, children: list[bytes]) -> bytes:
        digest = digest_of(kind, data)
        pieces[digest] = len(data)
        return digest

    nobody: Any = None
    builder = empty_index(PieceReader(nobody), IndexCache()).builder(emit)
    ids = [f"n{at}" for at in range(count)]
    distances = [0 if not at else 5 if at > 5 and not at % 3 else 1 for at in range(count)]
    hashes = b"".join([node_index.id_hash(node_id) for node_id in ids])
    builder.append(hashes, distances, [plain_hash(node_id.encode()) for node_id in ids])
    tail = builder.finish()
    field = node_index.encode_tail(tail)[0]
    return {
        "nodes": count,
        "spine": None if tail.spine is None else tail.spine.hex(),
        "field_bytes": len(field),
        "field_hash": plain_hash(field).hex(),
        "pieces": len(pieces),
        "pieces_bytes": sum(pieces.values()),
    }


def main() -> int:
    """Write the file."""
    vectors = {
        "format": STORE_FORMAT,
        "chunking": chunking.PROFILE,
        "values": {name: measure_value(value) for name, value in VALUES.items()},
        "blobs": {name: measure_blob(blob) for name, blob in BLOBS.items()},
        "indexes": [measure_index(count) for count in INDEXES],
    }
    PATH.write_text(json.dumps(vectors, indent=1) + "\n")
    print(f"wrote {PATH}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
