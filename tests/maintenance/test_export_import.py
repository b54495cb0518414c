"""A session that was exported and imported is the session that it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from casstore import Commit, Digest, Link, NodeDraft, Store, Usage
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import TABLES, RowKey, Write, WriteResult
from casstore.errors import (
    BundleError,
    CasstoreError,
    CorruptionError,
    InvalidInputError,
    ObjectsMissingError,
    SessionDeletedError,
    SessionDivergedError,
    SessionExistsError,
    SessionNotFoundError,
    TargetExistsError,
)
from casstore.format.digest import Kind
from casstore.maintenance import gc, vacuum
from casstore.maintenance.bundle_file import BundleReader, BundleWriter
from casstore.maintenance.check import check
from casstore.maintenance.copy import copy
from casstore.maintenance.export import Have, export_session, have_of, read_have, write_have
from casstore.maintenance.import_ import ImportOutcome, import_session
from casstore.maintenance.progress import Step
from casstore.maintenance.transfer import objects as sending
from casstore.maintenance.verify import new_object, verify_bundle
from casstore.session import keys
from casstore.session.state import runtime_of
from casstore.testing.engine_fixtures import all_objects, all_rows, find_object
from casstore.testing.inspection import replace_object
from tests.maintenance import sessions
from tests.maintenance.sessions import MakeStore, Watched


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "session.bundle"


def everything(store: Store) -> tuple[object, object]:
    rows = {table: all_rows(store.engine, table) for table in TABLES}
    return rows, {info.digest for info in all_objects(store.engine)}


def test_a_session_with_every_feature_survives_export_and_import_unchanged(
    make_store: MakeStore, make_memory: MakeStore, make_lmdb: MakeStore, file: Path
) -> None:
    source = make_store()
    sessions.fill(source)
    report = export_session(source, "s", file)
    assert report.size_bytes == file.stat().st_size
    assert verify_bundle(file)[:4] == ("s", report.revisions, report.objects, report.object_bytes)
    for target in (make_memory(), make_lmdb()):
        assert import_session(target, file).outcome is ImportOutcome.CREATED
        assert sessions.seen(target, "s") == sessions.seen(source, "s")
        # Exactly what the session reaches has come, and all of it is reached.
        assert gc.plan(target, grace_ms=0).report.outcome is gc.Outcome.NOTHING


@pytest.mark.parametrize("seed", range(12))
def test_any_random_session_survives_export_and_import_unchanged(
    make_memory: MakeStore, file: Path, seed: int
) -> None:
    source, names = make_memory(), ["r"]
    sessions.grow(source, random.Random(seed), names, 40)
    for name in names:
        if source.session(name).head() is not None:
            target = make_memory()
            export_session(source, name, file, replace=True)
            verify_bundle(file)
            import_session(target, file, name="other")
            assert sessions.seen(target, "other") == sessions.seen(source, name)


@pytest.mark.parametrize("seed", range(6))
def test_an_imported_session_accepts_the_same_commits_as_its_original(
    make_memory: MakeStore, file: Path, seed: int
) -> None:
    source, names = make_memory(), ["r"]
    sessions.grow(source, random.Random(seed), names, 25)
    for name in [name for name in names if source.session(name).head() is not None]:
        target = make_memory()
        export_session(source, name, file, replace=True)
        import_session(target, file)
        for store in (source, target):
            session = store.session(name)
            first = [node.id for node in session.nodes("full")][:1]
            session.commit(
                Commit(
                    append=[
                        sessions.message("later", parent=first[0] if first else None),
                        sessions.message("latest"),
                    ],
                )
            )
            session.rewind(session.entry().revision - 1)
            session.commit(Commit(append=[sessions.message("again")]))
        for at in (None, source.session(name).entry().revision - 2):
            ours = list(source.session(name).nodes("full", at=at))
            assert list(target.session(name).nodes("full", at=at)) == ours
        assert target.session(name).node("later") == source.session(name).node("later")


def test_a_session_imported_after_a_rewind_keeps_the_revisions_before_the_rewind(
    make_store: MakeStore, file: Path
) -> None:
    source, target = make_store(), make_store()
    sessions.step(source, "s", sessions.message("a"))
    sessions.step(source, "s", sessions.message("b"), sessions.message("c"))
    source.session("s").rewind(1)
    export_session(source, "s", file)
    import_session(target, file)
    sessions.step(target, "s", sessions.message("d"), sessions.message("b"))
    assert [node.id for node in target.session("s").nodes()] == ["a", "d", "b"]
    assert list(target.session("s").nodes(at=2)) == list(source.session("s").nodes(at=2))


@pytest.mark.parametrize("care", ["copy", "vacuum"])
def test_copy_and_vacuum_keep_all_revisions_of_a_session_imported_after_a_rewind(
    make_store: MakeStore, file: Path, care: str
) -> None:
    """What had been gone back from was lost in a copy, which a check called sound."""
    source, target, other = make_store(), make_store(), make_store()
    sessions.step(source, "s", sessions.message("a"))
    sessions.step(source, "s", sessions.message("b"), sessions.message("c"))
    source.session("s").rewind(1)
    source.session("s").commit(Commit(usage=[Usage("agent", "m", input=1)]))
    sessions.step(source, "s", sessions.message("d"))
    export_session(source, "s", file)
    import_session(target, file)
    if care == "copy":
        copy(target, other)
        target = other
    else:
        for store in (source, target):
            store.session("s").tombstone(["a"])
        assert vacuum.vacuum(target).outcome is vacuum.VacuumOutcome.DONE
    assert check(target, level="full").sound
    for entry in source.session("s").history():
        ours = [node.id for node in source.session("s").nodes("full", at=entry.revision)]
        theirs = [node.id for node in target.session("s").nodes("full", at=entry.revision)]
        assert theirs == ours


def test_a_session_that_went_another_way_beyond_its_first_page_of_nodes_is_imported(
    make_store: MakeStore, file: Path
) -> None:
    source, target = make_store(), make_store()
    for number in range(40):
        sessions.step(source, "s", sessions.message(f"n{number}"))
    source.session("s").rewind(35)
    sessions.step(source, "s", sessions.message("another way"))
    export_session(source, "s", file)
    import_session(target, file)
    assert sessions.seen(target, "s") == sessions.seen(source, "s")


def test_a_turn_is_replayed_in_the_imported_session(make_store: MakeStore, file: Path) -> None:
    source, target = make_store(), make_store()
    sessions.fill(source)
    export_session(source, "s", file)
    import_session(target, file)
    image = Digest.of_blob(sessions.noise("image", 150_000))
    shown = NodeDraft("another id", {"image": Link(image), "text": "€" * 90_000})
    change = Commit(append=[shown], turn="t2", label="shown", attachments=[image.hex(), "away"])
    result = target.session("s").commit(change)
    assert (result.replayed, result.nodes) == (True, ("d",))


def test_an_export_omits_leases_queued_work_and_uncommitted_attachments(
    make_store: MakeStore, file: Path
) -> None:
    source, target = make_store(), make_store()
    sessions.fill(source)
    source.session("s").claim_lease("worker", 60_000)
    source.session("s").attachments.intend("only announced", uri="s3://bucket/soon")
    export_session(source, "s", file)
    import_session(target, file)
    assert target.session("s").queue.batches() == []
    assert target.session("s").claim_lease("another", 1000) is not None
    assert target.session("s").attachments.find("only announced") is None


def test_a_single_revision_can_be_exported_and_imported(make_store: MakeStore, file: Path) -> None:
    source, target = make_store(), make_store()
    sessions.fill(source)
    report = export_session(source, "s", file, at="shown")
    assert report.revisions == 1
    import_session(target, file)
    assert [entry.labels for entry in target.session("s").history()] == [("shown",)]
    ours = list(source.session("s").nodes("full", at="shown"))
    assert list(target.session("s").nodes("full")) == ours
    assert [node.id for node in ours] == ["a", "c", "d"]

    whole = export_session(source, "s", file, replace=True, history=False)
    assert whole.revisions == 1
    import_session(target, file, name="head")
    assert list(target.session("head").nodes()) == list(source.session("s").nodes())


def test_missing_sessions_are_not_exported(make_store: MakeStore, file: Path) -> None:
    with pytest.raises(SessionNotFoundError):
        export_session(make_store(), "nothing", file)
    assert list(file.parent.glob("session.bundle*")) == []


def test_an_existing_file_stays_unless_replacing_it_is_requested(
    make_store: MakeStore, file: Path
) -> None:
    source = make_store()
    sessions.step(source, "s", sessions.message("a"))
    file.write_bytes(b"mine")
    with pytest.raises(TargetExistsError):
        export_session(source, "s", file)
    assert file.read_bytes() == b"mine"
    export_session(source, "s", file, replace=True)
    assert verify_bundle(file).session == "s"


def test_an_export_that_fails_leaves_nothing(make_store: MakeStore, file: Path) -> None:
    source = make_store()
    sessions.fill(source)

    def stop(step: Step) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_session(source, "s", file, progress=stop)
    assert list(file.parent.glob("session.bundle*")) == []


# --- whom it is about -----------------------------------------------------------------------


def test_an_imported_session_has_its_subjects_from_its_first_visible_moment(
    make_store: MakeStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make_store(), make_store()
    sessions.fill(source)
    export_session(source, "s", file)
    seen: list[bool] = []
    write = target.engine.write

    def watched(change: Write) -> WriteResult:
        # Nobody ever sees the session without its subjects.
        done = write(change)
        there = [one.meta.session for one in target.sessions()] == ["s"]
        seen.append(there)
        assert not there or target.session("s").subjects() == ("alice", "bob")
        return done

    monkeypatch.setattr(target.engine, "write", watched)
    import_session(target, file, subjects=["bob", "alice", "bob"])
    assert seen[-1]
    assert list(target.sessions_about("alice")) == ["s"]


def test_subjects_are_added_to_those_of_a_session_that_is_there(
    make_store: MakeStore, file: Path
) -> None:
    source, target = make_store(), make_store()
    sessions.fill(source)
    export_session(source, "s", file)
    import_session(target, file, subjects=["alice"])
    assert import_session(target, file, subjects=["bob"]).outcome is ImportOutcome.UNCHANGED
    assert target.session("s").subjects() == ("alice", "bob")
    sessions.step(source, "s", sessions.message("more"))
    export_session(source, "s", file, replace=True)
    report = import_session(target, file, subjects=["carol"], on_conflict="fast-forward")
    assert report.outcome is ImportOutcome.FORWARDED
    assert target.session("s").subjects() == ("alice", "bob", "carol")
    # Nothing said is nothing changed.
    import_session(target, file)
    assert target.session("s").subjects() == ("alice", "bob", "carol")


def test_an_import_keeps_subjects_added_concurrently(
    make_store: MakeStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = make_store(), make_store()
    sessions.fill(source)
    export_session(source, "s", file)
    import_session(target, file)
    sessions.step(source, "s", sessions.message("more"))
    export_session(source, "s", file, replace=True)
    pending = ["dora"]
    get_rows = target.engine.get_rows

    def interposed(places: Sequence[RowKey]) -> list[bytes | None]:
        found = get_rows(places)
        if pending and list(places) == [keys.subjects(keys.session_key("s"))]:
            target.session("s").add_subjects([pending.pop()])
        return found

    monkeypatch.setattr(target.engine, "get_rows", interposed)
    import_session(target, file, subjects=["alice"], on_conflict="fast-forward")
    assert pending == []
    assert target.session("s").subjects() == ("alice", "dora")


@pytest.mark.parametrize("bad", ["alice", [""], [7], ["\ud800"]])
def test_an_invalid_subject_is_refused_before_anything(
    make_store: MakeStore, file: Path, bad: Any
) -> None:
    source, target = make_store(), make_store()
    sessions.fill(source)
    export_session(source, "s", file)
    before = everything(target)
    with pytest.raises(InvalidInputError):
        import_session(target, file, subjects=bad)
    assert everything(target) == before


# --- when something is there ----------------------------------------------------------------


def test_the_same_file_again_changes_nothing(make_store: MakeStore, file: Path) -> None:
    source, target = make_store(), make_store()
    sessions.fill(source)
    export_session(source, "s", file)
    import_session(target, file)
    before = everything(target)
    report = import_session(target, file)
    assert (report.outcome, report.new_objects) == (ImportOutcome.UNCHANGED, 0)
    assert everything(target) == before


def test_an_import_over_a_diverged_session_of_the_same_id_is_refused(
    make_store: MakeStore, file: Path
) -> None:
    source, target = make_store(), make_store()
    sessions.fill(source)
    export_session(source, "s", file)
    sessions.step(target, "s", sessions.message("mine"))
    before = everything(target)
    for way in ("refuse", "fast-forward"):
        with pytest.raises(SessionDivergedError):
            import_session(target, file, on_conflict=way)
    assert everything(target) == before
    import_session(target, file, name="theirs")
    assert sessions.seen(target, "theirs") == sessions.seen(source, "s")
    assert [node.id for node in target.session("s").nodes()] == ["mine"]
    target.delete_session("s")
    with pytest.raises(SessionDeletedError):
        import_session(target, file)
    target.create_session("only a name")
    with pytest.raises(SessionExistsError):
        import_session(target, file, name="only a name")
    with pytest.raises(InvalidInputError):
        import_session(target, file, on_conflict="whatever")


@pytest.mark.parametrize("seed", range(8))
def test_an_import_with_fast_forward_updates_an_earlier_state(
    make_store: MakeStore, file: Path, seed: int
) -> None:
    source, target = make_store(), make_store()
    rng, names = random.Random(seed), ["r"]
    sessions.grow(source, rng, names, 15)
    export_session(source, "r", file)
    import_session(target, file)
    target.fork("r", "fork of the copy")
    kept = sessions.seen(target, "fork of the copy")
    sessions.grow(source, random.Random(seed + 100), ["r"], 0)
    sessions.step(source, "r", sessions.message("x1"), sessions.message("x2", parent=None))
    source.session("r").rewind(1, label="far back")
    sessions.step(source, "r", sessions.message("x3"))
    source.session("r").tombstone(["x3"])
    source.session("r").rename("another name")
    export_session(source, "r", file, replace=True)
    with pytest.raises(SessionExistsError):
        import_session(target, file)
    report = import_session(target, file, on_conflict="fast-forward")
    assert (report.outcome, report.revisions) == (ImportOutcome.FORWARDED, 3)
    assert sessions.seen(target, "r") == sessions.seen(source, "r")
    assert sessions.seen(target, "fork of the copy") == kept
    assert import_session(target, file).outcome is ImportOutcome.UNCHANGED


def test_an_import_does_not_fast_forward_a_session_in_which_a_node_was_hidden(
    make_store: MakeStore, file: Path
) -> None:
    source, target = make_store(), make_store()
    sessions.step(source, "s", sessions.message("a"), sessions.message("b"))
    export_session(source, "s", file)
    import_session(target, file)
    target.session("s").tombstone(["a"])
    sessions.step(source, "s", sessions.message("c"))
    export_session(source, "s", file, replace=True)
    with pytest.raises(SessionDivergedError):
        import_session(target, file, on_conflict="fast-forward")


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("has_head", [False, True])
def test_an_import_keeps_the_attachment_state_of_the_target(
    make_memory: MakeStore, file: Path, when: str, has_head: bool
) -> None:
    """Its bytes were to be deleted by their host, and came to be committed, or forgotten."""
    source = make_memory()
    sessions.step(source, "s", sessions.message("a"))
    engine = Watched()
    target = Store(engine)
    if has_head:
        copy(source, target)
    source.session("s").attachments.intend("away", uri="s3://bucket/away")
    sessions.step(source, "s", sessions.message("b"), attachments=["away"])
    export_session(source, "s", file)

    def condemn() -> None:
        target.session("s").attachments.intend("away", uri="s3://bucket/away")
        target.session("s").attachments.condemn("away")

    def condemn_before_it_appears(write: Write) -> None:
        if any(change.table == "heads" for change in write.rows):
            engine.before = None
            condemn()

    if when == "before":
        condemn()
    else:
        engine.before = condemn_before_it_appears
    import_session(target, file, on_conflict="fast-forward")
    assert engine.before is None
    assert [node.id for node in target.session("s").nodes()] == ["a", "b"]
    assert [one.state for one in target.session("s").attachments.list()] == ["condemned"]


def commits(store: Store) -> None:
    sessions.step(store, "s", sessions.message("ours"))


def creates(store: Store) -> None:
    store.create_session("s", name="ours")


def deletes(store: Store) -> None:
    commits(store)
    store.delete_session("s")


def collects(store: Store) -> None:
    assert gc.collect(store, grace_ms=0).objects_swept > 0


@pytest.mark.parametrize(
    ("come", "has_head", "refusal"),
    [
        (commits, False, SessionDivergedError),
        (commits, True, SessionDivergedError),
        (creates, False, SessionExistsError),
        (deletes, False, SessionDeletedError),
        (deletes, True, SessionDeletedError),
        (collects, False, None),
        (collects, True, None),
    ],
)
def test_a_session_created_right_before_publication_is_not_overwritten(
    file: Path,
    come: Callable[[Store], None],
    has_head: bool,
    refusal: type[CasstoreError] | None,
) -> None:
    source, engine = Store(MemoryEngine()), Watched()
    target = Store(engine)
    sessions.step(source, "s", sessions.message("a"))
    if has_head:
        copy(source, target)
    sessions.step(source, "s", sessions.message("b"))
    export_session(source, "s", file)
    theirs: list[object] = []

    def get_in(write: Write) -> None:
        if any(change.table == "heads" for change in write.rows):
            engine.before = None
            come(target)
            theirs.append(sessions.rows_of(target))

    engine.before = get_in
    if refusal is None:
        import_session(target, file, on_conflict="fast-forward")
        assert sessions.seen(target, "s") == sessions.seen(source, "s")
        assert check(target, level="full").sound
    else:
        with pytest.raises(refusal):
            import_session(target, file, on_conflict="fast-forward")
        assert sessions.rows_of(target) == theirs[0]


def test_a_file_older_than_the_target_session_is_refused(make_store: MakeStore, file: Path) -> None:
    store = make_store()
    sessions.step(store, "s", sessions.message("a"))
    export_session(store, "s", file)
    sessions.step(store, "s", sessions.message("b"))
    with pytest.raises(SessionDivergedError):
        import_session(store, file, on_conflict="fast-forward")
    assert [node.id for node in store.session("s").nodes()] == ["a", "b"]


def test_damage_in_the_target_is_reported_and_not_mistaken_for_a_concurrent_change(
    make_memory: MakeStore, file: Path
) -> None:
    source, target = make_memory(), make_memory()
    sessions.step(source, "s", sessions.message("a"))
    copy(source, target)
    sessions.step(source, "s", sessions.message("b"))
    export_session(source, "s", file)
    target.session("s").tombstone(["a"])
    hidden = runtime_of(target).get("s").head.hidden
    assert hidden is not None
    engine = target.engine
    assert isinstance(engine, MemoryEngine)
    stored = find_object(engine, hidden)
    assert stored is not None
    replace_object(engine, hidden, b"\xc0" + stored.data[1:])
    with pytest.raises(CorruptionError):
        import_session(target, file, on_conflict="fast-forward")


def test_an_imported_session_with_an_id_too_long_for_its_key_is_listed_by_its_id(
    make_memory: MakeStore, file: Path
) -> None:
    name = "long " * 100
    source, target = make_memory(), make_memory()
    sessions.step(source, name, sessions.message("a"))
    export_session(source, name, file)
    import_session(target, file)
    assert [info.meta.session for info in target.sessions()] == [name]


def test_a_fast_forward_writes_only_new_objects(make_memory: MakeStore, file: Path) -> None:
    source, target = make_memory(), make_memory()
    for number in range(300):
        sessions.step(source, "s", sessions.message(f"n{number}"))
    export_session(source, "s", file)
    import_session(target, file)
    before = len(target.engine.scan_objects(limit=10_000))
    sessions.step(source, "s", sessions.message("new"))
    export_session(source, "s", file, replace=True)
    import_session(target, file, on_conflict="fast-forward")
    # The node and the manifest.
    assert len(target.engine.scan_objects(limit=10_000)) == before + 2
    assert len(target.session("s").nodes()) == 301


# --- only what is lacking -------------------------------------------------------------------


def test_a_thin_file_holds_only_what_the_other_lacks(
    make_store: MakeStore, file: Path, tmp_path: Path
) -> None:
    source, target = make_store(), make_store()
    sessions.fill(source)
    whole = export_session(source, "s", file)
    import_session(target, file)
    sessions.step(source, "s", sessions.message("new", sessions.LONG_TEXT + "and more"))
    write_have(target, tmp_path / "have", "s")
    assert read_have(tmp_path / "have") == have_of(target, "s")
    ways: list[Have] = [have_of(target), tmp_path / "have", target.engine.missing]
    for have in ways:
        thin = export_session(source, "s", file, replace=True, have=have)
        assert thin.thin
        assert thin.objects <= 4 < whole.objects
        found = verify_bundle(file)
        assert (found.thin, found.left_out > 0) == (True, True)
    report = import_session(target, file, on_conflict="fast-forward")
    assert sessions.seen(target, "s") == sessions.seen(source, "s")
    assert report.new_objects == report.objects


def test_a_thin_file_is_refused_by_name_where_something_is_missing(
    make_store: MakeStore, file: Path
) -> None:
    source, target = make_store(), make_store()
    sessions.fill(source)
    have = have_of(source)
    sessions.step(source, "s", sessions.message("new"))
    export_session(source, "s", file, have=have)
    before = everything(target)
    with pytest.raises(ObjectsMissingError) as caught:
        import_session(target, file)
    assert caught.value.digests
    assert source.engine.missing(caught.value.digests) == []
    assert everything(target) == before


def test_an_invalid_have_file_is_refused(make_store: MakeStore, file: Path) -> None:
    source = make_store()
    sessions.step(source, "s", sessions.message("a"))
    file.write_bytes(b"\xff" * 100)
    with pytest.raises(InvalidInputError):
        export_session(source, "s", file.with_name("out"), have=file)


# --- beside a collector ---------------------------------------------------------------------


class Greedy(MemoryEngine):
    """Collects everything that no row names after each write, the first few times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times
        self.swept = 0

    def write(self, write: Write) -> WriteResult:
        done = super().write(write)
        if write.objects and self.times:
            self.times -= 1
            self.swept += gc.collect(Store(self), grace_ms=0).objects_swept
        return done


def test_an_import_stores_objects_again_that_gc_removed_before_their_rows(
    make_memory: MakeStore, file: Path
) -> None:
    source = make_memory()
    sessions.fill(source)
    export_session(source, "s", file)
    engine = Greedy(3)
    target = Store(engine)
    import_session(target, file)
    assert engine.swept > 0
    assert sessions.seen(target, "s") == sessions.seen(source, "s")


def test_an_import_is_invisible_until_it_is_complete(make_memory: MakeStore, file: Path) -> None:
    source = make_memory()
    sessions.fill(source)
    export_session(source, "s", file)
    views: list[Sequence[object]] = []

    class Watched(MemoryEngine):
        def write(self, write: Write) -> WriteResult:
            store = Store(self)
            views.append([list(store.sessions()), store.session("s").head()])
            return super().write(write)

    target = Store(Watched())
    import_session(target, file)
    assert len(views) > 1
    assert all(view == [[], None] for view in views)
    assert target.session("s").head() is not None


def test_a_file_that_changes_while_it_is_read_is_refused(
    make_memory: MakeStore, file: Path
) -> None:
    source, target = make_memory(), make_memory()
    sessions.fill(source)
    export_session(source, "s", file)
    other = file.with_name("other")
    sessions.step(source, "s", sessions.message("new"))
    export_session(source, "s", other)

    def swap(step: Step) -> None:
        if step.phase == "store":
            file.write_bytes(other.read_bytes())

    with pytest.raises(BundleError):
        import_session(target, file, progress=swap)
    assert target.session("s").head() is None


class Swapping(MemoryEngine):
    """Puts another file in the place of one as soon as that was proven."""

    def __init__(self, file: Path, other: Path) -> None:
        super().__init__()
        self._file, self._other = file, other

    def get_rows(self, keys: Sequence[RowKey]) -> list[bytes | None]:
        # The first look for a session of that id comes between proving and storing.
        self._file.write_bytes(self._other.read_bytes())
        return super().get_rows(keys)


def test_a_file_replaced_by_an_older_one_after_its_verification_is_refused(
    make_memory: MakeStore, file: Path
) -> None:
    source, other = make_memory(), file.with_name("other")
    sessions.step(source, "s", sessions.message("a"))
    export_session(source, "s", other)
    sessions.step(source, "s", sessions.message("b"))
    export_session(source, "s", file)
    target = Store(Swapping(file, other))
    with pytest.raises(BundleError, match="changed while it was read"):
        import_session(target, file)
    assert list(target.sessions()) == []


@pytest.mark.parametrize("known", [True, False])
def test_a_rope_replaced_after_its_verification_is_not_stored_under_a_wrong_digest(
    make_memory: MakeStore, file: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """Its own bytes do not prove its name; whoever puts that content later would rely on it."""
    # Everything is written at once, not when there is enough of it.
    monkeypatch.setattr(sending, "_WRITE_OBJECTS", 1)
    source, other, good = make_memory(), file.with_name("other"), file.with_name("good")
    texts = [letter * 200_000 for letter in "ab"]
    sessions.step(source, "s", *[sessions.message(text[0], text) for text in texts])
    export_session(source, "s", good)
    file.write_bytes(good.read_bytes())
    victim = "c" * 200_000
    name = bytes(Digest.of_blob((texts[0] if known else victim).encode()))
    with BundleReader(str(file)) as reader:
        *blocks, last = reader.blocks()
        objects = [new_object(one) for block in blocks for one in reader.objects(block)]
        rope = next(one for one in objects if one.digest == Digest.of_blob(texts[1].encode()))
        ahead = [one for one in objects if one.kind == Kind.BLOB]
        behind = [one for one in objects if one.kind != Kind.BLOB and one.digest != name]
        assert reader.header is not None
        with BundleWriter(str(other), reader.header) as writer:
            for one in (*ahead, rope._replace(digest=name), *behind):
                writer.add_object(one.kind, one.digest, one.data)
            for row in reader.rows(last):
                writer.add_row(row)
    target = Store(Swapping(file, other))
    with pytest.raises(BundleError, match="changed while it was read"):
        import_session(target, file)
    assert target.missing([Digest(name)]) == [name]
    assert target.get_blob(target.put_blob(victim.encode())) == victim.encode()
    other.write_bytes(good.read_bytes())
    import_session(target, good)
    assert sessions.seen(target, "s") == sessions.seen(source, "s")
