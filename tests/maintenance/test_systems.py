"""Record systems: found from a store's rows, loaded by entry point, kept when not installed.

The third-party system is the example of ``docs/guides/record-systems.md``, installed as a
distribution in a directory on the path.
"""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import PutRow, Write
from casstore.errors import InvalidInputError
from casstore.maintenance import erasure, gc, keepers, systems
from casstore.maintenance.check import check
from casstore.maintenance.copy import copy
from casstore.maintenance.erasure import ErasurePlan
from casstore.maintenance.expiring import expire_rows
from casstore.records.lifecycles.tables import LifecycleTables
from casstore.records.log import NewMessage, SessionLog
from casstore.records.log.tables import LogTables
from casstore.records.runs import Runs
from casstore.records.runs.tables import RunTables
from casstore.records.scoped.tables import ScopedTables
from casstore.session.records import Draft, Table
from casstore.store import Store
from tests.maintenance.test_check_records import fill

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = (ROOT / "docs" / "guides" / "record-systems.md").read_text()
NOT_REGISTERED = "no installed package registers it"


def example(language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def install(directory: Path, name: str, value: str, *, package: str = "first") -> None:
    """A distribution as pip leaves it: metadata, with an entry point."""
    info = directory / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[casstore.systems]\n{name} = {value}\n")


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[ModuleType]:
    """The example's module, importable and not registered."""
    place = tmp_path / "code"
    place.mkdir()
    (place / "notes.py").write_text(example("python"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(place))
        yield importlib.import_module("notes")
    del sys.modules["notes"]


@pytest.fixture
def installed(notes: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's module, registered as the document says."""
    declared = re.findall(r'^(\w+) = "(.*)"$', example("toml"), re.MULTILINE)
    assert declared == [("notes", "notes:NOTES")]
    install(tmp_path / "site", *declared[0])
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return notes


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(MemoryEngine()) as store:
        yield store


def pages(notes: Any, store: Store) -> list[tuple[str, ...]]:
    return [record.key for record in notes.pages(store).scan()]


# --- installed ------------------------------------------------------------------------------------


def test_a_system_of_another_package_is_found_by_its_rows_and_listed(
    installed: Any, store: Store
) -> None:
    assert systems.held_by(store) == ((), {})
    installed.write_page(store, "anna", "1", "hello")
    installed.write_page(store, "ben", "1", "hello")
    held = systems.held_by(store)
    assert ([one.title for one in held.systems], held.missing) == (["Notes"], {})
    [system] = held.systems
    first = system.entries(store, limit=1)
    assert [(one.id, one.title) for one in first] == [("anna", "1 pages")]
    assert [one.id for one in system.entries(store, after="anna")] == ["ben"]
    [size] = systems.measure(store)
    assert (size.name, size.version, size.rows, size.missing) == ("notes", 1, 4, None)
    assert size.size_bytes == sum(one.size_bytes for one in system.entries(store))


def test_a_system_of_another_package_is_checked(installed: Any, store: Store) -> None:
    installed.write_page(store, "anna", "1", "hello")
    assert (check(store).sound, check(store).counts) == (True, {})
    draft = Draft(store)
    draft.put(installed.totals(store), ("anna",), 2)
    draft.commit()
    report = check(store)
    assert (report.sound, report.counts) == (False, {"notes_total_wrong": 1})
    assert [(one.what, one.remedy) for one in report.findings] == [
        ("anna has 1 pages", "count again")
    ]


def test_rows_of_a_table_that_a_system_does_not_know_are_reported(
    installed: Any, store: Store
) -> None:
    draft = Draft(store)
    draft.put(Table(store, "notes.margins", 1), ("anna",), "of a newer version")
    draft.commit()
    report = check(store)
    assert (report.sound, report.counts) == (True, {"records_unchecked": 1})
    assert "version 1 of system 'notes' has no such table" in report.findings[0].what


def test_records_of_another_package_expire(installed: Any, store: Store) -> None:
    installed.write_page(store, "anna", "late", "hello", expires_at_ms=1)
    installed.write_page(store, "anna", "new", "hello")
    report = expire_rows(store)
    assert (report.records, report.missing_systems) == (1, ())
    assert pages(installed, store) == [("anna", "new")]


def test_records_of_another_package_are_erased_with_their_subject(
    installed: Any, store: Store
) -> None:
    store.create_session("s", subjects=["anna"])
    for person in ("anna", "ben"):
        installed.write_page(store, person, "1", "long " * 1000)
    plan = ErasurePlan.from_json(erasure.plan(store, "anna").to_json())
    assert (plan.records, plan.missing_systems) == ({"notes": ("anna/1",)}, ())
    # The page of ben has the same text. Her own page, which goes, is not counted as sharing it.
    assert [one.name for one in plan.sharing.sharers] == ["record notes.pages ben / 1"]
    report = erasure.execute(store, plan)
    assert (report.sessions_deleted, report.records_erased) == (1, 1)
    assert pages(installed, store) == [("ben", "1")]


def test_a_provider_given_by_the_caller_replaces_the_installed_one(
    installed: Any, store: Store
) -> None:
    installed.write_page(store, "anna", "1", "hello")

    class NothingFound(installed.NotesErasure):  # type: ignore[misc]
        def find(self, store: Store, subject: str) -> list[str]:
            return []

    assert erasure.plan(store, "anna", providers=[NothingFound()]).records == {"notes": ()}


def test_a_system_removes_its_outdated_rows_from_the_target_of_a_copy(
    installed: Any, store: Store
) -> None:
    with Store(MemoryEngine()) as target:
        installed.write_page(store, "anna", "1", "hello")
        installed.write_page(store, "anna", "2", "hello")
        copy(store, target)
        assert pages(installed, target) == [("anna", "1"), ("anna", "2")]
        installed.remove_pages(store, "anna", ["1"])
        report = copy(store, target)
        assert report.rows_removed == 1
        assert pages(installed, target) == [("anna", "2")]
        assert check(target).counts == {}


# --- not installed --------------------------------------------------------------------------------


def test_rows_of_a_system_that_is_not_installed_are_kept_copied_and_counted(
    notes: Any, store: Store
) -> None:
    notes.write_page(store, "anna", "1", "long " * 1000, expires_at_ms=1)
    before = store.engine.scan_rows("records")
    assert expire_rows(store).records == 0
    assert gc.collect(store, grace_ms=0).outcome is gc.Outcome.NOTHING
    erasure.execute(store, erasure.plan(store, "anna"))
    assert store.engine.scan_rows("records") == before
    [size] = systems.measure(store)
    assert (size.name, size.title, size.rows) == ("notes", None, 2)
    with Store(MemoryEngine()) as target:
        for _ in range(2):
            copy(store, target)
        assert target.engine.scan_rows("records") == before
        [record] = notes.pages(target).scan()
        assert record.value["text"] == "long " * 1000


def test_a_system_that_is_not_installed_is_reported_by_name(notes: Any, store: Store) -> None:
    notes.write_page(store, "anna", "1", "hello")
    told = (("notes", NOT_REGISTERED),)
    assert systems.held_by(store) == ((), dict(told))
    assert gc.collect(store).missing_systems == ("notes",)
    assert gc.plan(store).report.missing_systems == ("notes",)
    assert expire_rows(store).missing_systems == told
    plan = erasure.plan(store, "anna")
    assert ErasurePlan.from_json(plan.to_json()).missing_systems == told
    report = check(store)
    assert (report.sound, report.counts) == (True, {"records_unchecked": 2})
    assert report.findings[0].what == (
        "1 rows of records table 'notes.pages' were not checked: system 'notes' is not "
        f"installed: {NOT_REGISTERED}"
    )


def test_a_plan_with_records_of_a_system_that_is_gone_erases_nothing(
    notes: Any, store: Store, tmp_path: Path
) -> None:
    store.create_session("s", subjects=["anna"])
    notes.write_page(store, "anna", "1", "hello")
    plan = erasure.plan(store, "anna", providers=[notes.NotesErasure()])
    with pytest.raises(InvalidInputError, match="install the package of that record system"):
        erasure.execute(store, plan)
    assert [info.meta.session for info in store.sessions()] == ["s"]


# --- loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("no_such_module_here:SYSTEM", "cannot be loaded: No module named"),
        ("notes:NOTHING", "cannot be loaded"),
        ("notes:write_page", "is not a RecordSystem with the name 'notes'"),
        ("notes:NotesSystem", "is not a RecordSystem with the name 'notes'"),
        ("casstore.records.runs.system:SYSTEM", "is not a RecordSystem with the name 'notes'"),
    ],
)
def test_a_system_that_cannot_be_loaded_is_reported_with_the_reason(
    notes: Any,
    store: Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    why: str,
) -> None:
    install(tmp_path / "site", "notes", value)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    notes.write_page(store, "anna", "1", "hello")
    assert why in systems.held_by(store).missing["notes"]
    assert check(store).counts == {"records_unchecked": 2}


def test_two_packages_with_one_system_are_both_refused(
    installed: Any, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "other", "notes", "others:NOTES", package="second")
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    assert systems.load("notes") == "several packages register it: notes:NOTES, others:NOTES"


def test_casstores_own_systems_are_found_in_a_source_tree_without_metadata(tmp_path: Path) -> None:
    """Started without the directory that has the metadata of the installation."""
    code = (
        "from casstore.session.entry_points import registered\n"
        "import importlib.metadata as metadata\n"
        "assert not list(metadata.entry_points(group='casstore.systems'))\n"
        "print(*[registered('casstore.systems', name) for name in ('log', 'notes')])\n"
    )
    # -S leaves out site-packages, and with it the metadata; what casstore imports comes by a link
    # for each package.
    for path in [Path(one) for one in sys.path if one.endswith("site-packages")]:
        for package in path.iterdir():
            if not package.name.endswith((".dist-info", ".pth")):
                (tmp_path / package.name).symlink_to(package)
    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c",
         f"import sys; sys.path += {[str(ROOT), str(tmp_path)]!r}\n{code}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert answer.stdout == "['casstore.records.log.system:SYSTEM'] []\n"


# --- casstore's own -------------------------------------------------------------------------------


def test_every_table_of_casstores_own_systems_is_declared(store: Store) -> None:
    for name, made in {
        "log": LogTables(store),
        "runs": RunTables(store),
        "scoped": ScopedTables(store),
        "life": LifecycleTables(store),
    }.items():
        system = systems.load(name)
        assert not isinstance(system, str)
        tables = [one for one in vars(made).values() if isinstance(one, Table)]
        assert sorted(system.tables) == sorted([one.keys.start[:-1].decode() for one in tables])


def test_casstores_own_systems_list_what_they_store_page_by_page(store: Store) -> None:
    fill(store)
    held = systems.held_by(store)
    assert [one.name for one in held.systems] == ["life", "log", "runs", "scoped"]
    for system in held.systems:
        entries = system.entries(store)
        assert len(entries) > 1
        assert all(one.title and one.size_bytes > 0 for one in entries)
        paged: list[systems.SystemEntry] = []
        while page := system.entries(store, after=paged[-1].id if paged else None, limit=1):
            paged += page
        assert paged == list(entries)
        for wrong in (0, 10_001, True, "1"):
            with pytest.raises(InvalidInputError, match="limit must be from 1"):
                system.entries(store, limit=wrong)  # type: ignore[arg-type]


def test_the_entry_of_a_log_has_the_time_of_the_newest_commit_of_its_session(store: Store) -> None:
    log = SessionLog(store)
    log.create("chat")
    system = systems.load("log")
    assert not isinstance(system, str)
    [before] = system.entries(store)
    log.append("chat", NewMessage("user", "hello"))
    [after] = system.entries(store)
    head = store.session("chat").head()
    assert head is not None
    assert before.changed_at_ms is not None
    assert after.changed_at_ms == max(head.committed_at_ms, before.changed_at_ms)


def test_vacuums_own_records_belong_to_no_system(store: Store) -> None:
    keepers.remember(store, "s", [store.put_blob(b"hidden")])
    assert (systems.names(store.engine), check(store).counts) == ([], {})


@pytest.mark.parametrize("key", [b"", b"a", b"a.b", b"\0", b".\0x\0", b"\xff\xfe.x\0"])
def test_an_invalid_record_key_does_not_end_the_search_for_systems(
    key: bytes, store: Store
) -> None:
    Runs(store).create_thread("t", "helper")
    if key:
        store.engine.write(Write(rows=[PutRow("records", key, b"\x00\xc0")]))
    found = systems.names(store.engine)
    assert "runs" in found
    assert len(found) == (2 if key else 1)
