"""Values as trees that a page shows level by level: it loads inner entries when they are opened."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from casstore.cli.payloads import as_json
from casstore.errors import LimitError, PathStep
from casstore.format.canonical import Link
from casstore.objects.diff import Change
from casstore.objects.stored import Stored
from casstore.session.component_formats import Detail
from casstore.ui.texts import cut, one_line

#: The most entries of one level that are listed at once.
ENTRIES: Final = 100
CHANGES: Final = 100
_LINE: Final = 160
_VALUE_CHARACTERS: Final = 1_200
# Texts up to this length are compared line by line.
_TEXT_BYTES: Final = 40_000
_DIFF_LINES: Final = 60
_LINES_AROUND: Final = 2


class ValueBranch(NamedTuple):
    """An entry of a list or a map."""

    name: str
    path: str
    #: A value without entries on one line; None for lists and maps.
    text: str | None
    #: str, number, bytes, link, list, map …
    kind: str
    #: How many entries it has.
    size: int
    #: Of a link: the digest that it names.
    digest: str = ""
    is_changed: bool = False
    #: Its first entries, and how many it has besides; None: the page loads them when asked.
    children: tuple[ValueBranch, ...] | None = None
    more: int = 0


class Level(NamedTuple):
    """Entries of one level, from ``start`` on."""

    branches: tuple[ValueBranch, ...]
    start: int
    total: int

    @property
    def stop(self) -> int:
        """The position after the last entry."""
        return self.start + len(self.branches)


def path_text(path: Sequence[PathStep]) -> str:
    """A path as JSON, for a URL."""
    return json.dumps(list(path), ensure_ascii=True, separators=(",", ":"))


def level(
    stored: Stored,
    path: tuple[PathStep, ...],
    *,
    start: int = 0,
    changed: frozenset[tuple[PathStep, ...]] = frozenset(),
    deeper: int = 0,
    limit: int = ENTRIES,
) -> Level:
    """The entries of a list or map; those of inner ones too, for ``deeper`` levels."""
    total = stored.entry_count() or 0
    branches = [
        branch(str(step), value, (*path, step), changed=changed, deeper=deeper)
        for step, value in islice(stored.entries(), start, start + limit)
    ]
    return Level(tuple(branches), start, total)


def branch(
    name: str,
    value: Any,
    path: tuple[PathStep, ...],
    *,
    changed: frozenset[tuple[PathStep, ...]] = frozenset(),
    deeper: int = 0,
) -> ValueBranch:
    """One entry as the page shows it; its own entries too, for ``deeper`` levels."""
    is_changed = path in changed
    count = value.entry_count() if isinstance(value, Stored) else None
    if count is None:
        begun = value.beginning(4 * _LINE, 4 * _LINE) if isinstance(value, Stored) else value
        if isinstance(begun, Link):
            return ValueBranch(name, path_text(path), "", "link", 0, begun.digest.hex(), is_changed)
        return ValueBranch(
            name, path_text(path), one_line(scalar(begun), _LINE), kind_of(begun), 0, "", is_changed
        )
    assert isinstance(value, Stored)
    is_map = next((isinstance(step, str) for step, _ in value.entries()), True)
    children: tuple[ValueBranch, ...] | None = None
    more = 0
    if deeper > 0 and count:
        inner = level(value, path, changed=changed, deeper=deeper - 1, limit=20)
        children, more = inner.branches, count - len(inner.branches)
    return ValueBranch(
        name, path_text(path), None, "map" if is_map else "list", count, "", is_changed, children,
        more,
    )  # fmt: skip


def kind_of(value: Any) -> str:
    """The type of a value without entries."""
    if value is None or isinstance(value, bool):
        return "constant"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, bytes | bytearray):
        return "bytes"
    if isinstance(value, str):
        return "text"
    return "map" if isinstance(value, dict) else "list" if isinstance(value, list) else "value"


def scalar(value: Any) -> str:
    """A text unchanged, another value as JSON."""
    return value if isinstance(value, str) else as_json(value)


class Line(NamedTuple):
    """A line of a text diff: ``+``, ``-``, a space, or ``@``."""

    sign: str
    text: str


class ShownChange(NamedTuple):
    """A difference between two values, or between two states."""

    op: str
    path: tuple[PathStep, ...]
    before: str | None
    after: str | None
    #: Of texts with several lines, what differs in them.
    lines: tuple[Line, ...]

    @property
    def where(self) -> str:
        """The path as a person writes it."""
        text = ""
        for step in self.path:
            if isinstance(step, int):
                text += f"[{step}]"
            elif step.isidentifier():
                text += f".{step}" if text else step
            else:
                text += f"[{json.dumps(step, ensure_ascii=False)}]"
        return text


def show_difference(
    changes: Sequence[Change],
    details: Mapping[str, Sequence[Detail]],
    failures: Mapping[str, str],
) -> tuple[ShownChange, ...]:
    """The first changes, with their values and texts cut: at most ``CHANGES``, and all failures.

    ``details`` are changes within components, such as files of a workspace; ``failures`` are the
    components that the package of their format could not describe, and why.
    """
    shown = [_shown(change) for change in changes[:CHANGES]]
    described = [one for found in details.values() for one in found]
    shown += [_shown_detail(one) for one in described[: CHANGES - len(shown)]]
    shown += [ShownChange("changed", (name,), None, why, ()) for name, why in failures.items()]
    return tuple(shown)


def _shown_detail(one: Detail) -> ShownChange:
    op = one.kind if one.kind in ("added", "removed") else "changed"
    before = after = None
    if one.old_path is not None:
        before, after = one.old_path, one.path
    elif one.kind == "mode":
        before, after = f"mode {one.old_mode or 0:o}", f"mode {one.new_mode or 0:o}"
    found = one.lines()
    if found[:1] and not found[0].startswith("---"):
        after = found[0]
        found = []
    lines = [Line(line[:1], line[1:]) for line in found[2 : 2 + _DIFF_LINES]]
    if len(found) > 2 + _DIFF_LINES:
        lines.append(Line("@", "…"))
    return ShownChange(op, (one.component, one.path), before, after, tuple(lines))


def _shown(change: Change) -> ShownChange:
    before, after = change.stored_before(), change.stored_after()
    lines: tuple[Line, ...] = ()
    if before is not None and after is not None:
        texts = _whole(before), _whole(after)
        if texts[0] is not None and texts[1] is not None and "\n" in texts[0] + texts[1]:
            lines = tuple(diff_lines(texts[0], texts[1]))
    return ShownChange(change.op, change.path, _value(before), _value(after), lines)


def _whole(stored: Stored) -> str | None:
    try:
        return stored.whole_text(_TEXT_BYTES)
    except LimitError:
        return None


def _value(stored: Stored | None) -> str | None:
    if stored is None:
        return None
    begun = stored.beginning(_VALUE_CHARACTERS, _VALUE_CHARACTERS)
    return cut(scalar(begun), _VALUE_CHARACTERS)


def diff_lines(before: str, after: str) -> Iterator[Line]:
    """What differs between two texts, by lines; long lines and long diffs are cut."""
    found = difflib.unified_diff(
        before.splitlines(), after.splitlines(), n=_LINES_AROUND, lineterm=""
    )
    for count, line in enumerate(islice(found, 2, None)):
        if count == _DIFF_LINES:
            yield Line("@", "…")
            return
        yield Line(line[:1], line[1:401])
