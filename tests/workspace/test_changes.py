"""Comparisons of sessions name the files that changed, with bounded texts."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from casstore.engine.protocol import StoredObject
from casstore.errors import CorruptionError, LimitError
from casstore.session import component_formats, entry_points
from casstore.session.session import Session
from casstore.store import Store
from casstore.workspace import Workspace, snapshots, tree


def edit(files: Path, session: Session, component: str = "workspace") -> None:
    """Two revisions between which every kind of change happens."""
    ws = Workspace(files, component=component)
    (files / "changed").write_text("one\n")
    (files / "moved").write_text("content")
    (files / "mode").write_text("x")
    (files / "mode").chmod(0o644)
    (files / "removed").write_text("gone\n")
    ws.commit(session)
    (files / "changed").write_text("two\n")
    (files / "moved").rename(files / "renamed")
    (files / "mode").chmod(0o755)
    (files / "removed").unlink()
    (files / "added").write_text("new\n")
    ws.commit(session)


def test_a_comparison_names_files_added_removed_changed_renamed_and_modes(
    store: Store, session: Session, files: Path
) -> None:
    edit(files, session)
    found = session.diff(session, at=1)
    assert [(one.kind, one.path, one.old_path) for one in found.details["workspace"]] == [
        ("added", "added", None),
        ("changed", "changed", None),
        ("mode", "mode", None),
        ("removed", "removed", None),
        ("renamed", "renamed", "moved"),
    ]
    text = str(found)
    assert "5 changes in the components" in text
    assert "~ workspace: mode (mode 644 → 755)" in text
    assert "> workspace: renamed (from moved)" in text
    assert "    -one\n    +two" in text
    assert "$.workspace" not in text
    assert store.compare(("agent", 1), "agent").details == found.details
    assert pickle.loads(pickle.dumps(found.details)) == found.details


def test_a_workspace_under_another_name_is_described_by_its_format(
    session: Session, files: Path
) -> None:
    edit(files, session, "sources")
    details = session.diff(session, at=1).details
    assert [len(found) for found in details.values()] == [5]
    assert {one.component for one in details["sources"]} == {"sources"}


def test_text_of_a_comparison_is_bounded(session: Session, files: Path) -> None:
    ws = Workspace(files)
    session.append("begin")
    (files / "lines").write_text("".join([f"{at}\n" for at in range(5000)]))
    (files / "long").write_text("x" * 200_000)
    (files / "wide").write_text("y" * 100_000)
    session.append("files", workspace=ws)
    lines, long, wide = session.diff(session, at=1).details["workspace"]
    assert len(lines.lines()) == 201
    assert lines.lines()[-1] == "… 4803 more lines"
    assert long.lines() == ["binary or long files differ: /dev/null b/long"]
    assert max([len(line) for line in wide.lines()]) == 400


def test_a_value_that_only_claims_to_be_a_workspace_is_compared_as_any_value(
    session: Session,
) -> None:
    for number in (1, 2):
        session.commit(components={"workspace": {"format": "workspace/1", "n": number}})
    found = session.diff(session, at=1)
    assert found.details == {}
    assert [change.path for change in found.changes] == [("workspace", "n")]


@pytest.mark.parametrize("error", [CorruptionError("damaged"), LimitError("too large")])
def test_damage_and_limits_are_raised_and_not_taken_for_another_format(
    session: Session, files: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    edit(files, session)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(tree.TreeReader, "entries", fail)
    with pytest.raises(type(error)):
        session.diff(session, at=1)


class Broken:
    """A format whose code has a mistake."""

    name = "workspace"

    def details(self, *_: object) -> Sequence[component_formats.Detail]:
        raise ZeroDivisionError("a mistake")


BROKEN = Broken()
HERE = f"{__name__}:BROKEN"


@pytest.mark.parametrize(
    ("registered", "why"),
    [
        (
            ["no_such_package:FORMAT"],
            "no_such_package:FORMAT of the format 'workspace' failed: Mod",
        ),
        ([f"{__name__}:ABSENT"], "ABSENT of the format 'workspace' failed: AttributeError"),
        ([f"{__name__}:HERE"], "HERE of the format 'workspace' is not a ComponentFormat"),
        ([HERE], "BROKEN of the format 'workspace' failed: ZeroDivisionError: a mistake"),
        (["a:b", "c:d"], "several packages register the format 'workspace': a:b, c:d"),
    ],
)
def test_a_package_that_fails_is_named_and_the_plain_values_are_compared(
    session: Session,
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    registered: list[str],
    why: str,
) -> None:
    edit(files, session)
    monkeypatch.setattr(entry_points, "registered", lambda *_: registered)
    found = session.diff(session, at=1)
    assert found.details == {}
    assert why in found.failures["workspace"]
    assert f"! workspace: {found.failures['workspace']}" in str(found)
    assert "$.workspace" in str(found)


@contextmanager
def counted_reads(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """The digests that are read meanwhile."""
    read: list[bytes] = []
    engine = store.engine
    get_many = engine.get_many

    def counting(digests: Sequence[bytes]) -> list[StoredObject | None]:
        read.extend(digests)
        return get_many(digests)

    with monkeypatch.context() as patch:
        patch.setattr(engine, "get_many", counting)
        yield read


def test_a_comparison_without_details_reads_neither_directories_nor_files(
    store: Store, session: Session, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(files, session)
    trees = [tree.TreeReader(store.engine).root(one.snapshot.digest).top.digest
             for one in snapshots(session)]  # fmt: skip
    with counted_reads(store, monkeypatch) as read:
        found = store.compare(("agent", 1), "agent", describe=False)
    assert found.details == {}
    assert found.changes
    assert not set(trees) & set(read)
    with counted_reads(store, monkeypatch) as read_more:
        described = store.compare(("agent", 1), "agent")
    assert set(trees) <= set(read_more)
    assert described.pieces_read > found.pieces_read
