"""``tools/gc.py`` and ``tools/snapshot_diff.py``: run as programs, as cron would."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import casstore
from casstore import Commit, NodeDraft
from casstore.cli.configuration import Steps, change_steps, find_stores, read_config
from casstore.cli.maintain import maintain_store
from casstore.engine.protocol import PackReport
from casstore.errors import InvalidInputError
from casstore.maintenance import pack as packing
from casstore.maintenance.progress import Progress, Step
from casstore.maintenance.retention import Policy
from tests.cli.running import run
from tests.cli.test_endings import environment, until
from tests.faults.children import killed_at_the_end


def said(node: str, text: str) -> Commit:
    return Commit(append=[NodeDraft(node, {"role": "user", "text": text})])


ROOT = Path(__file__).parent.parent.parent


def gc(*arguments: str, ends: int = 0) -> subprocess.CompletedProcess[str]:
    """Run the program from somewhere else."""
    answer = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "gc.py"), *arguments],
        capture_output=True, text=True, check=False, cwd="/", env=environment(),
    )  # fmt: skip
    assert answer.returncode == ends, answer
    return answer


def objects(place: str) -> int:
    with casstore.open(place, readonly=True) as store:
        return sum(1 for _ in store.engine.scan_objects(limit=10**6))


def test_many_stores_are_maintained_by_one_run(own: str, tmp_path: Path) -> None:
    second = str(tmp_path / "own2")
    shutil.copytree(own, second)
    (tmp_path / "own-but-no-store").mkdir()
    report = tmp_path / "report.json"
    for place in (own, second):
        run("put", store=place, stdin=b"garbage")
    before = objects(own)
    pattern = str(tmp_path / "own*")
    planned = gc(pattern, "--grace", "0", "--last", "3", "--dry-run")
    assert planned.stdout.count("would prune 9 revisions") == 2
    assert objects(own) == before
    done = gc(pattern, "--grace", "0", "--last", "3", "--pack", "--batch", "100",
              "--durability", "relaxed", "--report", str(report))  # fmt: skip
    lines = done.stdout.splitlines()
    assert [line.split(": ")[0] for line in lines] == [own, second]
    assert all("pruned 9 revisions" in line and "gc swept" in line for line in lines)
    told = json.loads(report.read_text())
    assert told["schema"] == "casstore.maintain/1"
    assert [one["exit_code"] for one in told["stores"]] == [0, 0]
    assert told["stores"][0]["collected"]["objects_swept"] > 0
    assert objects(own) < before
    quiet = gc(own, "--quiet")
    assert (quiet.stdout, quiet.stderr) == ("", "")
    assert json.loads(gc(own, "--json").stdout)["stores"][0]["path"] == own


def test_the_policy_of_a_session_applies_unless_it_is_overridden(own: str, tmp_path: Path) -> None:
    run("policy", "--session", "agent", "--everything", store=own)
    config = tmp_path / "gc.toml"
    config.write_text("[retention]\nlast = 3\n")
    for given in (("--last", "3"), ("--config", str(config))):
        assert "pruned 0 revisions" in gc(own, *given).stdout
    assert "needs a policy" in gc(own, "--prune", "--override-policies", ends=2).stderr
    config.write_text("override_policies = true\n[retention]\nlast = 3\n")
    told = gc(own, "--config", str(config), "--dry-run").stdout
    assert "would prune 9 revisions, 0 sessions; would override the stored policy of agent" in told
    told = gc(own, "--config", str(config), "--no-override-policies").stdout
    assert "pruned 0 revisions" in told
    report = gc(own, "--last", "3", "--override-policies", "--json").stdout
    [store] = json.loads(report)["stores"]
    assert store["pruned"]["revisions_removed"] == 9
    assert [one["session"] for one in store["pruned"]["overridden"]] == ["agent"]


@pytest.mark.parametrize("way", ["gc", "vacuum"])
def test_a_dry_run_counts_what_the_run_takes(own: str, tmp_path: Path, way: str) -> None:
    with casstore.open(own) as store:
        store.session("agent").tombstone(["n3", "n5"])
        store.session("expired").commit(said("e1", "text " * 2000))
        store.session("expired").expire_in(0)
        store.session("never").attachments.put(b"pixels" * 1000)
        store.pin("moment", store.put_blob(b"pinned for a moment"), ttl_ms=1)
        store.put_blob(b"nobody's")
    before = objects(own)
    given = [own, "--last", "1", "--grace", "0", "--attachments", "0", "--json"]
    given += ["--vacuum" if way == "vacuum" else "--no-vacuum"]
    [plan] = json.loads(gc(*given, "--dry-run").stdout)["stores"]
    assert objects(own) == before
    [done] = json.loads(gc(*given).stdout)["stores"]
    for key in ("revisions_removed", "labels_removed", "sessions_deleted", "expired_rows"):
        assert plan["pruned"][key] == done["pruned"][key]
    assert plan["pruned"]["sessions_deleted"] == 1
    assert plan["pruned"]["expired_rows"]["attachments"] == 1
    parts = [one["vacuumed"]["collected"] if way == "vacuum" else one["collected"]
             for one in (plan, done)]  # fmt: skip
    assert parts[0]["objects_unreached"] == parts[1]["objects_swept"] > 20
    assert parts[0]["unreached_bytes"] == parts[1]["swept_bytes"]
    # The run stores what a vacuum has rewritten.
    assert way == "vacuum" or before - objects(own) == parts[1]["objects_swept"]
    told = gc(own, "--attachments", "0", "--no-vacuum").stdout
    assert "gave up 0 attachments, condemned 0; gc nothing to do" in told


def test_slabs_packed_by_vacuum_are_counted_in_the_report(own: str) -> None:
    with casstore.open(own) as store:
        for number in range(50):
            store.tag(f"t{number}", store.put_blob(b"small" + bytes([number])))
    [done] = json.loads(gc(own, "--vacuum", "--pack", "--json").stdout)["stores"]
    packed = done["packed"]
    assert packed == done["vacuumed"]["packed"]
    assert packed["slabs_before"] > packed["slabs_after"] > 0
    with casstore.open(own) as store:
        for number in range(50, 60):
            store.tag(f"t{number}", store.put_blob(b"small" + bytes([number])))
    assert "nothing to pack that is older than 15 min" in gc(own, "--pack", "--no-vacuum").stdout
    assert re.search("packed [1-9][0-9]* slabs into 1", gc(own, "--vacuum", "--pack").stdout)
    assert "nothing to pack; file" in gc(own, "--vacuum", "--pack").stdout


def test_one_bad_store_does_not_keep_others_from_maintenance(own: str, tmp_path: Path) -> None:
    nowhere, letter = str(tmp_path / "nowhere"), tmp_path / "letter"
    letter.write_text("dear")
    answer = gc(nowhere, own, str(letter), ends=4)
    assert "gc nothing to do" in answer.stdout
    assert "try: " in answer.stderr
    assert "a store is a directory" in answer.stderr
    damaged = tmp_path / "damaged"
    shutil.copytree(own, damaged)
    data = damaged / "data.mdb"
    data.write_bytes(data.read_bytes()[: 3 * 4096])
    assert "try: casstore check" in gc(str(damaged), ends=8).stderr


def test_a_second_run_on_the_same_store_is_refused(own: str) -> None:
    handle = os.open(own, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        assert "maintained by another run" in gc(own, ends=7).stderr
    finally:
        os.close(handle)
    gc(own)


def test_a_configuration_selects_the_stores_and_steps(own: str, tmp_path: Path) -> None:
    second = str(tmp_path / "second")
    shutil.copytree(own, second)
    config = tmp_path / "gc.toml"
    config.write_text(
        f'stores = ["{own}", "{second}"]\n'
        'grace = "0"\npack = true\nvacuum = false\n'
        '[retention]\nlast = 3\nwithin = "1ms"\n'
        f'[store."{second}"]\nretention = {{ everything = true }}\n'
    )
    answer = gc("--config", str(config), "--dry-run")
    assert f"{own}: would prune 9 revisions" in answer.stdout
    assert f"{second}: would prune 0 revisions" in answer.stdout
    # What the command line says goes before.
    answer = gc("--config", str(config), "--dry-run", "--last", "1", "--within", "1ms")
    assert answer.stdout.count("would prune 13 revisions") == 2
    assert "would prune 0" in gc(own, "--prune", "--dry-run").stdout


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("grace = 5", "grace cannot be 5"),
        ('grace = "soon"', "is not a duration"),
        ("mistake = true", "unknown key 'mistake'"),
        ("[retention]\nlats = 3", "unknown policy field 'lats'"),
        ("[retention]\nlast = 0", "keeps nothing"),
        ("stores = 3", "a list of paths"),
        ('stores = ["a\\u0000b"]', "contains a NUL character"),
        ("store = 3", "a table for each path"),
        ('[store."x"]\nnope = 1', "unknown key 'nope'"),
        ("batch = true", "batch cannot be True"),
        ("batch = 0", "batch must be from 1 to 100,000, got 0"),
        ('durability = "some"', "durability must be one of full, relaxed, got 'some'"),
        ("= broken", "is not TOML"),
    ],
)
def test_an_invalid_configuration_is_refused_completely(
    tmp_path: Path, text: str, why: str
) -> None:
    config = tmp_path / "gc.toml"
    config.write_text(text)
    with pytest.raises(InvalidInputError, match=why.replace("[", ".")):
        read_config(str(config))


def test_the_configuration_in_the_document_is_one(tmp_path: Path) -> None:
    document = (ROOT / "docs" / "reference" / "cli.md").read_text()
    config = tmp_path / "gc.toml"
    config.write_text(document.split("```toml\n")[1].split("```")[0])
    found = read_config(str(config))
    assert found.stores == ("/var/lib/agents/*",)
    policy = found.steps.policy
    assert policy is not None
    assert (policy.last, policy.idle_ms, found.steps.pack) == (20, 90 * 86_400_000, True)
    other = found.steps_of("/var/lib/agents/archive").policy
    assert other is not None
    assert other.everything


def test_settings_for_a_store_that_is_not_maintained_are_reported(own: str, tmp_path: Path) -> None:
    """It names the store that was to be spared, with a slip of the finger."""
    config = tmp_path / "gc.toml"
    table = '[store."{}"]\nretention = {{ everything = true }}\n'
    config.write_text(
        f'stores = ["{own}"]\n'
        + table.format(f"{own}-archiv")
        + table.format("postgresql://u:pw@h/d")
    )
    told = gc("--config", str(config), "--dry-run").stderr
    assert f'[store."{own}-archiv"] is none of the stores that are maintained' in told
    assert "pw" not in told
    config.write_text(f'stores = ["{own}"]\n' + table.format(f"{own}/."))
    assert gc("--config", str(config), "--dry-run").stderr == ""


def test_a_mistake_on_the_command_line_ends_with_2(own: str, tmp_path: Path) -> None:
    # Without a name it is the current directory, here the root.
    assert "holds no store" in gc(ends=9).stderr
    before = len(run("history", "agent", "--json", store=own).json["revisions"])
    gc(own, "--last", "1", "--batch", "0", ends=2)
    assert len(run("history", "agent", "--json", store=own).json["revisions"]) == before
    gc(own, "--grace", "soon", ends=2)
    gc(own, "--last", "0", ends=2)
    gc(own, "--what", ends=2)
    gc("--config", str(tmp_path / "nowhere"), ends=2)
    (tmp_path / "latin.toml").write_bytes(b"# \xe9")
    assert "is not TOML" in gc("--config", str(tmp_path / "latin.toml"), ends=2).stderr
    gc(str(tmp_path / "none*"), ends=2)
    assert "--report" in gc("--help").stdout


def test_patterns_find_stores_and_each_once(own: str, tmp_path: Path) -> None:
    os.symlink(own, tmp_path / "link")
    assert find_stores([own, str(tmp_path / "*"), own + "/"]) == [own]
    assert change_steps(Steps(), {"retention": True}, "x").prune is True
    assert change_steps(Steps(prune=True), {"retention": False}, "x").prune is False


def test_a_signal_stops_a_run_and_the_report_says_so(tmp_path: Path) -> None:
    place, report = str(tmp_path / "full"), tmp_path / "report"
    with casstore.open(place, durability="relaxed") as store:
        stored = store.put_many([number.to_bytes(4, "big") for number in range(4000)])
    collecting = subprocess.Popen(
        [sys.executable, str(ROOT / "tools" / "gc.py"), place, "--grace", "0", "--batch", "1",
         "--durability", "relaxed", "--report", str(report)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    with (
        killed_at_the_end(collecting) as worker,
        casstore.open(place, readonly=True) as watching,
    ):
        # A look that is quick: the collector must not be done before the signal comes.
        until(lambda: bool(watching.engine.missing(stored[::40])), worker)
        worker.send_signal(signal.SIGTERM)
        _, err = worker.communicate(timeout=60)
    assert worker.returncode == 130
    assert b"gc incomplete" in err
    told: dict[str, Any] = json.loads(report.read_text())
    assert told["interrupted"] is True
    assert told["stores"][0]["collected"]["outcome"] == "incomplete"


def revisions(place: str) -> int:
    with casstore.open(place, readonly=True) as store:
        return sum(
            1 for info in store.sessions() for _ in store.session(info.meta.session).history()
        )


def test_a_signal_stops_pruning_and_packing_too(
    own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = revisions(own)
    unstopped = str(tmp_path / "unstopped")
    shutil.copytree(own, unstopped)
    steps = Steps(grace_ms=0, policy=Policy(last=1), prune=True, pack=True)
    seen: list[str] = []
    pack = packing.pack

    def note(step: Step) -> None:
        seen.append(step.phase)

    def pack_all(store: casstore.Store, *, progress: Progress) -> PackReport:
        # What is as new as this store would be left as it is. The signal comes in the first step.
        seen.append("pack")
        return pack(store, min_age_ms=0, progress=progress)

    monkeypatch.setattr(packing, "pack", pack_all)

    def stop_in(phase: str) -> Callable[[], bool]:
        seen.clear()
        return lambda: phase in seen

    stopped = maintain_store(own, steps, dry_run=False, progress=note, stop=stop_in("retain"))
    assert stopped.exit_code == 130
    assert "stopped; the next run continues" in stopped.summary
    assert stopped.report["collected"] is None
    # The first session was pruned, the others were not come to.
    assert revisions(own) < before
    stopped = maintain_store(own, steps, dry_run=False, progress=note, stop=stop_in("pack"))
    assert (stopped.exit_code, stopped.report["packed"]) == (130, None)
    assert stopped.report["collected"]["outcome"] == "swept"
    for place in (own, unstopped):
        assert maintain_store(place, steps, dry_run=False).exit_code == 0
    assert revisions(own) == revisions(unstopped)
    assert objects(own) == objects(unstopped)
    run("check", "--level", "full", store=own)


@pytest.mark.parametrize(("into", "code"), [(">/dev/full", 10), ("| true", 141), (">&-", 0)])
def test_every_store_is_maintained_though_no_process_reads_the_output(
    own: str, tmp_path: Path, into: str, code: int
) -> None:
    second, report = str(tmp_path / "sécond"), tmp_path / "report.json"
    shutil.copytree(own, second)
    line = f"{sys.executable} {ROOT / 'tools' / 'gc.py'} {own} {second} --report {report} {into}"
    # The pipe is left before anything is written to it.
    line = line.replace("| true", '> >(exec <&-; true); exit "${PIPESTATUS[0]}"')
    ran = subprocess.run(
        ["bash", "-c", line], capture_output=True, check=False,
        env=environment(PYTHONIOENCODING="ascii"),
    )  # fmt: skip
    told = json.loads(report.read_text())["stores"]
    assert ([one["path"] for one in told], ran.stderr) == ([own, second], b"")
    assert ran.returncode == code


def test_a_path_with_brackets_is_a_path_if_it_is_there(own: str, tmp_path: Path) -> None:
    odd = str(tmp_path / "st[a]re")
    shutil.copytree(own, odd)
    assert find_stores([odd]) == [odd]
    assert find_stores([str(tmp_path / "ow[n]")]) == [own]


def test_the_snapshot_tool_is_casstore_diff(own: str) -> None:
    def snapshot_diff(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "tools" / "snapshot_diff.py"), *arguments],
            capture_output=True, text=True, check=False, cwd="/", env=environment(),
        )  # fmt: skip

    answer = snapshot_diff(f"{own}::agent@4", f"{own}::agent@6", "--stat", "--exit-code")
    assert answer.returncode == 1
    assert "tool_state  0 added, 0 removed, 7 changed" in answer.stdout
    told = snapshot_diff("--store", own, "agent@4", "agent@6", "--json")
    assert json.loads(told.stdout)["schema"] == "casstore.diff/1"
    assert "OLD NEW" in snapshot_diff().stdout


@pytest.mark.parametrize("tool", ["gc.py", "snapshot_diff.py", "cli_docs.py"])
def test_tools_can_be_executed(tool: str) -> None:
    path = ROOT / "tools" / tool
    assert os.access(path, os.X_OK)
    assert path.read_text().startswith("#!/usr/bin/env python3\n")


def test_a_report_that_cannot_be_written_leaves_the_last_one_and_nothing_else(
    own: str, tmp_path: Path
) -> None:
    place = tmp_path / "reports"
    place.mkdir()
    (place / "report").write_text("the last one")
    line = (
        f"ulimit -f 0; {sys.executable} {ROOT / 'tools' / 'gc.py'} {own} -n --report {place}/report"
    )
    ran = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, check=False, env=environment()
    )
    assert ran.returncode == 10, ran
    assert "cannot write the report" in ran.stderr
    assert [one.read_text() for one in place.iterdir()] == ["the last one"]


@pytest.mark.parametrize("tool", ["gc.py", "snapshot_diff.py"])
def test_a_tool_runs_with_the_python_of_its_checkout_if_a_package_is_missing(
    tmp_path: Path, tool: str
) -> None:
    """Python 3 as cron finds it has no LMDB: a traceback, every night."""
    for name in (tool, "checkout.py"):
        (tmp_path / "tools").mkdir(exist_ok=True)
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools" / name)
    (tmp_path / "casstore").symlink_to(ROOT / "casstore")

    def started() -> subprocess.CompletedProcess[str]:
        # Without site there are no installed packages.
        line = [sys.executable, "-S", str(tmp_path / "tools" / tool), "--help"]
        env = {"PATH": os.environ["PATH"]}
        return subprocess.run(line, capture_output=True, text=True, check=False, env=env)

    refused = started()
    assert (refused.returncode, refused.stdout) == (2, "")
    assert re.match(rf"{tool}: \S+ has no blake3, .*\ntry: python3 -m venv ", refused.stderr)
    own = tmp_path / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    own.chmod(0o755)
    found = started()
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.lower().startswith("usage: ")


def test_maintain_does_all_steps_and_reports_what_went_and_what_stays(own: str) -> None:
    with casstore.open(own) as store:
        store.session("agent").tombstone(["n3"])
        store.put_blob(os.urandom(3_000_000))
        store.tag("kept", store.put_blob(b"kept"))
    run("policy", "--last", "2", store=own)
    arguments = ("maintain", own, "--grace", "0", "--json")
    [plan] = run(*arguments, "--dry-run").json["stores"]
    assert (plan["dry_run"], plan["compacted"]) == (True, None)
    assert plan["file_bytes"] == plan["file_bytes_before"]
    [done] = run(*arguments).json["stores"]
    assert done["pruned"]["revisions_removed"] > 0
    assert done["nodes_removed"] == 1
    assert done["objects_removed"] == done["collected"]["objects_swept"] > 0
    assert done["packed"]["slabs_after"] > 0
    assert done["compacted"]["file_bytes_after"] == done["file_bytes"] < done["file_bytes_before"]
    assert "session agent" in [one["what"] for one in done["holding"]]
    text = run("maintain", store=own).out
    assert "file now" in text
    assert "session agent" in text


def test_steps_of_maintain_are_switched_off(own: str, tmp_path: Path) -> None:
    report = tmp_path / "report"
    off = ("--no-prune", "--no-vacuum", "--no-pack", "--no-compact")
    run("maintain", *off, "--report", str(report), store=own)
    [done] = json.loads(report.read_text())["stores"]
    skipped = ("pruned", "vacuumed", "packed", "compacted")
    assert [done[key] for key in skipped] == [None] * 4
    assert done["collected"]["outcome"] == "nothing to do"


def test_a_store_in_use_is_maintained_and_not_compacted(own: str) -> None:
    with casstore.open(own) as store:
        store.put_blob(os.urandom(3_000_000))
        ran = run("maintain", "--grace", "0", store=own)
        assert "not compacted: another process has the store open" in ran.out
        store.session("agent").head()


def test_maintain_accepts_every_option(own: str, tmp_path: Path) -> None:
    config = tmp_path / "gc.toml"
    config.write_text(f'stores = ["{own}"]\ncompact = false\n')
    [done] = run(
        "maintain", "--config", str(config), "--prune", "--last", "50", "--hourly", "1", "--daily",
        "1", "--weekly", "1", "--monthly", "1", "--yearly", "1", "--within", "1d", "--idle", "90d",
        "--everything", "--unlabelled", "--override-policies", "--attachments", "7d", "--vacuum",
        "--pack", "--compact", "--batch", "10", "--dry-run", "--json",
    ).json["stores"]  # fmt: skip
    assert (done["exit_code"], done["pruned"]["revisions_removed"]) == (0, 0)
