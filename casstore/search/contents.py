"""The texts of nodes and components, read from the store with bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from casstore.errors import LimitError
from casstore.format.digest import plain_hash
from casstore.format.graph import Manifest, link_target
from casstore.format.splitting import Encoded
from casstore.objects import graph
from casstore.objects.pieces import PieceReader
from casstore.objects.stored import Stored, open_stored
from casstore.objects.values import BLOB_KINDS, read_value
from casstore.search.texts import MAX_CHARACTERS, text_of
from casstore.session.checkpoint import components_of

# The largest values that are loaded whole. Of a larger one, only the indexed beginning is read.
_WHOLE_BYTES: Final = 32 << 20
_BATCH: Final = 256


def node_texts(reader: PieceReader, digests: Sequence[bytes]) -> Iterator[tuple[str, str]]:
    """The ids and texts of nodes, in order."""
    for start in range(0, len(digests), _BATCH):
        batch = digests[start : start + _BATCH]
        try:
            fields = list(graph.iter_fields(reader, batch, max_bytes=_WHOLE_BYTES))
        except LimitError:
            for digest in batch:
                yield _long_node(reader, digest)
            continue
        for one in fields:
            yield one[0], text_of(one[-1])


def _long_node(reader: PieceReader, digest: bytes) -> tuple[str, str]:
    try:
        [fields] = graph.iter_fields(reader, (digest,), max_bytes=_WHOLE_BYTES)
        return fields[0], text_of(fields[-1])
    except LimitError:
        [node] = graph.stored_nodes(reader, (digest,))
        return node.header.id, text_of(_beginning(node.payload))


def _beginning(value: Any) -> Any:
    return value.beginning(MAX_CHARACTERS) if isinstance(value, Stored) else value


def components(manifest: Manifest) -> Iterator[tuple[str, bytes, Encoded]]:
    """The names of components, the digests of their contents, and the contents themselves."""
    for name, encoded in components_of(manifest).items():
        target = link_target(encoded)
        yield name, plain_hash(encoded.data) if target is None else target, encoded


def component_text(reader: PieceReader, encoded: Encoded) -> str:
    """The text of a component; "" if it is a blob."""
    target = link_target(encoded)
    if target is None:
        [value] = graph.load_encoded(reader, [encoded], max_bytes=_WHOLE_BYTES)
        return text_of(value)
    [item] = reader.follow((target,))
    if item.kind in BLOB_KINDS:
        return ""
    try:
        return text_of(read_value(reader, target, item, max_bytes=_WHOLE_BYTES))
    except LimitError:
        return text_of(open_stored(reader, target, item).beginning(MAX_CHARACTERS))
