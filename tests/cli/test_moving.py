"""Stores and sessions on their way elsewhere: backup, copy, export, import, verify."""

from __future__ import annotations

import re
from pathlib import Path

import casstore
from casstore import Commit, NodeDraft
from tests.cli.running import counts, run


def commit(place: str, node: str, session: str = "agent") -> None:
    with casstore.open(place) as store:
        store.session(session).commit(Commit(append=[NodeDraft(node, node)]))


def test_a_backup_is_a_store_and_is_brought_up_to_date(own: str, tmp_path: Path) -> None:
    target = str(tmp_path / "backup")
    made = run("backup", target, "--compact", "--json", store=own).json
    assert (made["updated"], made["target"]) == (False, target)
    assert "the same" in run("diff", "agent", f"{target}::agent", store=own).out
    assert "try: " in run("backup", target, store=own, ends=5).err
    commit(own, "later")
    assert "updated" in run("backup", target, "--update", store=own).out
    assert run("show", "agent#later", store=target)
    made = run("backup", target, "--replace", store=own).out
    assert re.search(r"^copied +[0-9,]+ objects$", made, re.MULTILINE)
    assert re.search(r"^size +[0-9.]+ KiB$", made, re.MULTILINE)
    run("backup", target, "--replace", "--update", store=own, ends=3)


def test_copy_sends_what_the_target_lacks(own: str, tmp_path: Path) -> None:
    target = str(tmp_path / "copy")
    run("copy", target, store=own, ends=4)
    made = run("copy", target, "--create", "--json", store=own).json
    assert made["sessions"] >= 4
    commit(target, "own", session="theirs")
    again = run("copy", target, store=own).out
    assert re.search("^copied +0 sessions\nnew +0 objects$", again, re.MULTILINE)
    run("show", "theirs", store=target)
    assert run("copy", target, "--mirror", "--json", store=own).json["rows_removed"] > 0
    run("show", "theirs", store=target, ends=4)


def test_a_copy_names_both_stores_or_one_and_takes_single_sessions(
    own: str, tmp_path: Path
) -> None:
    target = str(tmp_path / "copy")
    made = run("copy", own, target, "--session", "agent", "--create", "--json").json
    assert (made["sessions"], made["target"]) == (1, target)
    assert [one["id"] for one in run("sessions", "--json", store=target).json["sessions"]] == [
        "agent"
    ]
    assert "the same" in run("diff", "agent", f"{target}::agent", store=own).out
    run("copy", own, target, "--session", "nobody", ends=4)
    run("copy", own, target, "another", ends=2)
    run("copy", own, target, "--session", "agent", "--mirror", ends=2)
    run("copy", ends=2)


def test_a_session_travels_as_a_file(own: str, tmp_path: Path) -> None:
    file, place = str(tmp_path / "agent.bundle"), str(tmp_path / "new")
    wrote = run("export", "agent", file, "--json", store=own).json
    assert (wrote["session"], wrote["revisions"], wrote["thin"]) == ("agent", 15, False)
    assert run("verify", file, "--json").json["revisions"] == 15
    assert run("verify", file).out.startswith(f"verified      {file}\n")
    run("export", "agent", file, store=own, ends=5)
    shown = run("export", "agent", file, "--replace", store=own).out
    assert re.search(r"^revisions +15 revisions$", shown, re.MULTILINE)
    run("init", place)
    would = run("import", "bundle", file, "--dry-run", "--json", store=place).json
    assert run("sessions", "--json", store=place).json["sessions"] == []
    told = run("import", "bundle", file, "--json", store=place).json
    assert [one["outcome"] for one in told["sessions"]] == ["imported"]
    assert counts(told) == counts(would)
    assert counts(told)["revisions"] == (15, 15, 0)
    assert "imported 0 of 15 revisions" in run("import", "bundle", file, store=place).out
    named = run("import", "bundle", file, "--name", "theirs", store=place).out
    assert "imported: theirs" in named
    run(
        "import", "bundle", file, "--subject", "alice", "--subject", "bob", "--name", "hers",
        store=place,
    )  # fmt: skip
    assert "would erase hers" in run("erase", "bob", "--dry-run", store=place).out
    assert "the same" in run("diff", "agent", f"{place}::agent", store=own).out
    commit(own, "later")
    run("export", "agent", file, "--replace", store=own)
    run("import", "bundle", file, store=place, ends=5)
    moved = run("import", "bundle", file, "--fast-forward", "--json", store=place).json
    assert [one["outcome"] for one in moved["sessions"]] == ["updated"]
    assert counts(moved)["revisions"] == (16, 1, 0)
    run("export", "note", str(tmp_path / "x"), store=own, ends=3)


def test_export_can_be_limited_to_a_revision_the_head_or_missing_objects(
    own: str, tmp_path: Path
) -> None:
    place, have = str(tmp_path / "new"), str(tmp_path / "have")
    one, head, rest = [str(tmp_path / name) for name in ("one", "head", "rest")]
    assert run("export", "agent@5", one, "--json", store=own).json["revisions"] == 1
    assert run("export", "agent", head, "--head-only", "--json", store=own).json["revisions"] == 1
    run("init", place)
    run("import", "bundle", one, "--name", "known", store=place)
    assert "1 digest in" in run("export", "known", have, "--list-have", store=place).out
    thin = run("export", "agent", rest, "--have", have, "--json", store=own).json
    assert thin["thin"] is True
    shown = run("verify", rest).out
    assert re.search(r"^thin +yes\nleft out +[0-9,]+ objects?$", shown, re.MULTILINE)
    run("import", "bundle", rest, store=place)
    empty = str(tmp_path / "empty")
    run("init", empty)
    assert run("import", "bundle", rest, store=empty, ends=4).err.startswith("error: ")
    run("export", "agent", have, "--list-have", "--replace", store=own, ends=2)


def test_a_damaged_file_is_refused_with_the_byte(own: str, tmp_path: Path) -> None:
    file = tmp_path / "agent.bundle"
    run("export", "agent", str(file), store=own)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert run("verify", str(file), "--json", ends=8).error["exit_code"] == 8
    run("import", "bundle", str(file), "--name", "x", store=own, ends=8)
    file.write_bytes(b"no bundle at all")
    run("verify", str(file), ends=9)
    run("verify", str(tmp_path / "nowhere"), ends=None)


def test_two_exported_files_are_compared(own: str, tmp_path: Path) -> None:
    monday, tuesday = str(tmp_path / "monday"), str(tmp_path / "tuesday")
    run("export", "agent", monday, store=own)
    commit(own, "later")
    run("export", "agent", tuesday, store=own)
    told = run("diff", monday, tuesday, "--json").json
    assert [one["id"] for one in told["nodes"]["added"]] == ["later"]
    assert told["new"]["store"] == tuesday
    assert "the same" in run("diff", f"{monday}::agent", f"{tuesday}::agent~1").out
    run("diff", monday, "agent", "--exit-code", store=own, ends=1)
    assert run("diff", monday, f"{tuesday}::nowhere", ends=4)
