"""The state beside the graph: components into links, and back.

A component given as a body is stored and linked to; given as a ``Link`` it is what is
stored already, and must be; absent, there is none. Equal bodies are one object, whoever
stores them.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from casstore.format.manifest import COMPONENTS, NOTHING, Manifest, spell_field
from casstore.format.splitting import Spelled
from casstore.objects import blobs, values
from casstore.objects import graph as objects
from casstore.objects.pieces import PieceReader, PieceWriter
from casstore.session import keys
from casstore.session.arguments import check_text
from casstore.session.data import Checkpoint, Usage

_LARGEST: Final = (1 << 63) - 1


def store_checkpoint(manifest: Manifest, given: Checkpoint, writer: PieceWriter) -> Manifest:
    """The manifest with the checkpoint that was given in place of its own."""
    if not isinstance(given, Checkpoint):
        raise InvalidInputError(f"a checkpoint is a Checkpoint, not {type(given).__name__}")
    (
        turn_state, tool_state, plugin_snapshot, revision, execution_state, frames, frame, config,
    ) = given  # fmt: skip
    if revision is not None and (type(revision) is not int or not 0 <= revision <= _LARGEST):
        raise InvalidInputError(f"a plugin revision is a number from 0 on, not {revision!r}")
    if frame is not None:
        keys.id_bytes(frame, "a frame id")
    if type(frames) is not tuple and type(frames) is not list:
        raise InvalidInputError(f"frames are a list, not {type(frames).__name__}")
    emit = writer.emit
    leaf_id, nodes, next_seq, _, _, leaf, first_user, *_, usage, tips, index = manifest
    return Manifest(
        leaf_id,
        nodes,
        next_seq,
        revision,
        frame,
        leaf,
        first_user,
        _component(tool_state, "tool_state", writer),
        _component(plugin_snapshot, "plugin_snapshot", writer),
        _component(execution_state, "execution_state", writer),
        spell_field(turn_state, "turn_state", emit),
        spell_field(list(frames), "frames", emit) if frames else NOTHING,
        spell_field(config, "config", emit),
        usage,
        tips,
        index,
    )


def _component(body: Any, name: str, writer: PieceWriter) -> bytes | None:
    if body is None:
        return None
    if type(body) is Link:
        return bytes(Digest(body.digest))
    try:
        return splitting.root_object(splitting.spell(body, MAX_DEPTH, writer.emit), writer.emit)
    except InvalidValueError as exc:
        raise exc.within(name) from exc.__cause__


def name_missing(manifest: Manifest, exc: ObjectNotFoundError) -> Exception:
    """The error for an object that a commit links to and that is not stored."""
    for name in COMPONENTS:
        if getattr(manifest, name) == exc.digest:
            return ComponentNotFoundError(name, exc.digest)
    return exc


def read_checkpoint(
    reader: PieceReader, manifest: Manifest, *, hydrate: bool, max_bytes: int = DEFAULT_MAX_BYTES
) -> Checkpoint:
    """The checkpoint of a manifest: components loaded if ``hydrate``, else as links."""
    turn_state, frames, config = objects.load_spelled(
        reader, (manifest.turn_state, manifest.frames, manifest.config), max_bytes=max_bytes
    )
    components: list[Any] = []
    for name in COMPONENTS:
        digest = getattr(manifest, name)
        if digest is None:
            components.append(None)
        elif hydrate:
            components.append(_load(reader, name, digest, max_bytes))
        else:
            components.append(Link(Digest(digest)))
    tool_state, plugin_snapshot, execution_state = components
    return Checkpoint(
        turn_state,
        tool_state,
        plugin_snapshot,
        manifest.plugin_revision,
        execution_state,
        _listed(frames),
        manifest.current_frame,
        config,
    )


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
    read_usage(reader, manifest.usage)
    _listed(objects.load_spelled(reader, (manifest.frames,))[0])
