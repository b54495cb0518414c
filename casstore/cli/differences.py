"""Computes the difference of two checkpoints, nodes, values or blobs, of one store or two.

A digest names the same content in every store. So two stores are compared as if they were one:
objects that the first lacks are read from the second.
"""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import IO, Any, Final, NamedTuple, cast

from casstore.cli import naming
from casstore.cli.naming import Target
from casstore.cli.places import load, node_document, read_node, read_nodes
from casstore.cli.text import plain_key
from casstore.engine.protocol import Engine, StoredObject
from casstore.errors import InvalidInputError, PathStep
from casstore.format import splitting
from casstore.format.canonical import ROLE_LINK, decode, inspect
from casstore.format.digest import Digest, Kind
from casstore.format.graph import cut_node
from casstore.format.limits import DEFAULT_MAX_BYTES, MAX_DEPTH
from casstore.format.splitting import Encoded
from casstore.maintenance.import_ import import_session
from casstore.maintenance.progress import Progress
from casstore.objects import diff as value_diff
from casstore.objects.diff import ADDED, REMOVED, Change
from casstore.objects.node_index import IndexCache
from casstore.objects.pieces import PendingReader, PieceReader, PieceWriter
from casstore.objects.stored import Stored
from casstore.session import compare as checkpoints
from casstore.session.compare import Comparison
from casstore.store import Store
from casstore.store import open as open_store

CHECKPOINT: Final = "checkpoint"
NODE: Final = "node"
VALUE: Final = "value"
BLOB: Final = "blob"
RECORD: Final = "record"
_KINDS: Final = {
    Kind.MANIFEST: CHECKPOINT, Kind.NODE: NODE, Kind.BLOB: BLOB, Kind.ROPE: BLOB,
    Kind.VALUE: VALUE, Kind.LIST: VALUE, Kind.MAP: VALUE,
}  # fmt: skip
# Texts up to this length are compared line by line.
_TEXT_BYTES: Final = 4 << 20
_PART_BYTES: Final = 1 << 20


class Place(NamedTuple):
    """One side of a comparison: a name, resolved in its store."""

    store: Store
    target: Target
    #: The name as given by the user.
    asked: str
    #: The directory of the store, or the exported file.
    where: str

    @property
    def digest(self) -> Digest:
        """The digest of the manifest, node or object that the name refers to."""
        assert self.target.digest is not None
        return self.target.digest

    @property
    def kind(self) -> str:
        """The kind of object that is compared."""
        if self.target.entry is not None:
            return RECORD
        return _KINDS.get(naming.kind_of(self.store, self.digest), "piece")


class Blobs(NamedTuple):
    """How two blobs differ: ``lines`` if both are short texts, else the first byte that differs."""

    old_bytes: int
    new_bytes: int
    lines: list[str] | None
    first_difference: int


class Difference(NamedTuple):
    """The difference of two objects of one kind."""

    kind: str
    old: Place
    new: Place
    changes: Sequence[Change]
    comparison: Comparison | None = None
    blobs: Blobs | None = None

    @property
    def equal(self) -> bool:
        """True if the two have the same content."""
        if self.kind == RECORD:
            return not self.changes
        return self.old.digest == self.new.digest

    def patch(self) -> Iterator[dict[str, Any]]:
        """A JSON Patch. Of checkpoints, it applies to {leaf, nodes: {id: node}, components …}."""
        assert self.blobs is None, "the command refuses a patch of blobs"
        found = self.comparison
        if found is not None:
            if found.old_leaf != found.new_leaf:
                yield {"op": "replace", "path": "/leaf", "value": found.new_leaf}
            for node in found.dropped:
                yield {"op": "remove", "path": pointer(("nodes", node.id))}
            digests = [node.digest for node in found.added]
            for added in read_nodes(self.new.store, digests, self.new.target.session):
                path = pointer(("nodes", added.id))
                yield {"op": "add", "path": path, "value": node_document(added)}
        yield from operations(self.changes)


class _Either:
    """Reads objects from one engine, and those that it lacks from another."""

    def __init__(self, first: Engine, second: Engine) -> None:
        self._first = first
        self._second = second

    def get_many(self, digests: Sequence[bytes]) -> list[StoredObject | None]:
        """The objects in the order of the digests; None where one does not exist."""
        found = self._first.get_many(digests)
        lacking = [digest for digest, item in zip(digests, found, strict=True) if item is None]
        others = iter(self._second.get_many(lacking))
        return [next(others) if item is None else item for item in found]


def compare(old: Place, new: Place, *, describe: bool = True) -> Difference:
    """The difference of two sides; InvalidInputError if they are of different kinds."""
    if old.kind != new.kind or old.kind not in (CHECKPOINT, NODE, VALUE, BLOB, RECORD):
        raise InvalidInputError(
            f"{old.asked!r} is a {old.kind} and {new.asked!r} a {new.kind}; "
            "only two of a kind can be compared"
        )
    if old.kind == RECORD:
        return Difference(RECORD, old, new, _records(old, new))
    engine = old.store.engine
    if new.store is not old.store:
        # Only get_many is ever called on it.
        engine = cast(Engine, _Either(old.store.engine, new.store.engine))
    if old.kind == CHECKPOINT:
        found = _checkpoints(old, new, engine, describe)
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


def _checkpoints(old: Place, new: Place, engine: Engine, describe: bool) -> Comparison:
    if old.store is new.store:
        return old.store.compare(_side(old.target), _side(new.target), describe=describe)
    return checkpoints.compare(
        PieceReader(engine), IndexCache(), old.digest, new.digest, describe=describe
    )


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


def _fields(reader: PieceReader, place: Place, writer: PieceWriter) -> dict[str, Encoded]:
    """The fields that ``show`` prints of a node, encoded as a map would hold them."""
    stored = dict(zip(("cause", "payload"), cut_node(reader.get(place.digest).data), strict=True))
    document = node_document(read_node(place.store, place.digest, place.target.session))
    fields: dict[str, Encoded] = {}
    for name, value in document.items():
        if not isinstance(value, Stored):
            fields[name] = splitting.encode_split(value, MAX_DEPTH, writer.emit)
        elif any(role != ROLE_LINK for role, _ in inspect(stored[name].data)[1]):
            fields[name] = stored[name]
        else:
            # A short payload keeps long texts inline; a map would not.
            fields[name] = splitting.encode_split(decode(stored[name].data), MAX_DEPTH, writer.emit)
    return fields


def _records(old: Place, new: Place) -> tuple[Change, ...]:
    """The changes between two entries of record systems, in the content that ``show`` prints."""
    writer = PieceWriter()
    reader = PendingReader(old.store.engine, writer)
    before, after = [
        splitting.encode_split(load(place.store, place.target), MAX_DEPTH, writer.emit)
        for place in (old, new)
    ]
    fields = [("content", before, after)]
    return tuple(value_diff.diff_fields(reader, fields, DEFAULT_MAX_BYTES))


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

    Only a newline ends a line: other line ends are content. A last line without a newline is marked
    as ``diff`` does.
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


Path = tuple[PathStep, ...]


def pointer(path: Path) -> str:
    """A JSON Pointer (RFC 6901)."""
    return "".join(["/" + _token(step) for step in path])


def _token(step: PathStep) -> str:
    """One step of a pointer: an index, or a key as it is in the JSON document, escaped."""
    if isinstance(step, int):
        return str(step)
    return plain_key(step).replace("~", "~0").replace("/", "~1")


def operations(changes: Iterable[Change]) -> Iterator[dict[str, Any]]:
    """The operations of a JSON Patch that turn the old value into the new one, in this order."""
    # For each list, how many entries more or fewer it has after the operations so far.
    shifts: dict[Path, int] = {}
    for change in changes:
        if change.op == REMOVED:
            at = _current(change.path, shifts)
            _shift(shifts, at, -1)
            yield {"op": "remove", "path": pointer(at)}
        elif change.op == ADDED:
            _shift(shifts, change.path, 1)
            yield {"op": "add", "path": pointer(change.path), "value": change.stored_after()}
        else:
            yield {"op": "replace", "path": pointer(change.path), "value": change.stored_after()}


def _current(old: Path, shifts: dict[Path, int]) -> Path:
    """The path that an entry of the old value has after the operations so far."""
    at: Path = ()
    for step in old:
        at = (*at, step + shifts.get(at, 0) if isinstance(step, int) else step)
    return at


def _shift(shifts: dict[Path, int], at: Path, by: int) -> None:
    """Count an entry that was added to a list (1) or removed from it (-1) at this path."""
    if at and isinstance(at[-1], int):
        shifts[at[:-1]] = shifts.get(at[:-1], 0) + by


class Opened(NamedTuple):
    """A bundle imported into a temporary store, and its session."""

    store: Store
    session: str


def open_bundle(stack: ExitStack, path: str, progress: Progress | None) -> Opened:
    """Verify a bundle and import it into a temporary store, deleted when ``stack`` closes.

    The store is on disk, because a bundle may be of any size.
    """
    place = stack.enter_context(tempfile.TemporaryDirectory(prefix="casstore-bundle-"))
    store = stack.enter_context(open_store(place, durability="relaxed", auto_train=False))
    return Opened(store, import_session(store, path, progress=progress).session)
