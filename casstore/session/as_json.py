"""Leases, claims and commits as JSON documents, to be handed to another process.

``to_json`` writes one, ``from_json`` reads it back and refuses everything that is not exactly such
a document. Each begins with its schema:

    casstore.lease/1    session, owner, token (hexadecimal), fencing, claimed_at_ms, expires_at_ms
    casstore.claim/1    id, session, fencing, batches
    casstore.commit/1   the fields of ``Commit``

Fields of a commit that have their default value are left out, and a reader adds them. A lease needs
only the four fields that identify it. Leaving out ``leaf`` or the ``parent`` of a node does not
mean null: the leaf is then the last node, and the parent the node before. A bare payload is written
as a node with a generated id. An edit is an object with ``op`` (set, delete, insert, append),
``path`` and ``value``. Values are written as in ``format.value_json``. ``Commit.also`` (rows of
other systems) cannot be written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

from casstore.errors import InvalidInputError
from casstore.format.value_json import parse_json, plain
from casstore.objects.edit import Append, Delete, Edit, Insert, Set
from casstore.session.commit import checked_commit
from casstore.session.data import (
    LAST,
    LEAF,
    Batch,
    Checkpoint,
    Claim,
    Commit,
    Lease,
    Node,
    NodeDraft,
    Usage,
)

Document = TypeVar("Document", Lease, Claim, Commit)
# Reads one field: takes the JSON value and its name for error messages, returns what is stored.
_Kind = Callable[[Any, str], Any]

_SCHEMA: Final = "schema"
_SCHEMAS: Final[dict[type, str]] = {
    Lease: "casstore.lease/1",
    Claim: "casstore.claim/1",
    Commit: "casstore.commit/1",
}


def to_json(value: Lease | Claim | Commit) -> str:
    """A lease, a claim or a commit as a JSON document, in ASCII.

    InvalidInputError if JSON cannot hold a value, or ``Commit.also`` is given.

    >>> lease = session.claim_lease("worker-1", ttl_ms=30_000)
    >>> from_json(Lease, to_json(lease)) == lease
    True
    """
    if not isinstance(value, Lease | Claim | Commit):
        raise InvalidInputError(
            f"value must be a Lease, Claim or Commit, got {type(value).__name__}"
        )
    if isinstance(value, Commit):
        value = checked_commit(value)
    try:
        return json.dumps(plain(_document(value)), allow_nan=False, separators=(",", ":"))
    except InvalidInputError:
        raise
    except (AttributeError, TypeError, ValueError, RecursionError) as exc:
        raise InvalidInputError(f"JSON cannot hold this {type(value).__name__}: {exc}") from exc


def from_json(kind: type[Document], text: str | bytes) -> Document:
    """The lease, claim or commit of a document; InvalidInputError if it is not one of this kind.

    >>> step = Commit(append=[NodeDraft("n3", {"role": "user"})], expected=2)
    >>> from_json(Commit, to_json(step)) == step
    True
    """
    if kind not in _SCHEMAS:
        raise InvalidInputError(f"kind must be Lease, Claim or Commit, got {kind!r:.80}")
    if not isinstance(text, str | bytes):
        raise InvalidInputError(f"text must be a str or bytes, got {type(text).__name__}")
    name = kind.__name__.lower()
    data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    read = _READERS[kind](parse_json(data, f"the {name}"), name)
    if isinstance(read, Commit):
        checked_commit(read)
    found: Document = read
    return found


# --- writing --------------------------------------------------------------------------------


def _document(value: Lease | Claim | Commit) -> dict[str, Any]:
    document: dict[str, Any] = {_SCHEMA: _SCHEMAS[type(value)]}
    if isinstance(value, Lease):
        return {**document, **value._asdict(), "token": value.token.hex()}
    if isinstance(value, Claim):
        return {**document, **value._asdict(), "batches": [one._asdict() for one in value.batches]}
    if value.also is not None:
        raise InvalidInputError(
            "Commit.also cannot be written as JSON: set it in the process that commits"
        )
    document |= _changed(value, Commit())
    for name in ("append", "replace"):
        if name in document:
            document[name] = [_node(node) for node in document[name]]
    if value.edits:
        document["edits"] = {
            name: [_edit(edit) for edit in edits] for name, edits in value.edits.items()
        }
    if "leaf" in document and value.leaf is LAST:
        del document["leaf"]
    if value.checkpoint is not None:
        document["checkpoint"] = _changed(value.checkpoint, Checkpoint())
    if value.lease is not None:
        document["lease"] = _document(value.lease)
    if value.usage:
        document["usage"] = [_changed(one, Usage("", "")) for one in value.usage]
    if value.completes:
        document["completes"] = [_document(one) for one in value.completes]
    return document


def _edit(edit: Edit) -> dict[str, Any]:
    return {"op": type(edit).__name__.lower(), **edit._asdict(), "path": list(edit.path)}


def _node(node: NodeDraft | Node) -> dict[str, Any]:
    document = {name: getattr(node, name) for name in NodeDraft._fields}
    if node.parent is LEAF:
        del document["parent"]
    return {
        name: value
        for name, value in document.items()
        if value is not None or name in ("parent", "payload")
    }


def _changed(value: Any, default: Any) -> dict[str, Any]:
    """The fields of a tuple that do not have their default."""
    return {
        name: mine
        for name, mine, theirs in zip(value._fields, value, default, strict=True)
        if mine is not theirs and (type(mine) is not type(theirs) or mine != theirs)
    }


# --- reading --------------------------------------------------------------------------------


def _text(value: Any, where: str) -> str:
    if type(value) is not str:
        raise InvalidInputError(f"{where} must be a text, got {value!r:.80}")
    return value


def _number(value: Any, where: str) -> int:
    if type(value) is not int:
        raise InvalidInputError(f"{where} must be a whole number, got {value!r:.80}")
    return value


def _flag(value: Any, where: str) -> bool:
    if type(value) is not bool:
        raise InvalidInputError(f"{where} must be true or false, got {value!r:.80}")
    return value


def _token(value: Any, where: str) -> bytes:
    digits = _text(value, where)
    try:
        return bytes.fromhex(digits)
    except ValueError as exc:
        raise InvalidInputError(f"{where} must be hexadecimal digits, got {value!r:.80}") from exc


def _any(value: Any, where: str) -> Any:
    return value


def _time(value: Any, where: str) -> Any:
    if type(value) not in (str, int, float, type(None)):
        raise InvalidInputError(f"{where} must be a text, a number or null, got {value!r:.80}")
    return value


def _or_none(kind: _Kind) -> _Kind:
    return lambda value, where: None if value is None else kind(value, where)


def _list_of(kind: _Kind) -> _Kind:
    def read(value: Any, where: str) -> list[Any]:
        if type(value) is not list:
            raise InvalidInputError(f"{where} must be a list, got {value!r:.80}")
        return [kind(one, f"{where}[{at}]") for at, one in enumerate(value)]

    return read


def _fields(
    value: Any, where: str, kinds: Mapping[str, _Kind], needed: frozenset[str]
) -> dict[str, Any]:
    """Read the fields of a JSON object; InvalidInputError if one is unknown or missing."""
    if type(value) is not dict:
        raise InvalidInputError(f"{where} must be an object, got {value!r:.80}")
    for name in value:
        if name not in kinds:
            raise InvalidInputError(f"{where} has an unknown field {name!r:.80}")
    for name in needed:
        if name not in value:
            raise InvalidInputError(f"{where} lacks the field {name!r}")
    return {name: kinds[name](one, f"{where}.{name}") for name, one in value.items()}


def _read(made: type, kinds: Mapping[str, _Kind], *needed: str) -> _Kind:
    """A function that reads a JSON object into the NamedTuple ``made``."""
    every, required = dict(kinds), frozenset(needed)
    schema = _SCHEMAS.get(made)
    if schema is not None:
        every[_SCHEMA] = _any
        required |= {_SCHEMA}

    def read(value: Any, where: str) -> Any:
        if schema is not None and type(value) is dict and value.get(_SCHEMA) != schema:
            raise InvalidInputError(
                f"the schema of {where} must be {schema!r}, got {value.get(_SCHEMA)!r:.80}"
            )
        fields = _fields(value, where, every, required)
        fields.pop(_SCHEMA, None)
        return made(**fields)

    return read


_read_lease: Final = _read(
    Lease,
    {
        "session": _text,
        "owner": _text,
        "token": _token,
        "fencing": _number,
        "claimed_at_ms": _number,
        "expires_at_ms": _number,
    },
    "session",
    "owner",
    "token",
    "fencing",
)
_BATCH: Final[dict[str, _Kind]] = {
    "id": _text,
    "session": _text,
    "seq": _number,
    "items": _list_of(_any),
    "source_key": _or_none(_text),
    "delivery": _text,
    "slot": _text,
    "merge_key": _or_none(_text),
    "available_at_ms": _number,
    "enqueued_at_ms": _number,
    "fence": _number,
    "held_by": _number,
}
_read_batch: Final = _read(Batch, _BATCH, *_BATCH)


def _read_claim(value: Any, where: str) -> Claim:
    claim: Claim = _read_claim_fields(value, where)
    batches = tuple([one._replace(items=tuple(one.items)) for one in claim.batches])
    return claim._replace(batches=batches)


_CLAIM: Final[dict[str, _Kind]] = {
    "id": _text,
    "session": _text,
    "fencing": _number,
    "batches": _list_of(_read_batch),
}
_read_claim_fields: Final = _read(Claim, _CLAIM, *_CLAIM)
_read_node: Final = _read(
    NodeDraft,
    {
        "id": _text,
        "payload": _any,
        "parent": _or_none(_text),
        "cause": _any,
        "frame": _or_none(_text),
        "time": _time,
    },
    "id",
    "payload",
)
_read_checkpoint: Final = _read(
    Checkpoint,
    {
        "turn_state": _any,
        "tool_state": _any,
        "plugin_snapshot": _any,
        "plugin_revision": _or_none(_number),
        "execution_state": _any,
        "frames": _list_of(_any),
        "current_frame": _or_none(_text),
        "config": _any,
        "others": _any,
    },
)
_read_usage: Final = _read(
    Usage,
    {
        "source": _text,
        "model": _text,
        "input": _number,
        "output": _number,
        "cached_input": _number,
        "reasoning": _number,
    },
    "source",
    "model",
)


def _read_edit(value: Any, where: str) -> Edit:
    op = value.get("op") if type(value) is dict else None
    if type(op) is not str or op not in _EDITS:
        raise InvalidInputError(
            f"{where} must be an object whose op is one of {', '.join(_EDITS)}, got {value!r:.80}"
        )
    made = _EDITS[op]
    fields = {name: one for name, one in value.items() if name != "op"}
    kinds = {"path": _list_of(_any), "value": _any}
    read = _read(made, {name: kinds[name] for name in made._fields}, *made._fields)
    edit: Edit = read(fields, where)
    return edit


_EDITS: Final[dict[str, type[Edit]]] = {
    one.__name__.lower(): one for one in (Set, Delete, Insert, Append)
}


def _map_of(kind: _Kind) -> _Kind:
    def read(value: Any, where: str) -> dict[str, Any]:
        if type(value) is not dict:
            raise InvalidInputError(f"{where} must be an object, got {value!r:.80}")
        return {name: kind(one, f"{where}.{name}") for name, one in value.items()}

    return read


_read_commit: Final = _read(
    Commit,
    {
        "append": _list_of(_read_node),
        "replace": _or_none(_list_of(_read_node)),
        "leaf": _or_none(_text),
        "checkpoint": _or_none(_read_checkpoint),
        "expected": _or_none(_number),
        "lease": _or_none(_read_lease),
        "release": _flag,
        "turn": _or_none(_text),
        "label": _or_none(_text),
        "usage": _list_of(_read_usage),
        "completes": _list_of(_read_claim),
        "attachments": _list_of(_text),
        "session": _or_none(_text),
        "durability": _or_none(_text),
        "components": _or_none(_map_of(_any)),
        "edits": _or_none(_map_of(_list_of(_read_edit))),
    },
)
_READERS: Final[dict[type, _Kind]] = {
    Lease: _read_lease,
    Claim: _read_claim,
    Commit: _read_commit,
}
