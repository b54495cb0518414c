"""Scans a directory into the maps of a snapshot, reading only changed files.

``scan`` lists every directory and compares names and stamps with the cache. Files that differ are
read and passed to a sink: ``StoringSink`` stores them, ``HashingSink`` only computes digests. A
directory in which nothing differs keeps the digest that it had.

No link is followed and no file is opened that is not a regular one. A file that changes while it
is read is read again, ``READ_ATTEMPTS`` times in all; then the last bytes are taken, the file is
named in ``Scanned.unstable``, and the next scan reads it again. What vanishes during the scan is
taken to have been absent; if the root vanishes, WorkspaceNotFoundError is raised.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from typing import BinaryIO, Final, NamedTuple, Protocol, cast

from casstore.engine.files import open_regular, storage_error
from casstore.engine.protocol import Engine, Write
from casstore.errors import (
    CasstoreError,
    UnreadablePathError,
    WorkspaceNotFoundError,
)
from casstore.format import splitting
from casstore.format.digest import BlobHasher, Digest, Kind, name_piece
from casstore.maintenance.progress import Progress, Step
from casstore.objects import blobs
from casstore.objects.pieces import PieceWriter
from casstore.workspace.beneath import Beneath, Parts, shown
from casstore.workspace.cache import NO_STAMP, RACY_NS, STAMP, CachedDirectory, Records
from casstore.workspace.rules import GITIGNORE, Rules
from casstore.workspace.tree import (
    MODE_BITS,
    PART,
    Directory,
    Entries,
    Entry,
    File,
    Symlink,
    TreeReader,
    encode_entries,
    path_key,
)

READ_ATTEMPTS: Final = 3
#: Larger files are streamed.
_WHOLE_BYTES: Final = 4 << 20
_BATCH_BYTES: Final = 16 << 20
# Storing a stream holds several copies of a batch in memory; larger batches were not faster.
_STREAM_BATCH_BYTES: Final = 2 << 20
_READ_BYTES: Final = 1 << 20
_KINDS: Final = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
}
# Opening an entry fails with one of these if it was replaced by another kind since it was listed.
_REPLACED: Final = frozenset((errno.ELOOP, errno.EINVAL, errno.ENOTDIR, errno.ENXIO))
_GONE: Final = frozenset((errno.ENOENT, errno.ESTALE))


class Sink(Protocol):
    """Receives the content that a scan reads, and returns its digest."""

    def content(self, handle: int, size_bytes: int) -> tuple[Digest, int]:
        """Read at most ``size_bytes`` of a file; returns their digest, and how many were read."""
        ...

    def directory(self, entries: Entries) -> Digest:
        """Take the map of a directory; returns its digest."""
        ...


class StoringSink:
    """Stores the content in writes of some megabytes; ``value`` stores the rest."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._writer = PieceWriter()

    def content(self, handle: int, size_bytes: int) -> tuple[Digest, int]:
        """Store a file."""
        if size_bytes > _WHOLE_BYTES:
            source = _FileStart(handle, size_bytes)
            # ``put_stream`` calls only ``read``, which ``_FileStart`` has.
            digest = blobs.put_stream(
                self._engine, cast("BinaryIO", source), batch_bytes=_STREAM_BATCH_BYTES
            )
            return digest, source.read_bytes
        content = _read_whole(handle, size_bytes)
        digest = Digest.known(self._writer.emit(Kind.BLOB, content, []))
        if self._writer.size_bytes >= _BATCH_BYTES:
            self._flush()
        return digest, len(content)

    def directory(self, entries: Entries) -> Digest:
        """Store a map."""
        return Digest.known(splitting.split(encode_entries(entries), self._writer.emit))

    def value(self, value: object) -> Digest:
        """Store a value, and all content that is not written yet."""
        digest = Digest.known(splitting.split(value, self._writer.emit))
        self._writer.flush(self._engine)
        return digest

    def _flush(self) -> None:
        # Need not reach the disk yet: the write of ``value`` follows. It waits for the disk if the
        # store's durability asks for it, and so for all writes before it.
        self._engine.write(Write(objects=self._writer.objects, durable=False))
        self._writer = PieceWriter()


class HashingSink:
    """Computes digests and stores nothing; ``maps`` has the directories by digest."""

    def __init__(self) -> None:
        self.maps: dict[bytes, Entries] = {}

    def content(self, handle: int, size_bytes: int) -> tuple[Digest, int]:
        """Hash a file."""
        hasher, source = BlobHasher(), _FileStart(handle, size_bytes)
        while part := source.read(_READ_BYTES):
            hasher.update(part)
        return hasher.digest(), source.read_bytes

    def directory(self, entries: Entries) -> Digest:
        """Hash a map."""
        digest = Digest.known(splitting.split(encode_entries(entries), name_piece))
        self.maps[digest] = entries
        return digest


class _FileStart:
    """The beginning of a file, limited because the file may grow while it is read."""

    def __init__(self, handle: int, size_bytes: int) -> None:
        self._handle = handle
        self._left = size_bytes
        self.read_bytes = 0

    def read(self, size: int) -> bytes:
        part = os.read(self._handle, min(size, self._left))
        self._left -= len(part)
        self.read_bytes += len(part)
        return part


def _read_whole(handle: int, size_bytes: int) -> bytes:
    # Usually one call: the kernel returns all of a short file at once.
    content = os.read(handle, size_bytes)
    while len(content) < size_bytes:
        part = os.read(handle, size_bytes - len(content))
        if not part:
            break
        content += part
    return content


class Scanned(NamedTuple):
    """The result of a scan."""

    top: Directory
    records: Records
    files: int
    size_bytes: int
    #: Paths that are left out, and why: as in the root of a snapshot.
    left_out: dict[str, str]
    #: Ignored files and directories; what is below an ignored directory is not counted.
    ignored: int
    #: Files that changed each time they were read.
    unstable: tuple[str, ...]
    #: How many files were read, and how many bytes.
    files_read: int
    bytes_read: int
    #: Temporary files of an interrupted restore.
    parts: tuple[Parts, ...]


class Settings(NamedTuple):
    """The settings that decide what a scan includes."""

    rules: Rules
    max_file_bytes: int | None = None
    skip_unreadable: bool = False
    gitignore: bool = False
    #: The device and inode of the store's own directory, which is ignored.
    store: tuple[int, int] | None = None
    #: Files of the cache, if they are in the directory; they are ignored.
    own: frozenset[Parts] = frozenset()
    #: Paths that are included despite the rules and the limit, and their parent directories.
    always: frozenset[Parts] = frozenset()
    #: Called after each file that was read.
    progress: Progress | None = None


class _ScannedDirectory:
    """A directory that is being scanned."""

    __slots__ = ("below", "handled", "listed", "parts", "rules", "same", "stamps", "status")

    def __init__(self, parts: Parts, status: os.stat_result, rules: Rules) -> None:
        self.parts = parts
        self.status = status
        self.rules = rules
        self.listed: list[tuple[str, os.stat_result]] = []
        self.stamps = b""
        #: The record of the last scan if names and stamps are as they were.
        self.same: CachedDirectory | None = None
        #: Its subdirectories that are still to be scanned.
        self.below: list[tuple[str, os.stat_result]] = []
        #: The entries of its subdirectories that have been scanned.
        self.handled: Entries = {}


def scan(
    beneath: Beneath, sink: Sink, reader: TreeReader, known: Records, settings: Settings
) -> Scanned:
    """Scan a directory; ``known`` has the records of the last scan."""
    return _Scan(beneath, sink, reader, known, settings).run()


class _Scan:
    def __init__(
        self,
        beneath: Beneath,
        sink: Sink,
        reader: TreeReader,
        known: Records,
        settings: Settings,
    ) -> None:
        self._beneath = beneath
        self._sink = sink
        self._reader = reader
        self._known = known
        self._settings = settings
        self._records: Records = {}
        self._unstable: list[str] = []
        self._parts: list[Parts] = []
        self._files_read = 0
        self._bytes_read = 0
        # Any change during or after this scan gets a time that is not earlier than this. So a file
        # with earlier times that has the same stamp later is unchanged.
        self._trusted_before_ns = time.time_ns() - RACY_NS

    def run(self) -> Scanned:
        status = os.fstat(self._beneath.root)
        top = self._tree(status)
        if status.st_nlink == 0 or not _is_there(self._beneath.path, status):
            # The root was removed or replaced, so the scan may lack what it contained.
            raise WorkspaceNotFoundError(self._beneath.path)
        records = self._records
        return Scanned(
            top=top,
            records=records,
            files=sum([record.files for record in records.values()]),
            size_bytes=sum([record.size_bytes for record in records.values()]),
            left_out={
                path_key((*parts, name)): why
                for parts, record in records.items()
                if record.left_out
                for name, why in record.left_out.items()
            },
            ignored=sum([len(record.ignored) for record in records.values()]),
            unstable=tuple(self._unstable),
            files_read=self._files_read,
            bytes_read=self._bytes_read,
            parts=tuple(self._parts),
        )

    def _tree(self, status: os.stat_result) -> Directory:
        """Scan all directories, subdirectories first; not recursive, because trees may be deep."""
        first = self._enter((), status, self._settings.rules)
        if first is None:
            raise WorkspaceNotFoundError(self._beneath.path)
        stack = [first]
        while True:
            frame = stack[-1]
            if frame.below:
                name, status = frame.below.pop()
                entered = self._enter((*frame.parts, name), status, frame.rules)
                if entered is not None:
                    stack.append(entered)
                continue
            entry = self._leave(frame)
            stack.pop()
            if not stack:
                return entry
            stack[-1].handled[frame.parts[-1]] = entry

    # --- listing ----------------------------------------------------------------------------

    def _enter(
        self, parts: Parts, status: os.stat_result, rules: Rules
    ) -> _ScannedDirectory | None:
        """List a directory; None if it is gone, or left out because it cannot be read."""
        frame = _ScannedDirectory(parts, status, rules)
        try:
            handle = self._beneath.open(parts)
            listed = frame.listed
            with os.scandir(handle) as entries:
                for entry in entries:
                    try:
                        listed.append((entry.name, entry.stat(follow_symlinks=False)))
                    except FileNotFoundError:
                        continue
        except OSError as exc:
            if exc.errno in _GONE or exc.errno in _REPLACED:
                return None
            if not self._settings.skip_unreadable or not parts:
                raise _refused(parts, exc) from exc
            # ``_take`` then finds no entry for this directory, and leaves it out as unreadable.
            return None
        listed.sort()
        if self._settings.gitignore:
            frame.rules = self._with_gitignore(frame, handle)
        self._compare(frame)
        return frame

    def _with_gitignore(self, frame: _ScannedDirectory, handle: int) -> Rules:
        for name, status in frame.listed:
            if name == GITIGNORE and stat.S_ISREG(status.st_mode):
                try:
                    file = open_regular(name, dir_fd=handle)
                    with os.fdopen(file, "rb") as source:
                        return frame.rules.with_file(frame.parts, source.read())
                except OSError:
                    # ``_take_file`` reports the error when it reads the file.
                    return frame.rules
        return frame.rules

    def _compare(self, frame: _ScannedDirectory) -> None:
        """Compare a listing with the record of the last scan, and find the directories in it."""
        record = self._known.get(frame.parts)
        if record is not None and record.rules != frame.rules.id:
            record = None
        names = tuple([name for name, _ in frame.listed])
        ignored = frozenset[str]()
        # Names that the same rules included in the last scan: the rules need not be asked again.
        taken: frozenset[str] | tuple[str, ...] = ()
        if record is not None:
            ignored = record.ignored
            taken = frozenset(names if record.names == names else record.names)
        pack, below = STAMP.pack, frame.below
        stamps: list[bytes] = []
        for name, status in frame.listed:
            mode = status.st_mode
            if name in ignored:
                stamps.append(pack(stat.S_IFMT(mode), 0, 0, 0, 0))
            elif mode & 0o170000 == 0o040000:
                stamps.append(pack(mode, 0, 0, 0, 0))
                if name in taken or not self._leaves_out(frame, name, status):
                    below.append((name, status))
            else:
                stamps.append(
                    pack(
                        mode,
                        status.st_size,
                        status.st_mtime_ns,
                        status.st_ctime_ns,
                        status.st_ino,
                    )
                )
        below.reverse()
        frame.stamps = b"".join(stamps)
        if (
            record is not None
            and record.stamps == frame.stamps
            and record.names == names
            and not self._settings.always
        ):
            frame.same = record

    def _leaves_out(self, frame: _ScannedDirectory, name: str, status: os.stat_result) -> bool:
        settings = self._settings
        parts = (*frame.parts, name)
        if parts in settings.always:
            return False
        if settings.store is not None and (status.st_dev, status.st_ino) == settings.store:
            return True
        if parts in settings.own:
            return True
        return frame.rules.ignores(parts, is_directory=stat.S_ISDIR(status.st_mode))

    # --- making the map ---------------------------------------------------------------------

    def _leave(self, frame: _ScannedDirectory) -> Directory:
        """The entry of a directory whose own directories have been scanned."""
        mode = frame.status.st_mode & MODE_BITS
        record = frame.same
        if record is not None and self._children_same(frame, record):
            self._records[frame.parts] = record
            self._parts += [
                (*frame.parts, name)
                for name, status in (frame.listed if record.ignored else ())
                if _is_part(name, status.st_mode)
            ]
            return Directory(mode, record.digest)
        made = _BuiltDirectory()
        before = self._before(frame)
        for at, (name, status) in enumerate(frame.listed):
            stamp = frame.stamps[at * STAMP.size : (at + 1) * STAMP.size]
            self._take(frame, made, before, name, status, stamp)
        digest = self._sink.directory(made.entries)
        own = [entry for entry in made.entries.values() if type(entry) is File]
        self._records[frame.parts] = CachedDirectory(
            names=tuple(made.names),
            stamps=b"".join(made.stamps),
            ignored=frozenset(made.ignored),
            left_out=made.left_out,
            rules=frame.rules.id,
            digest=digest,
            files=len(own),
            size_bytes=sum([entry.size_bytes for entry in own]),
        )
        return Directory(mode, digest)

    def _children_same(self, frame: _ScannedDirectory, record: CachedDirectory) -> bool:
        """Whether the subdirectories have the same maps as in the last scan."""
        if record.left_out and any(self._is_directory(frame, name) for name in record.left_out):
            return False  # it could not be read in the last scan, and may be readable now
        known, records = self._known, self._records
        for name, status in frame.listed:
            if status.st_mode & 0o170000 == 0o040000 and name not in record.ignored:
                below = (*frame.parts, name)
                old, new = known.get(below), records.get(below)
                if old is None or new is None or old.digest != new.digest:
                    return False
        return True

    def _is_directory(self, frame: _ScannedDirectory, name: str) -> bool:
        return any(
            listed == name and stat.S_ISDIR(status.st_mode) for listed, status in frame.listed
        )

    def _before(self, frame: _ScannedDirectory) -> dict[str, tuple[bytes, Entry]]:
        """The stamp and the entry that each name had in the last scan, where both are known."""
        record = self._known.get(frame.parts)
        if record is None or record.rules != frame.rules.id:
            return {}
        try:
            entries = self._reader.entries(record.digest, frame.parts)
        except CasstoreError:
            # The map was collected, or is in another store: read everything again.
            return {}
        return {
            name: (stamp, entries[name])
            for name, stamp in record.stamp_of().items()
            if name in entries and stamp != NO_STAMP
        }

    def _take(
        self,
        frame: _ScannedDirectory,
        made: _BuiltDirectory,
        before: dict[str, tuple[bytes, Entry]],
        name: str,
        status: os.stat_result,
        stamp: bytes,
    ) -> None:
        """Add one name of a directory to its map, or to the names that are left out."""
        parts = (*frame.parts, name)
        kind = stat.S_IFMT(status.st_mode)
        if _is_part(name, kind):
            self._parts.append(parts)
            made.ignore(name, kind)
        elif kind == stat.S_IFDIR:
            entry = frame.handled.get(name)
            if entry is not None:
                made.add(name, stamp, entry)
            elif self._leaves_out(frame, name, status):
                made.ignore(name, kind)
            elif self._settings.skip_unreadable and self._still_there(parts):
                made.leave_out(name, stamp, "unreadable")
        elif name in before and before[name][0] == stamp:
            made.add(name, self._trusted(stamp, status), before[name][1])
        elif self._leaves_out(frame, name, status):
            made.ignore(name, kind)
        elif kind == stat.S_IFREG:
            self._take_file(parts, made, status)
        elif kind == stat.S_IFLNK:
            self._take_link(parts, made, stamp, status)
        else:
            made.leave_out(name, stamp, _KINDS.get(kind, "of an unknown kind"))

    def _still_there(self, parts: Parts) -> bool:
        try:
            os.stat(parts[-1], dir_fd=self._beneath.open(parts[:-1]), follow_symlinks=False)
        except OSError:
            return False
        return True

    def _trusted(self, stamp: bytes, status: os.stat_result) -> bytes:
        """The stamp; NO_STAMP if the file changed so recently that another change may not show."""
        newest = max(status.st_mtime_ns, status.st_ctime_ns)
        return stamp if newest < self._trusted_before_ns else NO_STAMP

    def _take_link(
        self, parts: Parts, made: _BuiltDirectory, stamp: bytes, status: os.stat_result
    ) -> None:
        try:
            above = self._beneath.open(parts[:-1])
            target = os.fsencode(os.readlink(parts[-1], dir_fd=above))
        except OSError as exc:
            if exc.errno in _GONE or exc.errno in _REPLACED:
                return
            self._skip(parts, made, stamp, exc)
            return
        made.add(parts[-1], self._trusted(stamp, status), Symlink(target))

    def _take_file(self, parts: Parts, made: _BuiltDirectory, status: os.stat_result) -> None:
        limit = self._settings.max_file_bytes
        name = parts[-1]
        taken = parts in self._settings.always
        if limit is not None and status.st_size > limit and not taken:
            made.leave_out(name, stamp_of(status), f"larger than {limit} bytes")
            return
        try:
            read = self._read(parts)
        except OSError as exc:
            if exc.errno in _GONE or exc.errno in _REPLACED:
                return  # replaced by another kind of file: the next scan finds that
            self._skip(parts, made, stamp_of(status), exc)
            return
        stamp, entry = read
        made.add(name, stamp, entry)

    def _skip(self, parts: Parts, made: _BuiltDirectory, stamp: bytes, exc: OSError) -> None:
        if not self._settings.skip_unreadable:
            raise _refused(parts, exc) from exc
        made.leave_out(parts[-1], stamp, "unreadable")

    def _read(self, parts: Parts) -> tuple[bytes, File]:
        """Read a file, up to ``READ_ATTEMPTS`` times if it changes meanwhile; raises OSError."""
        for _ in range(READ_ATTEMPTS):
            handle = open_regular(parts[-1], dir_fd=self._beneath.open(parts[:-1]))
            try:
                status = os.fstat(handle)
                digest, size = self._sink.content(handle, status.st_size)
                stamp = stamp_of(status)
                is_same = size == status.st_size and stamp_of(os.fstat(handle)) == stamp
            finally:
                os.close(handle)
            self._files_read += 1
            self._bytes_read += size
            if self._settings.progress is not None:
                self._settings.progress(Step("read", self._bytes_read, None, "bytes"))
            if is_same:
                mode = status.st_mode & MODE_BITS
                return self._trusted(stamp, status), File(mode, size, digest)
        self._unstable.append(shown(parts))
        return NO_STAMP, File(status.st_mode & MODE_BITS, size, digest)


class _BuiltDirectory:
    """The map of a directory and its cache record, while they are built."""

    __slots__ = ("entries", "ignored", "left_out", "names", "stamps")

    def __init__(self) -> None:
        self.entries: Entries = {}
        self.names: list[str] = []
        self.stamps: list[bytes] = []
        self.ignored: list[str] = []
        self.left_out: dict[str, str] = {}

    def add(self, name: str, stamp: bytes, entry: Entry) -> None:
        self.names.append(name)
        self.stamps.append(stamp)
        self.entries[name] = entry

    def ignore(self, name: str, kind: int) -> None:
        self.names.append(name)
        self.stamps.append(STAMP.pack(kind, 0, 0, 0, 0))
        self.ignored.append(name)

    def leave_out(self, name: str, stamp: bytes, why: str) -> None:
        self.names.append(name)
        self.stamps.append(stamp)
        self.left_out[name] = why


def stamp_of(status: os.stat_result) -> bytes:
    """The stamp of a file, which the cache compares to find changes."""
    return STAMP.pack(
        status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino
    )


def _is_part(name: str, mode: int) -> bool:
    """Whether this is a temporary file of an interrupted restore."""
    return name.startswith(PART) and stat.S_IFMT(mode) in (stat.S_IFREG, stat.S_IFLNK)


def _is_there(path: str, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(os.stat(path), status)
    except OSError:
        return False


def _refused(parts: Parts, exc: OSError) -> CasstoreError:
    if exc.errno in (errno.EACCES, errno.EPERM, errno.EIO):
        return UnreadablePathError(shown(parts), exc.strerror or str(exc))
    return storage_error(f"cannot read {shown(parts)}", exc)
