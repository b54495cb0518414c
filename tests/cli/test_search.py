"""``search``: words in, places out."""

from __future__ import annotations

from pathlib import Path

import pytest

import casstore
from tests.cli.running import HOSTILE, run


def test_a_place_that_was_found_can_be_shown(own: str) -> None:
    found = run("search", "fork", "says", "--json", store=own).json
    assert found["schema"] == "casstore.search/1"
    [hit] = found["hits"]
    assert (hit["kind"], hit["session"], hit["node"]) == ("node", "other", "o1")
    assert [hit["snippet"][start:stop] for start, stop in hit["matches"]] == ["fork", "says"]
    assert "the fork says" in run("show", hit["place"], store=own).out


def test_text_has_the_place_and_the_snippet(own: str) -> None:
    said = run("search", "rewind", store=own).out.splitlines()
    assert said[0].startswith("agent#r1")
    assert said[1].strip() == "after the rewind"


def test_forks_are_counted_and_options_restrict_the_search(own: str) -> None:
    hit = run("search", '"turn 2"', "--json", store=own).json["hits"][0]
    assert (hit["session"], hit["sessions"]) == ("agent", ["agent", "other", "third"])
    assert "and 2 other sessions" in run("search", '"turn 2"', store=own).out
    one = run("search", "turn", "--session", "third", "--kind", "node", "--json", store=own).json
    assert [hit["node"] for hit in one["hits"]] == ["n3", "n2", "n1", "n0"]
    assert run("search", "turn", "--limit", "1", "--json", store=own).json["hits"][0]
    later = run("search", "turn", "--since", "2999-01-01", "--json", store=own, ends=1).json
    assert later["hits"] == []
    assert run("search", "turn", "--since", "1h", "--kind", "node", "--json", store=own).json[
        "hits"
    ]


def test_nothing_found_ends_with_1(own: str) -> None:
    ran = run("search", "nowhere", store=own, ends=1)
    assert (ran.out, ran.err) == ("", "nothing found\n")


def test_what_a_text_holds_does_not_reach_the_terminal_as_control_codes(own: str) -> None:
    ran = run("search", "pwned", store=own)
    assert "\x1b" not in ran.out
    assert "\x07" not in ran.out
    [hit] = run("search", "pwned", "--json", store=own).json["hits"]
    assert hit["session"] == HOSTILE


def test_the_index_is_rebuilt_by_one_command(own: str) -> None:
    report = run("search", "--rebuild", "--json", store=own).json
    assert report["hits"] == []
    assert report["index"]["sessions"] == 4
    assert report["index"]["texts_added"] == report["index"]["texts"] > 0
    assert "indexed" in run("search", "--rebuild", store=own).out
    assert run("search", "rewind", "--no-update", "--json", store=own).json["hits"]


def test_without_an_index_and_without_an_update_the_remedy_is_named(own: str) -> None:
    ran = run("search", "rewind", "--no-update", store=own, ends=6)
    assert "casstore search --rebuild" in ran.err
    assert not (Path(own) / "search.sqlite").exists()


def test_a_damaged_index_is_rebuilt_and_the_remark_says_so(own: str) -> None:
    (Path(own) / "search.sqlite").write_bytes(b"not a database" * 1000)
    ran = run("search", "rewind", store=own)
    assert "agent#r1" in ran.out
    assert "the search index is rebuilt" in ran.err


@pytest.mark.parametrize(
    "arguments", [[], ["word", "--rebuild"], ["word", "--since", "soon"], ["word", "--limit", "0"]]
)
def test_a_wrong_command_line_is_refused(own: str, arguments: list[str]) -> None:
    assert run("search", *arguments, store=own, ends=2).out == ""


def test_a_hidden_node_is_not_found(own: str) -> None:
    with casstore.open(own) as store:
        store.session("other").tombstone(["o1"])
    assert run("search", "fork", "says", store=own, ends=1).out == ""
