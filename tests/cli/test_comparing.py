"""``diff``: of two of anything, in every form, and quick where little differs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import casstore
from casstore import Checkpoint, Commit, NodeDraft, Usage
from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.protocol import StoredObject
from tests.cli.running import run
from tests.cli.test_json_patch import apply


def document(store: str, place: str) -> dict[str, Any]:
    """The document that a patch of two checkpoints is for."""
    found = run("cat", place, "--json", store=store).json["value"]
    with casstore.open(store, readonly=True) as opened:
        session, _, revision = place.partition("@")
        nodes = opened.session(session).nodes("full", at=int(revision))
        ids = [node.id for node in nodes]
    found["nodes"] = {
        one: run("cat", f"{place}#{one}", "--json", store=store).json["value"] for one in ids
    }
    # As the manifest has it: rows without names, and nothing where there is nothing.
    found["usage"] = [list(entry.values()) for entry in found["usage"]]
    del found["node_count"]
    return {key: value for key, value in found.items() if value not in (None, [])}


def test_checkpoints_are_compared_node_by_node_and_part_by_part(example: str) -> None:
    told = run("diff", "agent@4", "agent@6", "--json", store=example).json
    assert (told["kind"], told["equal"]) == ("checkpoint", False)
    assert [one["id"] for one in told["nodes"]["added"]] == ["n4", "n5"]
    assert told["nodes"]["ancestor"] == "n3"
    assert told["counts"]["nodes_dropped"] == 0
    assert told["by_part"]["tool_state"]["changed"] == 7
    change = next(one for one in told["changes"] if one["path"][0] == "turn_state")
    assert (change["op"], change["before"], change["after"]) == ("changed", 3, 5)
    text = run("diff", "agent@4", "agent@6", store=example).out
    assert "+ n5  assistant: turn 5" in text
    assert "~ $.turn  3 → 5" in text
    back = run("diff", "agent@6", "agent@4", store=example).out
    assert "- n5  assistant: turn 5" in back


def test_a_summary_lists_nothing_but_counts_all(example: str) -> None:
    text = run("diff", "agent@4", "agent@6", "--stat", store=example).out
    assert "nodes  2 added, 0 dropped" in text
    assert "tool_state  0 added, 0 removed, 7 changed" in text
    assert "f2.py" not in text
    told = run("diff", "agent@4", "agent@6", "--stat", "--json", store=example).json
    assert (told["changes"], told["nodes"]["added"]) == ([], [])
    assert told["counts"]["changed"] > 7
    run("diff", "agent@4", "agent@6", "--stat", "--patch", store=example, ends=2)


def test_a_limit_cuts_and_says_so(example: str) -> None:
    told = run("diff", "agent@4", "agent@9", "--limit", "2", "--json", store=example).json
    assert len(told["changes"]) == 2
    assert told["omitted"] == {"nodes": 3, "changes": len_all(example) - 2, "details": 0}
    text = run("diff", "agent@4", "agent@9", "-n", "2", store=example).out
    assert "… 3 more: --limit 0" in text
    assert "more changes: --limit 0" in text


def len_all(example: str) -> int:
    return len(run("diff", "agent@4", "agent@9", "--json", store=example).json["changes"])


def test_a_patch_of_two_checkpoints_turns_the_old_document_into_the_new_one(example: str) -> None:
    for old, new in (("agent@4", "agent@7"), ("agent@13", "agent@15"), ("agent@9", "agent@2")):
        patch = json.loads(run("diff", old, new, "--patch", store=example).out)
        assert apply(document(example, old), patch) == document(example, new)
        also = run("diff", old, new, "--patch", "--json", store=example).json
        assert also["patch"] == patch


def test_a_change_of_usage_names_source_model_and_field(own: str) -> None:
    told = run("diff", "agent@4", "agent@6", store=own).out
    assert "  ~ agent, made-up: input  40 → 60\n" in told
    assert "  ~ agent, made-up: output  8 → 12\n" in told
    assert "$[0]" not in told
    with casstore.open(own) as store:
        used = [
            Usage("tool", "other", input=5, cached_input=7),
            Usage("agent", "made-up", output=1),
        ]
        store.session("agent").commit(Commit(usage=used))
        store.session("plain").commit(Commit(append=[NodeDraft("p", 1)]))
    added = run("diff", "agent~1", "agent", store=own).out
    assert "  + tool, other  input 5, cached_input 7\n" in added
    assert (
        "  - tool, other  input 5, cached_input 7\n"
        in run("diff", "agent", "agent~1", store=own).out
    )
    assert (
        "  + agent, made-up  input 40, output 8\n" in run("diff", "plain", "agent@4", store=own).out
    )
    changes = run("diff", "agent~1", "agent", "--json", store=own).json["changes"]
    assert {"source": "agent", "model": "made-up", "field": "output"} in [
        one["usage"] for one in changes
    ]
    assert {"source": "tool", "model": "other", "field": None} in [one["usage"] for one in changes]
    others = run("diff", "agent@4", "agent@6", "--json", store=own).json["changes"]
    assert {one["usage"] is None for one in others} == {True, False}


def test_exit_code_says_whether_they_differ(example: str) -> None:
    run("diff", "agent@4", "agent@6", "--exit-code", store=example, ends=1)
    assert "the same" in run("diff", "agent@6", "agent@middle", "--exit-code", store=example).out
    run("diff", "agent@4", "agent@6", store=example)


def test_nodes_values_and_blobs_are_compared_too(own: str) -> None:
    assert "turn 3" in run("diff", "agent#n3", "agent#n5", store=own).out
    run("put", "--value", "--tag", "later", store=own, stdin=b'{"plan": ["read"], "more": 1}')
    told = run("diff", "note", "later", "--json", store=own).json
    assert told["kind"] == "value"
    assert sorted(one["op"] for one in told["changes"]) == ["added", "removed", "removed"]
    assert "+ $.more  1" in run("diff", "note", "later", store=own).out
    patch = json.loads(run("diff", "note", "later", "--patch", store=own).out)
    assert {"op": "remove", "path": "/plan/1"} in patch
    run("put", "--tag", "text2", store=own, stdin=b"one\n2\nthree\n")
    told = run("diff", "text", "text2", "--json", store=own).json
    assert told["text"][-4:] == [" one", "-two", "+2", " three"]
    assert "-two\n+2\n" in run("diff", "text", "text2", store=own).out
    assert run("diff", "text", "text2", "--patch", store=own, ends=3).out == ""
    run("put", "--tag", "binary2", store=own, stdin=bytes(range(256)) * 499 + b"\xff")
    told = run("diff", "binary", "binary2", "--json", store=own).json
    assert told["first_difference"] == 127_744
    assert "from byte 127,744 on" in run("diff", "binary", "binary2", store=own).out
    mixed = run("diff", "agent", "note", store=own, ends=3)
    assert "only two of a kind" in mixed.err
    run("diff", "agent", "empty", store=own, ends=3)


def test_long_texts_are_shown_line_by_line_and_long_values_cut(own: str) -> None:
    before = {"text": "\n".join(f"line {at}" for at in range(60)), "wide": "x" * 5000}
    after = {**before, "text": before["text"].replace("line", "row"), "wide": "y" * 5000}
    for tag, value in (("before", before), ("after", after)):
        run("put", "--value", "--tag", tag, store=own, stdin=json.dumps(value).encode())
    short = run("diff", "before", "after", store=own).out
    assert "-line 0" in short
    assert "more lines: --full" in short
    assert max(len(line) for line in short.splitlines()) < 400
    full = run("diff", "before", "after", "--full", store=own).out
    assert "+row 59" in full
    assert "y" * 5000 in full


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("one\ntwo\n", "one\r\ntwo\n", ["-one", "+one\r", " two"]),
        ("one\ntwo\n", "one\ntwo", [" one", "-two", "+two", "\\ No newline at end of file"]),
        ("one\ntwo\n", "one\x0ctwo\n", ["-one", "-two", "+one\x0ctwo"]),
        ("one\n", "", ["-one"]),
    ],
)
def test_texts_that_differ_in_their_line_ends_alone_are_distinguished(
    own: str, before: str, after: str, told: list[str]
) -> None:
    with casstore.open(own) as store:
        for tag, text in (("before", before), ("after", after)):
            store.tag(f"blob {tag}", store.put_blob(text.encode()))
            store.tag(f"value {tag}", store.put_value({"text": text}))
    assert run("diff", "blob before", "blob after", "--json", store=own).json["text"][3:] == told
    for kind in ("blob", "value"):
        shown = run("diff", f"{kind} before", f"{kind} after", store=own).out
        for line in told:
            assert line.replace("\r", "\\r").replace("\x0c", "\\x0c") in shown


def test_sessions_in_two_stores_are_compared_like_in_one(own: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with casstore.open(own) as source, casstore.open(other) as target:
        for turn in range(5):
            node = source.session("agent").node(f"n{turn}")
            assert node is not None
            target.session("agent").commit(Commit(append=[NodeDraft(node.id, node.payload)]))
        target.session("agent").commit(Commit(append=[NodeDraft("else", 1)]))
    told = run("diff", "agent@6", f"{other}::agent", "--json", store=own).json
    assert told["nodes"]["ancestor"] == "n4"
    assert [one["id"] for one in told["nodes"]["added"]] == ["else"]
    assert [one["id"] for one in told["nodes"]["dropped"]] == ["n5"]
    assert (told["old"]["store"], told["new"]["store"]) == (own, str(other))
    assert told["by_part"]["tool_state"]["removed"] == 1
    equal = run("diff", f"{own}::agent@5#n4", f"{other}::agent#n4", "--exit-code")
    assert "the same" in equal.out


def test_nodes_are_read_many_at_once_in_every_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    get_many = LmdbEngine.get_many

    def counted(self: LmdbEngine, digests: Sequence[bytes]) -> list[StoredObject | None]:
        calls.append(len(digests))
        return get_many(self, digests)

    places = [str(tmp_path / name) for name in ("one", "two")]
    for place, name in zip(places, "ab", strict=True):
        with casstore.open(place, durability="relaxed") as store:
            for session in ("s", name):
                nodes = [NodeDraft(f"{name}{at}", {"session": session}) for at in range(400)]
                store.session(session).commit(Commit(append=nodes))
    one, two = places
    monkeypatch.setattr(LmdbEngine, "get_many", counted)
    for old, new in (("s", "a"), ("s", f"{two}::s")):
        for options in (["--json"], ["--patch"], ["--limit", "0"]):
            calls.clear()
            told = run("diff", old, new, *options, store=one).out
            assert told.count("a399") >= 1
            # One by one, it would be 800 for comparing alone.
            assert len(calls) < 60, (old, new, options)


def test_one_change_in_a_large_state_is_found_in_few_pieces(tmp_path: Path) -> None:
    place = tmp_path / "large"
    state = {f"file {at:05}": {"lines": [at] * 40, "text": f"{at} " * 60} for at in range(12_000)}
    with casstore.open(place, durability="relaxed") as store:
        session = store.session("s")
        session.commit(Commit(checkpoint=Checkpoint(tool_state=state)))
        links = session.checkpoint()
        changed = store.edit(
            links.tool_state.digest, casstore.Set(("file 07777", "lines", 3), "changed")
        )
        after = links._replace(tool_state=casstore.Link(changed))
        session.commit(Commit(checkpoint=after))
        found = store.compare(("s", 1), ("s", 2))
        assert found.pieces_read < 60
    text = run("diff", "s@1", "s@2", store=str(place)).out
    assert "~ $['file 07777'].lines[3]  7777 → \"changed\"" in text
    assert len(text) < 1000
