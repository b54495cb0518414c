"""Sessions, their revisions and names: listed, shown, forked, rewound, labelled, deleted."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

import casstore
from casstore import Checkpoint, Commit, NodeDraft
from casstore.cli import sessions
from casstore.maintenance.contents import measure_sessions
from casstore.session import keys
from tests.cli.running import HOSTILE, run
from tests.maintenance.wounds import wounding


def test_sessions_are_listed_by_id_or_by_their_last_move(example: str) -> None:
    listed = run("sessions", "--json", store=example).json["sessions"]
    assert [one["id"] for one in listed] == ["agent", "empty", HOSTILE, "other", "third"]
    agent = listed[0]
    assert (agent["revision"], agent["leaf"], agent["first_user_message"]) == (15, "r1", "turn 0")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", agent["committed_at"])
    assert len(agent["manifest"]) == 64
    recent = run("sessions", "--recent", "--limit", "2", "--json", store=example).json["sessions"]
    everything = run("sessions", "--recent", "--json", store=example).json["sessions"]
    assert recent == everything[:2]
    # Several may have moved in the same millisecond.
    moved = [one["committed_at"] or one["created_at"] for one in everything]
    assert moved == sorted(moved, reverse=True)
    assert everything[-1]["id"] in ("other", "third")
    assert run("sessions", "th", store=example).out.splitlines()[1].split()[0] == "third"
    page = run("sessions", "--after", "other", "--limit", "5", "--json", store=example).json
    assert [one["id"] for one in page["sessions"]] == ["third"]
    assert "nothing begins with 'zz'" in run("sessions", "zz", store=example).err


def test_show_prints_what_a_name_refers_to(example: str) -> None:
    told = run("show", "agent@middle", "--json", store=example).json
    assert (told["kind"], told["revision"]["revision"]) == ("revision", 6)
    assert told["revision"]["labels"] == ["middle"]
    assert told["checkpoint"]["turn_state"] == {"turn": 5}
    assert set(told["checkpoint"]["tool_state"]) == {"$link"}
    text = run("show", "agent", store=example).out
    assert "leaf r1" in text
    assert "after the rewind" in text
    assert "14 (rewind to 9" in run("show", "agent~1", store=example).out
    assert run("show", "empty", "--json", store=example).json["digest"] is None
    assert "nothing was committed yet" in run("show", "empty", store=example).out


def test_the_list_has_the_size_of_objects_that_only_the_session_references(own: str) -> None:
    run("fork", "agent", "copy", store=own)
    with casstore.open(own) as store:
        text = {"role": "user", "text": os.urandom(30_000).hex()}
        store.session("large").commit(Commit(append=[NodeDraft("n", text)]))
        expected = {one.session: one.own_bytes for one in measure_sessions(
            store, [info.meta.session for info in store.sessions()]
        )}  # fmt: skip
    listed = run("sessions", "--json", store=own).json["sessions"]
    assert {one["id"]: one["own_bytes"] for one in listed} == expected
    # The fork and its source have everything in common but the source's history.
    assert expected["copy"] == 0 < expected["agent"] < 60_000 < expected["large"]
    assert re.search("^large .* 58.[0-9] KiB ", run("sessions", store=own).out, re.MULTILINE)


def test_sizes_are_left_out_where_measuring_them_would_take_long(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "_MAX_MEASURED", 20)
    ran = run("sessions", store=own)
    assert "sizes are not measured above 20 objects: casstore stats" in ran.err
    assert re.search("^agent +session +[-0-9]+ [:0-9]+ +- ", ran.out, re.MULTILINE)
    assert run("sessions", "--json", store=own).json["sessions"][0]["own_bytes"] is None


def test_show_reports_nodes_values_and_blobs(example: str) -> None:
    node = run("show", "agent#n4", "--json", store=example).json
    assert node["node"]["payload"]["text"] == "turn 4"
    assert "turn 4" in run("show", "agent#n4", store=example).out
    assert run("show", node["digest"], "--json", store=example).json["kind"] == "node"
    value = run("show", "note", "--json", store=example).json
    assert value["value"] == {"plan": ["read", "edit"], "bytes": {"$bytes": "AAE="}}
    assert value["kept_by"] == ["note"]
    assert '"edit"' in run("show", "note", "--full", store=example).out
    blob = run("show", "binary", "--json", store=example).json
    assert (blob["kind"], blob["size_bytes"]) == ("blob", 128_000)
    assert "125.0 KiB" in run("show", "binary", store=example).out
    assert "one" in run("show", "text", store=example).out
    assert run("show", "resume", "--json", store=example).json["expires_at"] is not None
    part = run("show", "agent", "--path", "tool_state.cwd", "--json", store=example).json
    assert part["value"] == "/repo"
    assert run("show", "agent", "--path", "tool_state.cwd", store=example).out == '"/repo"\n'


def test_show_cuts_what_stands_at_a_path_unless_it_is_to_be_full(own: str) -> None:
    value = {f"key {at:03}": at for at in range(100)}
    run("put", "--value", "--tag", "long", store=own, stdin=json.dumps({"deep": value}).encode())
    for path in ("deep", "$"):
        asked = ("show", "long", "--path", path)
        cut, full = run(*asked, store=own).out, run(*asked, "--full", store=own).out
        assert cut.count("\n") == 41
        assert "more lines: --full" in cut
        assert "key 099" in full
        assert "--full" not in full
        # As JSON it is always whole.
        plain = run(*asked, "--json", store=own).json
        assert plain == run(*asked, "--full", "--json", store=own).json


@pytest.mark.parametrize("recent", [(), ("--recent",)])
def test_a_limit_of_0_lists_all_sessions(example: str, recent: tuple[str, ...]) -> None:
    every = run("sessions", *recent, "--json", store=example).json["sessions"]
    assert len(every) > 3
    asked = ("sessions", *recent, "--limit", "0", "--json")
    assert run(*asked, store=example).json["sessions"] == every
    one = run("sessions", *recent, "--limit", "1", "--json", store=example).json["sessions"]
    assert one == every[:1]


def test_show_prints_a_value_as_cat_does(own: str) -> None:
    """Text spelled it twice: bytes came out as a map with the key $bytes."""
    value = {"$key": {"inner": b"\0\1"}}
    with casstore.open(own) as store:
        store.tag("spelled", store.put_value(value))
        store.session("spelled").commit(
            Commit(
                append=[NodeDraft("n", value)],
                checkpoint=Checkpoint(tool_state=value),
            )
        )
    encoded = {"$$key": {"inner": {"$bytes": "AAE="}}}
    for arguments in (
        ("tag:spelled",),
        ("spelled#n",),
        ("spelled#n", "--path", "payload"),
        ("session:spelled", "--path", "tool_state"),
    ):
        text = run("show", *arguments, store=own).out
        assert json.loads(text[text.index("{") :]) == encoded
        told = run("show", *arguments, "--json", store=own).json
        assert encoded in (told["value"], (told["node"] or {}).get("payload"))
    assert run("cat", "tag:spelled", "--json", store=own).json["value"] == encoded


def test_a_path_in_a_session_without_commits_is_refused(example: str) -> None:
    for command in ("show", "cat"):
        told = run(command, "empty", "--path", "tool_state", store=example, ends=3).err
        assert "nothing was committed yet" in told


@pytest.mark.parametrize(
    "arguments",
    [("fork", "empty", "x"), ("label", "empty", "x"), ("export", "empty", "x"),
     ("export", "empty", "x", "--list-have")],
)  # fmt: skip
def test_a_session_without_a_commit_is_not_said_to_be_missing(
    own: str, arguments: tuple[str, ...]
) -> None:
    """It was told that there is none, and to look at a list that has it."""
    told = run(*arguments, store=own, ends=4).err
    assert "session 'empty' is there, but nothing was committed to it yet" in told
    assert "try: casstore show empty" in told


def test_show_knows_a_text_also_if_it_is_cut_within_a_character(own: str) -> None:
    run("put", "--tag", "umlauts", store=own, stdin=b"x" + "ü".encode() * 500)
    assert "xüüü" in run("show", "umlauts", store=own).out
    run("put", "--tag", "broken", store=own, stdin=b"short \xc3")
    assert "73 68 6f 72 74 20 c3" in run("show", "broken", store=own).out


def test_history_lists_revisions_newest_first(example: str) -> None:
    told = run("history", "agent", "--limit", "2", "--json", store=example).json
    assert [one["revision"] for one in told["revisions"]] == [15, 14]
    assert told["more"] is True
    assert told["revisions"][1]["rewound_to"] == 9
    rest = run("history", "agent", "--limit", "0", "--before", "3", "--json", store=example).json
    assert [one["revision"] for one in rest["revisions"]] == [2, 1]
    assert rest["more"] is False
    labelled = run("history", "agent", "--labelled", "--json", store=example).json
    assert [one["labels"] for one in labelled["revisions"]] == [["middle"]]
    text = run("history", "agent", "--limit", "2", store=example)
    assert "rewind to 9" in text.out
    assert "--before 14" in text.err
    assert "there are more" not in run("history", "agent", "-n", "2", "-q", store=example).err


def test_fork_creates_a_session_at_the_given_revision_or_node(own: str) -> None:
    made = run("fork", "agent@5", "fresh", "--json", store=own).json
    assert (made["source"], made["source_revision"], made["nodes"]) == ("agent", 5, 5)
    assert run("fork", "agent#n3", "path", "--json", store=own).json["node"] == "n3"
    assert "forked agent@15 as copy" in run("fork", "agent", "copy", store=own).out
    again = run("fork", "agent", "copy", store=own, ends=5)
    assert "exists" in again.err
    assert "choose another id" in again.err
    run("fork", "empty", "nothing", store=own, ends=4)
    assert "only a session" in run("fork", "note", "x", store=own, ends=3).err


def test_a_rewind_is_a_new_revision(own: str) -> None:
    done = run("rewind", "agent@middle", "--label", "again", "--json", store=own).json
    assert (done["revision"], done["rewound_to"], done["leaf"]) == (16, 6, "n5")
    assert run("show", "agent@again", "--json", store=own).json["revision"]["revision"] == 16
    run("rewind", "agent~1", "--expected", "3", store=own, ends=5)
    assert "is at revision 17" in run("rewind", "agent~1", "--expected", "16", store=own).out
    assert "say which revision" in run("rewind", "agent", store=own, ends=3).err
    # What changes a session takes its whole name.
    run("rewind", "agen@3", store=own, ends=4)


def test_labels_are_set_moved_listed_and_taken_away(own: str) -> None:
    assert run("label", "agent@3", "here", "--json", store=own).json["changed"] == "set"
    run("label", "agent", "here", store=own)
    listed = run("label", "agent", "--json", store=own).json["labels"]
    assert listed == [{"label": "here", "revision": 15}, {"label": "middle", "revision": 6}]
    assert "middle" in run("label", "agent", store=own).out
    assert (
        run("label", "agent", "--delete", "here", "--json", store=own).json["changed"] == "removed"
    )
    assert "history agent" in run("label", "agent", "--delete", "here", store=own, ends=4).err
    run("label", "agent", "x", "--delete", "y", store=own, ends=2)
    run("label", "agent#n3", "x", store=own, ends=3)
    run("label", "empty", "x", store=own, ends=4)


def test_a_label_whose_revision_is_gone_can_be_taken_away(own: str) -> None:
    """Check says to remove it, and the command that removes labels did not find its revision."""
    with wounding(Path(own)) as cut:
        place = keys.label(keys.session_key("agent"), "astray")
        cut.put_row("history", place, (99).to_bytes(8, "big") + b"astray")
        cut.fix_sum()
    assert run("check", "--json", store=own).json["counts"]["label_dangling"] == 1
    told = run("label", "agent", "--delete", "astray", "--json", store=own).json
    assert told["labels"] == [{"label": "astray", "revision": None}]
    assert "label_dangling" not in run("check", "--json", store=own).json["counts"]
    assert "has nothing at" in run("label", "agent", "-d", "astray", store=own, ends=4).err


def test_tags_and_pins_keep_what_they_name(own: str) -> None:
    done = run("tag", "kept", "agent@2", "--note", "for later", "--json", store=own).json
    assert done["changed"] == "set"
    assert done["tags"][0]["expires_at"] is None
    assert run("tag", "kept", "agent@3", store=own, ends=5).err.count("--move") == 1
    run("tag", "kept", "agent@3", "--move", store=own)
    assert (
        run("show", "kept", "--json", store=own).json["digest"]
        == run("show", "agent@3", "--json", store=own).json["digest"]
    )
    assert run("tag", "--delete", "kept", "--json", store=own).json["changed"] == "removed"
    run("tag", "--delete", "kept", store=own, ends=4)
    run("tag", "x", "--delete", "kept", store=own, ends=2)
    pinned = run("pin", "soon", "text", "--for", "90s", "--note", "n", "--json", store=own).json
    assert pinned["pins"][0]["expires_at"] is not None
    assert "soon" in run("pin", "so", store=own).out
    run("pin", "gone", "text", "--for", "1ms", store=own)
    listed = run("pin", "--expired", "--json", store=own).json["pins"]
    assert {"gone", "soon", "resume"} <= {one["name"] for one in listed}
    assert "removed soon" in run("pin", "--delete", "soon", store=own).out
    run("pin", "soon", "--delete", "soon", store=own, ends=2)
    run("pin", "x", "text", "--for", "soon", store=own, ends=2)
    run("pin", "x", "empty", store=own, ends=3)
    refused = run("pin", "release", "release", "--for", "1h", store=own, ends=5).err
    assert "'release' is already a tag of" in refused
    assert "casstore tag --delete NAME" in refused


def test_delete_requires_confirmation(own: str) -> None:
    refused = run("delete", "third", store=own, ends=2)
    assert "--yes" in refused.err
    assert run("delete", "third", "--dry-run", "--json", store=own).json["dry_run"] is True
    assert "would delete third" in run("delete", "third", "--dry-run", store=own).out
    run("delete", "third", "nowhere", "--yes", store=own, ends=4)
    run("show", "third", store=own)
    done = run("delete", "third", "--yes", "--json", store=own).json
    assert done["sessions"] == [{"id": "third", "deleted": True}]
    assert "was deleted" in run("show", "third", store=own, ends=5).err


def test_log_follows_the_path_and_draws_branches_and_forks(example: str) -> None:
    path = run("log", "agent", "--json", store=example).json
    assert [one["id"] for one in path["nodes"]] == ["r1", *[f"n{at}" for at in range(8, -1, -1)]]
    assert path["nodes"][0]["marks"] == [{"kind": "leaf", "name": "agent"}]
    assert path["nodes"][0]["payload"] is None
    short = run("log", "agent", "--limit", "3", "--payloads", "--json", store=example).json
    assert short["more"] == 7
    assert short["nodes"][0]["payload"] == {"role": "user", "text": "after the rewind"}
    assert "… 7 more nodes" in run("log", "agent", "-n", "3", store=example).err
    drawn = run("log", "agent", "--graph", "--forks", "--rewound", store=example).out
    assert re.search(r"\* b1 \d{4}-\d\d-\d\d \d\d:\d\d \(agent@13\)", drawn)
    assert re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d ", "", drawn).splitlines() == [
        "* b1 (agent@13) user: another way",
        "| * n11 assistant: turn 11",
        "| * n10 user: turn 10",
        "| | * o1 (other) user: the fork says",
        "| |/",
        "| * n9 assistant: turn 9",
        "| | * r1 (agent) user: after the rewind",
        "| |/",
        "| * n8 user: turn 8",
        "|/",
        "* n7 assistant: turn 7",
        "* n6 user: turn 6",
        "* n5 (label agent@middle) assistant: turn 5",
        "* n4 (tag release) user: turn 4",
        '| * t1 (third) "plain"',
        "|/",
        "* n3 assistant: turn 3",
        "* n2 (tag resume) user: turn 2",
        "* n1 assistant: turn 1",
        "* n0 user: turn 0",
    ]


def test_log_reports_forks_that_are_not_drawn(example: str) -> None:
    alone = run("log", "agent", "--graph", "--json", store=example).json
    marks = {mark["name"]: one["id"] for one in alone["nodes"] for mark in one["marks"]}
    assert marks["third"] == "n3"
    everything = run("log", "--all", "--graph", "--json", "-n", "0", store=example).json
    assert set(everything["sessions"]) == {"agent", "empty", HOSTILE, "other", "third"}
    assert len({one["digest"] for one in everything["nodes"]}) == len(everything["nodes"])
    assert '"role": "user"' in run("log", "agent", "-g", "-p", "-n", "1", store=example).out
    assert run("log", "agent@4#n2", "--json", store=example).json["nodes"][0]["id"] == "n2"
    run("log", store=example, ends=2)
    run("log", "note", store=example, ends=3)


def test_the_log_skips_a_hidden_node_and_connects_its_neighbours(own: str) -> None:
    with casstore.open(own) as store:
        store.session("agent").tombstone(["n5", "n6"])
    told = run("log", "agent", "--graph", "--json", store=own).json["nodes"]
    by_id = {one["id"]: one for one in told}
    assert {"n5", "n6"} & set(by_id) == set()
    assert by_id["n7"]["parent_digest"] == by_id["n4"]["digest"]
    # Also where the list is cut, as far as it goes.
    cut = run("log", "agent", "--limit", "4", "--json", store=own).json
    assert [one["id"] for one in cut["nodes"]] == ["r1", "n8", "n7", "n4"]
    parents = [one["parent_digest"] for one in cut["nodes"]]
    assert parents == [*[one["digest"] for one in cut["nodes"][1:]], None]
    assert "turn 5" not in run("log", "agent", "--graph", store=own).out
    # Forks that were made before go on showing it.
    assert "turn 5" in run("log", "agent", "other", "--graph", store=own).out


@pytest.mark.parametrize("text", ["", "5 parsecs", "-1h", "1h2", "1e9y", "h"])
def test_an_invalid_duration_is_refused(own: str, text: str) -> None:
    ran = run("pin", "x", "text", "--for", text, store=own, ends=2)
    assert "is not a duration" in ran.err


def test_log_names_revision_turn_role_and_commit_time_of_each_node(example: str) -> None:
    told = run("log", "agent", "--limit", "3", "--json", store=example).json
    assert [(one["id"], one["revision"], one["turn"], one["role"]) for one in told["nodes"]] == [
        ("r1", 15, None, "user"), ("n8", 9, "t8", "user"), ("n7", 8, "t7", "assistant"),
    ]  # fmt: skip
    assert all(one["committed_at"].endswith("Z") for one in told["nodes"])
    assert told["cursor"] == "agent@15#n6"
    seen = [one["id"] for one in told["nodes"]]
    while told["cursor"] is not None:
        told = run("log", told["cursor"], "--limit", "3", "--json", store=example).json
        seen += [one["id"] for one in told["nodes"]]
    assert seen == ["r1", *[f"n{at}" for at in range(8, -1, -1)]]
    fork = run("log", "other", "--json", store=example).json["nodes"]
    assert [(one["session"], one["revision"]) for one in fork][:2] == [("other", 11), ("other", 10)]


def test_history_has_leaf_turn_labels_and_fork_origin(own: str) -> None:
    [top, first] = run("history", "other", "--limit", "2", "--json", store=own).json["revisions"]
    assert (top["leaf"], top["origin"]) == ("o1", None)
    assert first["operation"] == "fork"
    assert first["origin"] == {"session": "agent", "revision": 10, "node": None}
    assert "fork of agent@10" in run("history", "other", store=own).out


def test_a_session_adopts_another(own: str) -> None:
    done = run("adopt", "agent", "other", "--expected", "15", "--label", "won", "--json",
               store=own).json  # fmt: skip
    assert (done["revision"], done["leaf"]) == (16, "o1")
    assert done["adopted"]["session"] == "other"
    assert run("show", "agent@won", "--json", store=own).json["revision"]["leaf"] == "o1"
    assert "adopted third@" in run("adopt", "agent", "third", store=own).out
    run("adopt", "agent", "other", "--expected", "3", store=own, ends=5)
    assert (
        "fork an earlier revision first" in run("adopt", "agent", "other~1", store=own, ends=3).err
    )
    run("adopt", "agen", "other", store=own, ends=4)
    run("adopt", "agent", "empty", store=own, ends=4)


def test_a_tag_is_a_place_where_a_revision_is_asked_for(own: str) -> None:
    made = run("fork", "release", "from-tag", "--json", store=own).json
    assert (made["source"], made["source_revision"]) == ("agent", 5)
    assert run("log", "release", "--json", store=own).json["nodes"][0]["id"] == "n4"
    assert run("rewind", "resume", "--json", store=own).json["rewound_to"] == 3
    run("label", "release", "shipped", store=own)
    assert run("show", "agent@shipped", "--json", store=own).json["revision"]["revision"] == 5


def test_a_misspelt_name_gets_a_suggestion(example: str) -> None:
    assert "did you mean agent?" in run("show", "agnet", store=example, ends=4).err
    assert "did you mean agent@3?" in run("show", "agnet@3", store=example, ends=4).err
    assert "did you mean release" in run("show", "relaese", store=example, ends=4).err


def test_the_log_shows_tool_calls_and_results_in_words(tmp_path: Path) -> None:
    call = {"type": "tool_use", "id": "c", "name": "run", "input": {"command": "pytest"}}
    failed = {"type": "tool_result", "tool_use_id": "c", "content": "no tests", "is_error": True}
    with casstore.open(tmp_path / "s") as store:
        store.session("s").append(
            {"role": "assistant", "content": [{"type": "text", "text": "I run them."}, call]},
            {"role": "user", "content": [failed]},
        )
    text = run("log", "s", store=str(tmp_path / "s")).out
    assert 'assistant: I run them. → run {"command": "pytest"}' in text
    assert "tool: ← failed: no tests" in text
