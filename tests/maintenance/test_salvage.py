"""Salvage: whatever was hit, what survives comes back, and what does not is named."""

from __future__ import annotations

import os
import random
import shutil
import sys
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from campaigns import salvage as campaign
from casstore.engine.lmdb.log import LOG_FILE
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import Write
from casstore.errors import (
    ContendedError,
    CorruptionError,
    InvalidInputError,
    SessionDeletedError,
    StoreNotFoundError,
)
from casstore.maintenance import gc, salvaged_rows
from casstore.maintenance.check import check
from casstore.maintenance.condemned import forget_condemned, list_condemned
from casstore.maintenance.progress import Step
from casstore.maintenance.salvage import SalvageReport, salvage
from casstore.session import attempts, keys
from casstore.session.data import Checkpoint
from casstore.session.state import decode_head
from casstore.store import Store
from tests.maintenance.sessions import Watched
from tests.maintenance.wounds import (
    LONG,
    PAGE_BYTES,
    copy_as_killed,
    engine_of,
    everything,
    flip,
    lose_slab,
    open_store,
    overwrite,
    pages_of,
    populate,
    step,
    wounding,
)

ENGINES = [0, 1]


def make(path: Path, engine: int = 0) -> dict[str, Any]:
    """A store with a little of everything; all that can be read of it."""
    with open_store(path, lmdb_version=engine) as store:
        populate(store)
        store.delete_session("s2")
        gc.collect(store, grace_ms=0)
        step(store, "s1", "late", text=LONG)
        return everything(store)


def saved(path: Path) -> dict[str, Any]:
    with open_store(path, verify=True) as store:
        assert check(store, level="full").counts.keys() <= {"history_gap"}
        return everything(store)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sound_store_is_copied_whole(tmp_path: Path, engine: int) -> None:
    before = make(tmp_path / "s", engine)
    image = (tmp_path / "s" / "data.mdb").read_bytes()
    report = salvage(tmp_path / "s", tmp_path / "t")
    assert report.complete
    assert report.outcomes("deleted") == ("s2",)
    assert set(report.outcomes("whole")) == before.keys() - {"pins"}
    assert saved(tmp_path / "t") == before
    assert (tmp_path / "s" / "data.mdb").read_bytes() == image


def test_salvage_does_not_copy_unreachable_objects(tmp_path: Path) -> None:
    make(tmp_path / "s")
    with open_store(tmp_path / "s") as store:
        store.put_value(["unreachable"])
        assert gc.collect(store, grace_ms=0, dry_run=True).objects_unreached > 0
    salvage(tmp_path / "s", tmp_path / "t")
    with open_store(tmp_path / "t") as store:
        assert gc.collect(store, grace_ms=0, dry_run=True).objects_unreached == 0


def test_repeating_changes_nothing(tmp_path: Path) -> None:
    before = make(tmp_path / "s")
    first = salvage(tmp_path / "s", tmp_path / "t")
    assert salvage(tmp_path / "s", tmp_path / "t").sessions == first.sessions
    assert saved(tmp_path / "t") == before


def test_a_repeated_salvage_leaves_sessions_alone_that_changed_in_the_target(
    tmp_path: Path,
) -> None:
    make(tmp_path / "s")
    salvage(tmp_path / "s", tmp_path / "t")
    with open_store(tmp_path / "t") as store:
        step(store, "s1", "newer")
        store.delete_session("s3")
        before = everything(store)
        report = salvage(tmp_path / "s", store)
        assert report.outcomes("exists") == ("s1", "s3")
        assert everything(store) == before


def test_a_repeated_salvage_keeps_queue_and_leases_of_the_target(tmp_path: Path) -> None:
    """Its queue began to count anew, and the next batch took the place of one acknowledged."""
    with open_store(tmp_path / "s") as store:
        step(store, "s", "a")
        store.session("s").label("first")
        store.create_session("waiting", name="as it was")
        old = store.session("s").claim_lease("old", ttl_ms=1 << 40)
        for name in ("s", "waiting"):
            store.session(name).queue.enqueue(["theirs"])
    salvage(tmp_path / "s", tmp_path / "t")
    with open_store(tmp_path / "t") as store:
        session = store.session("s")
        assert old is not None
        assert session.release_lease(old)
        lease = session.claim_lease("new", ttl_ms=1 << 40)
        assert lease is not None
        session.unlabel("first")
        for name in ("s", "waiting"):
            store.session(name).queue.enqueue(["ours"])
        store.session("waiting").rename("as it is")
        salvage(tmp_path / "s", store)
        session.renew_lease(lease, ttl_ms=1 << 40)
        assert session.entry().labels == ()
        assert store.session("waiting").meta().name == "as it is"
        for name in ("s", "waiting"):
            queue = store.session(name).queue
            queue.enqueue(["next"])
            assert [batch.items for batch in queue.batches()] == [
                ("theirs",), ("ours",), ("next",),
            ]  # fmt: skip


def test_a_session_of_the_target_stays_though_the_source_has_deleted_it(tmp_path: Path) -> None:
    """A backup from before has it, and what came since is salvaged beside it."""
    make(tmp_path / "s")
    with open_store(tmp_path / "t") as store:
        step(store, "s2", "a")
        before = everything(store)["s2"]
        assert "s2" in salvage(tmp_path / "s", store).outcomes("exists")
        assert everything(store)["s2"] == before
        assert check(store, level="full").sound


def test_a_repeated_salvage_does_not_restore_forgotten_condemned_attachments(
    tmp_path: Path,
) -> None:
    with open_store(tmp_path / "s") as store:
        store.session("s").attachments.intend("away", uri="s3://bucket/away")
        step(store, "s", "a", attachments=["away"])
        store.delete_session("s")
    salvage(tmp_path / "s", tmp_path / "t")
    with open_store(tmp_path / "t") as store:
        [condemned] = list_condemned(store)
        assert forget_condemned(store, condemned)
        assert salvage(tmp_path / "s", store).outcomes("deleted") == ("s",)
        assert not list(list_condemned(store))


def test_salvage_can_write_into_a_memory_store(tmp_path: Path) -> None:
    before = make(tmp_path / "s")
    with Store(MemoryEngine()) as store:
        assert salvage(tmp_path / "s", store).complete
        assert everything(store) == before


def test_salvage_refuses_a_target_inside_the_source(tmp_path: Path) -> None:
    make(tmp_path / "s")
    os.symlink(tmp_path / "s", tmp_path / "other")
    for place in ("s", "s/inner", "other/inner"):
        with pytest.raises(InvalidInputError):
            salvage(tmp_path / "s", tmp_path / place)
    with open_store(tmp_path / "s") as store, pytest.raises(InvalidInputError):
        salvage(tmp_path / "s", store)
    with pytest.raises(StoreNotFoundError):
        salvage(tmp_path / "nothing", tmp_path / "t")


def test_a_source_that_is_not_a_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "data.mdb").write_bytes(random.Random(1).randbytes(PAGE_BYTES * 9))
    with pytest.raises(CorruptionError):
        salvage(tmp_path / "s", tmp_path / "t")


def test_salvage_reports_progress_and_can_be_stopped(tmp_path: Path) -> None:
    before = make(tmp_path / "s")

    def stop(step: Step) -> None:
        if step.phase == "rows" and step.done > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        salvage(tmp_path / "s", tmp_path / "t", progress=stop)
    assert salvage(tmp_path / "s", tmp_path / "t").complete
    assert saved(tmp_path / "t") == before


# --- pages that hold the rest together -------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("lost", ["meta 0", "meta 1", "both metas", "main", "slabs", "index"])
def test_salvage_finds_slabs_and_rows_without_the_meta_pages_or_table_roots(
    tmp_path: Path, engine: int, lost: str
) -> None:
    """Long slabs, and rows, are found by themselves when no tree leads to them any more."""
    path = tmp_path / "s"
    with open_store(path, lmdb_version=engine) as store:
        rng = random.Random(1)
        for number in range(60):
            # Too long for a leaf, and not to be compressed.
            step(store, f"s{number % 3}", f"n{number}", text=rng.randbytes(2500).hex())
        before = everything(store)
    metas = {"meta 0": [0], "meta 1": [1], "both metas": [0, 1]}
    overwrite(path, *(metas.get(lost) or pages_of(path, lost)[0]))
    salvage(path, tmp_path / "t")
    assert saved(tmp_path / "t") == before


@pytest.mark.parametrize("engine", ENGINES)
def test_salvage_finds_a_dictionary_whose_leaf_page_is_lost(tmp_path: Path, engine: int) -> None:
    path = tmp_path / "s"
    rng = random.Random(1)
    words = [rng.randbytes(5).hex() for _ in range(400)]
    with open_store(path, lmdb_version=engine) as store:
        for number in range(500):
            store.put_value({"n": number, "text": " ".join(rng.choices(words, k=90))})
        assert store.train_dictionary().adopted == 1
        for number in range(9):
            step(store, "s1", f"n{number}", text=" ".join(rng.choices(words, k=200)))
        before = everything(store)
    overwrite(path, *pages_of(path, "dictionaries")[0])
    report = salvage(path, tmp_path / "t")
    assert report.dictionaries_lost == ()
    assert saved(tmp_path / "t") == before


@pytest.mark.usefixtures("slab_a_commit")
def test_a_lost_dictionary_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "s"
    rng = random.Random(1)
    words = [rng.randbytes(5).hex() for _ in range(400)]
    with open_store(path) as store:
        step(store, "before", "a")
        for number in range(500):
            store.put_value({"n": number, "text": " ".join(rng.choices(words, k=90))})
        assert store.train_dictionary().adopted == 1
        step(store, "after", "a", text=" ".join(rng.choices(words, k=200)))
    overwrite(path, pages_of(path, "dictionaries")[1][0] + 3)
    report = salvage(path, tmp_path / "t")
    assert report.dictionaries_lost == (1,)
    assert (report.outcomes("whole"), report.outcomes("lost")) == (("before",), ("after",))
    assert "dictionary" in outcome(report, "after").lost[0].why


def test_salvage_replaces_a_lost_leaf_page_of_rows_by_an_older_page(tmp_path: Path) -> None:
    path = tmp_path / "s"
    before = make(path)
    # Until then the tables of the state before are those of the newest, page by page.
    overwrite(path, *pages_of(path, "heads")[0])
    report = salvage(path, tmp_path / "t")
    after = saved(tmp_path / "t")
    assert "heads" in {gap.table for gap in report.gaps}
    # The state before the last commit has all heads but the last one's.
    assert {name for name in before if after.get(name) == before[name]} >= before.keys() - {"s1"}
    assert all(one.from_strays for one in report.sessions if one.session not in ("s2", "named"))


def test_a_deleted_session_does_not_come_back_from_old_pages(tmp_path: Path) -> None:
    path = tmp_path / "s"
    make(path)
    overwrite(path, *pages_of(path, "heads")[0], *pages_of(path, "history")[0])
    salvage(path, tmp_path / "t")
    assert "s2" not in saved(tmp_path / "t")


def test_a_lost_log_costs_the_commits_in_it_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "killed"
    make(tmp_path / "s")
    with open_store(tmp_path / "s") as store:
        for number in range(6):
            step(store, "s0", f"more {number}", text=LONG)
        store.delete_session("path")
        store.tag("later", store.session("s3").entry(1).manifest)
        store.unpin("release")
        store.session("s0").queue.enqueue([3], batch_id="b3")
        engine_of(store).apply_log()
        before = everything(store)
        step(store, "s1", "the last")
        copy_as_killed(store, path)
    (path / LOG_FILE).unlink()
    report = salvage(path, tmp_path / "t")
    assert not report.complete
    assert "log" in report.gaps[0].why
    assert saved(tmp_path / "t") == before
    assert "path" in report.outcomes("deleted")


def lie_about(path: Path, page: int) -> None:
    """Leave a copy of a page where nothing leads to it, as one that is not used again yet."""
    with (path / "data.mdb").open("r+b") as file:
        file.seek(page * PAGE_BYTES)
        old = file.read(PAGE_BYTES)
        number = file.seek(0, 2) // PAGE_BYTES
        file.write(number.to_bytes(8, sys.byteorder) + old[8:])


def test_salvage_uses_rows_from_the_log_though_their_table_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "killed"
    make(tmp_path / "s")
    with open_store(tmp_path / "s") as store:
        # The first commits of a process go straight into the tables.
        step(store, "s0", "early", text=LONG)
        step(store, "s0", "not so late", text=LONG)
        step(store, "s0", "late", text=LONG)
        store.unpin("release")
        before = everything(store)
        copy_as_killed(store, path)
    [pins] = pages_of(path, "pins")[0]
    lie_about(path, pins)
    overwrite(path, *pages_of(path, "heads")[0], pins)
    salvage(path, tmp_path / "t")
    after = saved(tmp_path / "t")
    assert after["s0"] == before["s0"]
    assert after["pins"] == before["pins"] == []


def test_a_damaged_record_of_the_log_does_not_take_others_along(tmp_path: Path) -> None:
    path = tmp_path / "killed"
    make(tmp_path / "s")
    with open_store(tmp_path / "s") as store:
        # The first commit of a process takes the log into use.
        for number in range(2):
            store.tag(f"tag {number}", store.put_value(number))
        for name in ("s0", "s1", "s3"):
            step(store, name, "later")
        before = everything(store)
        copy_as_killed(store, path)
    log = (path / LOG_FILE).read_bytes()
    # The payload of s1's node, which is not the last record.
    at = log.index(b"later", log.index(b"later") + 64 * 8)
    (path / LOG_FILE).write_bytes(log[:at] + b"LATER" + log[at + 5 :])
    report = salvage(path, tmp_path / "t")
    after = saved(tmp_path / "t")
    assert {name for name in before if after[name] == before[name]} >= before.keys() - {"s1"}
    assert not report.complete


# --- losses, by name ------------------------------------------------------------------------------


def outcome(report: SalvageReport, session: str) -> Any:
    return next(one for one in report.sessions if one.session == session)


@pytest.mark.usefixtures("slab_a_commit")
def test_a_lost_head_leaves_the_revision_before(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        for number in range(5):
            step(store, "s1", f"n{number}", label=f"l{number}", turn=f"t{number}")
        before = everything(store)
        manifest = store.session("s1").entry(5).manifest
    lose_slab(path, manifest)
    report = salvage(path, tmp_path / "t")
    one = outcome(report, "s1")
    assert (one.outcome, one.revision, one.head_revision) == ("partial", 4, 5)
    assert (one.revisions_lost, one.revisions_saved) == ((5,), 4)
    assert {piece.name for piece in one.lost} >= {"the manifest"}
    assert {row.name for row in report.rows_lost} == {"label 'l4'", "turn 't4'"}
    assert not report.complete
    with open_store(tmp_path / "t") as store:
        assert store.session("s1").head() is not None
        assert everything(store)["s1"][1] == before["s1"][1][1:]
        # The turn whose outcome was lost can be taken again.
        step(store, "s1", "n4", label="l4", turn="t4")
        assert [node.id for node in store.session("s1").nodes()] == [f"n{n}" for n in range(5)]


@pytest.mark.usefixtures("slab_a_commit")
def test_a_lost_node_and_a_lost_component_are_named(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        populate(store)
        nodes = {name: store.session("s1").nodes()[2].digest for name in ("s1",)}
        tools = store.session("s3").checkpoint()
        assert tools is not None
    lose_slab(path, nodes["s1"])
    lose_slab(path, tools.tool_state.digest)
    report = salvage(path, tmp_path / "t")
    assert "node 'n9'" in {piece.name for piece in outcome(report, "s1").lost}
    assert outcome(report, "s1").revision == 2
    assert "tool_state" in {piece.name for piece in outcome(report, "s3").lost}
    assert all(piece.why for one in report.sessions for piece in one.lost)
    saved(tmp_path / "t")


@pytest.mark.usefixtures("slab_a_commit")
def test_salvage_names_the_lost_components_and_nodes_of_a_session(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        step(store, "s1", "a")
        step(store, "s1", "b", checkpoint=Checkpoint(tool_state={"log": [LONG]}))
        step(store, "s1", "c")
        tools = store.session("s1").checkpoint()
        assert tools is not None
    lose_slab(path, tools.tool_state.digest)
    report = salvage(path, tmp_path / "t")
    assert outcome(report, "s1").revision == 1
    assert {"tool_state", "node 'b'"} <= {piece.name for piece in outcome(report, "s1").lost}


@pytest.mark.usefixtures("slab_a_commit")
def test_salvage_takes_a_lost_object_from_a_second_copy_of_it(tmp_path: Path) -> None:
    """The index forgot an object, so it was stored a second time, where nothing leads to it."""
    path = tmp_path / "s"
    content = LONG.encode()
    with open_store(path) as store:
        lost = store.put_blob(content)
        step(store, "s1", "a", checkpoint=Checkpoint(tool_state={"file": content}))
        before = everything(store)["s1"]
    with wounding(path) as cut:
        cut.unname(lost)
        cut.fix_sum()
    with open_store(path) as store:
        assert store.put_blob(content) == lost
    with wounding(path) as cut:
        copies = [value for _, value in cut.rows("slabs") if bytes(lost) in value[: 28 + 40 * 32]]
    assert len(copies) == 2
    # The one that the session leads to.
    lose_slab(path, lost)
    report = salvage(path, tmp_path / "t")
    assert report.outcomes("whole") == ("s1",)
    assert saved(tmp_path / "t")["s1"] == before


@pytest.mark.usefixtures("slab_a_commit")
def test_queued_work_attachments_and_tags_whose_bytes_are_gone_are_named(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        attached = populate(store)
        with open_store(path):
            rows = store.engine.scan_rows("queue", limit=100)
        from casstore.session.queue import items_digest

        items = [found for row in rows if (found := items_digest(row.key, row.value))]
        pinned = store.find_pin("release")
        assert pinned is not None
    for digest in (attached.digest, items[0], pinned.digest):
        assert digest is not None
        lose_slab(path, digest)
    report = salvage(path, tmp_path / "t")
    lost = {(row.table, row.session, row.name) for row in report.rows_lost}
    assert lost >= {
        ("queue", "s0", "batch 1"),
        ("attachments", "s0", f"attachment {attached.id!r}"),
        ("pins", None, "release"),
    }
    with open_store(tmp_path / "t") as store:
        assert [batch.id for batch in store.session("s0").queue.batches()] == ["b2"]
        assert store.session("s0").queue.enqueue([3]).seq == 3


def test_bytes_that_changed_are_not_taken_over(tmp_path: Path) -> None:
    path = tmp_path / "s"
    content = random.Random(1).randbytes(1500)
    with open_store(path) as store:
        step(store, "s1", "a")
        store.session("s1").attachments.put(content)
    data = (path / "data.mdb").read_bytes()
    assert content in data  # noise is stored as it is, and no checksum but the digest covers it
    (path / "data.mdb").write_bytes(data.replace(content, flip(content)))
    report = salvage(path, tmp_path / "t")
    assert [(row.table, row.session) for row in report.rows_lost] == [("attachments", "s1")]
    with open_store(tmp_path / "t", verify=True) as store:
        assert store.session("s1").attachments.list() == []


def test_salvage_does_not_restore_a_deleted_row_while_its_page_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        blob = store.put_blob(b"kept")
        for number in range(150):
            store.tag(f"tag-{number:03}", blob, note="x" * 90)
    first = pages_of(path, "pins")[0][1] * PAGE_BYTES
    old = (path / "data.mdb").read_bytes()[first : first + PAGE_BYTES]
    assert b"tag-000" in old
    with open_store(path) as store:
        assert store.unpin("tag-000")
        step(store, "s1", "a")
    # The page as it was lies about somewhere, as pages do that are not used again yet.
    with (path / "data.mdb").open("ab") as file:
        number = file.tell() // PAGE_BYTES
        file.write(number.to_bytes(8, sys.byteorder) + old[8:])
    tree = pages_of(path, "pins")[0]
    assert len(tree) > 4
    overwrite(path, tree[-1])
    report = salvage(path, tmp_path / "t")
    assert [gap.table for gap in report.gaps] == ["pins"]
    with open_store(tmp_path / "t") as store:
        names = [pin.name for pin in store.pins()]
    assert "tag-000" not in names
    assert len(names) > 100


def test_a_lost_first_node_loses_the_session_and_says_so(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        step(store, "s1", "a", text=LONG)
        step(store, "s1", "b")
        step(store, "s2", "a", text="other")
        store.create_session("s1", name="what it was called")
        first = store.session("s1").nodes()[0].digest
    lose_slab(path, first)
    report = salvage(path, tmp_path / "t")
    assert report.outcomes("lost") == ("s1",)
    assert outcome(report, "s1").revisions_lost_count == 2
    with open_store(tmp_path / "t") as store:
        assert store.session("s1").meta().name == "what it was called"
        assert store.session("s1").load() is None
        assert [node.id for node in store.session("s2").nodes()] == ["a"]


def test_salvage_restores_a_lost_session_from_an_old_copy_with_the_newer_queue(
    tmp_path: Path,
) -> None:
    """Batches that were done since the copy was made must not be done again."""
    path = tmp_path / "s"
    with open_store(path) as store:
        step(store, "s", "a", text=LONG)
        session = store.session("s")
        session.queue.enqueue(["done since"])
        session.add_subjects(["alice"])
        first = session.nodes()[0].digest
    shutil.copytree(path, tmp_path / "copy")
    with open_store(path) as store:
        session = store.session("s")
        session.queue.cancel(session.queue.batches()[0].id)
        session.queue.enqueue(["new"])
        session.remove_subjects(["alice"])
        session.add_subjects(["bob"])
    lose_slab(path, first)
    assert salvage(path, tmp_path / "t").outcomes("lost") == ("s",)
    with open_store(tmp_path / "t") as store:
        report = salvage(tmp_path / "copy", store)
        assert report.outcomes("whole") == ("s",)
        # The queue as one, and whom it is about.
        assert report.rows_existing == 2
        assert [node.id for node in store.session("s").nodes()] == ["a"]
        store.session("s").queue.enqueue(["next"])
        batches = store.session("s").queue.batches()
        assert [batch.items for batch in batches] == [("new",), ("next",)]
        assert list(store.sessions_about("alice")) == []
        assert list(store.sessions_about("bob")) == ["s"]
        assert check(store, level="full").sound


@pytest.mark.usefixtures("slab_a_commit")
def test_hidden_nodes_stay_hidden_when_salvage_falls_back_to_an_earlier_revision(
    tmp_path: Path,
) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        for name in ("secret", "b", "c"):
            step(store, "s1", name, text=LONG)
        manifest = store.session("s1").entry(3).manifest
        store.session("s1").tombstone(["secret"])
    lose_slab(path, manifest)
    report = salvage(path, tmp_path / "t")
    assert outcome(report, "s1").revision == 2
    with open_store(tmp_path / "t") as store:
        assert [node.id for node in store.session("s1").nodes()] == ["b"]


def test_a_lost_map_of_hidden_nodes_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        step(store, "s1", "secret", "b", text=LONG)
        store.session("s1").tombstone(["secret"])
    with wounding(path) as cut:
        hidden = decode_head(cut.value("heads", keys.session_key("s1"))).hidden
    assert hidden is not None
    lose_slab(path, hidden)
    one = outcome(salvage(path, tmp_path / "t"), "s1")
    assert "the map of hidden nodes" in {piece.name for piece in one.lost}
    assert one.outcome == "partial"


def test_salvage_takes_an_object_stored_twice_from_its_intact_copy(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with open_store(path) as store:
        populate(store)
        before = everything(store)
        old = {info.digest: info.id for info in store.engine.scan_objects(limit=10**6)}
        store.pack(min_age_ms=0)
    # The packed slabs are damaged; those that were packed lie in pages that are free now.
    with wounding(path) as cut:
        fresh = [(k, v) for k, v in cut.rows("slabs")]
    assert len(fresh) < len(old)
    tree, runs = pages_of(path, "slabs")
    assert runs
    overwrite(path, runs[0])
    report = salvage(path, tmp_path / "t")
    assert report.stray_slabs > 0
    after = saved(tmp_path / "t")
    assert all(after[name] == before[name] for name in after if name in ("s0", "s1", "fork"))
    assert tree


# --- pages overwritten at random -------------------------------------------------------------


def test_salvage_restores_all_expected_revisions_with_one_page_in_a_hundred_overwritten(
    tmp_path: Path,
) -> None:
    report = campaign.run(tmp_path, count=2, seed=3)
    assert report.findings == ()
    assert report.kept()
    assert report.total("revisions that came back") >= report.total("had to come back") > 100


def test_salvage_violates_no_guarantee_with_one_page_in_ten_overwritten(tmp_path: Path) -> None:
    report = campaign.run(tmp_path, count=1, seed=4, share=0.1)
    assert report.findings == ()
    assert report.total("revisions lost") > 0


def test_no_target_is_made_where_there_is_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError):
        salvage(tmp_path / "nowhere", tmp_path / "target")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("table", ["attachments", "history", "pins", "queue", "receipts"])
def test_salvage_finds_a_missing_row_by_the_checksum_over_all_rows(
    tmp_path: Path, table: str
) -> None:
    """Everything that was there had been taken over, so it was called complete."""
    make(tmp_path / "s")
    with wounding(tmp_path / "s") as cut:
        cut.delete(table, cut.rows(table)[0][0])
    report = salvage(tmp_path / "s", tmp_path / "t")
    assert [(gap.table, gap.low, gap.high) for gap in report.gaps] == [("any table", b"", None)]
    assert "older or missing" in report.gaps[0].why
    assert not report.complete


@pytest.mark.parametrize("table", ["pins", "queue"])
def test_an_unreadable_row_does_not_make_salvage_report_other_missing_rows(
    tmp_path: Path, table: str
) -> None:
    make(tmp_path / "s")
    with wounding(tmp_path / "s") as cut:
        key, value = cut.rows(table)[0]
        cut.put(table, key, flip(value))
    report = salvage(tmp_path / "s", tmp_path / "t")
    assert "any table" not in [gap.table for gap in report.gaps]
    assert not report.complete


def test_no_row_is_salvaged_without_the_objects_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gc in the target removes objects before the write that names them."""
    monkeypatch.setattr(attempts, "MAX_ATTEMPTS", 2)
    before = make(tmp_path / "s")
    stopped = 0
    for number in count(1):
        engine = Watched()
        target = Store(engine)
        seen = _collect_before_rows(engine, target, number)
        try:
            report = salvage(tmp_path / "s", target)
        except ContendedError:
            stopped += 1
        else:
            assert not report.complete or everything(target) == before
        assert check(target, level="full").counts.keys() <= {"history_gap"}
        if len(seen) < number:
            break
    assert stopped


def test_salvage_writes_all_rows_of_a_session_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of the target sees no session without a part of its rows."""
    monkeypatch.setattr(salvaged_rows, "_BATCH_ROWS", 1)
    make(tmp_path / "s")
    engine = Watched()
    writes: list[Write] = []
    engine.before = writes.append
    salvage(tmp_path / "s", Store(engine))
    key = keys.session_key("s1")
    tables = [
        {change.table for change in write.rows if change.key.startswith(key)} for write in writes
    ]
    [of_session] = [found for found in tables if found]
    assert {"heads", "history"} <= of_session


@pytest.mark.parametrize("deleted", [False, True])
def test_salvage_keeps_a_session_of_the_same_id_created_in_the_target_meanwhile(
    tmp_path: Path, deleted: bool
) -> None:
    make(tmp_path / "s")
    engine = Watched()
    target = Store(engine)

    def appear(write: Write) -> None:
        if any(change.table == "heads" and change.key == keys.session_key("s1")
               for change in write.rows):  # fmt: skip
            engine.before = None
            step(target, "s1", "ours")
            if deleted:
                target.delete_session("s1")

    engine.before = appear
    report = salvage(tmp_path / "s", target)
    assert engine.before is None
    assert report.outcomes("exists") == ("s1",)
    if deleted:
        with pytest.raises(SessionDeletedError):
            target.session("s1").head()
    else:
        assert [node.id for node in target.session("s1").nodes()] == ["ours"]
    assert check(target, level="full").counts.keys() <= {"history_gap"}


def _collect_before_rows(engine: Watched, target: Store, number: int) -> list[Write]:
    """Run gc once, before the write with this number among the writes of rows; those seen."""
    seen: list[Write] = []

    def collect(write: Write) -> None:
        if write.rows:
            seen.append(write)
            if len(seen) == number:
                engine.before = None
                gc.collect(target, grace_ms=0)

    engine.before = collect
    return seen
