"""The index configuration of a ``CasstoreStore``: which texts of an item are embedded, and by what.

Texts are extracted with LangGraph's own functions, so that an item has the same vectors as in
LangGraph's stores.
"""

from __future__ import annotations

import asyncio
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from math import isfinite
from typing import Any, Final

from langchain_core.embeddings import Embeddings
from langgraph.store.base import (
    IndexConfig,
    PutOp,
    ensure_embeddings,
    get_text_at_path,
    tokenize_path,
)

from casstore.adapters.langgraph.item_records import INDEX_KEY, IndexRow
from casstore.errors import InvalidInputError, VectorIndexChangedError
from casstore.session.arguments import check_count

_WHOLE: Final = "$"
_MAX_DIMS: Final = 65_536
# The attributes in which the Embeddings of LangChain's packages have the name of their model.
_MODEL_ATTRIBUTES: Final = ("model", "model_name", "model_id", "deployment")

#: Vectors by text: of documents and of queries, which a model may embed differently.
Embedded = Mapping[str, Sequence[float]]


class Distance(StrEnum):
    """How vectors are compared. The vectors that are stored do not depend on it."""

    COSINE = "cosine"
    L2 = "l2"
    INNER_PRODUCT = "inner_product"


class VectorIndex:
    """An index configuration: the embedder, the size of its vectors and the default fields."""

    def __init__(self, config: IndexConfig) -> None:
        embed = config.get("embed")
        if embed is None:
            raise InvalidInputError("index must have 'embed': an embedder or a function")
        dims: Any = config.get("dims")
        check_count(dims, "dims", least=1, most=_MAX_DIMS)
        fields = config.get("fields") or [_WHOLE]
        if isinstance(fields, str) or not all(type(field) is str for field in fields):
            raise InvalidInputError(f"fields must be a list of texts, got {fields!r:.80}")
        # As in PostgresStore; the other stores of LangGraph use the cosine only.
        distance = config.get("distance_type") or Distance.COSINE
        if distance not in [*Distance]:
            raise InvalidInputError(
                f"distance_type must be one of {', '.join(Distance)}, got {distance!r:.80}"
            )
        self.distance = Distance(str(distance))
        self.embeddings: Embeddings = ensure_embeddings(embed)
        self.dims: int = dims
        self.fields = tuple(fields)
        self.description = IndexRow(INDEX_KEY, "", embedder_name(embed), dims, self.fields)
        self._tokens = {field: _tokens(field) for field in self.fields}

    def require(self, found: IndexRow | None) -> None:
        """Raise VectorIndexChangedError if a store's vectors are of another index."""
        if found is not None and not found.is_like(self.description):
            raise VectorIndexChangedError(str(found), str(self.description))

    def texts(self, value: Any, fields: Iterable[str] | None) -> list[str]:
        """The texts of an item to embed; ``fields`` as given to ``put``, None: the default."""
        found: list[str] = []
        for field in self.fields if fields is None else fields:
            tokens = self._tokens.get(field)
            found += get_text_at_path(value, _tokens(field) if tokens is None else tokens)
        return found

    def named_texts(self, value: Any) -> list[tuple[str, str]]:
        """The texts of the default fields, by the names that LangGraph's databases give them."""
        found: list[tuple[str, str]] = []
        for field, tokens in self._tokens.items():
            texts = get_text_at_path(value, tokens)
            several = len(texts) > 1
            found += [(f"{field}.{n}" if several else field, text) for n, text in enumerate(texts)]
        return found

    # --- embedding ----------------------------------------------------------------------

    def embed(self, texts: Sequence[str]) -> Embedded:
        """The vectors of documents; each text is embedded once."""
        distinct = list(dict.fromkeys(texts))
        return self._paired(distinct, self.embeddings.embed_documents(distinct) if texts else ())

    async def aembed(self, texts: Sequence[str]) -> Embedded:
        """As ``embed``, by the asynchronous method of the embedder."""
        distinct = list(dict.fromkeys(texts))
        vectors = await self.embeddings.aembed_documents(distinct) if texts else ()
        return self._paired(distinct, vectors)

    def embed_queries(self, queries: Iterable[str]) -> Embedded:
        """The vectors of queries; each is embedded once."""
        distinct = list(dict.fromkeys(queries))
        return self._paired(distinct, [self.embeddings.embed_query(query) for query in distinct])

    async def aembed_queries(self, queries: Iterable[str]) -> Embedded:
        """As ``embed_queries``, by the asynchronous method of the embedder, concurrently."""
        distinct = list(dict.fromkeys(queries))
        embed = self.embeddings.aembed_query
        return self._paired(distinct, await asyncio.gather(*[embed(query) for query in distinct]))

    def _paired(self, texts: Sequence[str], vectors: Sequence[Sequence[float]]) -> Embedded:
        if len(vectors) != len(texts):
            raise InvalidInputError(
                f"embed must return a vector for each text, got {len(vectors)} for {len(texts)}"
            )
        for vector in vectors:
            if len(vector) != self.dims:
                raise InvalidInputError(
                    f"embed must return vectors of {self.dims} dims, got {len(vector)}"
                )
        return dict(zip(texts, vectors, strict=True))


def packed(vectors: Iterable[Sequence[float]]) -> bytes:
    """Vectors as they are stored: float32, one after the other."""
    floats = array("f")
    try:
        for vector in vectors:
            floats.extend(vector if isinstance(vector, list) else map(float, vector))
    except (OverflowError, TypeError, ValueError) as exc:
        raise InvalidInputError(f"embed must return vectors of numbers: {exc}") from exc
    if not isfinite(sum(floats)):
        raise InvalidInputError("embed must return finite numbers that fit in float32")
    if sys.byteorder == "big":
        floats.byteswap()
    return floats.tobytes()


def fields_of(op: PutOp) -> tuple[str, ...] | None:
    """The fields that a put asks to index, as an item's row holds them."""
    if op.index is None:
        return None
    if op.index is False:
        return ()
    if isinstance(op.index, str) or not all(type(field) is str for field in op.index):
        raise InvalidInputError(f"index must be a list of fields or False, got {op.index!r:.80}")
    return tuple(op.index)


def embedder_name(embed: Any) -> str:
    """A name for an embedder that is different for another model, as far as attributes show it."""
    if isinstance(embed, str):
        return embed
    if isinstance(embed, partial):
        return embedder_name(embed.func)
    if isinstance(embed, Embeddings) or not hasattr(embed, "__qualname__"):
        kind = type(embed)
        name = f"{kind.__module__}.{kind.__qualname__}"
        models = [getattr(embed, attribute, None) for attribute in _MODEL_ATTRIBUTES]
        return ":".join([name, *[model for model in models if isinstance(model, str)][:1]])
    return f"{embed.__module__}.{embed.__qualname__}"


def _tokens(field: str) -> str | list[str]:
    return field if field == _WHOLE else tokenize_path(field)
