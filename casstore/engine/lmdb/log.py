"""The redo log: one record for each commit, appended and flushed instead of changing the tables.

    offset 0     magic 8 ‖ log id 8 ‖ checksum of both 8
    offset 64    published LSN 8 ‖ flushed LSN 8 ‖ applying LSN 8 ‖ generation 8: shared by the
                 processes that have the store open (``RedoLog.lsns``, ``RedoLog.generation``)
    offset 4096  records, each padded to 64 bytes
    record       magic 4 ‖ length of the body 4 ‖ log id 8 ‖ LSN 8 ‖ flushed LSN 8 ‖
                 checksum of the record before 16 ‖ checksum 16 ‖ body

Records are numbered without a gap (LSN, log sequence number). The log is circular: a record begins
where the record before it ends, or at offset 4096 if the space there is too short. A record belongs
to the log if it has the log's id, the next LSN, the checksum of the record before it, and a correct
checksum of its own. So neither a torn record nor an old one, left from before the log wrapped
around, is taken for a commit.

The header, and each record, says up to which LSN the log was flushed when it was written. A damaged
record with a higher LSN is the torn end of the log, and is ignored. If a record that was flushed is
damaged, opening the store fails: its commit and later ones were acknowledged.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from struct import Struct
from typing import Final, NamedTuple, NoReturn

from casstore.engine.files import flush_file, storage_error, write_at
from casstore.engine.forks import Descriptor
from casstore.errors import CorruptionError, StorageError
from casstore.format.digest import plain_hash

LOG_FILE: Final = "redo.log"
ID_BYTES: Final = 8
CHECKSUM_BYTES: Final = 16

_MAGIC: Final = b"casslog1"
_RECORD_MAGIC: Final = b"rec1"
_HEADER_CHECKSUM_BYTES: Final = 8
_HEADER_BYTES: Final = len(_MAGIC) + ID_BYTES + _HEADER_CHECKSUM_BYTES
# Little-endian, like LMDB's file on all supported machines.
_NUMBER: Final = Struct("<Q")
_SHARED: Final = Struct("<QQQ8s")
_PUBLISHED_AT: Final = 64
_FLUSHED_AT: Final = 72
_APPLYING_AT: Final = 80
_GENERATION_AT: Final = 88
_GENERATION_BYTES: Final = 8
_LSN_BYTES: Final = 24
_FIRST_OFFSET: Final = 4096
_RECORD: Final = Struct("<4sI8sQQ16s16s")
_RECORD_BYTES: Final = _RECORD.size
_ALIGNMENT: Final = 64
_PADDING: Final = [bytes(length) for length in range(_ALIGNMENT)]

FIRST_LOG_BYTES: Final = 512 << 10
#: The default limit on the length of the log. When the log is full, a commit first applies it to
#: the tables.
MAX_LOG_BYTES: Final = 16 << 20
# How much of a damaged log is read at most.
_MAX_SURVIVING_BYTES: Final = 1 << 30
# The log grows only while the disk has this many times its new length free.
_FREE_SHARE: Final = 4
# How many zeros one call writes at most when the log grows.
_FILL_BYTES: Final = 1 << 20

_ROW: Final = Struct("<?8sQQ16s")
_ROW_CHECKSUM_BYTES: Final = 8
_NO_LOG: Final = bytes(8)

#: Positions in ``RedoLog.lsns``: the LSN of the last record that readers may see; that of the last
#: record known to be flushed to the disk; and the highest of a commit that the tables may hold.
PUBLISHED: Final = 0
FLUSHED: Final = 1
APPLYING: Final = 2

# The flag that makes pwritev flush what it writes. 0 on a system without it: write, then flush.
_WRITE_AND_FLUSH: Final = getattr(os, "RWF_DSYNC", 0)


class Position(NamedTuple):
    """A position between two records of the log."""

    #: The LSN of the record before the position.
    lsn: int
    #: Where that record ends; the next begins here, or at offset 4096.
    offset: int
    #: The checksum of that record, which the next record repeats.
    chain: bytes


class LogRecord(NamedTuple):
    """A record of the log."""

    #: Where it begins.
    offset: int
    #: The position after it.
    position: Position
    body: bytes


def first_position(lsn: int, log_id: bytes) -> Position:
    """The position before the first record of a new log, whose LSN will be ``lsn + 1``."""
    return Position(lsn, _FIRST_OFFSET, log_id.ljust(CHECKSUM_BYTES, b"\0"))


class RecoveryPoint(NamedTuple):
    """Which commits the tables hold, and where in which log the next ones are: the row ``log``."""

    #: False: the tables hold all commits, and a log file that exists is ignored.
    in_use: bool
    log_id: bytes
    #: The position after the last record that was applied to the tables.
    applied: Position

    def encode(self) -> bytes:
        """The value of the row ``log``."""
        fields = _ROW.pack(self.in_use, self.log_id, *self.applied)
        return fields + plain_hash(fields)[:_ROW_CHECKSUM_BYTES]

    def retired(self) -> RecoveryPoint:
        """The same commits in the tables, and no log in use."""
        return RecoveryPoint(False, _NO_LOG, first_position(self.applied.lsn, _NO_LOG))


def first_recovery_point() -> RecoveryPoint:
    """The recovery point of a new store: no commit, no log in use."""
    return RecoveryPoint(False, _NO_LOG, first_position(0, _NO_LOG))


def decode_recovery_point(row: bytes) -> RecoveryPoint | None:
    """Decode the row ``log``; None if it is damaged."""
    fields, checksum = row[:-_ROW_CHECKSUM_BYTES], row[-_ROW_CHECKSUM_BYTES:]
    if len(fields) != _ROW.size or plain_hash(fields)[:_ROW_CHECKSUM_BYTES] != checksum:
        return None
    in_use, log_id, lsn, offset, last = _ROW.unpack(fields)
    return RecoveryPoint(in_use, log_id, Position(lsn, offset, last))


class RedoLog:
    """The log file of a store, open. Writers must hold the store's log lock."""

    def __init__(self, handle: Descriptor, path: str, max_bytes: int) -> None:
        """``max_bytes``: the limit on its length. Raises OSError."""
        self._handle = handle
        self.path = path
        self._max_bytes = max_bytes
        #: The id in the header; empty if the header is absent or damaged.
        self.id = b""
        # Set when a flush fails: what reached the disk is unknown then, so nothing more may be
        # written.
        self._failure: StorageError | None = None
        self.read_header()

    def read_header(self) -> None:
        """Read the id, and map the page that the processes share. Raises OSError."""
        self.size_bytes = os.fstat(self._handle.fileno()).st_size
        header = os.pread(self._handle.fileno(), _HEADER_BYTES, 0)
        content, checksum = header[:-_HEADER_CHECKSUM_BYTES], header[-_HEADER_CHECKSUM_BYTES:]
        is_valid = content.startswith(_MAGIC) and checksum == plain_hash(content)[: len(checksum)]
        log_id = content[len(_MAGIC) :] if is_valid and self.size_bytes >= _FIRST_OFFSET else b""
        # Before ``id``: another thread that finds the right id uses the map.
        self._share_page(
            mmap.mmap(self._handle.fileno(), _FIRST_OFFSET, prot=mmap.PROT_READ)
            if log_id
            else bytes(_FIRST_OFFSET)
        )
        self.id = log_id

    def _share_page(self, page: mmap.mmap | bytes) -> None:
        self._page = page
        #: The LSNs that the processes share, at PUBLISHED, FLUSHED and APPLYING. One load reads
        #: one, so that never half of a number is read while another process writes it.
        self.lsns = memoryview(page)[_PUBLISHED_AT : _PUBLISHED_AT + _LSN_BYTES].cast("Q")

    def fileno(self) -> int:
        """The file descriptor."""
        return self._handle.fileno()

    def close(self) -> None:
        """Release the descriptor."""
        self._share_page(bytes(_FIRST_OFFSET))
        self._handle.close()

    # --- numbers that the processes share -----------------------------------------------------

    @property
    def generation(self) -> bytes:
        """A random value; the first writer after a crash changes it once it has read the log."""
        return bytes(self._page[_GENERATION_AT : _GENERATION_AT + _GENERATION_BYTES])

    def publication(self, lsn: int, *, flushed: bool) -> tuple[int, bytes, int]:
        """The arguments for ``os.pwrite``, with which the caller lets readers see a record.

        It writes to the file and not to the map, so that the kernel wakes the watches on the file.
        The caller makes the call itself: nothing comes between the call and the caller's next
        statement, not even an interrupt.
        """
        # The flushed LSN follows the published LSN in the file, so both are written at once.
        numbers = _NUMBER.pack(lsn) * 2 if flushed else _NUMBER.pack(lsn)
        return self._handle.fileno(), numbers, _PUBLISHED_AT

    def note_applying(self, lsn: int) -> None:
        """Set the applying LSN, durably: the tables are about to get the commits up to this one.

        If a recovery finds tables with a higher LSN than this, the log file is an older copy.
        """
        descriptor = self._handle.fileno()
        try:
            os.pwritev(descriptor, (_NUMBER.pack(lsn),), _APPLYING_AT, _WRITE_AND_FLUSH)
            if not _WRITE_AND_FLUSH:
                flush_file(descriptor)
        except OSError as exc:
            raise storage_error(f"cannot write {self.path}", exc) from exc

    def share(self, lsn: int, applied_lsn: int) -> None:
        """Set all numbers after a crash. No other process may have the store open for writing.

        First flushes the log: how much of it was flushed before the crash is unknown.
        """
        shared = _SHARED.pack(lsn, lsn, applied_lsn, os.urandom(_GENERATION_BYTES))
        try:
            flush_file(self._handle.fileno())
            os.pwrite(self._handle.fileno(), shared, _PUBLISHED_AT)
        except OSError as exc:
            raise storage_error(f"cannot write {self.path}", exc) from exc

    # --- beginning ----------------------------------------------------------------------------

    def begin(self, log_id: bytes, lsn: int) -> Position:
        """Begin a new log in the file, durably; returns the position before its first record.

        Old records in the file have another log id, so they are ignored.
        """
        content = _MAGIC + log_id
        header = content + plain_hash(content)[:_HEADER_CHECKSUM_BYTES]
        shared = _SHARED.pack(lsn, lsn, lsn, os.urandom(_GENERATION_BYTES))
        header = header.ljust(_PUBLISHED_AT, b"\0") + shared
        try:
            self._fill(FIRST_LOG_BYTES)
            write_at(self._handle.fileno(), header, 0)
            os.fsync(self._handle.fileno())
            self.read_header()
        except OSError as exc:
            raise storage_error(f"cannot write {self.path}", exc) from exc
        return first_position(lsn, log_id)

    def _fill(self, size_bytes: int) -> None:
        """Lengthen the file to this size by writing zeros.

        If the space were only allocated, the first flush of each part would have to flush metadata.
        """
        while self.size_bytes < size_bytes:
            part = min(_FILL_BYTES, size_bytes - self.size_bytes)
            write_at(self._handle.fileno(), bytes(part), self.size_bytes)
            self.size_bytes += part

    # --- appending ----------------------------------------------------------------------------

    def find_space(self, end: Position, oldest: int | None, body_bytes: int) -> int | None:
        """The offset for a record of this length, or None if the log has no space for it.

        ``end`` is the position after the last record, ``oldest`` the offset of the first record
        that is not applied yet; None: all are applied.
        """
        length = _RECORD_BYTES + body_bytes
        length += -length % _ALIGNMENT
        offset = end.offset
        if oldest is None:
            offset = oldest = _FIRST_OFFSET
        elif offset <= oldest:
            # The log has wrapped around: the space between the last and the oldest record is free.
            return offset if offset + length <= oldest else None
        if offset + length <= self.size_bytes:
            return offset
        if _FIRST_OFFSET + length <= oldest:
            return _FIRST_OFFSET
        return offset if self._grow(offset + length) else None

    def _grow(self, needed_bytes: int) -> bool:
        """Lengthen the file to at least this size; False if it may not, or the disk is too full."""
        self.size_bytes = os.fstat(self._handle.fileno()).st_size
        wanted = self.size_bytes
        while wanted < needed_bytes:
            wanted *= 2
        if wanted > self._max_bytes or self._is_disk_low(wanted):
            return False
        try:
            self._fill(wanted)
            os.fsync(self._handle.fileno())
        except OSError:
            # The disk is full. The zeros added so far may stay.
            self.size_bytes = os.fstat(self._handle.fileno()).st_size
            return self.size_bytes >= needed_bytes
        return True

    def _is_disk_low(self, wanted_bytes: int) -> bool:
        """True if the disk may lack the space for applying a log of this length."""
        free = os.fstatvfs(self._handle.fileno())
        return free.f_bavail * free.f_frsize < _FREE_SHARE * wanted_bytes

    def append(self, end: Position, offset: int, body: bytes, *, flush: bool) -> Position:
        """Write the record that follows ``end`` in the log; returns the position after it.

        It is written at ``offset``, which is where ``end`` points, or the first offset of the file.
        Readers see it once the caller has published it (``publication``). If StorageError is
        raised, recovery ignores the record, unless the error says that the outcome is unknown.
        """
        if self._failure is not None:
            self.require_sound()
        if offset != end.offset:
            self._clear(end)
        flushed_lsn = self.lsns[FLUSHED]
        lsn = end.lsn + 1
        fields = (_RECORD_MAGIC, len(body), self.id, lsn, flushed_lsn, end.chain)
        unsealed = _RECORD.pack(*fields, b"")[:-CHECKSUM_BYTES]
        checksum = plain_hash(unsealed + body)[:CHECKSUM_BYTES]
        length = _RECORD_BYTES + len(body)
        padding = _PADDING[-length % _ALIGNMENT]
        padded = length + len(padding)
        parts = (unsealed, checksum, body, padding)
        descriptor = self._handle.fileno()
        # The flag flushes only the bytes of this call, so it suffices only if all earlier records
        # are flushed.
        at_once = _WRITE_AND_FLUSH if flush and flushed_lsn >= end.lsn else 0
        try:
            if os.pwritev(descriptor, parts, offset, at_once) != padded:
                write_at(descriptor, b"".join(parts), offset)
                at_once = 0
            if flush and not at_once:
                flush_file(descriptor)
        except OSError as exc:
            # EFBIG, the limit on the length of files, is raised before anything is written.
            if exc.errno != errno.EFBIG:
                self.cancel(offset, exc)
                if flush and flushed_lsn < end.lsn:
                    self._fail_unflushed(exc)
            raise storage_error(f"cannot write {self.path}", exc) from exc
        return Position(lsn, offset + padded, checksum)

    def _clear(self, end: Position) -> None:
        """Remove a record that was written after ``end`` and never published, durably.

        Its writer was killed or interrupted. ``read_next`` looks there before it looks at the first
        offset, and would take the old record for the one that is about to be written there.
        """
        try:
            if self._read_at(end.offset, end) is not None:
                write_at(self._handle.fileno(), bytes(_RECORD_BYTES), end.offset)
                flush_file(self._handle.fileno())
        except OSError as exc:
            raise storage_error(f"cannot write {self.path}", exc) from exc

    def cancel(self, offset: int, reason: OSError) -> None:
        """Overwrite a record that could not be flushed or published, so that recovery ignores it.

        If that fails too, raises StorageError, and so does every later call that writes.
        """
        try:
            write_at(self._handle.fileno(), bytes(_RECORD_BYTES), offset)
            flush_file(self._handle.fileno())
        except OSError as exc:
            self._failure = StorageError(
                f"{self.path} could not be written ({reason.strerror}), and neither could the "
                f"failed commit be undone ({exc.strerror}): it may or may not have happened; "
                "close the store, and open it again when the disk is sound"
            )
            raise self._failure from exc

    def flush(self, lsn: int) -> bool:
        """Flush all records up to ``lsn``, a published one; False if they were flushed already."""
        self.require_sound()
        if self.lsns[FLUSHED] >= lsn:
            return False
        try:
            flush_file(self._handle.fileno())
            os.pwrite(self._handle.fileno(), _NUMBER.pack(lsn), _FLUSHED_AT)
        except OSError as exc:
            self._fail_unflushed(exc)
        return True

    def _fail_unflushed(self, reason: OSError) -> NoReturn:
        """Refuse every later write: a flush of acknowledged commits failed.

        The kernel may have dropped what it could not write, and report the next flush as done. A
        later commit would then follow a gap in the log.
        """
        self._failure = StorageError(
            f"{self.path} could not be flushed ({reason.strerror}): commits with durability "
            "'relaxed' may be lost; close the store, and open it again when the disk is sound"
        )
        raise self._failure from reason

    def require_sound(self) -> None:
        """Raise the earlier error if a flush failed, so that nothing more may be written."""
        if self._failure is not None:
            raise StorageError(*self._failure.args)

    # --- reading ------------------------------------------------------------------------------

    def read_next(self, end: Position) -> LogRecord | None:
        """The record after the position ``end``; None if there is none: the end of the log."""
        try:
            record = self._read_at(end.offset, end)
            if record is None and end.offset != _FIRST_OFFSET:
                record = self._read_at(_FIRST_OFFSET, end)
            return record
        except OSError as exc:
            raise storage_error(f"cannot read {self.path}", exc) from exc

    def _read_at(self, offset: int, end: Position) -> LogRecord | None:
        header = os.pread(self._handle.fileno(), _RECORD_BYTES, offset)
        if len(header) < _RECORD_BYTES:
            return None
        magic, body_bytes, log_id, lsn, _, chain, checksum = _RECORD.unpack(header)
        if (
            magic != _RECORD_MAGIC
            or log_id != self.id
            or lsn != end.lsn + 1
            or chain != end.chain
            or body_bytes > os.fstat(self._handle.fileno()).st_size
        ):
            return None
        body = os.pread(self._handle.fileno(), body_bytes, offset + _RECORD_BYTES)
        if len(body) != body_bytes or not _is_proven(header, body):
            return None
        next_offset = offset + _RECORD_BYTES + body_bytes
        next_offset += -next_offset % _ALIGNMENT
        return LogRecord(offset, Position(lsn, next_offset, checksum), body)

    def require_end(self, end: Position) -> None:
        """Raise CorruptionError if the log says that a record after ``end`` was flushed."""
        flushed_lsn = max(
            [
                # Written after each flush, so whatever value reached the disk is not too high.
                self.lsns[FLUSHED],
                *(each.flushed_lsn for each in _scan(self._read_all()) if each.log_id == self.id),
            ]
        )
        if flushed_lsn > end.lsn:
            raise CorruptionError(
                f"{self.path} is damaged: commit {end.lsn + 1} cannot be read, but was flushed; "
                "restore a backup, salvage the store, or run `casstore recover --discard-log` to "
                "continue without the commits in the log"
            )

    def _read_all(self) -> bytes:
        try:
            return os.pread(self._handle.fileno(), os.fstat(self._handle.fileno()).st_size, 0)
        except OSError as exc:
            raise storage_error(f"cannot read {self.path}", exc) from exc


class Survivor(NamedTuple):
    """A record with a valid checksum, wherever it is in a file that may be damaged."""

    log_id: bytes
    flushed_lsn: int
    lsn: int
    body: bytes


def _scan(content: bytes) -> Iterator[Survivor]:
    """All records of a log with valid checksums, in file order."""
    at = content.find(_RECORD_MAGIC, _FIRST_OFFSET)
    while at >= 0:
        header = content[at : at + _RECORD_BYTES]
        if not at % _ALIGNMENT and len(header) == _RECORD_BYTES:
            _, body_bytes, log_id, lsn, flushed_lsn, _, _ = _RECORD.unpack(header)
            body = content[at + _RECORD_BYTES : at + _RECORD_BYTES + body_bytes]
            if _is_proven(header, body):
                yield Survivor(log_id, flushed_lsn, lsn, body)
        at = content.find(_RECORD_MAGIC, at + 1)


def _is_proven(header: bytes, body: bytes) -> bool:
    """True if a record has the checksum in its header."""
    unsealed, checksum = header[:-CHECKSUM_BYTES], header[-CHECKSUM_BYTES:]
    return plain_hash(unsealed + body)[:CHECKSUM_BYTES] == checksum


def surviving_records(path: str) -> list[Survivor] | None:
    """The records of a log that may be damaged, in the order of their LSNs; None: no log."""
    try:
        with open(path, "rb") as source:
            content = source.read(_MAX_SURVIVING_BYTES)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise storage_error(f"cannot read {path}", exc) from exc
    return sorted(_scan(content), key=lambda record: record.lsn)
