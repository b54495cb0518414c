"""Describes changes of a component in the terms of its format, such as files of a workspace.

A component whose value has a field ``format`` with the text ``NAME/VERSION`` belongs to the format
NAME. The package of a format registers a ``ComponentFormat``, which is loaded only when a
comparison finds a component of this format that changed:

    [project.entry-points."casstore.components"]
    workspace = "casstore.workspace.component:FORMAT"

If no installed package registers the format, the component is compared as any value. If the package
fails, it is compared so, too, and the comparison names the package and the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, Protocol, runtime_checkable

from casstore.errors import CasstoreError, PathNotFoundError, UnsafeSnapshotError
from casstore.format.digest import Kind
from casstore.objects.diff import Field
from casstore.objects.pieces import PieceReader
from casstore.objects.stored import open_stored
from casstore.session import entry_points

GROUP: Final = "casstore.components"
_FORMAT_CHARACTERS: Final = 80
_MARKS: Final = {"added": "+", "removed": "-", "renamed": ">"}


class _DetailFields(NamedTuple):
    component: str
    #: ``added``, ``removed``, ``changed``, ``mode`` or ``renamed``.
    kind: str
    path: str
    old_path: str | None
    #: Permission bits, None where the path is absent or has none.
    old_mode: int | None
    new_mode: int | None


class Detail(_DetailFields):
    """One change within a component; its text is read when ``lines`` is called.

    >>> Detail("workspace", "renamed", "b.py", "a.py", 0o644, 0o644).summary
    '> workspace: b.py (from a.py)'
    """

    _read: Callable[[], list[str]] | None = None

    def lines(self) -> list[str]:
        """A unified diff of the text, cut to a maximum length; empty if the content is the same.

        >>> Detail("workspace", "mode", "run.sh", None, 0o644, 0o755).lines()
        []
        """
        return [] if self._read is None else self._read()

    @property
    def summary(self) -> str:
        """The change in one line.

        >>> Detail("workspace", "mode", "run.sh", None, 0o644, 0o755).summary
        '~ workspace: run.sh (mode 644 → 755)'
        """
        notes = []
        if self.old_path is not None:
            notes.append(f"from {self.old_path}")
        modes = self.old_mode, self.new_mode
        if None not in modes and modes[0] != modes[1]:
            notes.append(f"mode {modes[0]:o} → {modes[1]:o}")
        ending = f" ({', '.join(notes)})" if notes else ""
        return f"{_MARKS.get(self.kind, '~')} {self.component}: {self.path}{ending}"

    def __getstate__(self) -> None:
        """Pickle the fields without the function that reads the text."""

    def __str__(self) -> str:
        try:
            return "\n".join([self.summary, *[f"    {line}" for line in self.lines()]])
        except CasstoreError as exc:
            return f"{self.summary} ({type(exc).__name__} while reading its text)"


@runtime_checkable
class ComponentFormat(Protocol):
    """The interface that the package of a format implements.

    >>> class Board:
    ...     name = "board"
    ...     def details(self, reader, component, old, new):
    ...         return [Detail(component, "changed", "the board", None, None, None)]
    >>> isinstance(Board(), ComponentFormat)
    True
    """

    name: str

    def details(
        self, reader: PieceReader, component: str, old: bytes | None, new: bytes | None
    ) -> Sequence[Detail]:
        """What changed between two values of the format, by digest; None: absent."""
        ...


class Described(NamedTuple):
    """The changes of the components whose formats are known."""

    #: By component.
    details: dict[str, tuple[Detail, ...]]
    #: By component, why the package of its format could not describe the changes.
    failures: dict[str, str]


def describe_fields(reader: PieceReader, fields: Iterable[tuple[str, Field, Field]]) -> Described:
    """The changes of each component that an installed format describes."""
    details = {}
    failures = {}
    for component, old, new in fields:
        found = _describe(reader, component, old, new)
        if isinstance(found, str):
            failures[component] = found
        elif found is not None:
            details[component] = found
    return Described(details, failures)


def _describe(
    reader: PieceReader, component: str, old: Field, new: Field
) -> tuple[Detail, ...] | str | None:
    """The changes of a component; a text says why its package failed; None: no format has it.

    ``old`` and ``new`` are the digests of its values; a value of another type is not described.
    """
    if old == new or not isinstance(old, bytes | None) or not isinstance(new, bytes | None):
        return None
    names = {_format_name(reader, digest) for digest in (old, new) if digest is not None}
    if len(names) != 1 or not (name := names.pop()):
        return None
    values = entry_points.registered(GROUP, name)
    if not values:
        return None
    if len(values) > 1:
        return f"several packages register the format {name!r}: {', '.join(values)}"
    try:
        found = entry_points.imported(GROUP, values[0])
        if not isinstance(found, ComponentFormat):
            return f"{values[0]} of the format {name!r} is not a ComponentFormat"
        return tuple(found.details(reader, component, old, new))
    except UnsafeSnapshotError:
        # The value only looks like one of the format.
        return None
    except CasstoreError:
        raise
    except Exception as exc:
        # Code of any package may raise anything. The plain values are compared nevertheless.
        return f"{values[0]} of the format {name!r} failed: {type(exc).__name__}: {exc}"


def _format_name(reader: PieceReader, digest: bytes) -> str:
    """The name of the format of a value, "" if it has none."""
    item = reader.get(digest)
    if item.kind not in (Kind.VALUE, Kind.MAP):
        return ""
    stored = open_stored(reader, digest, item)
    if not stored.is_map():
        return ""
    try:
        said = stored.at(("format",)).beginning(_FORMAT_CHARACTERS)
    except PathNotFoundError:
        return ""
    return said.partition("/")[0] if type(said) is str else ""
