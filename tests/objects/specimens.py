"""Engines that count or tamper, objects made by hand, values of every size, exact equality."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from typing import Any

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Engine, NewObject, ObjectInfo, StoredObject, Write
from casstore.format.canonical import (
    ROLE_PART,
    ROLE_TEXT,
    Link,
    link_bytes,
    list_header,
    map_header,
    scalar_bytes,
)
from casstore.format.digest import Digest, Kind, digest_of
from casstore.format.tree import Child, encode_branch, seal_rope

# --- comparing -------------------------------------------------------------------------


def exact(value: Any) -> Any:
    """Something that compares equal only for the same value of the same types throughout.

    Python's own ``==`` takes 1, 1.0 and True for one another, and 0.0 for -0.0.
    """
    kind = type(value)
    if kind is list:
        return ("list", [exact(item) for item in value])
    if kind is dict:
        return ("dict", {key: exact(item) for key, item in value.items()})
    if kind is float:
        return ("float", struct.pack(">d", value))
    return (kind.__name__, value)


# --- engines ---------------------------------------------------------------------------


class CountingEngine(MemoryEngine):
    """Counts the objects it gives and the bytes in them."""

    def __init__(self) -> None:
        super().__init__()
        self.objects_read = 0
        self.bytes_read = 0

    def get_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        found = super().get_many(digests)
        self.objects_read += len(found)
        self.bytes_read += sum(len(item.data) for item in found if item is not None)
        return found

    def forget(self) -> None:
        """Count from zero again."""
        self.objects_read = self.bytes_read = 0


class TamperingEngine(MemoryEngine):
    """Gives one object with a flipped bit, or as another kind, or not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.flipped: bytes | None = None
        self.flipped_at = 0
        self.hidden: bytes | None = None
        self.other_kind: tuple[bytes, int] | None = None

    def get_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        return [
            self._altered(digest, item)
            for digest, item in zip(digests, super().get_many(digests), strict=True)
        ]

    def _altered(self, digest: bytes, item: StoredObject | None) -> StoredObject | None:
        if item is None or digest == self.hidden:
            return None
        if self.other_kind is not None and self.other_kind[0] == digest:
            return item._replace(kind=self.other_kind[1])
        if digest != self.flipped:
            return item
        data = bytearray(item.data)
        data[self.flipped_at % len(data)] ^= 1
        return item._replace(data=bytes(data))


def all_infos(engine: Engine) -> list[ObjectInfo]:
    """Every object of a store, the newest first."""
    infos: list[ObjectInfo] = []
    before: int | None = None
    while page := engine.scan_objects(before=before):
        infos += page
        before = page[-1].id
    return infos


def all_digests(engine: Engine) -> set[bytes]:
    """The names of all objects of a store."""
    return {info.digest for info in all_infos(engine)}


def reachable(engine: Engine, digest: bytes) -> dict[bytes, ObjectInfo]:
    """Everything that an object reaches, itself included."""
    infos = all_infos(engine)
    by_id = {info.id: info for info in infos}
    ahead = [info for info in infos if info.digest == digest]
    found: dict[bytes, ObjectInfo] = {}
    while ahead:
        info = ahead.pop()
        if info.digest not in found:
            found[info.digest] = info
            ahead.extend(by_id[child] for child in info.children)
    return found


# --- objects made by hand ----------------------------------------------------------------


def put_object(engine: Engine, kind: int, data: bytes, children: Sequence[bytes] = ()) -> bytes:
    """Store one object as it is, under its true digest."""
    digest = digest_of(kind, data)
    engine.write(Write(objects=[NewObject(digest, kind, data, children)]))
    return digest


def put_branch(engine: Engine, kind: int, level: int, children: list[Child]) -> bytes:
    """Store one branch over ``children``."""
    data = encode_branch(kind, level, children)
    return put_object(engine, kind, data, [child.digest for child in children])


def put_rope(engine: Engine, digest: bytes, chunks: Sequence[bytes]) -> None:
    """Store a soundly sealed rope of these chunks under any name."""
    children = []
    for chunk in chunks:
        name = put_object(engine, Kind.BLOB, chunk)
        children.append(Child(name, len(chunk), len(chunk), ""))
    data = seal_rope(encode_branch(Kind.CHUNKS, 1, children))
    links = [child.digest for child in children]
    engine.write(Write(objects=[NewObject(digest, Kind.ROPE, data, links)]))


def put_list_bomb(engine: Engine, leaf_items: Sequence[Any] = (0,), levels: int = 4) -> bytes:
    """A list tree whose branches name the same child 128 times, ``levels`` high."""
    data = list_header(len(leaf_items)) + b"".join([scalar_bytes(item) for item in leaf_items])
    child = Child(put_object(engine, Kind.VALUE, data), len(leaf_items), len(data), "")
    for level in range(1, levels + 1):
        name = put_branch(engine, Kind.LIST, level, [child] * 128)
        child = Child(name, child.entries * 128, child.size * 128, "")
    return child.digest


def put_shared_parts(
    engine: Engine,
    levels: int = 30,
    core: bytes = b"\x90",
    *,
    places: int = 2,
    mapped: bool = False,
) -> bytes:
    """A list, or map, that has the next one at several places, and so on down ``levels`` levels."""
    digest = put_object(engine, Kind.VALUE, core)
    for _ in range(levels):
        link = link_bytes(ROLE_PART, digest)
        if mapped:
            keys = [scalar_bytes(str(place)) for place in range(places)]
            data = map_header(places) + b"".join([key + link for key in keys])
        else:
            data = list_header(places) + link * places
        digest = put_object(engine, Kind.VALUE, data, [digest] * places)
    return digest


def put_part_chain(
    engine: Engine, length: int, *, nesting: int = 1, core: bytes = b"\x90"
) -> bytes:
    """``length`` objects, each linking to the next from inside ``nesting`` lists."""
    digest = put_object(engine, Kind.VALUE, core)
    for _ in range(length):
        data = b"\x91" * nesting + link_bytes(ROLE_PART, digest)
        digest = put_object(engine, Kind.VALUE, data, [digest])
    return digest


def put_text_link(engine: Engine, digest: bytes) -> bytes:
    """A value that says its text is in a blob."""
    return put_object(engine, Kind.VALUE, link_bytes(ROLE_TEXT, digest), [digest])


# --- values ------------------------------------------------------------------------------

_WORDS = (
    "",
    "a",
    "role",
    "text",
    "ключ",
    "日本",
    "x" * 31,
    "y" * 32,
    "id",
    "tool call",
    "\U0001f600",
)


class Values:
    """Random values whose parts fall on both sides of every threshold of the format."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def key(self) -> str:
        """A map key."""
        return f"{self.random.choice(_WORDS)}{self.random.randrange(10_000)}"

    def scalar(self) -> Any:
        """Anything but a list or map."""
        pick = self.random.randrange(14)
        if pick == 0:
            return self.random.choice((None, True, False))
        if pick == 1:
            return self.random.choice((0.0, -0.0, 1.0, 1.5, -1e300, 5e-324))
        if pick == 2:
            return self.random.choice((0, 1, -1, 127, 128, 2**64 - 1, -(2**63)))
        if pick == 3:
            # Around 512 bytes a string leaves its container.
            return self.random.choice("az") * self.random.choice((508, 509, 511, 512, 513, 700))
        if pick == 4:
            return self.random.randbytes(self.random.choice((0, 1, 90, 511, 512, 600)))
        if pick == 5:
            return "é" * self.random.choice((60, 254, 255, 256, 257))
        if pick == 6:
            return self.random.choice(_WORDS)
        return self.random.randrange(1 << 40)

    def value(self, depth: int = 3) -> Any:
        """A scalar, or a list or map of any size that matters."""
        pick = self.random.randrange(10)
        if depth == 0 or pick < 4:
            return self.scalar()
        count = self.random.choice((0, 1, 2, 3, 10, 15, 16, 17, 40, 90))
        if depth == 3 and self.random.randrange(3) == 0:
            count = self.random.choice((300, 450, 900))
        inside = depth - 1 if count < 50 else min(depth - 1, 1)
        if pick < 7:
            return [self.value(inside) for _ in range(count)]
        return {self.key(): self.value(inside) for _ in range(count)}

    def container(self, depth: int = 3) -> Any:
        """A list or map."""
        while True:
            value = self.value(depth)
            if type(value) in (list, dict):
                return value


def some_link(name: str = "somewhere") -> Link:
    """A link to a blob that may not be stored."""
    return Link(Digest.of_blob(name.encode()))
