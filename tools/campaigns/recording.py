"""Runs a writer under strace and returns its trace."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from campaigns.call_events import VOLATILE, parse
from campaigns.crash_images import final_contents
from campaigns.disk_events import Trace
from campaigns.strace_log import TraceError

# A name with "?" may be missing on an architecture. In addition to the calls that write or sync,
# the list has calls that identify descriptors (dup, fcntl, clone), and calls that are refused on
# the directory (mmap, sendfile, io_uring).
TRACED = (
    "?open,openat,?openat2,?creat,close,?close_range,dup,?dup2,dup3,fcntl,?fork,?vfork,clone,"
    "?clone3,write,pwrite64,writev,pwritev,pwritev2,lseek,truncate,ftruncate,fallocate,fsync,"
    "fdatasync,sync_file_range,msync,?rename,renameat,renameat2,?link,linkat,?unlink,unlinkat,"
    "chdir,fchdir,mmap,sendfile,copy_file_range,splice,io_uring_setup"
)
LONGEST_WRITE_BYTES = 1 << 26


def record(
    workload_argv: Sequence[str],
    directory: Path,
    trace_file: Path,
    *,
    volatile: Collection[str] = VOLATILE,
    timeout_s: float = 600,
) -> Trace:
    """Run a writer to its end and return what it did inside ``directory``.

    Its standard output goes to a file next to ``trace_file``; each line there is an
    acknowledgement. TraceError if the writer fails, or if the trace does not reproduce the exact
    bytes that the writer left: then something was not recorded.
    """
    root = directory.resolve()
    initial = _contents(root, volatile)
    acks_file = trace_file.with_name(trace_file.name + ".acks").resolve()
    command = ["strace", "-f", "-y", "-xx", "-s", str(LONGEST_WRITE_BYTES)]
    command += ["-e", "signal=none", "-e", f"trace={TRACED}", "-o", str(trace_file), "--"]
    with acks_file.open("wb") as acks:
        finished = subprocess.run(
            [*command, *workload_argv], stdout=acks, timeout=timeout_s, check=False
        )
    if finished.returncode != 0:
        raise TraceError(f"the workload ended with {finished.returncode}")
    with trace_file.open(encoding="ascii") as lines:
        trace = parse(
            lines,
            str(root),
            acks_to=str(acks_file),
            cwd=os.getcwd(),
            initial=initial,
            volatile=volatile,
        )
    _compare(final_contents(trace), _contents(root, volatile))
    return trace


def _contents(root: Path, volatile: Collection[str]) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name not in volatile
    }


def _compare(replayed: Mapping[str, bytes], actual: Mapping[str, bytes]) -> None:
    for path in sorted({*replayed, *actual}):
        if replayed.get(path) != actual.get(path):
            raise TraceError(f"{path} differs from the result of the recorded calls")
