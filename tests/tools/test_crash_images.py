"""The recorder and the model behind the power-loss campaign, on traces small enough to read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from campaigns.call_events import parse
from campaigns.crash_images import Image, final_contents, images
from campaigns.disk_events import (
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
from campaigns.disk_model import ENTRY, SECTOR_BYTES, SIZE, Disk
from campaigns.recording import TRACED, record
from campaigns.replay import replay, run
from campaigns.strace_log import TraceError

OLD, NEW = b"o" * SECTOR_BYTES, b"n" * SECTOR_BYTES


def hexed(text: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in text.encode())


def log(*lines: str) -> list[Event]:
    """Parse lines in which 'text' stands for a quoted and <text> for a descriptor's string."""
    escaped = []
    for line in lines:
        parts = line.split("'")
        parts[1::2] = [f'"{hexed(part)}"' for part in parts[1::2]]
        line = "'".join(parts).replace("'", "")
        for path in ("/s/data.mdb", "/s/lock.mdb", "/s/new", "/acks", "/elsewhere", "/s"):
            line = line.replace(f"<{path}>", f"<{hexed(path)}>")
        escaped.append(line + "\n")
    return list(parse(escaped, "/s", acks_to="/acks").events)


OPEN = "7 openat(AT_FDCWD, '/s/data.mdb', O_RDWR|O_CREAT, 0644) = 4</s/data.mdb>"
CREATED = Create("data.mdb", "data.mdb", 1)


class TestLog:
    def test_plain_writes_follow_the_offset(self) -> None:
        assert log(
            OPEN,
            "7 write(4</s/data.mdb>, 'abc', 3) = 3",
            "7 lseek(4</s/data.mdb>, 100, SEEK_SET) = 100",
            "7 writev(4</s/data.mdb>, [{iov_base='de', iov_len=2}, "
            "{iov_base='f', iov_len=1}], 2) = 3",
            "7 write(4</s/data.mdb>, 'g', 1) = 1",
        ) == [
            CREATED,
            Write("data.mdb", 0, b"abc", 2),
            Write("data.mdb", 100, b"def", 4),
            Write("data.mdb", 103, b"g", 5),
        ]

    def test_a_short_write_counts_for_what_it_wrote(self) -> None:
        events = log(
            OPEN,
            "7 write(4</s/data.mdb>, 'abcdef', 6) = 2",
            "7 write(4</s/data.mdb>, 'cdef', 4) = 4",
        )
        assert events[1:] == [Write("data.mdb", 0, b"ab", 2), Write("data.mdb", 2, b"cdef", 3)]

    def test_a_failed_call_did_nothing(self) -> None:
        failed = "7 pwrite64(4</s/data.mdb>, 'abc', 3, 0) = -1 ENOSPC (No space left on device)"
        assert log(OPEN, failed) == [CREATED]

    def test_a_dsync_descriptor_syncs_its_own_write_only(self) -> None:
        assert log(
            OPEN,
            "7 openat(AT_FDCWD, '/s/data.mdb', O_WRONLY|O_DSYNC|O_CLOEXEC) = 5</s/data.mdb>",
            "7 pwrite64(4</s/data.mdb>, 'page', 4, 4096) = 4",
            "7 pwrite64(5</s/data.mdb>, 'meta', 4, 32) = 4",
        )[1:] == [
            Write("data.mdb", 4096, b"page", 3),
            Write("data.mdb", 32, b"meta", 4),
            SyncRange("data.mdb", 32, 4, 4),
        ]

    def test_a_write_that_overlaps_a_sync_keeps_both_ends(self) -> None:
        events = log(
            OPEN,
            "7 pwrite64(4</s/data.mdb>, 'a', 1, 0 <unfinished ...>",
            "8 fdatasync(9</elsewhere>) = 0",
            "7 <... pwrite64 resumed>) = 1",
        )
        assert events[1:] == [Write("data.mdb", 0, b"a", 4)]

    def test_threads_share_descriptors_even_before_clone_returns(self) -> None:
        events = log(
            OPEN,
            "7 clone3({flags=CLONE_VM|CLONE_FILES, stack_size=0x7fff80} <unfinished ...>",
            "8 fdatasync(4</s/data.mdb> <unfinished ...>",
            "7 <... clone3 resumed> => {parent_tid=[8]}, 88) = 8",
            "7 pwrite64(4</s/data.mdb>, 'a', 1, 0) = 1",
            "8 <... fdatasync resumed>) = 0",
        )
        assert events[1:] == [Write("data.mdb", 0, b"a", 5), Sync("data.mdb", 3)]

    def test_a_store_opened_by_one_thread_can_be_written_by_another(self) -> None:
        events = log(
            "7 clone3({flags=CLONE_VM|CLONE_FILES, stack_size=0x7fff80}, 88) = 8",
            OPEN,
            "8 write(4</s/data.mdb>, 'a', 1) = 1",
        )
        assert events[1:] == [Write("data.mdb", 0, b"a", 3)]

    def test_a_forked_child_shares_the_offset_but_not_the_closing(self) -> None:
        events = log(
            OPEN,
            "7 clone(child_stack=NULL, flags=CLONE_CHILD_CLEARTID|SIGCHLD) = 8",
            "8 write(4</s/data.mdb>, 'ab', 2) = 2",
            "8 close(4</s/data.mdb>) = 0",
            "7 write(4</s/data.mdb>, 'c', 1) = 1",
        )
        assert events[1:] == [Write("data.mdb", 0, b"ab", 3), Write("data.mdb", 2, b"c", 5)]

    def test_an_unfinished_write_in_the_trace_may_have_happened(self) -> None:
        events = log(OPEN, "7 write(4</s/data.mdb>, 'abc', 3 <unfinished ...>")
        assert events[1:] == [Write("data.mdb", 0, b"abc", sys.maxsize)]

    def test_acknowledgements_are_whole_lines_in_order(self) -> None:
        events = log(
            OPEN,
            "7 write(1</acks>, 'ack 1\nac', 8) = 8",
            "7 fsync(4</s/data.mdb>) = 0",
            "7 write(1</acks>, 'k 2\n', 4) = 4",
        )
        assert events[1:] == [Ack("ack 1"), Sync("data.mdb", 3), Ack("ack 2")]

    def test_the_trace_reader_follows_renames_links_and_size_changes(self) -> None:
        assert log(
            OPEN,
            "7 fallocate(4</s/data.mdb>, 0, 0, 9000) = 0",
            "7 ftruncate(4</s/data.mdb>, 3) = 0",
            "7 link('/s/data.mdb', '/s/new') = 0",
            "7 unlink('/s/new') = 0",
            "7 renameat2(AT_FDCWD</s>, 'data.mdb', AT_FDCWD</s>, 'new', RENAME_NOREPLACE) = 0",
            "7 openat(AT_FDCWD</s>, '/s', O_RDONLY|O_CLOEXEC) = 5</s>",
            "7 fsync(5</s>) = 0",
            "7 openat(AT_FDCWD, '/s/data.mdb', O_RDWR|O_CREAT, 0644) = 6</s/data.mdb>",
        )[1:] == [
            Allocate("data.mdb", 0, 9000, 2),
            Truncate("data.mdb", 3, 3),
            Link("data.mdb", "new", 4),
            Unlink("data.mdb", "new", 5),
            Rename("data.mdb", "data.mdb", "new", 6),
            SyncDirectory(".", 8),
            Create("data.mdb#2", "data.mdb", 9),
        ]

    def test_volatile_files_are_left_out(self) -> None:
        opened = "7 openat(AT_FDCWD, '/s/lock.mdb', O_RDWR|O_CREAT, 0644) = 3</s/lock.mdb>"
        mapped = "7 mmap(NULL, 8, PROT_READ|PROT_WRITE, MAP_SHARED, 3</s/lock.mdb>, 0) = 0x7f"
        assert log(opened, "7 ftruncate(3</s/lock.mdb>, 8192) = 0", mapped) == []

    @pytest.mark.parametrize(
        "line",
        [
            "7 mmap(NULL, 8, PROT_READ|PROT_WRITE, MAP_SHARED, 4</s/data.mdb>, 0) = 0x7f",
            "7 sendfile(4</s/data.mdb>, 9</elsewhere>, NULL, 100) = 100",
            "7 fallocate(4</s/data.mdb>, FALLOC_FL_KEEP_SIZE|FALLOC_FL_PUNCH_HOLE, 0, 9) = 0",
            "7 write(5</s/data.mdb>, 'abc', 3) = 3",
            "7 write(4</s/data.mdb>, 'abc'..., 9) = 9",
            "7 rename('/elsewhere', '/s/new') = 0",
            "7 <... write resumed>) = 1",
        ],
    )
    def test_a_traced_call_that_cannot_be_followed_is_refused(self, line: str) -> None:
        with pytest.raises(TraceError):
            log(OPEN, line)


def disk_after(
    events: Sequence[Event], initial: bytes | None = OLD + OLD, *, strict_entries: bool = False
) -> Disk:
    disk = Disk({} if initial is None else {"f": initial}, strict_entries=strict_entries)
    for change, event in enumerate(events):
        disk.apply(change, event)
    return disk


def left(disk: Disk, *landed: tuple[int, int]) -> bytes | None:
    """Return the file when just these parts of changes landed."""
    return disk.contents(lambda change, place: (change, place) in landed).get("f")


class TestDisk:
    def test_an_unsynced_write_may_be_missing_torn_or_there(self) -> None:
        disk = disk_after([Write("f", 0, NEW + NEW)])
        assert left(disk) == OLD + OLD
        assert left(disk, (0, 1)) == OLD + NEW
        assert left(disk, (0, 0), (0, 1)) == NEW + NEW

    def test_a_part_of_a_sector_lands_with_the_rest_of_it_unchanged(self) -> None:
        disk = disk_after([Write("f", 10, b"xx")])
        assert left(disk, (0, 0)) == OLD[:10] + b"xx" + OLD[12:] + OLD

    def test_a_sync_makes_everything_before_it_durable(self) -> None:
        disk = disk_after([Write("f", 0, NEW + NEW), Sync("f"), Write("f", 0, OLD)])
        assert left(disk) == NEW + NEW
        assert disk.unsynced() == [2]

    def test_a_sync_does_not_cover_a_write_that_ended_after_it_began(self) -> None:
        disk = disk_after([Write("f", 0, NEW, done=5), Sync("f", begun=4)])
        assert left(disk) == OLD + OLD
        assert disk.unsynced() == [0]

    def test_a_dsync_write_leaves_earlier_writes_unsynced(self) -> None:
        events: list[Event] = [Write("f", 512, NEW), Write("f", 0, b"meta"), SyncRange("f", 0, 4)]
        disk = disk_after(events)
        assert left(disk) == b"meta" + OLD[4:] + OLD
        assert disk.unsynced() == [0]

    def test_a_dsync_write_past_the_end_is_readable(self) -> None:
        events: list[Event] = [
            Truncate("f", 100),
            Write("f", 1024, b"meta"),
            SyncRange("f", 1024, 4),
        ]
        assert left(disk_after(events), (0, SIZE)) == OLD + OLD + b"meta"

    def test_of_two_writes_to_a_sector_either_may_be_the_one_that_landed(self) -> None:
        disk = disk_after([Write("f", 0, b"1" * 1024), Write("f", 0, b"2" * 1024)])
        assert left(disk, (0, 0), (1, 1)) == b"1" * 512 + b"2" * 512

    def test_a_later_version_of_a_sector_holds_the_earlier_write(self) -> None:
        disk = disk_after([Write("f", 0, b"a"), Write("f", 1, b"b")])
        assert left(disk, (1, 0)) == b"ab" + OLD[2:] + OLD

    def test_an_unsynced_extension_may_be_missing_or_zeros(self) -> None:
        disk = disk_after([Write("f", 1024, NEW)])
        assert left(disk, (0, 2)) == OLD + OLD
        assert left(disk, (0, SIZE)) == OLD + OLD + bytes(512)
        assert left(disk, (0, SIZE), (0, 2)) == OLD + OLD + NEW

    def test_allocating_extends_and_never_shrinks(self) -> None:
        disk = disk_after([Allocate("f", 0, 100), Allocate("f", 1000, 100), Sync("f")])
        assert left(disk) == OLD + OLD + bytes(76)

    def test_truncated_bytes_do_not_come_back_after_a_sync(self) -> None:
        disk = disk_after([Truncate("f", 10), Truncate("f", 1024), Sync("f")])
        assert left(disk) == OLD[:10] + bytes(1014)

    def test_a_sync_inside_the_last_sector_keeps_the_size(self) -> None:
        disk = disk_after([Write("f", 0, b"x"), Sync("f")], b"12345")
        assert left(disk) == b"x2345"

    def test_syncing_a_new_file_keeps_its_name_unless_entries_are_strict(self) -> None:
        events: list[Event] = [Create("f", "f"), Write("f", 0, b"x"), Sync("f")]
        assert left(disk_after(events, None)) == b"x"
        assert left(disk_after(events, None, strict_entries=True)) is None
        events.append(SyncDirectory("."))
        assert left(disk_after(events, None, strict_entries=True)) == b"x"

    def test_a_rename_may_land_before_the_contents_it_publishes(self) -> None:
        disk = disk_after([Create("t", "t"), Write("t", 0, b"x"), Rename("t", "t", "f")])
        assert left(disk, (2, ENTRY)) == b""
        assert left(disk) == OLD + OLD

    def test_a_recreated_file_gets_no_changes_of_the_removed_one(self) -> None:
        events: list[Event] = [
            Unlink("f", "f"),
            Create("f#2", "f"),
            Write("f#2", 0, b"x"),
            Sync("f#2"),
        ]
        assert left(disk_after(events), (0, ENTRY)) == b"x"


def drawn(count: int = 400, seed: int = 1) -> list[Image]:
    events: list[Event] = []
    for number in range(1, 6):
        events += [Write("f", 512 * number, NEW), Write("f", 512 * number + 512, OLD)]
        events += [Sync("f"), Ack(f"ack {number}")]
    return list(images(Trace({"f": OLD}, events), seed, count))


class TestImages:
    def test_the_same_seed_draws_the_same_images(self) -> None:
        assert drawn() == drawn()
        assert drawn() != drawn(seed=2)

    def test_images_are_drawn_at_every_crash_point_with_the_acks_before_it(self) -> None:
        assert {len(image.acknowledged) for image in drawn()} == {0, 1, 2, 3, 4, 5}
        assert all(
            image.acknowledged == tuple(f"ack {n + 1}" for n in range(len(image.acknowledged)))
            for image in drawn()
        )

    def test_changes_synced_before_an_ack_are_in_every_image(self) -> None:
        for image in drawn():
            synced = len(image.acknowledged)
            assert image.contents["f"][512 : 512 * synced + 512] == NEW * synced

    def test_the_images_include_the_extreme_cases(self) -> None:
        stories = " ".join(image.describe() for image in drawn())
        for label in ("nothing", "everything", "only the last", "all but the first"):
            assert f"{label} landed" in stories

    def test_a_directory_holds_exactly_the_image(self, tmp_path: Path) -> None:
        target = tmp_path / "image"
        Image({"left": b"over"}, (), "").materialise(target)
        Image({"a/b": b"1", "c": b""}, (), "").materialise(target)
        files = {p.relative_to(target).as_posix() for p in target.rglob("*") if p.is_file()}
        assert files == {"a/b", "c"}
        assert (target / "a/b").read_bytes() == b"1"


WRITER = """
import os, sys, threading
d = sys.argv[1]
sync = sys.argv[2] == "sync"
f = os.open(d + "/log", os.O_RDWR | os.O_CREAT)
def other():
    g = os.open(d + "/other", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for n in range(50):
        os.write(g, b"%d," % n)
        os.fsync(g)
thread = threading.Thread(target=other)
thread.start()
for n in range(1, 31):
    os.write(f, b"%08d" % n * 100)
    if sync:
        os.fdatasync(f)
    print("ack", n, flush=True)
thread.join()
if os.fork() == 0:
    os.write(f, b"from the child")
    os._exit(0)
os.wait()
os.rename(d + "/other", d + "/renamed")
"""
VERIFIER = """
import os, signal, sys
from campaigns.replay import Violation, serve
def check(directory, acks):
    log = directory / "log"
    content = log.read_bytes() if log.exists() else b""
    for n in range(1, len(acks) + 1):
        if content[n * 800 - 800 : n * 800] != b"%08d" % n * 100:
            if sys.argv[1] == "die":
                os.kill(os.getpid(), signal.SIGBUS)
            raise Violation(f"record {n} is damaged")
    return "more" if len(content) > 800 * len(acks) else ""
serve(check)
"""

needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="strace is missing")


def campaign(scratch: Path, *, sync: str, verifier: str = "answer") -> tuple[list[str], list[str]]:
    (scratch / "writer.py").write_text(WRITER)
    (scratch / "verifier.py").write_text(VERIFIER)
    return (
        [sys.executable, str(scratch / "writer.py"), "{dir}", sync],
        [sys.executable, str(scratch / "verifier.py"), verifier],
    )


@pytest.fixture(autouse=True)
def verifiers_find_the_campaigns(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = str(Path(__file__).resolve().parent.parent.parent / "tools")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([tools, os.environ.get("PYTHONPATH", "")]))


@needs_strace
class TestCampaign:
    def test_a_recorded_trace_leads_to_the_bytes_on_disk(self, tmp_path: Path) -> None:
        workload, _ = campaign(tmp_path, sync="sync")
        store = tmp_path / "store"
        store.mkdir()
        (store / "log").write_bytes(b"before")
        argv = [argument.replace("{dir}", str(store)) for argument in workload]
        trace = record(argv, store, tmp_path / "strace.log")
        assert trace.initial == {"log": b"before"}
        assert trace.acknowledged() == 30
        final = final_contents(trace)
        assert final["log"] == (store / "log").read_bytes()
        assert final["renamed"] == (store / "renamed").read_bytes()

    def test_a_writer_that_syncs_passes(self, tmp_path: Path) -> None:
        report = run(*campaign(tmp_path, sync="sync"), tmp_path, seed=1, count=300)
        assert (report.images, report.failures, report.acknowledged) == (300, 0, 30)
        assert report.sound()
        assert report.notes["more"] > 0

    def test_a_writer_that_does_not_sync_fails(self, tmp_path: Path) -> None:
        report = run(*campaign(tmp_path, sync="none"), tmp_path, seed=1, count=300)
        assert report.failures > 50
        assert not report.sound()
        assert "is damaged" in report.first_failures[0].reason
        assert report.first_failures[0].kept.is_dir()

    def test_a_verifier_that_dies_fails_its_image_and_is_started_again(
        self, tmp_path: Path
    ) -> None:
        argvs = campaign(tmp_path, sync="none", verifier="die")
        report = run(*argvs, tmp_path, seed=1, count=40)
        assert report.images == 40
        assert 1 < report.failures < 40
        assert "died of SIGBUS" in report.first_failures[0].reason

    def test_a_verifier_that_does_not_answer_fails_its_image(self, tmp_path: Path) -> None:
        silent = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.stdin.read()"]
        report = replay(Trace({}, [Ack("ack 1")]), silent, tmp_path, seed=1, count=1, timeout_s=0.2)
        assert report.failures == 1
        assert "no answer" in report.first_failures[0].reason

    def test_a_workload_that_fails_raises_trace_error(self, tmp_path: Path) -> None:
        with pytest.raises(TraceError, match="ended with 3"):
            record([sys.executable, "-c", "raise SystemExit(3)"], tmp_path, tmp_path / "log")


@needs_strace
def test_strace_knows_every_traced_system_call() -> None:
    command = ["strace", "-o", os.devnull, "-e", f"trace={TRACED}", "true"]
    assert subprocess.run(command, check=False, capture_output=True).stderr == b""
