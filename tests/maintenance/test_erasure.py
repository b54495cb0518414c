"""Erasure: everything about one subject goes, and what others share of it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import PutRow, RowKey, Write
from casstore.errors import CorruptionError, InvalidInputError, SessionDeletedError
from casstore.format.digest import Digest
from casstore.maintenance import check, erasure, gc, sharing
from casstore.maintenance.condemned import list_condemned
from casstore.maintenance.erasure import ErasedSession, ErasurePlan
from casstore.maintenance.expiring import expire_rows
from casstore.maintenance.progress import Step
from casstore.session import catalogue, keys, pins, queue
from casstore.session.data import Commit, NodeDraft
from casstore.session.records import Draft, Table, row_links
from casstore.session.state import decode_head, runtime_of
from casstore.store import Store
from casstore.testing import ManualClock
from casstore.testing.session_fixtures import interrupted, nothing_written
from tests.maintenance.lifetimes import CrashError, crashing, grow, step

LONG = "long " * 600


def saved(plan: ErasurePlan) -> ErasurePlan:
    return ErasurePlan.from_json(plan.to_json())


def erase(store: Store, subject: str, **options: Any) -> erasure.ErasureReport:
    return erasure.execute(store, saved(erasure.plan(store, subject, **options)))


def sessions(store: Store) -> list[str]:
    return [info.meta.session for info in store.sessions()]


def fill(store: Store) -> None:
    """Something about anna in every place where there can be something."""
    store.create_session("hers", subjects=["anna", "berta"])
    step(store, "hers", "a", text="CANARY-HEAD " + LONG, turn="turn", label="mark")
    step(store, "hers", "b")
    session = store.session("hers")
    session.tombstone(["a"])
    session.queue.enqueue([{"text": "CANARY-QUEUE " + LONG}])
    session.attachments.put(b"CANARY-ATTACHMENT " + LONG.encode())
    session.attachments.intend("video", uri="s3://video")
    session.protect(1, by="run")
    session.claim_lease("worker", 60_000)
    store.tag("release", session.entry(1).manifest)
    store.fork("hers", "fork of hers", at=1)


def everywhere(store: Store) -> bytes:
    """All bytes of all objects and rows."""
    found = [
        item.data
        for info in store.engine.scan_objects(limit=1_000_000)
        for item in store.engine.get_many([info.digest])
        if item is not None
    ]
    for table in ("heads", "history", "sessions", "queue", "receipts", "attachments", "retention"):
        found += [row.key + row.value for row in store.engine.scan_rows(table)]
    return b"\n".join(found)


def test_erasure_removes_everything_about_a_subject(lmdb_store: Store) -> None:
    store = lmdb_store
    grow(store, "other", 3)
    before = everywhere(store)
    fill(store)
    assert b"CANARY" in everywhere(store)
    plan = saved(erasure.plan(store, "anna"))
    assert plan.sessions == (
        ErasedSession("fork of hers", 1, 0, 0, 0, 0, ("berta",)),
        ErasedSession("hers", 2, 1, 1, 2, 1, ("berta",)),
    )
    assert [name for name, _ in plan.pins] == ["release"]
    assert plan.sharing.shared_objects == 0
    report = erasure.execute(store, plan)
    assert (report.sessions_deleted, report.already_gone, report.pins_removed) == (2, 0, 1)
    assert (report.kept, report.remaining) == ((), ())
    assert report.still_to_run == ("gc", "compact")
    assert sessions(store) == ["other"]
    assert [one.uri for one in list_condemned(store)] == ["s3://video"]
    expire_rows(store)
    gc.collect(store, grace_ms=0)
    after = everywhere(store)
    assert b"CANARY" not in after
    assert b"anna" not in after
    assert len(after) < len(before) + 300
    with pytest.raises(SessionDeletedError):
        store.session("hers").head()
    again = erasure.plan(store, "anna")
    assert (again.sessions, again.pins, again.sharing) == ((), (), sharing.NOTHING)
    with nothing_written(store):
        assert erasure.execute(store, again).sessions_deleted == 0


def test_the_plan_names_the_sessions_and_pins_that_share_erased_content(lmdb_store: Store) -> None:
    store = lmdb_store
    shared, own = "SHARED " + LONG, "OWN " + LONG
    step(store, "hers", "a", text=shared)
    store.session("hers").commit(Commit(append=[NodeDraft("b", shared), NodeDraft("c", own)]))
    store.fork("hers", "untagged fork", at=1)
    store.session("hers").add_subjects(["anna"])
    step(store, "theirs", "x")
    store.session("theirs").commit(Commit(append=[NodeDraft("y", shared)]))
    store.tag("kept", store.put_value({"text": shared}))
    plan = erasure.plan(store, "anna")
    [found] = [one for one in plan.sharing.largest if "pin kept" in one.names]
    assert (found.size_bytes, found.more) == (len(shared), False)
    assert found.names == ("pin kept", "session theirs")
    sizes = [one.size_bytes for one in plan.sharing.largest]
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) == plan.sharing.shared_objects
    assert sum(sizes) == plan.sharing.shared_bytes < plan.sharing.bytes
    assert {one.name: one.objects for one in plan.sharing.sharers} == {
        "session untagged fork": 3, "session theirs": 1, "pin kept": 1,
    }  # fmt: skip
    report = erasure.execute(store, plan)
    assert report.sharing == plan.sharing
    gc.collect(store, grace_ms=0)
    left = everywhere(store)
    assert (b"SHARED" in left, b"OWN" in left) == (True, False)
    assert [node.id for node in store.session("untagged fork").nodes()] == ["a"]
    # What the survey called shared is what is left of the subject's objects.
    assert store.missing([one.digest for one in plan.sharing.largest]) == []


def test_the_plan_names_sessions_that_share_content_in_their_queue_or_attachments(
    store: Store,
) -> None:
    store.create_session("hers", subjects=["anna"])
    queued, attached = "queued " + LONG, "attached " + LONG
    store.session("hers").commit(Commit([NodeDraft("a", queued), NodeDraft("b", attached)]))
    store.session("waiting").queue.enqueue([queued])
    store.session("holding").attachments.put(attached.encode())
    sharing = erasure.plan(store, "anna").sharing
    assert {one.names: one.size_bytes for one in sharing.largest} == {
        ("session waiting",): len(queued), ("session holding",): len(attached),
    }  # fmt: skip


def test_the_shared_content_in_the_plan_is_what_gc_leaves(lmdb_store: Store) -> None:
    store = lmdb_store
    for n in range(12):
        step(store, f"s{n}", "a", text=f"{n % 5} " + LONG)
        step(store, f"s{n}", "b", text=f"{n} " + LONG)
        store.fork(f"s{n}", f"t{n}", at=1)
        if n % 4 == 0:
            store.session(f"s{n}").add_subjects(["anna"])
    store.session("t3").queue.enqueue([{"text": "0 " + LONG}])
    store.session("t5").attachments.put(b"bytes " + LONG.encode())
    gc.collect(store, grace_ms=0)
    mine = erasure.plan(store, "anna", listed=1_000_000)
    count = len(list(store.engine.scan_objects(limit=1_000_000)))
    erasure.execute(store, mine)
    report = gc.collect(store, grace_ms=0)
    assert report.objects_swept == mine.sharing.objects - mine.sharing.shared_objects > 5
    assert report.objects_kept == count - report.objects_swept
    assert store.missing([one.digest for one in mine.sharing.largest]) == []


def test_lists_are_bounded_and_counts_are_not(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharing, "_ROOTS_AT_ONCE", 3)
    monkeypatch.setattr(sharing, "_PAGE", 2)
    for n in range(20):
        step(store, f"s{n:02}", *[f"{m}" for m in range(5)], text=LONG)
    store.session("s00").add_subjects(["anna"])
    whole = erasure.plan(store, "anna").sharing
    assert whole.shared_objects == whole.objects > 5
    assert {one.names for one in whole.largest} == {tuple(f"session s{n:02}" for n in range(1, 9))}
    assert all(one.more for one in whole.largest)
    assert len(whole.sharers) == 19
    short = erasure.plan(store, "anna", listed=2).sharing
    assert (len(short.largest), len(short.sharers)) == (2, 2)
    assert short[:4] == whole[:4]
    assert short.largest == whole.largest[:2]
    assert erasure.plan(store, "anna", survey=False).sharing == sharing.NOTHING


def test_the_shared_content_is_the_same_in_one_or_several_passes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was met in each of them was counted as often."""
    step(store, "hers", "a", text=LONG)
    store.session("hers").add_subjects(["anna"])
    for name in "abcd":
        step(store, "his", name, text=LONG if name == "a" else "")
    step(store, "another", "a", text=LONG)
    whole = erasure.plan(store, "anna").sharing
    assert [one.name for one in whole.sharers] == ["session another", "session his"]
    monkeypatch.setattr(sharing, "_ROOTS_AT_ONCE", 1)
    assert erasure.plan(store, "anna").sharing == whole


def test_erasure_removes_nothing_about_other_subjects(store: Store) -> None:
    for name, subjects in {"a": ["anna"], "b": ["ann"], "c": ["anna "], "d": []}.items():
        store.create_session(name, subjects=subjects)
    assert erase(store, "anna").sessions_deleted == 1
    assert sessions(store) == ["b", "c", "d"]
    assert erase(store, "nobody").sessions_deleted == 0
    with pytest.raises(InvalidInputError):
        erasure.plan(store, "")


def test_finding_the_sessions_of_a_subject_reads_no_rows_of_other_subjects(store: Store) -> None:
    for n in range(30):
        store.create_session(f"s{n}", subjects=[f"subject {n}"])

    class Watched:
        rows = 0

        def scan_rows(self, table: str, **limits: Any) -> Any:
            found = store.engine.scan_rows(table, **limits)
            self.rows += len(found)
            return found

        def __getattr__(self, name: str) -> Any:
            return getattr(store.engine, name)

    watched = Watched()
    plan = erasure.plan(Store(watched), "subject 7", survey=False)
    assert [one.session for one in plan.sessions] == ["s7"]
    assert watched.rows == 1


# --- who comes in between ---------------------------------------------------------------------


def test_revisions_no_longer_about_the_subject_stay(store: Store) -> None:
    for name in ("a", "b"):
        store.create_session(name, subjects=["anna"])
    plan = saved(erasure.plan(store, "anna"))
    store.session("a").remove_subjects(["anna"])
    report = erasure.execute(store, plan)
    assert (report.sessions_deleted, report.kept, sessions(store)) == (1, ("a",), ["a"])
    store.session("a").add_subjects(["anna"])
    plan = erasure.plan(store, "anna")
    late = interrupted(store, before=lambda: store.session("a").remove_subjects(["anna"]))
    assert erasure.execute(late, plan).kept == ("a",)
    assert sessions(store) == ["a"]


@pytest.mark.parametrize("when", ["after planning", "right before the write"])
def test_a_tag_of_a_revision_no_longer_about_the_subject_stays(store: Store, when: str) -> None:
    """The session stayed, and what its tag was to keep was left to retention."""
    for name in ("a", "b"):
        store.create_session(name, subjects=["anna"])
        step(store, name, name)
        store.tag(f"tag of {name}", store.session(name).entry(1).manifest)
    plan = saved(erasure.plan(store, "anna"))

    def come() -> None:
        store.session("a").remove_subjects(["anna"])

    late = interrupted(store, before=come)
    if when == "after planning":
        come()
        late = store
    report = erasure.execute(late, plan)
    assert (report.kept, report.pins_removed) == (("a",), 1)
    assert [pin.name for pin in store.pins()] == ["tag of a"]


def test_a_tag_on_content_shared_with_a_remaining_session_is_removed(store: Store) -> None:
    store.create_session("a", subjects=["anna"])
    step(store, "a", "x")
    store.fork("a", "b")
    store.tag("tag", store.session("a").entry(1).manifest)
    plan = saved(erasure.plan(store, "anna"))
    store.session("b").remove_subjects(["anna"])
    report = erasure.execute(store, plan)
    assert (report.kept, report.pins_removed, list(store.pins())) == (("b",), 1, [])


@pytest.mark.parametrize("gone", [False, True])
def test_a_tag_set_after_the_plan_is_removed_with_its_session(store: Store, gone: bool) -> None:
    """It kept everything, nothing told of it, and no later plan could find it."""
    store.create_session("a", subjects=["anna"])
    step(store, "a", "x")
    store.tag("first", store.session("a").entry(1).manifest)
    plan = saved(erasure.plan(store, "anna"))
    step(store, "a", "y")
    if gone:
        store.delete_session("a")
    else:
        for revision in (1, 2):
            store.tag(f"late {revision}", store.session("a").entry(revision).manifest)
    report = erasure.execute(store, plan)
    assert report.pins_removed == (1 if gone else 3)
    assert list(store.pins()) == []


def pin_of(store: Store, session: str, name: str) -> None:
    """Pin an object that no revision reaches, owned by the session."""
    pins.put(
        runtime_of(store),
        name,
        store.put_blob(name.encode()),
        ttl_ms=None,
        note=None,
        is_tag=False,
        move=False,
        session=session,
    )


def test_the_pins_that_a_session_owns_are_removed_with_it(store: Store) -> None:
    for name in ("hers", "no longer hers"):
        store.create_session(name, subjects=["anna"])
        step(store, name, name)
        pin_of(store, name, f"of {name}")
    step(store, "other", "other")
    pin_of(store, "other", "of other")
    store.pin("hers", store.put_blob(b"named like the session"))
    plan = saved(erasure.plan(store, "anna"))
    assert [name for name, _ in plan.pins] == ["of hers", "of no longer hers"]
    pin_of(store, "hers", "late")
    store.session("no longer hers").remove_subjects(["anna"])
    report = erasure.execute(store, plan)
    assert (report.kept, report.pins_removed) == (("no longer hers",), 2)
    left = {pin.name: pin.session for pin in store.pins()}
    assert left == {"hers": None, "of no longer hers": "no longer hers", "of other": "other"}
    assert check.check(store).sound


def test_a_tag_is_removed_though_its_session_is_deleted_meanwhile(store: Store) -> None:
    """With the session goes whom it was about: that must not count as being about others."""
    fill(store)
    plan = saved(erasure.plan(store, "anna"))

    def delete() -> None:
        store.delete_session("hers")
        store.delete_session("fork of hers")

    report = erasure.execute(interrupted(store, before=delete), plan)
    assert (report.already_gone, report.pins_removed, list(store.pins())) == (2, 1, [])


def test_a_fork_made_after_the_plan_is_reported_as_remaining(store: Store) -> None:
    store.create_session("a", subjects=["anna"])
    step(store, "a", "x")
    plan = saved(erasure.plan(store, "anna"))
    late = interrupted(store, before=lambda: store.fork("a", "b"))
    report = erasure.execute(late, plan)
    assert (report.sessions_deleted, report.remaining) == (1, ("b",))
    assert erase(store, "anna").remaining == ()


def test_an_erased_session_includes_commits_made_after_the_plan(store: Store) -> None:
    store.create_session("a", subjects=["anna"])
    step(store, "a", "x")
    plan = saved(erasure.plan(store, "anna"))
    late = interrupted(store, before=lambda: step(store, "a", "y"))
    assert erasure.execute(late, plan).sessions_deleted == 1
    assert sessions(store) == []


def test_erasure_removes_an_expired_pin(store: Store, clock: ManualClock) -> None:
    """It keeps nothing, but it names what is to be forgotten."""
    step(store, "hers", "a")
    store.session("hers").add_subjects(["anna"])
    store.pin("pin", store.session("hers").entry(1).manifest, ttl_ms=1, note="of anna")
    clock.now_ms += 1
    assert erasure.execute(store, erasure.plan(store, "anna")).pins_removed == 1
    assert store.engine.scan_rows("pins") == []


def test_a_tag_moved_to_another_object_after_the_plan_stays(store: Store) -> None:
    store.create_session("a", subjects=["anna"])
    step(store, "a", "x")
    store.tag("tag", store.session("a").entry().manifest)
    plan = saved(erasure.plan(store, "anna"))
    other = store.put_blob(b"other")
    store.tag("tag", other, move=True)
    assert erasure.execute(store, plan).pins_removed == 0
    pin = store.find_pin("tag")
    assert pin is not None
    assert pin.digest == other


@pytest.mark.parametrize("table", ["heads", "history", "retention"])
def test_a_plan_raises_corruption_error_if_a_row_cannot_be_decoded(
    store: Store, table: str
) -> None:
    store.create_session("a", subjects=["anna"])
    grow(store, "a", 3)
    key = keys.session_key("a")
    place = {
        "heads": RowKey("heads", key),
        "history": RowKey("history", keys.history(key, 1)),
        "retention": keys.subjects(key),
    }[table]
    store.engine.write(Write(rows=[PutRow(*place, b"\xc1")]))
    with nothing_written(store), pytest.raises(CorruptionError):
        erasure.plan(store, "anna")


def test_repeating_an_erasure_that_crashed_twice_at_any_write_finishes_it(
    clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalogue, "_DELETE_BATCH", 2)

    def make() -> Store:
        store = Store(MemoryEngine(clock=clock))
        grow(store, "other", 2)
        fill(store)
        return store

    def work(store: Store) -> None:
        erase(store, "anna")

    deaths = 0
    for first in range(16):
        for second in range(0, 16, 2):
            died = make()
            for writes in (first, second):
                with suppress(CrashError):
                    work(crashing(died, writes))
                    break
            else:
                deaths += 1
            work(died)
            assert_nothing_left(died)
    assert deaths > 25


def assert_nothing_left(store: Store) -> None:
    assert sessions(store) == ["other"]
    tables = ("heads", "history", "leases", "queue", "receipts", "sessions", "retention")
    rows = {
        table: [row.key for row in store.engine.scan_rows(table) if b"hers" in row.key]
        for table in tables
    }
    assert rows == {table: [] for table in tables}
    assert list(store.pins()) == []
    assert list(store.sessions_about("anna")) == list(store.sessions_about("berta")) == []


# --- plans, providers -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda told: "not json",
        lambda told: "[]",
        lambda told: "[" * 100_000,
        lambda told: json.dumps({**told, "schema": "casstore.erasure/2"}),
        lambda told: json.dumps({key: told[key] for key in told if key != "sessions"}),
        lambda told: json.dumps({**told, "sessions": [{"session": "a"}]}),
        lambda told: json.dumps({**told, "sharing": {}}),
        lambda told: json.dumps({**told, "subject": ""}),
        lambda told: json.dumps({**told, "more": 1}),
        lambda told: json.dumps({**told, "planned_at_ms": "now"}),
        lambda told: json.dumps({**told, "records": {"notes": [1]}}),
        lambda told: json.dumps({**told, "pins": [["a pin", 1]]}),
    ],
)
def test_an_invalid_plan_is_refused(store: Store, change: Any) -> None:
    store.create_session("a", subjects=["anna"])
    told = json.loads(erasure.plan(store, "anna").to_json())
    with pytest.raises(InvalidInputError):
        ErasurePlan.from_json(change(told))


class Notes:
    """A layer that keeps notes about subjects in the table of records; the last one stays."""

    name = "notes"

    def find(self, store: Store, subject: str) -> Sequence[str]:
        return [record.key[1] for record in Table(store, "notes", 2).scan(subject)]

    def roots(self, store: Store, found: Sequence[str]) -> Iterator[bytes]:
        for record in Table(store, "notes", 2).find_many([("anna", name) for name in found]):
            assert record is not None
            yield from row_links(record.row)

    def erase(self, store: Store, subject: str, found: Sequence[str]) -> int:
        table, draft = Table(store, "notes", 2), Draft(store)
        for name in found[:-1]:
            draft.delete(table, (subject, name))
        draft.commit()
        return len(found) - 1


class ExplainingNotes(Notes):
    """As that, and tells what is whose, what stays and who was given it."""

    def rows(self, store: Store, found: Sequence[str]) -> Iterator[bytes]:
        yield from [Table(store, "notes", 2).keys.key(("anna", name)) for name in found]

    def stays(self, store: Store, found: Sequence[str]) -> list[erasure.Staying]:
        there = self.find(store, "anna")
        return [
            erasure.Staying(self.name, name, "the last") for name in found[-1:] if name in there
        ]

    def recipients(self, store: Store, found: Sequence[str]) -> list[str]:
        return ["mailer"] if found else []


@pytest.mark.parametrize("provider", [Notes(), ExplainingNotes()], ids=["plain", "explaining"])
def test_erasure_includes_the_records_of_providers(store: Store, provider: Notes) -> None:
    table, draft = Table(store, "notes", 2), Draft(store)
    for key in (("anna", "1"), ("anna", "2"), ("berta", "1")):
        draft.put(table, key, {"text": LONG})
    draft.commit()
    step(store, "other", "a", checkpoint=None)
    plan = saved(erasure.plan(store, "anna", providers=[provider]))
    assert plan.records == {"notes": ("1", "2")}
    with nothing_written(store), pytest.raises(InvalidInputError, match="notes"):
        erasure.execute(store, plan)
    report = erasure.execute(store, plan, providers=[provider])
    assert report.records_erased == 1
    assert [record.key for record in table.scan()] == [("anna", "2"), ("berta", "1")]
    others = {one.name for one in plan.sharing.sharers}
    if isinstance(provider, ExplainingNotes):
        assert others == {"record notes berta / 1"}
        assert plan.stays == report.stays == (erasure.Staying("notes", "2", "the last"),)
        assert plan.recipients == report.recipients == ("mailer",)
    else:
        assert "record notes berta / 1" in others
        assert (plan.stays, report.stays, plan.recipients) == ((), (), ())


def test_records_that_came_after_the_plan_are_reported(store: Store) -> None:
    """They stayed, and nothing said so."""
    table, provider = Table(store, "notes", 2), Notes()

    def note(*names: str) -> None:
        draft = Draft(store)
        for name in names:
            draft.put(table, ("anna", name), name)
        draft.commit()

    note("1", "2")
    plan = saved(erasure.plan(store, "anna", providers=[provider]))
    note("3")
    report = erasure.execute(store, plan, providers=[provider])
    assert report.records_remaining == (("notes", "3"),)
    # What was planned without a provider that is there has none of its records.
    blind = saved(erasure.plan(store, "anna"))
    report = erasure.execute(store, blind, providers=[provider])
    assert report.records_remaining == (("notes", "2"), ("notes", "3"))
    assert erase(store, "berta").records_remaining == ()


def test_progress_is_reported_and_may_stop_the_work(store: Store) -> None:
    for n in range(4):
        store.create_session(f"s{n}", subjects=["anna"])
        step(store, f"s{n}", "a")
    told: list[Step] = []
    plan = erasure.plan(store, "anna", progress=told.append)
    assert {one.phase for one in told} == {"find", "survey"}

    def stop(step: Step) -> None:
        if step.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        erasure.execute(store, plan, progress=stop)
    assert sessions(store) == ["s2", "s3"]
    report = erasure.execute(store, plan)
    assert (report.already_gone, report.sessions_deleted) == (2, 2)


def test_hidden_nodes_queued_work_and_attachments_count_as_shared_content(
    store: Store,
) -> None:
    content, items = b"an image" * 200, ["work " * 400]
    store.create_session("hers", subjects=["alice"])
    for name in ("hers", "his"):
        step(store, name, "a", "b")
        store.session(name).tombstone(["b"])
        store.session(name).queue.enqueue(items)
        store.session(name).attachments.put(content)
    plan = erasure.plan(store, "alice")
    shared = {bytes(one.digest) for one in plan.sharing.largest}
    head = decode_head(store.engine.scan_rows("heads")[0].value)
    queued = [
        queue.items_digest(row.key, row.value)
        for row in store.engine.scan_rows("queue", limit=100)
        if keys.is_queue_batch(row.key)
    ]
    assert queued[0] == queued[1]
    assert {head.hidden, queued[0], bytes(Digest.of_blob(content))} <= shared


@pytest.mark.parametrize("when", ["after planning", "right before the write"])
@pytest.mark.parametrize("since", ["moved", "gone"])
def test_a_tag_moved_or_removed_after_the_plan_is_left_alone(
    store: Store, when: str, since: str
) -> None:
    fill(store)
    plan = saved(erasure.plan(store, "anna"))
    other = store.put_blob(b"nothing about her")

    def come() -> None:
        if since == "gone":
            store.unpin("release")
        else:
            store.tag("release", other, move=True)

    if when == "after planning":
        come()
    late = interrupted(store, before=come) if "before" in when else store
    assert erasure.execute(late, plan).pins_removed == 0
    assert [pin.digest for pin in store.pins()] == ([] if since == "gone" else [other])
