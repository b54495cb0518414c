"""The fields of a command's report: name, unit, label and help, each described once.

A ``Shape`` reads a report object field by field. The JSON document, the text and the tables of
``docs/reference/cli.md`` all come from it. JSON keys are only ever added.

The help of a field that is an attribute of a report's class stands in the docstring of that class,
in its section ``Attributes``; ``described`` takes it from there.

The name of a field carries its unit: ``bytes`` is a part of it, or it ends with ``_ms``, or with
``_at`` for a time, which a report object holds as ``…_at_ms``. Other numbers count things; ``unit``
is the singular of the thing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any, NamedTuple

from casstore.cli.quantities import count, duration, moment, size


class Field(NamedTuple):
    """One field of a report, or with ``fields`` an object or a list of objects."""

    #: Empty: ``described`` takes it from the class of the report.
    help: str = ""
    #: Its label in text; None: only JSON has it.
    label: str | None = None
    #: For a number: the thing that is counted, as in "node".
    unit: str | None = None
    #: Where its value is: an attribute, a path of attributes as in ``head.revision`` (None if a
    #: part of it is None), or a function of the report. None: the attribute of its own name.
    of: str | Callable[[Any], Any] | None = None
    fields: Fields | None = None
    #: In a table: cut this column if the terminal is too narrow. Ids are never cut.
    gives: bool = False


Fields = Mapping[str, "Field | str"]


def nested(help: str, fields: Fields, label: str | None = None, of: Any = None) -> Field:
    """An object inside a report, or a list of objects."""
    return Field(help, label, of=of, fields=fields)


def described(report: type, fields: Fields) -> Fields:
    """The fields, those without help with the description that the class ``report`` has."""
    known = _descriptions(report)
    found: dict[str, Field | str] = {}
    for key, given in fields.items():
        field = as_field(given)
        attribute = field.of.rpartition(".")[2] if isinstance(field.of, str) else key
        text = known.get(attribute) or known.get(f"{attribute}_ms", "")
        found[key] = field if field.help else field._replace(help=text)
    return found


def _descriptions(report: type) -> dict[str, str]:
    """The attributes of a class as its docstring and those of its properties describe them."""
    found: dict[str, str] = {}
    for name, value in vars(report).items():
        if isinstance(value, property) and value.__doc__:
            line = value.__doc__.partition("\n")[0].rstrip(".")
            found[name] = line[0].lower() + line[1:]
    _, _, section = inspect.cleandoc(report.__doc__ or "").partition("\nAttributes:\n")
    for item in re.split(r"\n(?=    \w)", section.rstrip()):
        name, _, text = item.partition(":")
        found[name.strip()] = " ".join(text.split())
    return found


def as_field(given: Field | str) -> Field:
    """A field; a text alone is the help of one that only JSON has."""
    return Field(given) if isinstance(given, str) else given


def document(fields: Fields, report: Any, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The report as JSON. ``more`` has values that the report object lacks."""
    if isinstance(report, Mapping):
        unknown = {*report, *(more or ())} - set(fields)
        assert not unknown, f"fields that the shape does not describe: {sorted(unknown)}"
    found: dict[str, Any] = {}
    for key, given in fields.items():
        field = as_field(given)
        value = more[key] if more and key in more else read(report, key, field)
        if field.fields is not None:
            value = _inside(field.fields, value)
        elif key.endswith("_at") and isinstance(value, int):
            value = moment(value)
        found[key] = value if field.fields is not None else _plain(value)
    return found


def _inside(fields: Fields, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields")):
        return [document(fields, one) for one in value]
    return document(fields, value)


def read(report: Any, key: str, field: Field) -> Any:
    """The value of a field of a report object, or of a document."""
    if isinstance(report, Mapping):
        # A document already, or values that a command has put together by key.
        return report[key]
    if callable(field.of):
        return field.of(report)
    *path, name = (field.of or key).split(".")
    for part in path:
        report = getattr(report, part)
        if report is None:
            return None
    return getattr(report, name) if hasattr(report, name) else getattr(report, f"{name}_ms")


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return value._asdict() if hasattr(value, "_asdict") else [_plain(one) for one in value]
    return value


def shown(key: str, field: Field, value: Any, *, counted: bool = True) -> str:
    """A value of a document as text, with its unit; ``counted``: also the thing it counts."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join([str(one) for one in value])
    if key.endswith("_at"):
        # To the minute in a table, to the second elsewhere.
        return str(value)[: 19 if counted else 16].replace("T", " ")
    if isinstance(value, int | float):
        if "bytes" in key.split("_"):
            return size(value)
        if key.endswith("_ms"):
            return duration(value)
        return count(int(value), field.unit) if field.unit and counted else f"{value:,}"
    return str(value)


def facts(fields: Fields, found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The labelled values of a document that are not None or empty, for ``Printer.facts``."""
    pairs: list[tuple[str, str]] = []
    for key, given in fields.items():
        field, value = as_field(given), found[key]
        if field.label is not None and field.fields is None and value not in (None, [], ""):
            pairs.append((field.label, shown(key, field, value)))
    return pairs


def is_number(key: str, field: Field) -> bool:
    """True if a column of this field is aligned to the right."""
    return field.unit is not None or "bytes" in key.split("_") or key.endswith("_ms")


class Shape(NamedTuple):
    """The report of one command."""

    name: str
    fields: Fields

    @property
    def schema(self) -> str:
        """The value of ``schema`` in the document."""
        return f"casstore.{self.name}/1"

    def document(self, report: Any, **more: Any) -> dict[str, Any]:
        """The whole JSON document."""
        return {"schema": self.schema, **document(self.fields, report, more)}

    def lines(self) -> Iterator[tuple[str, str]]:
        """Each key as a path, and what it means."""
        yield from _lines("", self.fields)


def _lines(prefix: str, fields: Fields) -> Iterator[tuple[str, str]]:
    for key, given in fields.items():
        field = as_field(given)
        yield prefix + key, field.help
        if field.fields is not None:
            yield from _lines(f"{prefix}{key}.", field.fields)


def _remedy(exc: Exception) -> str | None:
    from casstore.cli.advice import advice
    from casstore.errors import CasstoreError

    return advice(exc) if isinstance(exc, CasstoreError) else None


#: The error of a step that reports errors instead of raising them.
PROBLEM = nested(
    "the error that stopped it, null if none did",
    {
        "error": Field("the class of the error", of=lambda exc: type(exc).__name__),
        "message": Field("what is wrong", of=str),
        "try": Field("the next command to try, null if none helps", of=_remedy),
    },
)


ERROR = Shape(
    "error",
    {
        "error": "the class of the error, see `casstore.errors`; `Usage` for a wrong command line",
        "message": "what is wrong",
        "try": "what to do next, null if nothing helps",
        "exit_code": "what the command ends with",
    },
)
