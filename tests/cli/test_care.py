"""Maintenance: collecting, packing, pruning, erasing, checking, measuring."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import casstore
from casstore.cli import erase as erasing
from casstore.records.lifecycles import Annotation, FileKeys, Hold, Lifecycles
from casstore.records.scoped import Context, ScopedState
from tests.cli.running import run


def count(place: str) -> int:
    with casstore.open(place, readonly=True) as store:
        return sum(1 for _ in store.engine.scan_objects(limit=10**6))


def test_a_dry_run_is_the_plan_and_changes_nothing(own: str) -> None:
    run("delete", "third", "--yes", store=own)
    before = count(own)
    plan = run("gc", "--grace", "0", "--dry-run", "--json", store=own).json
    assert plan["outcome"] == "planned"
    assert plan["objects_swept"] == 0
    assert count(own) == before
    done = run("gc", "--grace", "0", "--batch", "2", "--json", store=own).json
    assert (done["outcome"], done["objects_swept"]) == ("swept", plan["objects_unreached"])
    assert done["problem"] is None
    assert count(own) == before - plan["objects_unreached"]
    assert run("gc", "--grace", "0", store=own).out.startswith("nothing to do")
    run("cat", "agent", store=own)


def test_gc_prints_readable_counts(own: str) -> None:
    run("put", store=own, stdin=b"nobody's")
    assert (
        "unreachable       1 object\nunreachable size  8 B"
        in run("gc", "--grace", "0", "-n", store=own).out
    )
    assert "removed" in run("gc", "--grace", "0", store=own).out
    run("gc", "--grace", "soon", store=own, ends=2)


def test_a_collection_that_must_not_run_is_refused_with_the_reason(own: str) -> None:
    with casstore.open(own) as store:
        from casstore.engine.protocol import Collecting
        from casstore.maintenance.roots import ROOTS

        assert isinstance(store.engine, Collecting)
        with store.engine.collection(ROOTS, grace_ms=0):
            busy = run("gc", "--json", store=own, ends=7)
            assert busy.json["outcome"] == "refused"
            assert busy.json["problem"]["error"] == "BusyError"
            assert "wait" in busy.json["problem"]["try"]
            assert "nothing was removed" in run("gc", store=own, ends=7).out


def test_packing_joins_slabs(own: str) -> None:
    with casstore.open(own) as store:
        for number in range(50):
            store.tag(f"t{number}", store.put_blob(b"small" + bytes([number])))
    assert run("pack", "--json", store=own).json["slabs_before"] == 0
    young = "nothing to pack; objects stored within 15 min stay where they are (--min-age 0)\n"
    assert run("pack", store=own).out.startswith(young)
    done = run("pack", "--min-age", "0", "--json", store=own).json
    assert done["slabs_before"] > done["slabs_after"] > 0
    assert done["damaged"] == []
    assert run("pack", "--min-age", "0", store=own).out.startswith(
        "nothing to pack\nslabs rewritten  0 slabs"
    )


def test_compacting_makes_the_file_shorter(own: str) -> None:
    run("put", "--tag", "long", store=own, stdin=os.urandom(3_000_000))
    run("tag", "--delete", "long", store=own)
    run("gc", "--grace", "0", store=own)
    before = os.stat(f"{own}/data.mdb").st_size
    done = run("compact", "--wait", "1s", "--json", store=own).json
    assert done["file_bytes_before"] == before
    assert os.stat(f"{own}/data.mdb").st_size == done["file_bytes_after"] < before / 2
    assert "file now" in run("compact", store=own).out
    with casstore.open(own):
        assert run("compact", store=own, ends=7).err.count("try: ") == 1


def test_policies_are_set_shown_and_taken_away(own: str) -> None:
    assert run("policy", "--json", store=own).json["policy"] is None
    done = run("policy", "--last", "2", "--within", "1h", "--idle", "30d", "--json", store=own).json
    assert (done["changed"], done["policy"]["last"], done["policy"]["idle_ms"]) == (
        "set", 2, 30 * 86_400_000,
    )  # fmt: skip
    run("policy", "--session", "agent", "--everything", "--unlabelled", store=own)
    told = run("policy", "--json", store=own).json
    assert told["sessions"][0]["id"] == "agent"
    assert "everything" in run("policy", "--session", "agent", store=own).out
    run("policy", "--session", "agent", "--delete", store=own)
    run("policy", "--session", "nowhere", store=own, ends=4)
    run("policy", "--last", "1", "--delete", store=own, ends=2)
    run("policy", "--unlabelled", store=own, ends=3)
    done = run(
        "policy", "--hourly", "1", "--daily", "2", "--weekly", "3", "--monthly", "4", "--yearly",
        "5", "--json", store=own,
    ).json  # fmt: skip
    assert (done["policy"]["monthly"], done["policy"]["last"]) == (4, 0)


def test_pruning_by_a_plan_or_at_once(own: str, tmp_path: Path) -> None:
    everything = run("prune", "--dry-run", "--json", store=own).json
    assert everything["revisions_removed"] == 0
    plan = run("prune", "--last", "3", "--prefix", "ag", "--dry-run", "--json", store=own).json
    assert plan["revisions_removed"] == 9
    # 3, 5 and 6 are kept by a pin, a tag and a label.
    assert plan["plan"][0]["removed"] == [12, 11, 10, 9, 8, 7, 4, 2, 1]
    assert len(run("history", "agent", "--json", store=own).json["revisions"]) == 15
    file = str(tmp_path / "plan")
    run("prune", "agent", "--last", "3", "--dry-run", "--plan", file, store=own)
    assert json.loads(Path(file).read_text().splitlines()[0])["schema"] == "casstore.retention/1"
    run("prune", "agent", "--last", "3", "--dry-run", "--plan", file, store=own, ends=3)
    run("prune", "--from", file, store=own, ends=2)
    done = run("prune", "--from", file, "--yes", "--json", store=own).json
    assert done["revisions_removed"] == plan["revisions_removed"]
    assert "0 removed" in run("prune", "--last", "3", "--yes", "--receipts", "7d", store=own).out
    for wrong in (("--plan", "x"), ("--from", "x", "--last", "1"), ("agent", "--prefix", "a")):
        run("prune", *wrong, "--yes", store=own, ends=2)
    run("prune", "--from", str(tmp_path / "nowhere"), "--yes", store=own, ends=4)
    (tmp_path / "latin").write_bytes(b"\xff")
    assert (
        "not a retention plan"
        in run("prune", "--from", str(tmp_path / "latin"), "--yes", store=own, ends=3).err
    )
    run(
        "prune", "--hourly", "1", "--daily", "1", "--weekly", "1", "--monthly", "1", "--yearly",
        "1", "--within", "1s", "--unlabelled", "--yes", store=own,
    )  # fmt: skip
    assert run("prune", "--everything", "--idle", "1d", "-y", "--json", store=own).json["sessions"]


def test_pruning_leaves_a_session_to_its_own_policy_unless_that_is_overridden(own: str) -> None:
    run("policy", "--session", "agent", "--everything", store=own)
    for arguments in (("prune", "--last", "3"), ("prune", "agent", "--last", "3")):
        plan = run(*arguments, "--dry-run", "--json", store=own).json
        assert (plan["revisions_removed"], plan["own_policies"]) == (0, 1)
        assert plan["overridden"] == []
    kept = run("prune", "--last", "3", "--yes", store=own).out
    assert "own policy  decided for 1 session\n" in kept
    assert len(run("history", "agent", "--json", store=own).json["revisions"]) == 15
    asked = ("prune", "--last", "3", "--override-policies")
    told = run(*asked, "--dry-run", store=own).out
    assert "policy overridden: agent  stored policy: everything\n" in told
    [named] = run(*asked, "--dry-run", "--json", store=own).json["overridden"]
    assert (named["session"], named["policy"]["everything"]) == ("agent", True)
    done = run(*asked, "--yes", "--json", store=own).json
    assert (done["revisions_removed"], done["overridden"]) == (9, [named])
    run("prune", "--override-policies", "--yes", store=own, ends=2)
    run("prune", "--from", "plan", "--override-policies", "--yes", store=own, ends=2)


def test_attachments_of_sessions_without_commits_are_listed_and_abandoned(own: str) -> None:
    assert run("attachments", "--json", store=own).json["attachments"] == []
    with casstore.open(own) as store:
        never = store.session("never began").attachments
        image = never.put(b"pixels")
        never.intend("video", uri="s3://bucket/video", owner="host")
    listed = run("attachments", "--json", store=own).json["attachments"]
    assert [(one["session"], one["id"], one["state"]) for one in listed] == [
        ("never began", image.id, "intent"),
        ("never began", "video", "intent"),
    ]
    assert (listed[0]["digest"], listed[1]["uri"]) == (image.id, "s3://bucket/video")
    assert "s3://bucket/video" in run("attachments", store=own).out
    assert run("attachments", "--older", "1h", store=own).out == ""
    plan = run("prune", "--attachments", "0", "--dry-run", "--json", store=own).json
    done = run("prune", "--attachments", "0", "--yes", "--json", store=own).json
    for told in (plan, done):
        rows = told["expired_rows"]
        assert (rows["attachments"], rows["condemned"]) == (1, 1)
    [left] = run("attachments", "--json", store=own).json["attachments"]
    assert (left["id"], left["state"]) == ("video", "condemned")
    assert "0 would be removed" in run("prune", "--attachments", "0", "--dry-run", store=own).out


def test_a_dry_run_of_vacuum_says_what_the_run_does(own: str) -> None:
    with casstore.open(own) as store:
        store.session("agent").tombstone(["n3", "n5"])
        store.pin("moment", store.put_blob(b"pinned for a moment"), ttl_ms=1)
        store.put_blob(b"nobody's")
    before = count(own)
    plan = run("vacuum", "--grace", "0", "--dry-run", "--json", store=own).json
    assert count(own) == before
    assert "expired row would be removed" in run("vacuum", "--grace", "0", "-n", store=own).out
    done = run("vacuum", "--grace", "0", "--json", store=own).json
    assert (plan["outcome"], done["outcome"]) == ("planned", "done")
    assert plan["collected"]["objects_unreached"] == done["collected"]["objects_swept"] > 10
    assert plan["expired_rows"] == done["expired_rows"] == 1
    for told in (plan, done):
        [session] = told["sessions"]
        assert (session["session"], session["nodes_removed"]) == ("agent", 2)
    again = run("vacuum", "--grace", "0", "--dry-run", "--json", store=own).json
    assert again["outcome"] == "nothing to do"


def test_vacuum_of_a_session_that_is_not_there_is_no_success(own: str) -> None:
    """Who misspells a session must not believe that what it hides is gone."""
    told = run("vacuum", "--session", "agent", "--session", "agnet", store=own, ends=4).err
    assert "no session 'agnet'" in told
    run("delete", "third", "--yes", store=own)
    run("vacuum", "--session", "third", store=own, ends=5)
    run("vacuum", "--session", "agent", store=own)


def test_erasing_a_subject_takes_its_sessions(own: str) -> None:
    with casstore.open(own) as store:
        store.session("other").add_subjects(["bob"])
    plan = run("erase", "bob", "--dry-run", "--json", store=own).json
    assert [one["id"] for one in plan["sessions"]] == ["other"]
    assert "session agent" in plan["shared"]["sharers"]
    assert plan["sessions_deleted"] is None
    assert "would erase other" in run("erase", "bob", "--dry-run", "--no-survey", store=own).out
    run("erase", "bob", store=own, ends=2)
    done = run("erase", "bob", "--yes", "--json", store=own).json
    assert done["sessions_deleted"] == 1
    again = run("erase", "bob", "--yes", store=own, ends=4).err
    assert "no session and no record is about 'bob'" in again


def test_sessions_added_while_erase_waits_for_confirmation_are_reported(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with casstore.open(own) as store:
        store.session("other").add_subjects(["bob"])

    def fork(**asked: object) -> None:
        with casstore.open(own) as store:
            store.fork("other", "another")

    monkeypatch.setattr(erasing, "require_yes", fork)
    told = run("erase", "bob", store=own).out
    assert "erased other" in told
    assert "remains another" in told


def test_erasing_a_subject_takes_its_records_and_keys(own: str, tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="needs the extra: pip install '.[sealing]'")
    keys, secret = tmp_path / "keys", tmp_path / "secret"
    secret.write_bytes(b"s" * 32)
    with casstore.open(own) as store:
        life = Lifecycles(store, keys=FileKeys(keys), secret=b"s" * 32)
        life.users.put("bob", "city", "Ulm", Annotation(processors=["crm"]))
        life.users.put("bob", "tax", 1, Annotation(hold=Hold("law", 2**42)))
        life.create_session("s", user="bob").checkpoint("x")
    assert "another secret" in run("erase", "bob", "--dry-run", store=own, ends=3).err
    given = ("--secret", str(secret), "--keys", str(keys))
    plan = run(
        "erase", "bob", "-n", "--secret", str(secret), "--keys", str(keys), "--json", store=own
    ).json
    assert (plan["records"], plan["records_erased"], plan["recipients"]) == (3, None, ["crm"])
    assert "would erase 3 records" in run("erase", "bob", "-n", *given, store=own).out
    done = run("erase", "bob", "--yes", *given, "--json", store=own).json
    assert done["records_erased"] == 2
    [stays] = done["stays"]
    assert stays["reason"] == "held until 2109-05-15T07:35:11+00:00 (law)"
    assert len(list(keys.glob("*.key"))) == 1
    told = run("erase", "bob", "--yes", *given, store=own).out
    assert "erased 0 records" in told
    assert "stays user" in told


def test_erasing_a_subject_takes_its_scoped_state(own: str) -> None:
    here = Context("runner", "binding", conversation_id="talk", actor_id="bob")
    with casstore.open(own) as store:
        scope = ScopedState(store).scope(here, "actor")
        scope.put("city", "Ulm")
        scope.put("mood", "good")
    plan = run("erase", "bob", "-n", "--json", store=own).json
    assert plan["records"] == 2
    assert run("erase", "bob", "--yes", "--json", store=own).json["records_erased"] == 2
    with casstore.open(own) as store:
        assert ScopedState(store).scope(here, "actor").list_keys().keys == []


def test_check_lists_no_gaps_that_a_prune_has_left(own: str) -> None:
    run("prune", "--last", "1", "--yes", store=own)
    told = run("check", store=own).out
    assert told.count("\n") == 1
    assert re.search("^sound  .*; [0-9]+ harmless notes, listed by --json", told)
    document = run("check", "--json", store=own).json
    codes = {one["code"] for one in document["findings"]}
    assert (document["sound"], codes) == (True, {"history_gap"})


def test_a_sound_store_is_sound_at_every_level(own: str) -> None:
    for level in ("quick", "connectivity", "sample", "full"):
        told = run("check", "--level", level, "--share", "0.5", "--seed", "1", "--json", store=own)
        assert told.json["sound"] is True
    assert run("check", "--since-last", store=own).out.startswith("sound")


def test_check_stores_its_result_for_stats_and_the_next_check(own: str) -> None:
    assert run("stats", "--json", store=own).json["last_check"] is None
    assert "no check has stored its result yet: casstore check" in run("stats", store=own).out
    at = run("check", "--level", "full", "--json", store=own).json["checked_at"]
    last = run("stats", "--json", store=own).json["last_check"]
    assert last == {
        "checked_at": at, "level": "full", "since_last": False, "sound": True, "findings": 0,
    }  # fmt: skip
    shown = at[:19].replace("T", " ")
    assert re.search(f"^last check +{shown}$", run("stats", store=own).out, re.MULTILINE)
    assert run("check", "--since-last", "--json", store=own).json["objects_checked"] == 0


def test_check_works_though_its_result_cannot_be_stored(own: str) -> None:
    # No file can grow or be written behind its first byte.
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1, 1));"
        "from casstore.cli import run; run()"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, "check"],
        env={**os.environ, "CASSTORE_PATH": own}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ran.stdout.startswith("sound")
    assert ran.stderr.startswith("the result was not stored: ")


def test_check_finds_damage_and_salvage_saves_the_rest(own: str, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    with casstore.open(damaged) as store:
        session = store.session("s")
        noise = os.urandom(40_000)
        for turn in range(3):
            change = casstore.Commit(
                append=[casstore.NodeDraft(f"n{turn}", {"bytes": noise + bytes([turn])})],
            )
            session.commit(change)
    data = damaged / "data.mdb"
    content = bytearray(data.read_bytes())
    at = content.rindex(noise[:1000]) + 500
    content[at] ^= 0xFF
    data.write_bytes(content)
    ran = run(
        "check", "--level", "full", "--max-findings", "5", "--json", store=str(damaged), ends=1
    )
    assert ran.json["sound"] is False
    finding = ran.json["findings"][0]
    assert finding["severity"] == "error"
    assert finding["remedy"]
    assert ran.json["affected"][0]["session"] == "s"
    text = run("check", "--level", "full", store=str(damaged), ends=1).out
    assert "not sound" in text
    assert "do: " in text
    saved = tmp_path / "saved"
    told = run("salvage", str(damaged), str(saved), "--json", ends=1).json
    assert told["complete"] is False
    assert told["sessions"][0]["outcome"] == "partial"
    run("log", "s", store=str(saved))
    assert "saved what could be verified" in run("salvage", str(damaged), str(saved), ends=1).out
    run("salvage", own, str(tmp_path / "copy"))
    assert "in the index" in run("rebuild", store=own).out
    assert run("rebuild", "--grace", "0", "--json", store=own).json["objects_missing"] == 0


def test_stats_count_objects_by_kind_and_by_session(own: str) -> None:
    told = run("stats", "--json", store=own).json
    assert told["objects"]["objects"] == count(own)
    assert sum(one["objects"] for one in told["kinds"]) == count(own)
    assert told["factors"]["dedup"] > 1
    assert told["factors"]["revisions"] == 15 + 2 + 2 + 1
    biggest = told["biggest"][0]
    assert (biggest["kind"], biggest["size_bytes"]) == ("blob", 128_000)
    shares = {one["id"]: one for one in told["sessions"]}
    assert shares["empty"]["size_bytes"] == 0
    assert shares["other"]["shared_bytes"] > shares["other"]["own_bytes"] > 0
    # What only a session reaches is what gc finds when it is gone.
    run("gc", "--grace", "0", store=own)
    run("delete", "other", "--yes", store=own)
    freed = run("gc", "--grace", "0", "--json", store=own).json
    assert freed["objects_swept"] > 0
    assert freed["swept_bytes"] <= shares["other"]["own_bytes"]
    assert sum(one["size_bytes"] for one in told["growth"]) == told["objects"]["size_bytes"]
    few = run("stats", "--sessions", "1", "--biggest", "0", "--json", store=own).json
    assert (len(few["sessions"]), few["sessions_left_out"], few["biggest"]) == (1, 3, [])
    assert "dedup" in run("stats", store=own).out


def test_the_dedup_factor_compares_with_one_whole_copy_per_revision(tmp_path: Path) -> None:
    place = str(tmp_path / "plain")
    with casstore.open(place, durability="relaxed") as store:
        session = store.session("s")
        for turn in range(10):
            draft = casstore.NodeDraft(f"n{turn}", os.urandom(100))
            session.commit(casstore.Commit(append=[draft]))
    told = run("stats", "--json", store=place).json
    # Ten revisions: revision r has r nodes of about the same size, and a manifest.
    assert told["factors"]["revisions"] == 10
    nodes = next(one for one in told["kinds"] if one["kind"] == "node")["size_bytes"]
    manifests = next(one for one in told["kinds"] if one["kind"] == "manifest")["size_bytes"]
    assert abs(told["factors"]["whole_copies_bytes"] - (nodes * 5.5 + manifests)) < nodes * 0.2


def test_vacuum_removes_hidden_nodes_for_good(own: str) -> None:
    with casstore.open(own) as store:
        store.session("agent").tombstone(["n5"])
        hidden = store.session("other").node("n5")
        assert hidden is not None
    first = run("vacuum", "--session", "agent", "--grace", "0", "--json", store=own).json
    assert first["outcome"] == "done"
    assert first["sessions"][0]["nodes_removed"] == 1
    assert first["collected"]["outcome"] in ("swept", "nothing to do")
    # The fork that was made before still has it.
    assert first["objects_kept"] > 0
    assert "other" in [keeper["name"] for keeper in first["keepers"]]
    run("show", "agent@8#n5", store=own, ends=4)
    assert run("vacuum", "--grace", "0", store=own).out.startswith("nothing to do")


def test_the_offline_collector_vacuums(own: str) -> None:
    from casstore.cli.configuration import Steps
    from casstore.cli.maintain import maintain_store

    with casstore.open(own) as store:
        store.session("agent").tombstone(["n5"])
    done = maintain_store(own, Steps(grace_ms=0, vacuum=True, pack=True), dry_run=False)
    assert done.exit_code == 0
    assert "vacuum done" in done.summary
    assert done.report["vacuumed"]["sessions"][0]["nodes_removed"] == 1
    assert done.report["error"] is None


def test_dedup_counts_the_active_path_of_a_revision_and_no_other_branch(tmp_path: Path) -> None:
    place = str(tmp_path / "branched")
    with casstore.open(place, durability="relaxed") as store:
        session = store.session("s")
        for turn in range(5):
            draft = casstore.NodeDraft(f"n{turn}", {"role": "user", "text": os.urandom(50).hex()})
            session.commit(casstore.Commit(append=[draft]))
        aside = casstore.NodeDraft("b", {"role": "user", "text": os.urandom(50).hex()}, parent="n0")
        session.commit(casstore.Commit(append=[aside]))
    told = run("stats", "--json", store=place).json
    nodes, manifests = [
        next(one for one in told["kinds"] if one["kind"] == kind)["size_bytes"]
        for kind in ("node", "manifest")
    ]
    # Paths of 1, 2, 3, 4, 5 and 2 nodes. The last manifest names the other branch as well, and
    # each names the first message of the user.
    wanted = nodes / 6 * (1 + 2 + 3 + 4 + 5 + 2) + manifests
    assert abs(told["factors"]["whole_copies_bytes"] - wanted) < nodes / 6


def test_maintain_ends_with_what_it_removed_and_what_still_takes_space(own: str) -> None:
    with casstore.open(own) as store:
        store.session("agent").tombstone(["r1"])
    dry = run("maintain", "--dry-run", "--grace", "0", store=own).out
    assert re.search(r"^would remove +1 node$", dry, re.MULTILINE)
    [planned] = re.findall(r"^would remove +(\d+) objects$", dry, re.MULTILINE)
    assert int(planned) > 0
    done = run("maintain", "--grace", "0", store=own).out
    assert re.search(r"^file before +[0-9.]+ KiB$", done, re.MULTILINE)
    assert re.search(r"^file now +[0-9.]+ KiB$", done, re.MULTILINE)
    assert re.search(r"^removed +1 node$", done, re.MULTILINE)
    [removed] = re.findall(r"^removed +(\d+) objects$", done, re.MULTILINE)
    assert removed == planned
    assert re.search(r"^session agent +[0-9.]+ KiB$", done, re.MULTILINE)
