"""Converts the calls of an strace log into disk events.

A log that cannot be understood in full is refused with ``TraceError``: a write that was missed
would make every crash image meaningless. So are ways to change a file that leave no bytes in
the log (a writable shared mapping, sendfile, hole punching, io_uring). Calls that give less
than a promise (sync_file_range, msync, sync, a sync whose exit was not seen) earn no durability.
"""

from __future__ import annotations

import itertools
import os
import posixpath
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from campaigns.disk_events import (
    NEVER,
    Ack,
    Allocate,
    Create,
    Event,
    Link,
    Rename,
    Sync,
    SyncDirectory,
    SyncRange,
    Trace,
    Truncate,
    Unlink,
    Write,
)
from campaigns.strace_log import QUOTED, Call, TraceError, calls, descriptor, flags, unescape

VOLATILE = ("lock.mdb",)


class _Description:
    """An open file description: what dup and fork share, so the offset lives here."""

    def __init__(self, *, file: str | None, directory: str | None, flags: set[str]) -> None:
        self.file = file
        self.directory = directory
        self.append = "O_APPEND" in flags
        self.synchronous = bool(flags & {"O_DSYNC", "O_SYNC"})
        self.offset = 0


class _Reader:
    """Follows descriptors and names through the calls and collects the events."""

    def __init__(self, directory: str, cwd: str, acks_to: str, volatile: Collection[str]) -> None:
        self._directory = directory
        self._cwd = cwd
        self._acks_to = acks_to
        self._volatile = volatile
        self._names: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._tables: dict[int, dict[int, _Description]] = {}
        self._half_ack = b""
        self._events: list[tuple[int, Event]] = []
        self._handlers = self._by_name()

    def start_with(self, path: str, size: int) -> None:
        """Register a file that existed before the first call."""
        self._names[path] = path
        self._sizes[path] = size

    def read(self, all_calls: Sequence[Call]) -> list[Event]:
        """Return the events of all calls, in the order they may first show."""
        born = self._births(all_calls)
        for call in sorted(all_calls, key=_takes_effect):
            if call.pid not in self._tables:
                self._adopt(call.pid, born.get(call.pid))
            handler = self._handlers.get(call.name)
            if handler is not None and not call.result.startswith("-1"):
                handler(call)
        self._events.sort(key=lambda placed: placed[0])
        return [event for _, event in self._events]

    def _by_name(self) -> dict[str, Callable[[Call], None]]:
        groups: dict[Callable[[Call], None], str] = {
            self._open: "open openat creat",
            self._close: "close",
            self._close_range: "close_range",
            self._dup: "dup dup2 dup3 fcntl",
            self._clone: "clone clone3 fork vfork",
            self._write: "write pwrite64 writev pwritev pwritev2",
            self._lseek: "lseek",
            self._truncate: "truncate ftruncate",
            self._allocate: "fallocate",
            self._sync: "fsync fdatasync",
            self._rename: "rename renameat renameat2",
            self._link: "link linkat",
            self._unlink: "unlink unlinkat",
            self._refuse_mapping: "mmap",
            self._refuse_transfer: "sendfile copy_file_range splice",
            self._refuse: "openat2 chdir fchdir io_uring_setup",
        }
        return {name: handler for handler, names in groups.items() for name in names.split()}

    # -- processes and descriptors -------------------------------------------------------------

    @staticmethod
    def _births(all_calls: Iterable[Call]) -> dict[int, Call]:
        """Map each child to the call that made it: its lines may come before that call's end."""
        return {
            child: call
            for call in all_calls
            if call.name in ("clone", "clone3", "fork", "vfork")
            and (child := call.value()) is not None
        }

    def _adopt(self, pid: int, birth: Call | None) -> None:
        table = self._tables.get(birth.pid, {}) if birth else {}
        # Threads share one descriptor table; a forked process has its own, with the same
        # descriptions.
        shared = birth is not None and "CLONE_FILES" in birth.arguments
        self._tables[pid] = table if shared else dict(table)

    def _clone(self, call: Call) -> None:
        child = call.value()
        if child and child not in self._tables:
            self._adopt(child, call)

    def _inside(self, path: str) -> str | None:
        """Return a path relative to the directory, "." for itself, None if not replayed."""
        relative = posixpath.relpath(path, self._directory)
        if relative == ".." or relative.startswith("../"):
            return None
        return None if posixpath.basename(relative) in self._volatile else relative

    def _find(self, call: Call, field: str) -> _Description | None:
        """The file of a descriptor; None if it is outside the recorded directory."""
        number, path = descriptor(field)
        if number is None or not path.startswith("/") or self._inside(path) is None:
            return None
        found = self._tables[call.pid].get(number)
        if found is None:
            raise TraceError(f"{call.name} on line {call.begun}: {path} was opened out of sight")
        return found

    def _find_file(self, call: Call) -> tuple[_Description, str] | None:
        found = self._find(call, call.fields()[0])
        return None if found is None or found.file is None else (found, found.file)

    def _open(self, call: Call) -> None:
        number, path = descriptor(call.result)
        if number is None:
            return
        relative = self._inside(path)
        opened = flags(call.fields()[2 if call.name == "openat" else 1])
        if call.name == "creat":
            opened = {"O_CREAT", "O_TRUNC"}
        if relative is None:
            self._tables[call.pid].pop(number, None)
        elif "O_TMPFILE" in opened:
            self._refuse(call)
        elif relative in self._names:
            file = self._names[relative]
            if "O_TRUNC" in opened and self._sizes[file]:
                self._emit(call.begun, Truncate(file, 0, call.ended))
                self._sizes[file] = 0
            self._hold(call, number, _Description(file=file, directory=None, flags=opened))
        elif "O_CREAT" in opened:
            file = self._create(relative, call)
            self._hold(call, number, _Description(file=file, directory=None, flags=opened))
        else:
            # Every file inside is known, so what opens without being created is a directory.
            self._hold(call, number, _Description(file=None, directory=relative, flags=opened))

    def _create(self, path: str, call: Call) -> str:
        again = (f"{path}#{count}" for count in itertools.count(2))
        file = next(name for name in itertools.chain([path], again) if name not in self._sizes)
        self._names[path] = file
        self._sizes[file] = 0
        self._emit(call.begun, Create(file, path, call.ended))
        return file

    def _hold(self, call: Call, number: int, description: _Description) -> None:
        self._tables[call.pid][number] = description

    def _close(self, call: Call) -> None:
        number, _ = descriptor(call.arguments)
        if number is not None:
            self._tables[call.pid].pop(number, None)

    def _close_range(self, call: Call) -> None:
        first, last, how = call.fields()
        if "CLOSE_RANGE_CLOEXEC" not in how:
            table = self._tables[call.pid]
            for number in [held for held in table if int(first) <= held <= int(last)]:
                del table[number]

    def _dup(self, call: Call) -> None:
        found = self._find(call, call.fields()[0])
        number, _ = descriptor(call.result)
        if call.name == "fcntl":
            command = call.fields()[1]
            if command == "F_SETFL" and found is not None:
                # Of the flags that matter here Linux lets only O_APPEND change after open.
                found.append = "O_APPEND" in flags(call.fields()[2])
            if command not in ("F_DUPFD", "F_DUPFD_CLOEXEC"):
                return
        if number is not None and found is not None:
            self._hold(call, number, found)
        elif number is not None:
            self._tables[call.pid].pop(number, None)

    # -- contents ------------------------------------------------------------------------------

    def _emit(self, line: int, event: Event) -> None:
        self._events.append((line, event))

    def _data(self, call: Call) -> bytes:
        data = b"".join(map(unescape, QUOTED.findall(call.arguments)))
        written = call.value()
        if written is None:
            return data  # the exit was not seen: all of it may have been written
        if len(data) < written:
            raise TraceError(f"line {call.begun}: {written} bytes written, {len(data)} logged")
        return data[:written]

    def _write(self, call: Call) -> None:
        if descriptor(call.arguments)[1] == self._acks_to:
            self._acknowledge(call)
            return
        found = self._find_file(call)
        if found is None:
            return
        description, file = found
        data = self._data(call)
        extra = call.fields()[-1] if call.name == "pwritev2" else ""
        if "RWF_APPEND" in extra:
            self._refuse(call)
        offset = self._offset(call, description, file, len(data))
        self._sizes[file] = max(self._sizes[file], offset + len(data))
        self._emit(call.begun, Write(file, offset, data, call.ended))
        if call.ended != NEVER and (description.synchronous or "SYNC" in extra):
            self._emit(call.ended, SyncRange(file, offset, len(data), call.ended))

    def _offset(self, call: Call, description: _Description, file: str, length: int) -> int:
        if call.name in ("write", "writev"):
            offset = self._sizes[file] if description.append else description.offset
            description.offset = offset + length
            return offset
        if description.append:
            # Linux appends here too, whatever offset is given.
            return self._sizes[file]
        return int(call.fields()[-2 if call.name == "pwritev2" else -1])

    def _acknowledge(self, call: Call) -> None:
        """Emit one Ack a line. At its entry: all that is promised is done by then."""
        *whole, self._half_ack = (self._half_ack + self._data(call)).split(b"\n")
        for line in whole:
            self._emit(call.begun, Ack(line.decode()))

    def _lseek(self, call: Call) -> None:
        found, offset = self._find_file(call), call.value()
        if found is not None and offset is not None:
            found[0].offset = offset

    def _truncate(self, call: Call) -> None:
        if call.name == "truncate":
            file = self._names.get(self._paths(call)[0] or "")
        else:
            found = self._find_file(call)
            file = found[1] if found else None
        if file is not None:
            size = int(call.fields()[1])
            self._sizes[file] = size
            self._emit(call.begun, Truncate(file, size, call.ended))

    def _allocate(self, call: Call) -> None:
        found = self._find_file(call)
        if found is None:
            return
        _, mode, offset, length = call.fields()
        if mode not in ("0", "FALLOC_FL_KEEP_SIZE"):
            self._refuse(call)
        if mode == "0":
            end = int(offset) + int(length)
            self._sizes[found[1]] = max(self._sizes[found[1]], end)
            self._emit(call.begun, Allocate(found[1], int(offset), int(length), call.ended))

    def _sync(self, call: Call) -> None:
        found = self._find(call, call.arguments)
        if found is None or call.ended == NEVER:
            return
        if found.file is not None:
            self._emit(call.ended, Sync(found.file, call.begun))
        elif found.directory is not None:
            self._emit(call.ended, SyncDirectory(found.directory, call.begun))

    # -- names ---------------------------------------------------------------------------------

    def _paths(self, call: Call) -> list[str | None]:
        """Return the paths among the arguments, each relative to the descriptor before it."""
        paths, base = [], self._cwd
        for field in call.fields():
            if quoted := QUOTED.fullmatch(field):
                path = os.fsdecode(unescape(quoted[1]))
                paths.append(self._inside(posixpath.normpath(posixpath.join(base, path))))
            else:
                base = descriptor(field)[1] or self._cwd
        return paths

    def _pair(self, call: Call) -> tuple[str, str] | None:
        source, target = self._paths(call)
        if source is None and target is None:
            return None
        if source not in self._names or target is None:
            raise TraceError(
                f"{call.name} on line {call.begun}: only single files inside are followed"
            )
        return source, target

    def _rename(self, call: Call) -> None:
        pair = self._pair(call)
        if pair is None:
            return
        if "RENAME_EXCHANGE" in call.arguments:
            self._refuse(call)
        source, target = pair
        file = self._names[source]
        if self._names.get(target) != file:  # two names of one file: rename(2) does nothing
            self._names[target] = self._names.pop(source)
            self._emit(call.begun, Rename(file, source, target, call.ended))

    def _link(self, call: Call) -> None:
        pair = self._pair(call)
        if pair is not None:
            self._names[pair[1]] = self._names[pair[0]]
            self._emit(call.begun, Link(self._names[pair[0]], pair[1], call.ended))

    def _unlink(self, call: Call) -> None:
        (path,) = self._paths(call)
        if path in self._names:
            self._emit(call.begun, Unlink(self._names.pop(path), path, call.ended))

    # -- what leaves no bytes in the log -------------------------------------------------------

    def _refuse(self, call: Call) -> None:
        raise TraceError(f"{call.name} on line {call.begun} cannot be replayed")

    def _refuse_mapping(self, call: Call) -> None:
        shared = "PROT_WRITE" in call.arguments and "MAP_SHARED" in call.arguments
        if shared and self._find(call, call.fields()[4]) is not None:
            self._refuse(call)

    def _refuse_transfer(self, call: Call) -> None:
        target = call.fields()[0 if call.name == "sendfile" else 2]
        if self._find(call, target) is not None:
            self._refuse(call)


def _takes_effect(call: Call) -> int:
    """Say where a call must be handled for descriptors to mean what they meant to it.

    close frees the number as it begins, and another thread may get it before close returns; a
    write looks its descriptor up as it begins. Calls that return something count at the end.
    """
    returns_something = ("open", "openat", "creat", "dup", "dup2", "dup3", "fcntl", "lseek")
    births = ("clone", "clone3", "fork", "vfork")
    return call.ended if call.name in returns_something + births else call.begun


def parse(
    lines: Iterable[str],
    directory: str,
    *,
    acks_to: str,
    cwd: str = "/",
    initial: Mapping[str, bytes] | None = None,
    volatile: Collection[str] = VOLATILE,
) -> Trace:
    """Turn a log of ``strace -f -y -xx`` into the events on files inside ``directory``.

    Whole lines written to the file ``acks_to`` become Ack events. Files whose name is in
    ``volatile`` are left out: they mean nothing after a restart.
    """
    files = dict(initial or {})
    reader = _Reader(directory, cwd, acks_to, volatile)
    for path, content in files.items():
        reader.start_with(path, len(content))
    return Trace(files, reader.read(list(calls(lines))))
