"""Restores a directory to a snapshot: first a plan, then its execution.

The plan compares three states of each path that differs from the target: the file as it is, as
the target has it, and as the base snapshots have it. A base is a snapshot that the directory may
hold, file by file: the newest one of the session, and the last one taken of or restored into the
directory. A file that equals its base can be overwritten, because the store gives it back. Any
other file is a conflict, and one conflict stops the restore before anything is touched.

Rules, each with the failure that it prevents:

1. Every open goes down from the root without following links (``beneath``), and every name of a
   snapshot is checked (``tree.name_of``): nothing outside the directory is touched.
2. A file is written under a temporary name and renamed: killed anywhere, each file is the old one
   or the new one. A killed restore leaves temporary files (``parts``), and the next one removes
   them. A lock on the directory excludes another restore, which may still be writing its own.
3. Before the first change the target joins the bases in the cache: after a kill, files that are
   restored already are not conflicts.
4. A file is compared with the plan once more before it is replaced or deleted: what another
   process changed since the plan was made is a conflict.
5. With ``force`` the present state is stored and pinned first, ignored files that would be lost
   included. A directory with other ignored files in it is never replaced.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from casstore.engine.files import open_regular, storage_error
from casstore.engine.protocol import Engine
from casstore.errors import CorruptionError, RestoreConflictError
from casstore.format.digest import Digest
from casstore.objects.blobs import BlobReader
from casstore.objects.pieces import PieceReader
from casstore.workspace.beneath import Beneath, Parts, shown
from casstore.workspace.changes import PathDifference, ReadEntries, compare
from casstore.workspace.scan import HashingSink, Scanned
from casstore.workspace.tree import (
    MODE_BITS,
    PART,
    Directory,
    Entries,
    Entry,
    File,
    SnapshotRoot,
    Symlink,
    TreeReader,
)

_TOKEN_BYTES: Final = 16
_COPY_BYTES: Final = 1 << 18
# Each block of this size that has only zeros becomes a hole in the file.
_HOLE_BYTES: Final = 1 << 16
_ZEROS: Final = bytes(_HOLE_BYTES)
_ABSENT: Final = frozenset((errno.ENOENT, errno.ENOTDIR))


class Conflict(NamedTuple):
    """A path that prevents a restore.

    >>> Conflict("a.py", "changed since the last snapshot", can_force=True).path
    'a.py'
    """

    path: str
    reason: str
    #: Whether ``force`` would overwrite it.
    can_force: bool


class RestorePlan(NamedTuple):
    """The changes that a restore would make. Paths are relative to the directory, and sorted.

    >>> from casstore.workspace import Workspace
    >>> files = place / "files"
    >>> files.mkdir()
    >>> size = (files / "a.py").write_text("pass")
    >>> ws = Workspace(files)
    >>> result = ws.commit(session)
    >>> size = (files / "a.py").write_text("changed since")
    >>> plan = ws.plan_restore(session)
    >>> plan.changed, [conflict.reason for conflict in plan.conflicts]
    (('a.py',), ['changed since the last snapshot'])
    """

    target: Digest
    #: Files, links and directories that are missing.
    created: tuple[str, ...]
    #: Files and links that differ, and directories whose modes do.
    changed: tuple[str, ...]
    deleted: tuple[str, ...]
    #: Paths in no base snapshot that are not in the way: kept, unless the restore is forced.
    untracked: tuple[str, ...]
    conflicts: tuple[Conflict, ...]
    #: What to do, parents first.
    steps: tuple[PathDifference, ...]
    untracked_steps: tuple[PathDifference, ...]
    #: Temporary files of an interrupted restore, to be deleted.
    parts: tuple[Parts, ...]

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to restore; the directory may have untracked files.

        >>> from casstore.workspace import Workspace
        >>> files = place / "files"
        >>> files.mkdir()
        >>> result = Workspace(files).commit(session)
        >>> Workspace(files).plan_restore(session).is_empty
        True
        """
        return not self.steps


class RestoreReport(NamedTuple):
    """The result of a restore.

    >>> from casstore.workspace import Workspace
    >>> files = place / "files"
    >>> files.mkdir()
    >>> ws = Workspace(files)
    >>> result = ws.commit(session)
    >>> report = ws.restore(session)
    >>> report.created, report.changed, report.deleted, report.saved
    (0, 0, 0, None)
    """

    target: Digest
    created: int
    changed: int
    deleted: int
    bytes_written: int
    #: Directories that should be deleted but still hold files that no snapshot has.
    kept: tuple[str, ...]
    #: The snapshot of the state before a forced restore, and the pin that keeps it.
    saved: Digest | None = None
    saved_pin: str | None = None


class Bases:
    """Looks paths up in the base snapshots."""

    def __init__(self, read: ReadEntries, roots: Sequence[SnapshotRoot]) -> None:
        self._read = read
        self._tops = [root.top for root in roots]
        self._known: dict[tuple[int, Parts], Entries] = {}

    def find(self, parts: Parts) -> list[Entry]:
        """The entries at a path, one for each base that has the path."""
        found = []
        for at in range(len(self._tops)):
            entry = self._entries(at, parts[:-1]).get(parts[-1])
            if entry is not None:
                found.append(entry)
        return found

    def _entries(self, at: int, parts: Parts) -> Entries:
        depth = len(parts)
        while depth and (at, parts[:depth]) not in self._known:
            depth -= 1
        if not depth and (at, ()) not in self._known:
            self._known[at, ()] = self._read(self._tops[at].digest, ())
        for level in range(depth, len(parts)):
            entry = self._known[at, parts[:level]].get(parts[level])
            below = parts[: level + 1]
            self._known[at, below] = (
                self._read(entry.digest, below) if isinstance(entry, Directory) else {}
            )
        return self._known[at, parts]


# --- planning -----------------------------------------------------------------------------------


def make_plan(
    beneath: Beneath,
    reader: TreeReader,
    target: SnapshotRoot,
    bases: Bases,
    now: Scanned,
    sink: HashingSink,
    store: tuple[int, int] | None,
) -> RestorePlan:
    """The changes that turn the directory, as scanned in ``now``, into ``target``.

    ``store`` is the device and inode of the store's directory, which is never restored into.
    """

    def read_now(digest: bytes, parts: Parts) -> Entries:
        known = sink.maps.get(digest)
        return reader.entries(digest, parts) if known is None else known

    return _RestorePlanner(beneath, bases, now, store).plan(
        target, compare(read_now, now.top, reader.entries, target.top)
    )


class _RestorePlanner:
    def __init__(
        self, beneath: Beneath, bases: Bases, now: Scanned, store: tuple[int, int] | None
    ) -> None:
        self._beneath = beneath
        self._bases = bases
        self._now = now
        self._store = store
        self._steps: list[PathDifference] = []
        self._untracked: list[PathDifference] = []
        self._conflicts: list[Conflict] = []
        # The last path that does not exist: the paths below it need not be looked up.
        self._missing: Parts | None = None
        # The last directory that is replaced by another kind of entry: everything in it is deleted.
        self._replaced: Parts | None = None

    def plan(self, target: SnapshotRoot, differences: Iterable[PathDifference]) -> RestorePlan:
        for found in differences:
            self._add(found)
        steps = self._steps
        return RestorePlan(
            target=target.digest,
            created=tuple([shown(step.parts) for step in steps if step.old is None]),
            changed=tuple(
                [shown(step.parts) for step in steps if None not in (step.old, step.new)]
            ),
            deleted=tuple([shown(step.parts) for step in steps if step.new is None]),
            untracked=tuple([shown(step.parts) for step in self._untracked]),
            conflicts=tuple(self._conflicts),
            steps=tuple(steps),
            untracked_steps=tuple(self._untracked),
            parts=self._now.parts,
        )

    def _add(self, found: PathDifference) -> None:
        parts, old, new = found
        if old is None:
            old = self._hidden(parts)
            if old is _UNKNOWN:
                return
            if old == new:
                return  # ignored, and equal to the target
            found = PathDifference(parts, old, new)
            if isinstance(old, Directory) and not isinstance(new, Directory):
                self._conflicts.append(Conflict(shown(parts), "an ignored directory", False))
                return
        if new is None:
            goes = self._replaced is not None and parts[: len(self._replaced)] == self._replaced
            if not goes and not self._bases.find(parts):
                self._untracked.append(found)
                return
        elif isinstance(old, Directory) and not isinstance(new, Directory):
            self._replaced = parts
            self._refuse_ignored(parts)
        self._steps.append(found)
        if old is not None and not self._is_known(parts, old, new):
            self._conflicts.append(
                Conflict(shown(parts), "changed since the last snapshot", can_force=True)
            )

    def _is_known(self, parts: Parts, old: Entry, new: Entry | None) -> bool:
        """Whether the store has the content that would be overwritten."""
        found = self._bases.find(parts)
        if isinstance(old, Directory):
            # Compare the kind only: a restore that was killed may have left another mode.
            return isinstance(new, Directory) or any(isinstance(one, Directory) for one in found)
        return old in found

    def _hidden(self, parts: Parts) -> Entry | None:
        """The entry at a path that is not in the scan; None if nothing is there.

        _UNKNOWN, and a conflict is added, if it cannot be replaced.
        """
        missing = self._missing
        if missing is not None and parts[: len(missing)] == missing:
            return None
        try:
            above = self._beneath.open(parts[:-1])
            status = os.stat(parts[-1], dir_fd=above, follow_symlinks=False)
        except OSError as exc:
            if exc.errno in _ABSENT or exc.errno == errno.ELOOP:
                # ELOOP: a link is in place of a parent directory, which is a difference of its own.
                self._missing = parts
                return None
            raise storage_error(f"cannot read {shown(parts)}", exc) from exc
        if (status.st_dev, status.st_ino) == self._store:
            self._conflicts.append(Conflict(shown(parts), "the store itself", can_force=False))
            return _UNKNOWN
        try:
            entry = read_entry(above, parts[-1], status)
        except OSError as exc:
            raise storage_error(f"cannot read {shown(parts)}", exc) from exc
        if entry is None:
            self._conflicts.append(
                Conflict(shown(parts), "neither a file, a directory nor a link", can_force=False)
            )
            return _UNKNOWN
        return entry

    def _refuse_ignored(self, parts: Parts) -> None:
        depth = len(parts)
        for place, record in self._now.records.items():
            if place[:depth] == parts and (record.ignored or record.left_out):
                held = next(iter([*record.ignored, *record.left_out]))
                self._conflicts.append(
                    Conflict(
                        shown(parts),
                        f"holds {shown((*place, held))}, which no snapshot has; move it away",
                        can_force=False,
                    )
                )
                return


#: Stands for an entry that no snapshot can hold.
_UNKNOWN: Final = Symlink(b"")


def read_entry(above: int, name: str, status: os.stat_result) -> Entry | None:
    """The entry at a path, by its content; None if no snapshot can hold it. Raises OSError."""
    mode = status.st_mode & MODE_BITS
    if stat.S_ISREG(status.st_mode):
        handle = open_regular(name, dir_fd=above)
        try:
            digest, size = HashingSink().content(handle, os.fstat(handle).st_size)
        finally:
            os.close(handle)
        return File(mode, size, digest)
    if stat.S_ISLNK(status.st_mode):
        return Symlink(os.fsencode(os.readlink(name, dir_fd=above)))
    # Only the kind of an ignored directory is used, so its map is not hashed.
    return Directory(mode, Digest(bytes(32))) if stat.S_ISDIR(status.st_mode) else None


# --- executing ----------------------------------------------------------------------------------


def execute(beneath: Beneath, engine: Engine, plan: RestorePlan, *, force: bool) -> RestoreReport:
    """Execute a plan; the caller holds the lock of ``beneath``."""
    # Open all directories again: one may have been moved away since the plan was made.
    beneath.forget(())
    return _RestoreExecution(beneath, engine, plan, force=force).run()


@contextmanager
def _restoring(parts: Parts) -> Iterator[None]:
    """Name the path in an error of the operating system, and the remedy."""
    try:
        yield
    except OSError as exc:
        raise storage_error(f"cannot restore {shown(parts)}; restore again to finish", exc) from exc


class _RestoreExecution:
    def __init__(self, beneath: Beneath, engine: Engine, plan: RestorePlan, *, force: bool) -> None:
        self._beneath = beneath
        self._reader = PieceReader(engine)
        self._plan = plan
        self._force = force
        self._bytes_written = 0
        self._kept: list[str] = []
        #: The modes to set on directories after their content is restored.
        self._modes: dict[Parts, int] = {}
        self._writable: set[Parts] = set()

    def run(self) -> RestoreReport:
        plan = self._plan
        steps = list(plan.steps)
        if self._force:
            steps = sorted([*steps, *plan.untracked_steps])
        for parts in plan.parts:
            with _restoring(parts):
                self._unlink(parts)
        # Delete first, children before parents: a file may be where a directory is to be created.
        for step in reversed(steps):
            if step.old is not None and not _replaces(step):
                with _restoring(step.parts):
                    self._remove(step)
        for step in steps:
            if step.new is not None:
                with _restoring(step.parts):
                    self._put(step)
        for parts, mode in sorted(self._modes.items(), reverse=True):
            with _restoring(parts):
                os.fchmod(self._beneath.open(parts), mode)
        return RestoreReport(
            target=plan.target,
            created=len(plan.created),
            changed=len(plan.changed),
            deleted=len(plan.deleted) + (len(plan.untracked) if self._force else 0),
            bytes_written=self._bytes_written,
            kept=tuple(self._kept),
        )

    # --- deleting ---------------------------------------------------------------------------

    def _remove(self, step: PathDifference) -> None:
        parts, old, new = step
        if not isinstance(old, Directory):
            self._require_planned(step)
            self._unlink(parts)
            return
        above = self._above(parts)
        self._beneath.forget(parts)
        try:
            os.rmdir(parts[-1], dir_fd=above)
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            if new is not None:
                raise RestoreConflictError(
                    [(shown(parts), "holds files that no snapshot has; move them away")]
                ) from exc
            self._kept.append(shown(parts))

    def _unlink(self, parts: Parts) -> None:
        with suppress(FileNotFoundError):
            os.unlink(parts[-1], dir_fd=self._above(parts))

    def _above(self, parts: Parts) -> int:
        """The descriptor of the directory of a path, made writable until the restore ends."""
        above = parts[:-1]
        handle = self._beneath.open(above)
        if above not in self._writable:
            mode = os.fstat(handle).st_mode & MODE_BITS
            if mode & 0o300 != 0o300:
                os.fchmod(handle, mode | 0o700)
                self._modes.setdefault(above, mode)
            self._writable.add(above)
        return handle

    def _require_planned(self, step: PathDifference) -> None:
        """Raise RestoreConflictError if a path is not what the plan saw there."""
        parts, old, _ = step
        above = self._beneath.open(parts[:-1])
        try:
            status = os.stat(parts[-1], dir_fd=above, follow_symlinks=False)
            now = read_entry(above, parts[-1], status)
        except FileNotFoundError:
            now = None
        if now != old:
            raise RestoreConflictError([(shown(parts), "changed while it was being restored")])

    # --- creating and replacing -------------------------------------------------------------

    def _put(self, step: PathDifference) -> None:
        parts, old, new = step
        above = self._above(parts)
        if isinstance(new, Directory):
            if not isinstance(old, Directory):
                os.mkdir(parts[-1], 0o700, dir_fd=above)
                self._writable.add(parts)
            self._modes[parts] = new.mode
            return
        part = PART + secrets.token_hex(_TOKEN_BYTES)
        replaces = _replaces(step)
        try:
            if isinstance(new, Symlink):
                os.symlink(new.target, os.fsencode(part), dir_fd=above)
            else:
                assert isinstance(new, File)
                self._write(above, part, new, flush=replaces)
            # If the step is not one rename, nothing may be here: a directory is removed by now.
            self._require_planned(step if replaces else PathDifference(parts, None, new))
            os.rename(part, parts[-1], src_dir_fd=above, dst_dir_fd=above)
        except BaseException:
            with suppress(OSError):
                os.unlink(part, dir_fd=above)
            raise

    def _write(self, above: int, part: str, entry: File, *, flush: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        handle = os.open(part, flags, 0o600, dir_fd=above)
        try:
            source = BlobReader(self._reader, entry.digest, self._reader.follow((entry.digest,))[0])
            if source.size_bytes != entry.size_bytes:
                raise CorruptionError(
                    f"blob {entry.digest.hex()} has {source.size_bytes} bytes, and the snapshot "
                    f"says {entry.size_bytes}"
                )
            self._copy(source, handle)
            os.fchmod(handle, entry.mode)
            if flush:
                # After a power loss the name must not refer to a file without its content.
                os.fsync(handle)
        finally:
            os.close(handle)
        self._bytes_written += entry.size_bytes

    def _copy(self, source: BlobReader, handle: int) -> None:
        buffer = bytearray(_COPY_BYTES)
        view = memoryview(buffer)
        offset = 0
        while read := _fill(source, view):
            for start in range(0, read, _HOLE_BYTES):
                block = view[start : min(start + _HOLE_BYTES, read)]
                if len(block) < _HOLE_BYTES or block != _ZEROS:
                    rest, at = block, offset + start
                    while rest:
                        written = os.pwrite(handle, rest, at)
                        rest, at = rest[written:], at + written
            offset += read
        os.ftruncate(handle, offset)


def _fill(source: BlobReader, view: memoryview) -> int:
    read = 0
    while read < len(view):
        part = source.readinto(view[read:])
        if not part:
            break
        read += part
    return read


def _replaces(step: PathDifference) -> bool:
    """Whether the step needs no deletion: the directory stays, or one rename replaces the entry."""
    _, old, new = step
    if old is None or new is None:
        return False
    return isinstance(old, Directory) == isinstance(new, Directory)


def forced_conflicts(plan: RestorePlan, *, force: bool) -> list[tuple[str, str]]:
    """The conflicts that stop a restore; with ``force``, only those that cannot be forced."""
    return [
        (conflict.path, conflict.reason)
        for conflict in plan.conflicts
        if not (force and conflict.can_force)
    ]
