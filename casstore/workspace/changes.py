"""What differs between two trees: reads only the directories whose digests differ.

``compare`` is the walk that diff, status and restore share. ``find_changes`` turns its result into
the list that users see: files added, removed, changed, and renamed with equal content.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from casstore.errors import LimitError
from casstore.objects import blobs
from casstore.objects.pieces import PieceReader
from casstore.workspace.beneath import Parts, shown
from casstore.workspace.tree import Directory, Entries, Entry, File, Symlink

#: Reads the entries of a directory, given its digest, and its path for error messages.
ReadEntries = Callable[[bytes, Parts], Entries]
_NOTHING: Final[Entries] = {}
_TEXT_BYTES: Final = 1 << 20


class PathDifference(NamedTuple):
    """A path at which two trees differ: the entry in each; None where the path does not exist."""

    parts: Parts
    old: Entry | None
    new: Entry | None


def compare(
    read_old: ReadEntries, old: Directory | None, read_new: ReadEntries, new: Directory | None
) -> Iterator[PathDifference]:
    """Every path that differs, directories before what is in them.

    A directory that both have is reported if its mode differs; one that only one side has is
    reported with everything below it.
    """
    ahead: list[PathDifference] = [PathDifference((), old, new)]
    while ahead:
        parts, before, after = found = ahead.pop()
        if before == after:
            continue
        first = second = _NOTHING
        if isinstance(before, Directory):
            first = read_old(before.digest, parts)
        if isinstance(after, Directory):
            second = read_new(after.digest, parts)
        is_kept = (
            isinstance(before, Directory)
            and isinstance(after, Directory)
            and before.mode == after.mode
        )
        if parts and not is_kept:
            yield found
        names = sorted(first.keys() | second.keys(), reverse=True)
        for name in names:
            one, other = first.get(name), second.get(name)
            if one != other:
                ahead.append(PathDifference((*parts, name), one, other))


class FileChange(NamedTuple):
    """One change of a file, link or directory.

    ``kind`` is ``added``, ``removed``, ``changed`` (other content, target or kind of file),
    ``mode`` (the same content) or ``renamed`` (from ``old_path``, with equal content).

    >>> from casstore.workspace import Workspace
    >>> files = place / "files"
    >>> files.mkdir()
    >>> result = Workspace(files).commit(session)
    >>> size = (files / "a.py").write_text("pass")
    >>> [(change.kind, change.path) for change in Workspace(files).status(session)]
    [('added', 'a.py')]
    """

    kind: str
    path: str
    old: Entry | None
    new: Entry | None
    old_path: str | None = None


def find_changes(differences: Iterator[PathDifference]) -> list[FileChange]:
    """The changes in order of path; pairs of equal content become renames."""
    found: list[FileChange] = []
    for parts, old, new in differences:
        path = shown(parts)
        if old is None:
            found.append(FileChange("added", path, None, new))
        elif new is None:
            found.append(FileChange("removed", path, old, None))
        else:
            found.append(FileChange(_kind(old, new), path, old, new))
    return _pair_renames(found)


def _kind(old: Entry, new: Entry) -> str:
    if isinstance(old, File) and isinstance(new, File):
        return "mode" if old.digest == new.digest else "changed"
    both = isinstance(old, Directory) and isinstance(new, Directory)
    return "mode" if both else "changed"


def _pair_renames(found: list[FileChange]) -> list[FileChange]:
    gone: dict[bytes, list[FileChange]] = {}
    for change in found:
        old = change.old
        # Empty files are not paired: equal content does not show that one was renamed.
        if change.kind == "removed" and isinstance(old, File) and old.size_bytes:
            gone.setdefault(old.digest, []).append(change)
    renamed: dict[str, FileChange] = {}
    sources: set[str] = set()
    for change in found:
        new = change.new
        if change.kind == "added" and isinstance(new, File) and gone.get(new.digest):
            source = gone[new.digest].pop(0)
            sources.add(source.path)
            renamed[change.path] = FileChange("renamed", change.path, source.old, new, source.path)
    return [
        renamed.get(change.path, change)
        for change in found
        if not (change.kind == "removed" and change.path in sources)
    ]


# --- text -------------------------------------------------------------------------------------


def text_lines(
    change: FileChange,
    read: Callable[[FileChange, Entry], bytes | None],
    max_bytes: int = _TEXT_BYTES,
) -> list[str]:
    """A change as lines of a unified diff; ``read`` returns contents, None for a directory."""
    before = change.old_path or change.path
    old = "/dev/null" if change.old is None else f"a/{before}"
    new = "/dev/null" if change.new is None else f"b/{change.path}"
    first = _lines(None if change.old is None else read(change, change.old), max_bytes)
    second = _lines(None if change.new is None else read(change, change.new), max_bytes)
    if first is None or second is None:
        return [f"binary or long files differ: {old} {new}"]
    lines = difflib.unified_diff(first, second, old, new, lineterm="")
    return [line.rstrip("\n") for line in lines]


def _lines(content: bytes | None, max_bytes: int) -> list[str] | None:
    if content is None:
        return []
    if b"\0" in content or len(content) > max_bytes:
        return None
    try:
        return content.decode().splitlines(keepends=True)
    except UnicodeDecodeError:
        return None


def stored_content(reader: PieceReader, entry: Entry, max_bytes: int = _TEXT_BYTES) -> bytes | None:
    """The content of an entry for a text diff; None for a directory.

    A file longer than ``max_bytes`` gives a NUL byte, so that ``text_lines`` treats it as binary.
    """
    if isinstance(entry, Symlink):
        return entry.target
    if isinstance(entry, Directory):
        return None
    try:
        item = reader.get(entry.digest)
        return blobs.read_blob(reader, entry.digest, item, max_bytes=max_bytes)
    except LimitError:
        return b"\0"
