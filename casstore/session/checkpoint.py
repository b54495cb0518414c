"""Encodes and decodes the state of a session that is not part of its graph.

Each component of a checkpoint becomes a link to an object, or a value inside the manifest. This
layer defines their names; the format treats names as opaque. The components in ``LINKED`` and
those that a runtime adds (``others``) are links: pass content to store it and link to it, or a
``Link`` to refer to an object that must exist. The rest are values. None means that there is no
such component. Identical content is stored once across all sessions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from casstore.errors import (
    ComponentNotFoundError,
    CorruptionError,
    InvalidInputError,
    InvalidValueError,
    ObjectNotFoundError,
)
from casstore.format import splitting
from casstore.format.canonical import Link
from casstore.format.digest import Digest
from casstore.format.limits import DEFAULT_MAX_BYTES, MAX_DEPTH
from casstore.format.manifest import (
    COMPONENT_ROOM,
    NOTHING,
    Manifest,
    cut_components,
    encode_components,
    link_target,
    linked,
    spell_field,
)
from casstore.format.splitting import Spelled
from casstore.objects import blobs, values
from casstore.objects import graph as objects
from casstore.objects.pieces import PieceReader, PieceWriter
from casstore.session import keys
from casstore.session.arguments import check_text
from casstore.session.data import Checkpoint, Usage

_LARGEST: Final = (1 << 63) - 1
#: Components that are objects of their own.
LINKED: Final = ("tool_state", "plugin_snapshot", "execution_state")
_VALUES: Final = ("turn_state", "plugin_revision", "frames", "current_frame", "config")
_NAMED: Final = frozenset((*LINKED, *_VALUES))


def encode_checkpoint(given: Checkpoint, writer: PieceWriter) -> Spelled:
    """The components of a checkpoint as a manifest holds them."""
    if not isinstance(given, Checkpoint):
        raise InvalidInputError(f"a checkpoint is a Checkpoint, not {type(given).__name__}")
    revision, frame, frames = given.plugin_revision, given.current_frame, given.frames
    if revision is not None and (type(revision) is not int or not 0 <= revision <= _LARGEST):
        raise InvalidInputError(f"a plugin revision is a number from 0 on, not {revision!r}")
    if frame is not None:
        keys.id_bytes(frame, "a frame id")
    if type(frames) is not tuple and type(frames) is not list:
        raise InvalidInputError(f"frames are a list, not {type(frames).__name__}")
    found: dict[str, Spelled] = {}
    for name in _VALUES:
        value = getattr(given, name)
        if name == "frames":
            value = list(frames) or None
        if value is not None:
            found[name] = spell_field(value, name, writer.emit, COMPONENT_ROOM)
    for name in LINKED:
        body = getattr(given, name)
        if body is not None:
            found[name] = _component(body, name, writer)
    if given.others:
        for name, body in _checked_others(given.others):
            found[name] = _component(body, name, writer)
    return encode_components(found)


def _checked_others(others: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(others, Mapping):
        raise InvalidInputError(f"others must be a mapping, got {type(others).__name__}")
    for name, body in others.items():
        keys.id_bytes(name, "the name of a component")
        if name in _NAMED:
            raise InvalidInputError(f"component {name!r} has a field of its own in Checkpoint")
        if body is not None:
            yield name, body


def _component(body: Any, name: str, writer: PieceWriter) -> Spelled:
    if type(body) is Link:
        return linked(bytes(Digest(body.digest)))
    emit = writer.emit
    try:
        return linked(splitting.root_object(splitting.spell(body, MAX_DEPTH, emit), emit))
    except InvalidValueError as exc:
        raise exc.within(name) from exc.__cause__


def name_missing(manifest: Manifest, exc: ObjectNotFoundError) -> Exception:
    """The error for an object that a commit links to and that is not stored."""
    for name, found in cut_components(manifest.components).items():
        if link_target(found) == exc.digest:
            return ComponentNotFoundError(name, exc.digest)
    return exc


def read_checkpoint(
    reader: PieceReader, manifest: Manifest, *, hydrate: bool, max_bytes: int = DEFAULT_MAX_BYTES
) -> Checkpoint:
    """The checkpoint of a manifest: components loaded if ``hydrate``, else as links."""
    values = cut_components(manifest.components)
    bodies: dict[str, Any] = {}
    for name, spelled in list(values.items()):
        digest = link_target(spelled)
        if digest is not None and name not in _VALUES:
            del values[name]
            bodies[name] = (
                _load(reader, name, digest, max_bytes) if hydrate else Link(Digest(digest))
            )
    loaded = objects.load_spelled(reader, tuple(values.values()), max_bytes=max_bytes)
    found = dict(zip(values, loaded, strict=True)) | bodies
    found["frames"] = _listed(found.get("frames"))
    others = {name: found.pop(name) for name in list(found) if name not in _NAMED}
    return Checkpoint(**found, others=others or None)


def component(manifest: Manifest, name: str) -> Spelled:
    """A component as it is stored; NOTHING if there is none."""
    return cut_components(manifest.components).get(name, NOTHING)


def _load(reader: PieceReader, name: str, digest: bytes, max_bytes: int) -> Any:
    # A component that is not there is never taken for one that was never given.
    item = reader.find_many((digest,))[0]
    if item is None:
        raise ComponentNotFoundError(name, digest)
    if item.kind in values.BLOB_KINDS:
        return blobs.read_blob(reader, digest, item, max_bytes=max_bytes)
    return values.read_value(reader, digest, item, max_bytes=max_bytes)


# --- the ledger ---------------------------------------------------------------------------


def add_usage(
    reader: PieceReader, ledger: Spelled, added: Sequence[Usage], writer: PieceWriter
) -> Spelled:
    """The ledger with more usage: merged by source and model, in order of first use."""
    if not added:
        return ledger
    merged = {(entry.source, entry.model): entry for entry in read_usage(reader, ledger)}
    for entry in added:
        known = merged.get((entry.source, entry.model))
        if known is not None:
            sums = [a + b for a, b in zip(known[2:], entry[2:], strict=True)]
            entry = Usage(entry.source, entry.model, *sums)
            check_usage(entry)
        merged[entry.source, entry.model] = entry
    rows = [list(entry) for entry in merged.values()]
    return spell_field(rows, "usage", writer.emit)


def check_usage(entry: Usage) -> None:
    """Refuse what cannot be added to a ledger."""
    if not isinstance(entry, Usage):
        raise InvalidInputError(f"usage is given as Usage, not {type(entry).__name__}")
    check_text(entry.source, "the source of usage")
    check_text(entry.model, "the model of usage")
    if any(type(count) is not int or not 0 <= count <= _LARGEST for count in entry[2:]):
        raise InvalidInputError(f"usage is counted in whole numbers from 0 on: {entry!r}")


def read_usage(reader: PieceReader, ledger: Spelled) -> list[Usage]:
    """All entries of a ledger, also those that count nothing yet."""
    rows = objects.load_spelled(reader, (ledger,))[0] or []
    if type(rows) is not list or not all(_is_usage(row) for row in rows):
        raise CorruptionError("the ledger of a checkpoint is no list of usage; check the store")
    return [Usage(*row) for row in rows]


def _is_usage(row: Any) -> bool:
    return (
        type(row) is list
        and 3 <= len(row) <= len(Usage._fields)
        and all(type(name) is str for name in row[:2])
        and all(type(number) is int for number in row[2:])
    )


def _listed(frames: Any) -> tuple[Any, ...]:
    """The frames of a checkpoint as they are shown."""
    if frames is None:
        return ()
    if type(frames) is not list:
        raise CorruptionError("the frames of a checkpoint are no list; check the store")
    return tuple(frames)


def check_fields(reader: PieceReader, manifest: Manifest) -> None:
    """Raise CorruptionError unless the ledger and the frames of a manifest are lists of theirs."""
    read_usage(reader, manifest.ledger)
    _listed(objects.load_spelled(reader, (component(manifest, "frames"),))[0])
