"""Describes the changes of a workspace for comparisons of checkpoints: files, modes, text.

``FORMAT`` is the entry point ``workspace`` of the group ``casstore.components``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from casstore.objects.pieces import PieceReader
from casstore.session.component_formats import ComponentFormat, Detail
from casstore.workspace.beneath import printable
from casstore.workspace.changes import (
    FileChange,
    compare,
    find_changes,
    stored_content,
    text_lines,
)
from casstore.workspace.tree import Directory, Entry, File, TreeReader

# A comparison shows many files, so it shows less of each than ``workspace diff --text``.
_TEXT_BYTES: Final = 128 << 10
_TEXT_LINES: Final = 200
_LINE_CHARACTERS: Final = 400


class WorkspaceFormat(ComponentFormat):
    """Files added, removed, changed and renamed between two snapshots."""

    name = "workspace"

    def details(
        self, reader: PieceReader, component: str, old: bytes | None, new: bytes | None
    ) -> Sequence[Detail]:
        """The changed files in order of path."""
        trees = TreeReader(reader)
        first = None if old is None else trees.root(old).top
        second = None if new is None else trees.root(new).top
        changes = find_changes(compare(trees.entries, first, trees.entries, second))
        return [_detail(reader, component, change) for change in changes]


def _detail(reader: PieceReader, component: str, change: FileChange) -> Detail:
    modes = _mode(change.old), _mode(change.new)
    old_path = None if change.old_path is None else printable(change.old_path)
    found = Detail(component, change.kind, printable(change.path), old_path, *modes)
    if change.kind in ("added", "removed", "changed"):
        found._read = partial(_text, reader, change)
    return found


def _mode(entry: Entry | None) -> int | None:
    return entry.mode if isinstance(entry, File | Directory) else None


def _text(reader: PieceReader, change: FileChange) -> list[str]:
    lines = text_lines(
        change, lambda _, entry: stored_content(reader, entry, _TEXT_BYTES), _TEXT_BYTES
    )
    shown = [line[:_LINE_CHARACTERS] for line in lines[:_TEXT_LINES]]
    if len(lines) > len(shown):
        shown.append(f"… {len(lines) - len(shown)} more lines")
    return shown


FORMAT: Final = WorkspaceFormat()
