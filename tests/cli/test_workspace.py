"""``workspace`` and ``bisect``: files on the command line."""

from __future__ import annotations

import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

import casstore
from casstore import NodeDraft
from casstore.records.log import SessionLog
from casstore.workspace import Workspace
from casstore.workspace.tree import TreeReader
from tests.cli.running import run
from tests.cli.test_endings import process, until
from tests.faults.children import killed_at_the_end


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def store(tmp_path: Path) -> str:
    place = str(tmp_path / "store")
    casstore.open(place).close()
    return place


@pytest.fixture
def files(tmp_path: Path) -> Path:
    place = tmp_path / "files"
    place.mkdir()
    (place / "a.py").write_text("one\n")
    return place


def test_a_snapshot_makes_a_revision_and_reports_included_and_skipped_files(
    store: str, files: Path
) -> None:
    (files / "b.log").write_text("log")
    (files / "large").write_bytes(b"x" * 100)
    (files / ".gitignore").write_text("c.tmp\n")
    (files / "c.tmp").write_text("x")
    found = run(
        "workspace", "snapshot", str(files), "--session", "coder", "--label", "first",
        "--ignore", "*.log", "--no-defaults", "--gitignore", "--max-file", "99",
        "--skip-unreadable", "--json", store=store,
    ).json  # fmt: skip
    assert (found["revision"], found["files"], found["ignored"]) == (1, 2, 2)
    assert found["left_out"] == [{"path": "large", "reason": "larger than 99 bytes"}]
    shown = run("workspace", "snapshot", str(files), "--session", "coder", store=store).out
    assert "coder@2: 5 files" in shown
    assert os.listdir(files.parent / "cache" / "casstore" / "workspaces")


def test_status_and_restore_ignore_the_files_that_a_snapshot_ignores(
    store: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (files / "large").write_bytes(b"x" * 100)
    (files / "locked").write_text("secret")
    open_file = os.open

    def refuse(path: Any, *given: Any, **more: Any) -> int:
        if os.fspath(path) in ("locked", b"locked"):
            raise PermissionError(13, "Permission denied")
        return open_file(path, *given, **more)

    monkeypatch.setattr(os, "open", refuse)
    of = (str(files), "--session", "coder")
    run("workspace", "snapshot", *of, "--max-file", "99", "--skip-unreadable", store=store)
    assert "--skip-unreadable" in run("workspace", "status", *of, store=store, ends=10).err
    same = run(
        "workspace", "status", *of, "--max-file", "99", "--skip-unreadable", store=store
    )  # fmt: skip
    assert same.out == ""
    (files / "a.py").unlink()
    run(
        "workspace", "restore", "coder", str(files), "--max-file", "99", "--skip-unreadable",
        store=store,
    )  # fmt: skip
    assert sorted(os.listdir(files)) == ["a.py", "large", "locked"]


def test_status_and_diff_name_changes_and_show_text(store: str, files: Path) -> None:
    run("workspace", "snapshot", str(files), "--session", "coder", store=store)
    (files / "a.py").write_text("two\n")
    os.rename(files / "a.py", files / os.fsdecode(b"\xff"))
    (files / "b.log").write_text("x")
    found = run(
        "workspace", "status", str(files), "--session", "coder", "--text", "--ignore", "*.log",
        "--no-defaults", "--gitignore", "--json", store=store,
    ).json  # fmt: skip
    assert [(one["kind"], one["path"]) for one in found["changes"]] == [
        ("removed", "a.py"), ("added", "\\xff"),
    ]  # fmt: skip
    shown = run("workspace", "status", str(files), "--session", "coder@1", "--text", store=store)
    assert "+two" in shown.out
    run("workspace", "snapshot", str(files), "--session", "coder", store=store)
    shown = run("workspace", "diff", "coder@1", "coder", "--text", store=store)
    assert "-one" in shown.out
    found = run("workspace", "diff", "coder@2", "coder@1", "--json", store=store).json
    assert (found["old"], found["new"]) == ("coder@2", "coder@1")
    assert [one["kind"] for one in found["changes"]] == ["added", "removed", "removed"]


def test_restore_plans_refuses_and_saves_before_force(store: str, files: Path) -> None:
    run("workspace", "snapshot", str(files), "--session", "coder", store=store)
    (files / "a.py").write_text("unsaved\n")
    plan = run(
        "workspace", "restore", "coder@1", str(files), "--dry-run", "--ignore", "*.log",
        "--no-defaults", "--gitignore", "--json", store=store,
    ).json  # fmt: skip
    reason = "changed since the last snapshot"
    assert plan["conflicts"] == [{"path": "a.py", "reason": reason}]
    assert (
        "conflict" in run("workspace", "restore", "coder", str(files), "--dry-run", store=store).out
    )
    refused = run("workspace", "restore", "coder@1", str(files), store=store, ends=5).err
    assert "a.py: changed since" in refused
    assert "--force" in refused
    assert (files / "a.py").read_text() == "unsaved\n"
    done = run("workspace", "restore", "coder@1", str(files), "--force", "--json", store=store).json
    assert (files / "a.py").read_text() == "one\n"
    # What was saved comes back by its pin.
    run("workspace", "restore", done["saved_pin"], str(files), store=store)
    assert (files / "a.py").read_text() == "unsaved\n"
    run("workspace", "restore", "nothing", str(files), store=store, ends=4)


def test_restore_makes_the_directory_if_there_is_none(store: str, files: Path) -> None:
    run("workspace", "snapshot", str(files), "--session", "coder", store=store)
    target = files.parent / "new" / "deep"
    assert "1 path created" in run("workspace", "restore", "coder", str(target), store=store).out
    assert (target / "a.py").read_text() == "one\n"


def test_restoring_an_entry_of_a_record_system_is_refused(store: str, files: Path) -> None:
    with casstore.open(store) as opened:
        SessionLog(opened).create("chat")
    told = run("workspace", "restore", "log:chat", str(files), store=store, ends=3).err
    assert "the entry of a record system is not one object" in told


def test_a_dry_run_makes_no_directory(store: str, files: Path) -> None:
    run("workspace", "snapshot", str(files), "--session", "coder", store=store)
    target = files.parent / "new"
    shown = run("workspace", "restore", "coder", str(target), "--dry-run", store=store).out
    assert "create    a.py" in shown
    assert not target.exists()


def test_the_log_lists_the_revisions_whose_files_changed(store: str, files: Path) -> None:
    assert "no files" not in run("workspace", "snapshot", str(files), "-S", "c", store=store).out
    run("workspace", "snapshot", str(files), "--session", "c", store=store)
    (files / "a.py").write_text("two\n")
    run("workspace", "snapshot", str(files), "--session", "c", "--label", "two", store=store)
    found = run("workspace", "log", "c", "--json", store=store).json["snapshots"]
    assert [(one["revision"], one["labels"]) for one in found] == [(3, ["two"]), (1, [])]
    assert len(run("workspace", "log", "c", "--limit", "1", store=store).out.splitlines()) == 2


def test_copies_and_bundles_carry_the_files(store: str, files: Path, tmp_path: Path) -> None:
    (files / "long").write_bytes(os.urandom(200_000))
    run("workspace", "snapshot", str(files), "--session", "coder", store=store)
    bundle, third = str(tmp_path / "coder.bundle"), str(tmp_path / "third")
    run("export", "coder", bundle, store=store)
    for place in (third, str(tmp_path / "second")):
        casstore.open(place).close()
    run("import", "bundle", bundle, store=third)
    run("copy", str(tmp_path / "second"), "--session", "coder", store=store)
    for place in (third, str(tmp_path / "second")):
        target = tmp_path / "restored" / Path(place).name
        run("workspace", "restore", "coder", str(target), store=place)
        assert (target / "long").read_bytes() == (files / "long").read_bytes()
        assert run("check", "--json", store=place).json["sound"]


@pytest.fixture
def history(store: str, files: Path) -> str:
    """Nine revisions, the seventh of which broke the file; the fourth changes nothing."""
    with casstore.open(store) as opened:
        ws = Workspace(files)
        for revision in range(1, 10):
            text = "works" if revision < 7 else "broken"
            if revision != 4:
                (files / "a.py").write_text(f"{text} {revision}\n")
            node = NodeDraft(f"n{revision}", f"step {revision}")
            ws.commit(opened.session("coder"), append=[node], turn=f"t{revision}")
    return store


@pytest.mark.parametrize("wrong_from", range(2, 10))
def test_bisect_finds_the_first_bad_revision_in_logarithmically_many_runs(
    history: str, wrong_from: int
) -> None:
    # Revision 4 has the files of revision 3, so it is never the first bad one.
    script = f"test $(cut -d' ' -f2 a.py) -lt {wrong_from}"
    found = run(
        "bisect", "coder", "--good", "1", "--bad", "9", "--json", "--", "sh", "-c", script,
        store=history,
    ).json  # fmt: skip
    assert found["revision"] == (5 if wrong_from == 4 else wrong_from)
    assert len(found["runs"]) <= 3  # eight revisions after the good one
    assert found["turn"] == f"t{found['revision']}"
    assert found["nodes"] == [f"n{found['revision']}"]
    assert [one["path"] for one in found["changes"]] == ["a.py"]


def test_bisect_prints_the_turn_and_what_it_changed(history: str) -> None:
    shown = run(
        "bisect", "coder", "--good", "1", "--bad", "9", "--", "grep", "-q", "works", "a.py",
        store=history,
    ).out  # fmt: skip
    assert "first bad  coder@7  turn t7" in shown
    assert "nodes      n7" in shown
    assert "M  a.py" in shown


def test_bisect_stops_if_the_command_cannot_decide(history: str) -> None:
    ends = ("bisect", "coder", "--good", "1", "--bad", "9", "--")
    assert "neither good nor bad" in run(*ends, "sh", "-c", "exit 125", store=history, ends=3).err
    assert "cannot run" in run(*ends, "no-such-program", store=history, ends=3).err
    same = ("bisect", "coder", "--good", "3", "--bad", "4", "--", "true")
    assert "do not differ" in run(*same, store=history, ends=3).err
    run("bisect", "coder", "--good", "9", "--bad", "1", "--", "true", store=history, ends=2)


def test_diff_of_sessions_names_the_files_and_shows_their_text(
    store: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("workspace", "snapshot", str(files), "--session", "coder", store=store)
    (files / "a.py").write_text("two\n")
    (files / "b.py").write_text("new\n")
    run("workspace", "snapshot", str(files), "--session", "coder", store=store)
    found = run("diff", "coder@1", "coder", "--json", store=store).json
    assert [(one["kind"], one["path"]) for one in found["details"]] == [
        ("changed", "a.py"), ("added", "b.py"),
    ]  # fmt: skip
    assert found["details"][0]["text"][-2:] == ["-one", "+two"]
    # The counts are those of the plain values, with or without --stat.
    assert found["by_part"] == {"workspace": {"added": 0, "removed": 0, "changed": 3}}
    assert [tuple(one["path"]) for one in found["changes"]] == [
        ("workspace", "bytes"), ("workspace", "files"), ("workspace", "root", 2),
    ]  # fmt: skip
    with monkeypatch.context() as patch:
        # --stat and --patch read no directory.
        patch.setattr(TreeReader, "root", None)
        stat = run("diff", "coder@1", "coder", "--stat", "--json", store=store).json
        operations = run("diff", "coder@1", "coder", "--patch", store=store).json
        assert operations[0]["op"] == "replace"
    assert stat["failures"] == {}
    assert (stat["counts"], stat["by_part"], stat["details"]) == (
        found["counts"], found["by_part"], [],
    )  # fmt: skip
    shown = run("diff", "coder@1", "coder", store=store).out
    assert "~ workspace: a.py" in shown
    assert "+two" in shown
    assert "+ workspace: b.py" in shown
    assert "1 more change" in run("diff", "coder@1", "coder", "--limit", "1", store=store).out
    assert "3 changed" in run("diff", "coder@1", "coder", "--stat", store=store).out


def sha256_of(root: Path) -> dict[str, str]:
    """The SHA-256 of every file below a directory, by relative path."""
    return {
        str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_an_archive_restores_every_file_with_the_same_sha256(store: str, tmp_path: Path) -> None:
    """Transcripts that grow, with names that the default rules would ignore."""
    source = tmp_path / "transcripts"
    names = [
        "projects/a/1.jsonl",
        "projects/b/.git/2.jsonl",
        "node_modules/3",
        "cache/__pycache__/4",
    ]
    states = []
    for step in range(3):
        for at, name in enumerate(names):
            path = source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "ab") as file:
                file.write(os.urandom(3_000_000 if at == step else 2_000))
        (source / f"empty {step}").touch()
        given = ("workspace", "snapshot", str(source), "--session", "archive", "--no-defaults")
        found = run(*given, "--json", store=store).json
        assert (found["left_out"], found["ignored"], found["unstable"]) == ([], 0, [])
        states.append(sha256_of(source))
        assert found["files"] == len(states[-1])
    for revision, state in enumerate(states, 1):
        target = tmp_path / f"restored {revision}"
        restoring = ("workspace", "restore", f"archive@{revision}", str(target), "--no-defaults")
        run(*restoring, store=store)
        assert sha256_of(target) == state


def test_ctrl_c_stops_a_snapshot_quietly_and_nothing_is_committed(
    store: str, files: Path, tmp_path: Path
) -> None:
    with open(files / "large", "wb") as file:
        file.truncate(64 << 30)  # a hole: read for minutes, stored in a few chunks
    given = ("workspace", "snapshot", str(files), "--session", "coder", "--store", store)
    with killed_at_the_end(process(*given, "--max-file", str(1 << 40))) as worker:
        handles = Path(f"/proc/{worker.pid}/fd")

        def position(handle: Path) -> int:
            if not os.readlink(handle).endswith("/large"):
                return 0
            return int((handles.parent / "fdinfo" / handle.name).read_text().split()[1])

        def reading() -> bool:
            # Not while the first chunks are cut: the cutter is imported then, and Python ignores an
            # interrupt that comes in one of its own callbacks.
            try:
                return any(position(one) > 8 << 20 for one in handles.iterdir())
            except FileNotFoundError:
                return False  # closed since it was listed

        until(reading, worker)
        worker.send_signal(signal.SIGINT)
        out, err = worker.communicate(timeout=60)
    assert (worker.returncode, out, err) == (130, b"", b"error: interrupted\n")
    with casstore.open(store, readonly=True) as opened:
        assert opened.session("coder").head() is None
    (files / "large").unlink()
    run(*given)
    assert run("check", "--json", store=store).json["sound"]


def test_a_snapshot_reports_how_much_it_has_read(
    store: str, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.cli.progress.LINE_INTERVAL_S", 0)
    given = ("workspace", "snapshot", str(files), "--session", "coder")
    assert run(*given, store=store).err == "read: 4 B\n"
    (files / "b").write_text("more")
    assert run(*given, "--quiet", store=store).err == ""
