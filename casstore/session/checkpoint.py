"""Encodes and decodes the state of a session that is not part of its graph.

Each component of a checkpoint becomes a link to an object, or a value inside the manifest. This
module defines their names; the format treats names as opaque. The components in ``LINKED`` and
those with other names (``others``) are links: pass content to store it and link to it, or a
``Link`` to an object that must exist. The rest are values. None means that there is no such
component. Identical content is stored once across all sessions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from casstore.engine.protocol import Engine
from casstore.errors import (
    ComponentNotFoundError,
    CorruptionError,
    InvalidInputError,
    InvalidValueError,
    ObjectNotFoundError,
    PathNotFoundError,
)
from casstore.format import splitting
from casstore.format.canonical import Link
from casstore.format.digest import Digest
from casstore.format.graph import (
    COMPONENT_DEPTH,
    NIL,
    Manifest,
    cut_components,
    encode_components,
    encode_field,
    link_target,
    linked,
)
from casstore.format.limits import DEFAULT_MAX_BYTES, MAX_DEPTH
from casstore.format.splitting import Encoded
from casstore.objects import blobs, values
from casstore.objects import graph as objects
from casstore.objects.pieces import PendingReader, PieceReader, PieceWriter
from casstore.session import keys
from casstore.session.arguments import check_count, check_kind, check_text, dict_of, invalid
from casstore.session.data import Checkpoint, Commit, Usage

if TYPE_CHECKING:
    from casstore.objects.edit import Edit

_LARGEST: Final = (1 << 63) - 1
#: Components that are objects of their own.
LINKED: Final = ("tool_state", "plugin_snapshot", "execution_state")
_VALUES: Final = ("turn_state", "plugin_revision", "frames", "current_frame", "config")
_NAMED: Final = frozenset((*LINKED, *_VALUES))
#: The component that holds the ledger: the usage of tokens, which only ``Commit.usage`` changes.
LEDGER: Final = "usage"
_KEYWORDS: Final = (*Commit._fields, *_NAMED)


def encode_checkpoint(given: Checkpoint, writer: PieceWriter) -> Encoded:
    """The components of a checkpoint as a manifest holds them."""
    check_kind(given, "checkpoint", Checkpoint)
    found: dict[str, Encoded] = {}
    for name, body in zip(Checkpoint._fields, given, strict=True):
        if body is not None and name != "others":
            encoded = _encode(name, body, writer)
            if encoded is not None:
                found[name] = encoded
    if given.others is not None:
        for name, body in dict_of(given.others, "others").items():
            if name in _NAMED:
                raise InvalidInputError(f"component {name!r} has a field of its own in Checkpoint")
            encoded = _encode(name, body, writer)
            if encoded is not None:
                found[name] = encoded
    return encode_components(found)


def encode_changes(
    given: Mapping[str, Any] | None, writer: PieceWriter
) -> dict[str, Encoded | None]:
    """The components that a commit sets, encoded for a manifest; None deletes a component."""
    if given is None:
        return {}
    if "others" in dict_of(given, "components"):
        raise InvalidInputError("others is not a component: give each component by its own name")
    return {name: _encode(name, body, writer) for name, body in given.items()}


@lru_cache(maxsize=256)
def check_keyword(name: str) -> None:
    """Refuse a keyword of ``append`` that looks like a mistyped parameter, not a component name."""
    if name in _NAMED:
        return
    meant = get_close_matches(name, _KEYWORDS, 1, 0.8)
    if meant:
        raise InvalidInputError(
            f"append has no parameter {name!r}; did you mean {meant[0]!r}? A component of that "
            f"name is set with commit(components={{{name!r}: …}})"
        )


def _encode(name: str, body: Any, writer: PieceWriter) -> Encoded | None:
    """Encode a component for a manifest; None if ``body`` is None."""
    keys.id_bytes(name, "the name of a component")
    if name == LEDGER:
        raise _not_the_ledger()
    if body is None:
        return None
    if name not in _VALUES:
        return _component(body, name, writer)
    if name == "frames":
        if type(body) is not tuple and type(body) is not list:
            raise invalid("frames", "a list", body)
        if not body:
            return None
        body = list(body)
    elif name == "plugin_revision":
        check_count(body, name, most=_LARGEST)
    elif name == "current_frame":
        keys.id_bytes(body, name)
    return encode_field(body, name, writer.emit, COMPONENT_DEPTH)


def _not_the_ledger() -> InvalidInputError:
    return InvalidInputError(
        f"component {LEDGER!r} is the ledger: add to it with Commit(usage=[…]), or choose another "
        "name"
    )


def _component(body: Any, name: str, writer: PieceWriter) -> Encoded:
    if type(body) is Link:
        return linked(bytes(Digest(body.digest)))
    emit = writer.emit
    try:
        return linked(splitting.root_object(splitting.encode_split(body, MAX_DEPTH, emit), emit))
    except InvalidValueError as exc:
        raise exc.within(name) from exc.__cause__


def change_components(
    engine: Engine,
    before: Encoded,
    changes: Mapping[str, Encoded | None],
    edits: Mapping[str, Sequence[Edit]],
    writer: PieceWriter,
) -> Encoded:
    """The components ``before`` after ``changes``, then ``edits``; the others stay."""
    found = cut_components(before)
    for name, encoded in changes.items():
        if encoded is None:
            found.pop(name, None)
        else:
            found[name] = encoded
    for name, steps in edits.items():
        edited = _edited(PendingReader(engine, writer), name, found.pop(name, None), steps, writer)
        if edited is not None:
            found[name] = edited
    return encode_components(found)


def _edited(
    reader: PendingReader,
    name: str,
    component: Encoded | None,
    edits: Sequence[Edit],
    writer: PieceWriter,
) -> Encoded | None:
    from casstore.objects.edit import Set, apply_edit

    if component is None and isinstance(edits[0], Set) and not edits[0].path:
        # It sets the whole component, which need not exist before.
        component, edits = _encode(name, edits[0].value, writer), edits[1:]
    if component is None:
        raise PathNotFoundError((name,))
    digest = link_target(component)
    if digest is None or name in _VALUES:
        # Edits work on stored values: store the value of the manifest. Below, it becomes one again.
        [value] = objects.load_encoded(reader, (component,))
        digest = splitting.split(value, writer.emit)
    elif reader.find_many((digest,))[0] is None:
        raise ComponentNotFoundError(name, digest)
    try:
        for edit in edits:
            digest = apply_edit(reader, digest, edit, writer.emit)
    except PathNotFoundError as exc:
        raise PathNotFoundError((name, *exc.path)) from exc
    except InvalidValueError as exc:
        raise exc.within(name) from exc.__cause__
    if name not in _VALUES:
        return linked(digest)
    return _encode(name, _load(reader, name, digest), writer)


def check_edits(edits: Mapping[str, Sequence[Edit]]) -> None:
    """InvalidInputError unless this maps names of components to lists of edits."""
    from casstore.objects.edit import Edit

    for name, steps in dict_of(edits, "edits").items():
        keys.id_bytes(name, "the name of a component")
        if name == LEDGER:
            raise _not_the_ledger()
        if type(steps) not in (list, tuple) or not steps:
            raise InvalidInputError(
                f"edits of component {name!r} must be a list of one edit or more, got {steps!r:.40}"
            )
        for step in steps:
            if not isinstance(step, Edit):
                raise InvalidInputError(
                    f"an edit must be a Set, Delete, Insert or Append, got {step!r:.40}"
                )


def name_missing(manifest: Manifest, exc: ObjectNotFoundError) -> Exception:
    """The error for a linked object that is not stored; names the component that links to it."""
    for name, found in cut_components(manifest.components).items():
        if link_target(found) == exc.digest:
            return ComponentNotFoundError(name, exc.digest)
    return exc


def read_checkpoint(reader: PieceReader, manifest: Manifest, *, hydrate: bool) -> Checkpoint:
    """The checkpoint of a manifest: components loaded if ``hydrate``, else as links."""
    values = components_of(manifest)
    bodies: dict[str, Any] = {}
    for name, encoded in list(values.items()):
        digest = link_target(encoded)
        if digest is not None and name not in _VALUES:
            del values[name]
            bodies[name] = _load(reader, name, digest) if hydrate else Link(Digest(digest))
    loaded = objects.load_encoded(reader, tuple(values.values()))
    found = dict(zip(values, loaded, strict=True)) | bodies
    found["frames"] = _listed(found.get("frames"))
    others = {name: found.pop(name) for name in list(found) if name not in _NAMED}
    return Checkpoint(**found, others=others or None)


def components_of(manifest: Manifest) -> dict[str, Encoded]:
    """The components of a checkpoint by name: all but the ledger."""
    found = cut_components(manifest.components)
    found.pop(LEDGER, None)
    return found


def ledger_of(manifest: Manifest) -> Encoded:
    """The encoded ledger; NIL if the manifest has none."""
    return component(manifest, LEDGER)


def component(manifest: Manifest, name: str) -> Encoded:
    """The encoded component; NIL if the manifest does not have it."""
    return cut_components(manifest.components).get(name, NIL)


def _load(reader: PieceReader, name: str, digest: bytes) -> Any:
    # If the object is missing, raise: None would mean that the component does not exist.
    item = reader.find_many((digest,))[0]
    if item is None:
        raise ComponentNotFoundError(name, digest)
    if item.kind in values.BLOB_KINDS:
        return blobs.read_blob(reader, digest, item, max_bytes=DEFAULT_MAX_BYTES)
    return values.read_value(reader, digest, item, max_bytes=DEFAULT_MAX_BYTES)


# --- the ledger ---------------------------------------------------------------------------


def with_ledger(
    reader: PieceReader,
    before: Encoded,
    components: Encoded,
    added: Sequence[Usage],
    writer: PieceWriter,
) -> Encoded:
    """``components`` with the ledger of ``before``, and more usage in it.

    Usage is merged by source and model, in order of first use.
    """
    found = cut_components(components)
    ledger = (found if components is before else cut_components(before)).get(LEDGER, NIL)
    if added:
        ledger = _add_usage(reader, ledger, added, writer)
    if ledger is NIL:
        return components
    found[LEDGER] = ledger
    return encode_components(found)


def _add_usage(
    reader: PieceReader, ledger: Encoded, added: Sequence[Usage], writer: PieceWriter
) -> Encoded:
    merged = {(entry.source, entry.model): entry for entry in read_usage(reader, ledger)}
    for entry in added:
        known = merged.get((entry.source, entry.model))
        if known is not None:
            sums = [a + b for a, b in zip(known[2:], entry[2:], strict=True)]
            entry = Usage(entry.source, entry.model, *sums)
            check_usage(entry)
        merged[entry.source, entry.model] = entry
    rows = [list(entry) for entry in merged.values()]
    return encode_field(rows, LEDGER, writer.emit, COMPONENT_DEPTH)


def check_usage(entry: Usage) -> None:
    """InvalidInputError unless this is a Usage whose token counts are valid."""
    check_kind(entry, "usage", Usage)
    check_text(entry.source, "Usage.source")
    check_text(entry.model, "Usage.model")
    for name, tokens in zip(Usage._fields[2:], entry[2:], strict=True):
        check_count(tokens, f"Usage.{name}", most=_LARGEST)


def read_usage(reader: PieceReader, ledger: Encoded) -> list[Usage]:
    """All entries of a ledger, also those with zero tokens."""
    rows = objects.load_encoded(reader, (ledger,))[0] or []
    if type(rows) is not list or not all(_is_usage(row) for row in rows):
        raise CorruptionError("the ledger of a checkpoint is not a list of usage; check the store")
    return [Usage(*row) for row in rows]


def _is_usage(row: Any) -> bool:
    return (
        type(row) is list
        and 3 <= len(row) <= len(Usage._fields)
        and all(type(name) is str for name in row[:2])
        and all(type(number) is int for number in row[2:])
    )


def _listed(frames: Any) -> tuple[Any, ...]:
    """The stored frames of a checkpoint as a tuple; CorruptionError if they are not a list."""
    if frames is None:
        return ()
    if type(frames) is not list:
        raise CorruptionError("the frames of a checkpoint are not a list; check the store")
    return tuple(frames)


def check_fields(reader: PieceReader, manifest: Manifest) -> None:
    """Raise CorruptionError unless the ledger and the frames of a manifest are valid lists."""
    read_usage(reader, ledger_of(manifest))
    _listed(objects.load_encoded(reader, (component(manifest, "frames"),))[0])
