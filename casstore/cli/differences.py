"""What differs between two of anything: checkpoints, nodes, values, blobs; of one store or two.

A digest names content wherever it is stored. So two stores are compared as if they were one:
what the first does not have is looked for in the second.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import IO, Any, Final, NamedTuple, cast

from casstore.cli import naming
from casstore.cli.json_patch import operations
from casstore.cli.naming import Target
from casstore.cli.places import node_document, read_node, read_nodes
from casstore.engine.protocol import Engine, StoredObject
from casstore.errors import InvalidInputError
from casstore.format import splitting
from casstore.format.canonical import ROLE_LINK, decode, inspect
from casstore.format.digest import Digest
from casstore.format.hashing import Kind
from casstore.format.limits import DEFAULT_MAX_BYTES, MAX_DEPTH
from casstore.format.node import cut_node
from casstore.format.splitting import Spelled
from casstore.objects import diff as value_diff
from casstore.objects.diff import Change
from casstore.objects.node_index import IndexCache
from casstore.objects.pieces import PendingReader, PieceReader, PieceWriter
from casstore.objects.stored import Stored
from casstore.session import compare as checkpoints
from casstore.session.compare import Comparison
from casstore.store import Store

CHECKPOINT: Final = "checkpoint"
NODE: Final = "node"
VALUE: Final = "value"
BLOB: Final = "blob"
_KINDS: Final = {
    Kind.MANIFEST: CHECKPOINT, Kind.NODE: NODE, Kind.BLOB: BLOB, Kind.ROPE: BLOB,
    Kind.VALUE: VALUE, Kind.LIST: VALUE, Kind.MAP: VALUE,
}  # fmt: skip
# Texts up to this length are compared line by line.
_TEXT_BYTES: Final = 4 << 20
_PART_BYTES: Final = 1 << 20


class Place(NamedTuple):
    """One of the two: a name, resolved in its store."""

    store: Store
    target: Target
    #: As it was asked for.
    asked: str
    #: The directory of the store, or the exported file.
    where: str

    @property
    def digest(self) -> Digest:
        """What it stands for."""
        assert self.target.digest is not None
        return self.target.digest

    @property
    def kind(self) -> str:
        """What is compared."""
        return _KINDS.get(naming.kind_of(self.store, self.digest), "piece")


class Blobs(NamedTuple):
    """How two blobs differ: line by line if both are short texts, else where they first do."""

    old_bytes: int
    new_bytes: int
    lines: list[str] | None
    first_difference: int


class Difference(NamedTuple):
    """What differs between two of one kind."""

    kind: str
    old: Place
    new: Place
    changes: Sequence[Change]
    comparison: Comparison | None = None
    blobs: Blobs | None = None

    @property
    def equal(self) -> bool:
        """Are the two the same?"""
        return self.old.digest == self.new.digest

    def patch(self) -> Iterator[dict[str, Any]]:
        """A JSON Patch. Of checkpoints: of a document with leaf, nodes by id, and components."""
        assert self.blobs is None, "who asks for a patch of blobs is told before"
        found = self.comparison
        if found is not None:
            if found.old_leaf != found.new_leaf:
                yield {"op": "replace", "path": "/leaf", "value": found.new_leaf}
            for node in found.dropped:
                yield {"op": "remove", "path": _node_pointer(node.id)}
            digests = [node.digest for node in found.added]
            for added in read_nodes(self.new.store, digests, self.new.target.session):
                value = node_document(added)
                yield {"op": "add", "path": _node_pointer(added.id), "value": value}
        yield from operations(self.changes)


def _node_pointer(node_id: str) -> str:
    from casstore.cli.json_patch import pointer

    return pointer(("nodes", node_id))


class _Either:
    """Reads objects from one engine, and what that does not have from another."""

    def __init__(self, first: Engine, second: Engine) -> None:
        self._first = first
        self._second = second

    def get_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        """The objects in the order asked for; None where there is none."""
        found = self._first.get_many(digests)
        lacking = [digest for digest, item in zip(digests, found, strict=True) if item is None]
        others = iter(self._second.get_many(lacking))
        return [next(others) if item is None else item for item in found]


def compare(old: Place, new: Place) -> Difference:
    """What turns the one into the other; InvalidInputError if they are of different kinds."""
    if old.kind != new.kind or old.kind not in (CHECKPOINT, NODE, VALUE, BLOB):
        raise InvalidInputError(
            f"{old.asked!r} is a {old.kind} and {new.asked!r} a {new.kind}; "
            "only two of a kind can be compared"
        )
    engine = old.store.engine
    if new.store is not old.store:
        # Only get_many is ever called on it.
        engine = cast(Engine, _Either(old.store.engine, new.store.engine))
    if old.kind == CHECKPOINT:
        found = _checkpoints(old, new, engine)
        return Difference(CHECKPOINT, old, new, found.changes, comparison=found)
    if old.kind == BLOB:
        return Difference(BLOB, old, new, (), blobs=_blobs(old, new))
    if old.kind == NODE:
        return Difference(NODE, old, new, _nodes(old, new, engine))
    reader = PieceReader(engine)
    before, after = reader.get(old.digest), reader.get(new.digest)
    changes = value_diff.diff_objects(
        reader, (old.digest, before), (new.digest, after), DEFAULT_MAX_BYTES
    )
    return Difference(VALUE, old, new, tuple(changes))


def _checkpoints(old: Place, new: Place, engine: Engine) -> Comparison:
    if old.store is new.store:
        return old.store.compare(_side(old.target), _side(new.target))
    return checkpoints.compare(PieceReader(engine), IndexCache(), old.digest, new.digest)


def _side(target: Target) -> tuple[str, int | None] | Digest:
    if target.session is not None:
        return target.session, target.at
    assert target.digest is not None
    return target.digest


def _nodes(old: Place, new: Place, engine: Engine) -> tuple[Change, ...]:
    """Two nodes are compared as the documents that ``show`` prints of them."""
    writer = PieceWriter()
    reader = PendingReader(engine, writer)
    before, after = [_fields(reader, place, writer) for place in (old, new)]
    fields = [(name, before[name], after[name]) for name in sorted(before)]
    return tuple(value_diff.diff_fields(reader, fields, DEFAULT_MAX_BYTES))


def _fields(reader: PieceReader, place: Place, writer: PieceWriter) -> dict[str, Spelled]:
    """The fields that ``show`` prints of a node, encoded as a map would hold them."""
    stored = dict(zip(("cause", "payload"), cut_node(reader.get(place.digest).data), strict=True))
    document = node_document(read_node(place.store, place.digest, place.target.session))
    fields: dict[str, Spelled] = {}
    for name, value in document.items():
        if not isinstance(value, Stored):
            fields[name] = splitting.spell(value, MAX_DEPTH, writer.emit)
        elif any(role != ROLE_LINK for role, _ in inspect(stored[name].data)[1]):
            fields[name] = stored[name]
        else:
            # A short payload keeps long texts inline; a map would not.
            fields[name] = splitting.spell(decode(stored[name].data), MAX_DEPTH, writer.emit)
    return fields


def _blobs(old: Place, new: Place) -> Blobs:
    with old.store.open_blob(old.digest) as before, new.store.open_blob(new.digest) as after:
        sizes = before.seek(0, 2), after.seek(0, 2)
        before.seek(0)
        after.seek(0)
        if max(sizes) <= _TEXT_BYTES:
            lines = _text_lines(before.read(), after.read(), old.asked, new.asked)
            if lines is not None:
                return Blobs(*sizes, lines, -1)
            before.seek(0)
            after.seek(0)
        return Blobs(*sizes, None, _first_difference(before, after))


def _text_lines(before: bytes, after: bytes, old: str, new: str) -> list[str] | None:
    try:
        texts = before.decode(), after.decode()
    except UnicodeDecodeError:
        return None
    if any("\0" in text for text in texts):
        return None
    return unified(*texts, old, new)


def unified(before: str, after: str, old: str = "", new: str = "", *, around: int = 3) -> list[str]:
    """A unified diff, without line ends; empty only if the texts are the same.

    A line ends with a newline and nothing else: what other ends are made of is content, and a
    last line without one is told as ``diff`` does.
    """
    found: list[str] = []
    for line in difflib.unified_diff(
        _newline_lines(before), _newline_lines(after), old, new, n=around
    ):
        found.append(line.removesuffix("\n"))
        if not line.endswith("\n"):
            found.append("\\ No newline at end of file")
    return found


def _newline_lines(text: str) -> list[str]:
    *lines, last = text.split("\n")
    return [f"{line}\n" for line in lines] + ([last] if last else [])


def _first_difference(before: IO[bytes], after: IO[bytes]) -> int:
    at = 0
    while True:
        one, other = before.read(_PART_BYTES), after.read(_PART_BYTES)
        if one != other or not one:
            for offset, (left, right) in enumerate(zip(one, other, strict=False)):
                if left != right:
                    return at + offset
            return at + min(len(one), len(other))
        at += len(one)
