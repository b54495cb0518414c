"""Check: each finding by real damage, what it affects, and no false alarm beside others."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from casstore.engine import faults
from casstore.engine.lmdb import slab as slabs
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.lmdb.lookup import index_key
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import TABLES, DeleteRow, NewObject, PutRow, RowKey, Write
from casstore.errors import InvalidInputError
from casstore.format.canonical import pack_checked
from casstore.format.digest import Digest, Kind, digest_of
from casstore.format.graph import Manifest, encode_manifest
from casstore.maintenance import findings as codes
from casstore.maintenance import gc
from casstore.maintenance.backup import backup
from casstore.maintenance.check import LEVELS, CheckReport, check, last_check, rebuild, record
from casstore.maintenance.compact import compact
from casstore.maintenance.progress import Step
from casstore.objects.pieces import PieceWriter
from casstore.session import keys
from casstore.session.data import Checkpoint, Commit, NodeDraft
from casstore.session.state import decode_head, encode_head, runtime_of
from casstore.store import Store
from tests.maintenance.test_check_records import ALL_CODES, FOUND_IN_RECORDS
from tests.maintenance.wounds import (
    LONG,
    PAGE_BYTES,
    Wound,
    flip,
    open_store,
    overwrite,
    pages_of,
    populate,
    step,
    wounding,
)
from tests.objects.specimens import put_shared_parts

pytestmark = pytest.mark.usefixtures("slab_a_commit")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "store"
    with open_store(place) as store:
        populate(store)
    return place


def checked(path: Path, level: str = "full", **options: object) -> CheckReport:
    with open_store(path) as store:
        return check(store, level=level, **options)  # type: ignore[arg-type]


# --- a sound store ----------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("engine", [0, 1])
def test_a_sound_store_has_no_findings(tmp_path: Path, level: str, engine: int) -> None:
    with open_store(tmp_path / "s", lmdb_version=engine) as store:
        populate(store)
        gc.collect(store, grace_ms=0)
        report = check(store, level=level, share=0.5, seed=1)
    assert (report.findings, report.counts, report.affected) == ((), {}, ())
    assert report.sound
    if level != "quick":
        assert report.rows_checked > 100
        assert report.objects_checked > 100
    if level == "full":
        assert report.contents_checked == report.objects_checked
    if level == "sample":
        assert 0 < report.contents_checked < report.objects_checked


def test_the_same_seed_draws_the_same_sample(path: Path) -> None:
    with open_store(path) as store:
        reports = [check(store, level="sample", share=0.3, seed=seed) for seed in (1, 1, 2)]
    first, same, other = [report._replace(checked_at_ms=0) for report in reports]
    assert first == same != other


@pytest.mark.parametrize("level", LEVELS)
def test_an_empty_store_is_sound(tmp_path: Path, level: str) -> None:
    with open_store(tmp_path / "s") as store:
        assert check(store, level=level).counts == {}


@pytest.mark.parametrize("level", LEVELS)
def test_check_supports_the_memory_engine(level: str) -> None:
    with Store(MemoryEngine()) as store:
        populate(store)
        assert check(store, level=level).counts == {}
        head = store.session("s1").head()
        assert head is not None
        store.engine.write(Write(deletes=[head.manifest]))
        report = check(store, level=level)
        if level != "quick":
            assert report.counts[codes.ROOT_MISSING] >= 1
            assert [one.session for one in report.affected] == ["s1"]


def test_wrong_arguments_are_refused(tmp_path: Path) -> None:
    with open_store(tmp_path / "s") as store:
        odd: list[dict[str, Any]] = [
            {"level": "deep"}, {"share": 0}, {"share": "half"}, {"share": math.nan}, {"seed": [1]},
            {"max_findings": 0},
            {"since_last": "no"},
        ]  # fmt: skip
        for wrong in odd:
            with pytest.raises(InvalidInputError):
                check(store, **wrong)


def test_a_readonly_store_can_be_checked(path: Path) -> None:
    with open_store(path, readonly=True) as store:
        assert check(store, level="full").counts == {}


def test_progress_is_reported_and_may_stop_the_check(path: Path) -> None:
    steps: list[Step] = []

    def stop(step: Step) -> None:
        steps.append(step)
        if step.phase == "graphs":
            raise KeyboardInterrupt

    with open_store(path) as store:
        with pytest.raises(KeyboardInterrupt):
            check(store, progress=stop)
        assert {"objects", "rows", "graphs"} <= {step.phase for step in steps}
        assert check(store).counts == {}


# --- every code, by real damage ---------------------------------------------------------

WOUNDS: dict[str, Callable[[Path], None]] = {}


def wound(code: str) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def register(make: Callable[[Path], None]) -> Callable[[Path], None]:
        WOUNDS[code] = make
        return make

    return register


def head_of(cut: Wound, session: str) -> bytes:
    return cut.value("heads", keys.session_key(session))


@wound(faults.HEADER_DAMAGED)
def lose_the_time_of_creation(path: Path) -> None:
    with wounding(path) as cut:
        cut.put("meta", b"created_at_ms", b"yesterday")


@wound(faults.PAGE_DAMAGED)
def overwrite_a_leaf_of_the_history(path: Path) -> None:
    overwrite(path, pages_of(path, "history")[0][-1])


@wound(faults.SLAB_DAMAGED)
def change_a_directory(path: Path) -> None:
    with wounding(path) as cut:
        key, value = cut.rows("slabs")[5]
        cut.put("slabs", key, flip(value, slabs.HEADER_BYTES + 3))


@wound(faults.SLABS_OVERLAP)
def put_a_slab_back_after_packing(path: Path) -> None:
    with wounding(path) as cut:
        old = cut.rows("slabs")
    with open_store(path) as store:
        store.pack(min_age_ms=0)
    with wounding(path) as cut:
        present = {key for key, _ in cut.rows("slabs")}
        cut.put("slabs", *next(one for one in old if one[0] not in present))


@wound(faults.DICTIONARY_DAMAGED)
def damage_a_dictionary(path: Path) -> None:
    with wounding(path) as cut:
        cut.put("dictionaries", (7).to_bytes(4, "big"), b"not what it was")


@wound(faults.INDEX_DANGLING)
def lead_a_name_elsewhere(path: Path) -> None:
    with wounding(path) as cut:
        cut.put("index", index_key(bytes(32), 3), b"")


@wound(codes.OBJECT_MISSING)
def take_the_name_of_a_node_away(path: Path) -> None:
    with open_store(path) as store:
        digest = store.session("s1").nodes()[0].digest
    with wounding(path) as cut:
        cut.unname(digest)


@wound(faults.OBJECT_DAMAGED)
def change_content(path: Path) -> None:
    with wounding(path) as cut:
        key, value = cut.rows("slabs")[-6]
        cut.put("slabs", key, flip(value))


def put_slab(path: Path, items: list[NewObject], children: list[list[int]]) -> None:
    """Store objects as no writer would."""
    with wounding(path) as cut:
        last = int.from_bytes(cut.rows("slabs")[-1][0], "big")
        ids = [[last + 1 + child for child in row] for row in children]
        cut.put("slabs", *slabs.encode(items, ids, last + 1, 1, slabs.uncompressed))
        for at, item in enumerate(items):
            cut.put("index", index_key(item.digest, last + 1 + at), b"")


@wound(codes.OBJECT_MALFORMED)
def store_a_value_that_is_spelled_wrongly(path: Path) -> None:
    data = b"\xcc\x01"  # 1, but not in its shortest form
    put_slab(path, [NewObject(digest_of(Kind.VALUE, data), Kind.VALUE, data, ())], [[]])


@wound(codes.VALUE_EXPANDS)
def store_a_value_that_repeats_its_parts(path: Path) -> None:
    with open_store(path) as store:
        put_shared_parts(store.engine)


@wound(codes.LINK_ORDER)
def store_a_parent_before_its_child(path: Path) -> None:
    # Distances are unsigned: only a link to itself can be spelled.
    leaf = NewObject(Digest.of_blob(b"x"), Kind.BLOB, b"x", ())
    put_slab(path, [leaf], [[0]])


@wound(codes.LINKS_DIFFER)
def list_links_that_are_not_there(path: Path) -> None:
    blob = NewObject(Digest.of_blob(b"x"), Kind.BLOB, b"x", ())
    # Its digest does not stand in the data, so the object keeps its (no) links.
    other = NewObject(Digest.of_blob(b"y"), Kind.BLOB, b"y", (blob.digest,))
    put_slab(path, [blob, other], [[], [0]])


@wound(codes.ROOT_MISSING)
def take_the_name_of_a_manifest_away(path: Path) -> None:
    with wounding(path) as cut:
        cut.unname(decode_head(head_of(cut, "s1")).manifest)


@wound(faults.ROW_DAMAGED)
def change_a_row(path: Path) -> None:
    with wounding(path) as cut:
        key = keys.session_key("s2")
        cut.put("heads", key, flip(cut.get("heads", key), 3))


@wound(codes.ROW_MALFORMED)
def write_a_row_that_makes_no_sense(path: Path) -> None:
    with wounding(path) as cut:
        cut.put_row("leases", keys.session_key("s2"), b"mine")
        cut.fix_sum()


@wound(faults.ROWS_SUM_WRONG)
def throw_a_row_back(path: Path) -> None:
    with wounding(path) as cut:
        key = keys.session_key("s2")
        older = cut.value(
            "history", keys.history(key, decode_head(head_of(cut, "s2")).revision - 1)
        )
        cut.put_row("heads", key, older)


def reencode_manifest(path: Path, change: Callable[[Manifest], Manifest]) -> None:
    """Put another manifest in the place of the head's of session s1."""
    with open_store(path) as store:
        state = runtime_of(store).get("s1")
        writer = PieceWriter()
        digest = writer.emit(Kind.MANIFEST, *encode_manifest(change(state.manifest)))
        row = encode_head(state.head._replace(manifest=digest))
        store.engine.write(
            Write(writer.objects, rows=[PutRow("heads", keys.session_key("s1"), row)])
        )


@wound(codes.NODE_INDEX_WRONG)
def hash_ids_otherwise(path: Path) -> None:
    def lie(manifest: Manifest) -> Manifest:
        tail = manifest.node_index
        assert tail.hashes
        return manifest._replace(node_index=tail._replace(hashes=bytes(len(tail.hashes))))

    reencode_manifest(path, lie)


@wound(codes.GRAPH_WRONG)
def number_the_next_node_wrongly(path: Path) -> None:
    reencode_manifest(path, lambda manifest: manifest._replace(next_seq=manifest.next_seq + 1))


@wound(codes.LABEL_DANGLING)
def label_a_revision_that_never_was(path: Path) -> None:
    with wounding(path) as cut:
        place = keys.label(keys.session_key("s1"), "astray")
        cut.put_row("history", place, (99).to_bytes(8, "big") + b"astray")
        cut.fix_sum()


@wound(codes.HISTORY_GAP)
def drop_a_revision(path: Path) -> None:
    with open_store(path) as store:
        place = keys.history(keys.session_key("s1"), 4)
        store.engine.write(Write(rows=[DeleteRow("history", place)]))
        store.session("s1").unlabel("l13")


@wound(codes.HISTORY_WRONG)
def misplace_a_revision(path: Path) -> None:
    with wounding(path) as cut:
        key = keys.session_key("s1")
        cut.put_row("history", keys.history(key, 3), cut.value("history", keys.history(key, 4)))
        cut.fix_sum()


@wound(codes.HEAD_MISSING)
def lose_a_head(path: Path) -> None:
    with wounding(path) as cut:
        cut.delete("heads", keys.session_key("s1"))
        cut.fix_sum()


@wound(codes.DELETION_UNFINISHED)
def leave_rows_of_a_deleted_session(path: Path) -> None:
    with wounding(path) as cut:
        key = keys.session_key("s1")
        cut.delete("heads", key)
        cut.put_row("tombstones", key, (1).to_bytes(8, "big"))
        cut.fix_sum()


@wound(codes.QUEUE_WRONG)
def lose_the_way_to_a_batch(path: Path) -> None:
    with wounding(path) as cut:
        cut.delete("queue", keys.queue_id(keys.session_key("s0"), "b2").key)
        cut.fix_sum()


def test_every_finding_code_has_a_damage_case() -> None:
    assert WOUNDS.keys() | FOUND_IN_RECORDS == ALL_CODES.keys()


@pytest.mark.parametrize("code", WOUNDS)
def test_each_damage_case_is_reported_with_its_code_severity_and_remedy(
    path: Path, code: str
) -> None:
    WOUNDS[code](path)
    report = checked(path)
    found = [one for one in report.findings if one.code == code]
    assert found, report.counts
    meaning = codes.CODES[code]
    assert {(one.severity, one.remedy) for one in found} == {(meaning.severity, meaning.remedy)}
    assert all(one.what for one in found)
    assert report.sound == (meaning.severity != codes.ERROR)


# Damage of these kinds shows in other places, too; all others must give their own code alone.
_WIDE = {
    faults.SLAB_DAMAGED,
    faults.SLABS_OVERLAP,
    faults.PAGE_DAMAGED,
    faults.ROW_DAMAGED,
    faults.ROWS_SUM_WRONG,
    faults.OBJECT_DAMAGED,
    codes.OBJECT_MISSING,
    codes.ROOT_MISSING,
    codes.HISTORY_WRONG,
    codes.LINK_ORDER,
    codes.DELETION_UNFINISHED,
}


@pytest.mark.parametrize("code", [code for code in WOUNDS if code not in _WIDE])
def test_each_damage_case_is_reported_with_no_other_code(path: Path, code: str) -> None:
    WOUNDS[code](path)
    assert checked(path).counts.keys() == {code}


# --- what is affected -------------------------------------------------------------------


def test_the_sessions_and_revisions_that_need_a_lost_object_are_named(path: Path) -> None:
    with open_store(path) as store:
        digest = store.session("s1").node("n17")
        assert digest is not None
        with_it = [entry.revision for entry in store.session("s1").history()]
    with wounding(path) as cut:
        cut.unname(digest.digest)
    report = checked(path, "connectivity")
    [affected] = report.affected
    # n17 is the fifth node of s1; the fork was made at revision 3.
    assert affected.session == "s1"
    assert affected.revisions == tuple(each for each in with_it if each >= 5)
    assert (affected.revision_count, affected.head) == (len(affected.revisions), True)


def test_forks_that_share_a_lost_object_are_named(path: Path) -> None:
    with open_store(path) as store:
        digest = store.session("s1").nodes()[0].digest
    with wounding(path) as cut:
        cut.unname(digest)
    assert [one.session for one in checked(path).affected] == ["fork", "s1"]


def test_queued_work_attachments_and_tags_that_need_it_are_named_too(path: Path) -> None:
    with open_store(path) as store:
        [queued, _] = store.session("s0").queue.batches()
        [attached] = [one for one in store.session("s0").attachments.list() if one.digest]
        tagged = store.find_pin("release")
        assert tagged is not None
    with wounding(path) as cut:
        cut.unname(attached.digest or b"")
        cut.unname(tagged.digest)
        cut.unname(Digest.of_blob(LONG.encode()))
    report = checked(path, "connectivity")
    assert report.affected_pins == ("release",)
    [own] = [one for one in report.affected if one.session == "s0"]
    assert own.others == (f"batch {queued.seq}", f"attachment {attached.id!r}")
    assert (own.revisions, own.head) == ((), False)


def test_a_damaged_slab_names_the_sessions_that_need_it(path: Path) -> None:
    with wounding(path) as cut:
        key, value = cut.rows("slabs")[10]
        cut.put("slabs", key, flip(value))
    report = checked(path)
    assert "s2" in [one.session for one in report.affected]
    assert all(one.code == faults.OBJECT_DAMAGED for one in report.findings)


# --- bounds -----------------------------------------------------------------------------


def test_findings_are_bounded_and_the_rest_is_counted(path: Path) -> None:
    with wounding(path) as cut:
        cut.drop("index")
    report = checked(path, max_findings=7)
    assert len(report.findings) == 7
    assert report.findings_omitted == sum(report.counts.values()) - 7 > 20


def test_harmless_findings_do_not_crowd_out_errors(path: Path) -> None:
    with wounding(path) as cut:
        key = keys.session_key("s1")
        for number in range(20):
            place = keys.label(key, f"astray {number}")
            cut.put_row("history", place, (99).to_bytes(8, "big") + b"astray")
        cut.delete("heads", keys.session_key("s3"))
        cut.fix_sum()
    report = checked(path, "connectivity", max_findings=6)
    assert codes.HEAD_MISSING in {one.code for one in report.findings}


@pytest.mark.parametrize("table", ["heads", "history", "receipts", "slabs", "index", "queue"])
def test_a_damaged_root_page_is_reported_for_its_table_only(path: Path, table: str) -> None:
    overwrite(path, pages_of(path, table)[0][0])
    report = checked(path)
    assert {one.where.table for one in report.findings if one.code == faults.PAGE_DAMAGED} == {
        table
    }


def test_a_page_with_the_content_of_another_page_is_reported_as_damaged(path: Path) -> None:
    data = (path / "data.mdb").read_bytes()
    other = pages_of(path, "history")[0][-1] * PAGE_BYTES
    place = pages_of(path, "heads")[0][0]
    overwrite(path, place, fill=lambda size: data[other : other + size])
    [finding] = checked(path).findings
    assert (finding.code, finding.where.table) == (faults.PAGE_DAMAGED, "heads")
    assert finding.what == f"page {place} is damaged"


def test_an_object_that_is_named_twice_is_found(path: Path) -> None:
    with open_store(path) as store:
        digest = store.put_blob(b"named twice")
    assert checked(path).counts == {}
    with wounding(path) as cut:
        last = int.from_bytes(cut.rows("slabs")[-1][0], "big")
        twin = NewObject(digest, Kind.BLOB, b"", ())
        cut.put("slabs", *slabs.encode([twin], [[]], last + 1, 1, slabs.uncompressed))
        cut.put("index", index_key(digest, last + 1), b"")
    found = [one for one in checked(path).findings if one.code == faults.INDEX_DANGLING]
    assert [one.where.digest for one in found] == [digest]


# --- since the last one -----------------------------------------------------------------


def test_since_last_checks_only_objects_stored_after_the_last_sound_check(path: Path) -> None:
    first = checked(path)
    assert first.objects_checked > 0
    assert checked(path, since_last=True).objects_checked == 0
    with open_store(path) as store:
        step(store, "s1", "new", text=LONG)
        report = check(store, level="full", since_last=True)
        assert 0 < report.objects_checked < 20
        assert check(store, level="full").objects_checked > first.objects_checked


def test_a_connectivity_check_does_not_advance_the_mark_of_full_checks(path: Path) -> None:
    assert checked(path, "connectivity").sound
    assert checked(path, "connectivity", since_last=True).objects_checked == 0
    assert checked(path, "full", since_last=True).contents_checked > 0
    assert checked(path, "full", since_last=True).contents_checked == 0


def test_a_check_that_finds_an_error_does_not_advance_the_mark(path: Path) -> None:
    change_content(path)
    for _ in range(2):
        assert checked(path, since_last=True).counts[faults.OBJECT_DAMAGED] >= 1


def test_since_last_finds_a_new_object_whose_older_child_is_missing(path: Path) -> None:
    assert checked(path).sound
    with open_store(path) as store:
        old = store.session("s1").nodes()[-1].digest
        step(store, "s1", "new")
    with wounding(path) as cut:
        cut.unname(old)
    assert codes.OBJECT_MISSING in checked(path, since_last=True).counts


def test_an_invalid_check_mark_is_ignored(path: Path) -> None:
    assert checked(path).sound
    for mark in (b"nonsense", pack_checked([9, 1, 1]), pack_checked(["a"])):
        with open_store(path) as store:
            assert isinstance(store.engine, LmdbEngine)
            store.engine.write_mark(mark)
            assert check(store, level="full", since_last=True).objects_checked > 0


# --- the result of the last check -------------------------------------------------------


def test_the_result_of_the_last_check_is_stored(path: Path) -> None:
    with open_store(path) as store:
        assert last_check(store) is None
        report = check(store, level="quick")
        assert last_check(store) == (report.checked_at_ms, "quick", False, True, 0)
    # A quick check verifies no object: the next one starts at the first.
    assert checked(path, since_last=True).objects_checked > 0
    change_content(path)
    report = checked(path)
    with open_store(path, readonly=True) as store:
        found = last_check(store)
        assert found is not None
        assert (found.level, found.sound, found.findings) == ("full", False, len(report.findings))
        # A read-only store keeps the result of the last check that could store it.
        check(store, level="quick")
        assert last_check(store) == found


def test_the_result_is_kept_by_copies_and_compaction(path: Path, tmp_path: Path) -> None:
    with open_store(path) as store:
        check(store)
        found = last_check(store)
        backup(store, tmp_path / "copy")
    compact(path)
    for place in (path, tmp_path / "copy"):
        with open_store(place, readonly=True) as store:
            assert last_check(store) == found is not None


def test_a_check_that_finds_damaged_pages_writes_nothing(path: Path) -> None:
    checked(path)
    overwrite(path, pages_of(path, "history")[0][-1])
    with open_store(path) as store:
        found = last_check(store)
        report = check(store)
        assert faults.PAGE_DAMAGED in report.counts
        assert last_check(store) == found
        assert not record(store, report)


# --- beside others ----------------------------------------------------------------------


def test_a_check_concurrent_with_writers_and_a_collector_finds_nothing(tmp_path: Path) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                while not stop.is_set():
                    work()
            except BaseException as exc:
                failures.append(exc)
                stop.set()

        return run

    with open_store(tmp_path / "s") as store:
        populate(store)
        turns = iter(range(1 << 30))

        def write() -> None:
            turn = next(turns)
            if turn > 1500:
                # The longer the histories, the longer a check of all of them takes.
                stop.wait(0.01)
            name = f"w{turn % 3}"
            tools = Checkpoint(tool_state={"log": [f"{turn} {at}" for at in range(90)]})
            draft = NodeDraft(f"x{turn}", {"text": LONG[: turn % 900]})
            store.session(name).commit(Commit(append=[draft], checkpoint=tools, label="last"))
            store.put_blob(b"garbage %d" % turn)
            if turn % 7 == 6:
                store.fork(name, f"f{turn}")
            if turn % 21 == 20:
                store.delete_session(f"f{turn - 14}")
                store.session("s0").queue.enqueue([turn])

        def collect() -> None:
            gc.collect(store, grace_ms=0)

        threads = [threading.Thread(target=guarded(work)) for work in (write, collect)]
        for thread in threads:
            thread.start()
        try:
            reports: list[CheckReport] = []
            while (len(reports) < 6 or next(turns) < 150) and not failures:
                for level in ("full", "connectivity", "quick"):
                    reports.append(check(store, level=level))
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert failures == []
        assert [report.findings for report in reports] == [()] * len(reports)
        assert check(store, level="full").findings == ()


class Meddling(LmdbEngine):
    """Lets something happen between a row and the object that it names."""

    meddle: Callable[[], None] | None = None

    def missing(self, digests: Sequence[bytes]) -> list[bytes]:
        hook, self.meddle = self.meddle, None
        if hook is not None:
            hook()
        return super().missing(digests)


def test_an_object_collected_during_the_check_is_not_reported(tmp_path: Path) -> None:
    engine = Meddling(str(tmp_path / "s"), durability="relaxed", auto_train=False)
    with Store(engine) as store:
        step(store, "s1", "a", text=LONG)

        def meddle() -> None:
            store.delete_session("s1")
            assert gc.collect(store, grace_ms=0).objects_swept

        engine.meddle = meddle
        assert check(store, level="full").findings == ()
        assert engine.meddle is None


def test_the_remedy_for_an_unfinished_deletion_finishes_it(path: Path) -> None:
    leave_rows_of_a_deleted_session(path)
    with open_store(path) as store:
        assert codes.DELETION_UNFINISHED in check(store).counts
        store.delete_session("s1")
        assert codes.DELETION_UNFINISHED not in check(store).counts


def test_findings_with_the_remedy_rebuild_are_gone_after_rebuild(path: Path) -> None:
    for code in (faults.INDEX_DANGLING, codes.ROOT_MISSING):
        WOUNDS[code](path)
        with open_store(path) as store:
            assert code in check(store, level="full").counts
            rebuild(store)
            assert check(store, level="full").counts == {}


def test_check_changes_no_row(path: Path) -> None:
    with open_store(path) as store:
        rows = {table: store.engine.scan_rows(table, limit=10**6) for table in TABLES}
        check(store, level="full")
        assert {table: store.engine.scan_rows(table, limit=10**6) for table in TABLES} == rows


# --- rows of a session, seen together -----------------------------------------------------------


def told(path: Path) -> list[tuple[str, str | None, bytes | None]]:
    """What a check finds: the code, the table and the key of the row."""
    return [(one.code, one.where.table, one.where.key) for one in checked(path).findings]


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """A session of three revisions with a label, hidden nodes and work."""
    path = tmp_path / "short"
    with open_store(path) as store:
        for name in ("a", "b", "c"):
            step(store, "s", name)
        session = store.session("s")
        session.label("mark", 2)
        session.tombstone(["a"])
        session.queue.enqueue(["work"], batch_id="b", source_key="k")
    return path


def test_a_revision_that_is_missing_right_below_the_head_is_a_gap(short: Path) -> None:
    with wounding(short) as cut:
        cut.delete("history", keys.label(keys.session_key("s"), "mark"))
        cut.delete("history", keys.history(keys.session_key("s"), 2))
        cut.fix_sum()
    assert told(short) == [(codes.HISTORY_GAP, "history", None)]


def test_a_map_of_hidden_nodes_that_is_missing_is_reported(short: Path) -> None:
    key = keys.session_key("s")
    with wounding(short) as cut:
        hidden = decode_head(cut.value("heads", key)).hidden
        assert hidden is not None
        cut.unname(hidden)
    assert (codes.ROOT_MISSING, "heads", key) in told(short)
    assert [one.session for one in checked(short).affected] == ["s"]


@pytest.mark.parametrize("found_by", [keys.queue_id, keys.queue_source])
def test_a_queue_index_row_without_its_batch_is_reported(
    short: Path, found_by: Callable[[bytes, str], RowKey]
) -> None:
    place = found_by(keys.session_key("s"), "of another")
    with wounding(short) as cut:
        cut.put_row(*place, (9).to_bytes(8, "big"))
        cut.fix_sum()
    assert told(short) == [(codes.QUEUE_WRONG, *place)]


@pytest.mark.parametrize("how", ["makes no sense", "is gone"])
def test_a_damaged_or_missing_head_does_not_make_check_report_other_rows_as_malformed(
    short: Path, how: str
) -> None:
    key = keys.session_key("s")
    with wounding(short) as cut:
        # Then the label cannot be seen to name something by the history alone.
        cut.delete("history", keys.history(key, 2))
        if how == "is gone":
            cut.delete("heads", key)
        else:
            cut.put_row("heads", key, b"nonsense")
        cut.fix_sum()
    found = {(code, table) for code, table, _ in told(short)}
    if how == "is gone":
        assert (codes.HEAD_MISSING, "history") in found
        assert codes.ROW_MALFORMED not in {code for code, _ in found}
    else:
        assert [one for one in found if one[0] == codes.ROW_MALFORMED] == [
            (codes.ROW_MALFORMED, "heads")
        ]
