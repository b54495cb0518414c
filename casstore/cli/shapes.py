"""The shape of a command's JSON: which keys it has and what they mean.

A shape is documentation that cannot go stale: ``docs/cli.md`` is made from it, and every
document is compared with it before it is printed. Keys are only ever added.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Part(NamedTuple):
    """An object inside another, or a list of objects: what it means and what it has."""

    meaning: str
    fields: Mapping[str, str | Part]


Fields = Mapping[str, str | Part]


class Shape(NamedTuple):
    """The JSON of one command."""

    name: str
    fields: Fields

    @property
    def schema(self) -> str:
        """What the document says it is."""
        return f"casstore.{self.name}/1"

    def document(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """The document with this data, which must have exactly the keys of the shape."""
        _compare(self.name, self.fields, data)
        return {"schema": self.schema, **data}

    def lines(self) -> Iterator[tuple[str, str]]:
        """Each key as a path, and what it means."""
        yield from _lines("", self.fields)


def _compare(where: str, fields: Fields, data: Mapping[str, Any]) -> None:
    assert set(fields) == set(data), f"{where}: {sorted(set(fields) ^ set(data))}"
    for key, field in fields.items():
        if isinstance(field, Part):
            found = data[key]
            for item in found if isinstance(found, list) else [found]:
                if item is not None:
                    _compare(f"{where}.{key}", field.fields, item)


def _lines(prefix: str, fields: Fields) -> Iterator[tuple[str, str]]:
    for key, field in fields.items():
        if isinstance(field, Part):
            yield prefix + key, field.meaning
            yield from _lines(f"{prefix}{key}.", field.fields)
        else:
            yield prefix + key, field


ERROR = Shape(
    "error",
    {
        "error": "the class of the error, see `casstore.errors`; `Usage` for a wrong command line",
        "message": "what is wrong",
        "try": "what to do next, null if nothing helps",
        "exit_code": "what the command ends with",
    },
)
