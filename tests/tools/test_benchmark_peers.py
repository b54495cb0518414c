"""The comparison with peers: every peer does its part, and the page is written as it should be."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.chart import Line, draw
from benchmarks.peers import comparison, page
from benchmarks.peers.bare_lmdb import BareLmdbLater
from benchmarks.peers.casstore_sessions import CasstoreRelaxed
from benchmarks.peers.comparison import Column, Results, Spread
from benchmarks.peers.git_binary import Git
from benchmarks.peers.langgraph_savers import CasstoreSaver, InMemorySaver, SqliteSaver
from benchmarks.peers.openai_session import OpenAiSession
from benchmarks.peers.peer import Peer, does, missing
from benchmarks.peers.power_loop import PowerLoop
from benchmarks.peers.sqlite_wal import SqliteNormal
from benchmarks.peers.workloads import TINY, Point, figures
from benchmarks.sessions import make_turns

SVG = "{http://www.w3.org/2000/svg}"
EACH = (
    CasstoreRelaxed,
    BareLmdbLater,
    SqliteNormal,
    CasstoreSaver,
    SqliteSaver,
    InMemorySaver,
    OpenAiSession,
    PowerLoop,
    Git,
)


class Absent(Peer):
    name = "a peer nobody has"
    needs = ("no_such_module.at_all",)


@pytest.fixture(params=EACH, ids=lambda peer: peer.__name__)
def peer(request: pytest.FixtureRequest, tmp_path: Path) -> Peer:
    kind: type[Peer] = request.param
    lack = missing(kind)
    if lack is not None:
        pytest.skip(f"{lack} is not installed")
    return kind()


def contents(peer: Peer, session: str) -> list[str]:
    """The text of each message, in order, however the peer wraps it."""
    found = []
    for one in peer.path(session):
        message = getattr(one, "payload", one)
        found.append(message["content"] if isinstance(message, dict) else message.content)
    return found


def test_a_peer_stores_its_turns_and_keeps_forks_apart(peer: Peer, tmp_path: Path) -> None:
    turns = make_turns(8)
    said = [[str(message["content"]) for message in turn] for turn in turns]
    peer.start(tmp_path)
    try:
        peer.commit("s", turns[0])
        peer.commit("s", turns[1])
        peer.reopen(tmp_path)
        assert contents(peer, "s") == said[0] + said[1]
        assert peer.size_bytes(tmp_path) > 0
        peer.bulk({"x": turns[2:4], "y": turns[4:6]})
        assert contents(peer, "x") == said[2] + said[3]
        if does(type(peer), "branch"):
            peer.fork("x", "fork")
            peer.commit("fork", turns[6])
            peer.branch("x", "branch", turns[7])
            assert contents(peer, "fork") == said[2] + said[3] + said[6]
            assert contents(peer, "branch") == said[2] + said[3] + said[7]
            assert contents(peer, "x") == said[2] + said[3]
        if does(type(peer), "diff"):
            assert peer.diff("fork", "branch") == 4
            assert peer.diff("x", "branch") == 2
        peer.collect(["y"])
        if does(type(peer), "pack"):
            peer.pack()
        assert contents(peer, "s") == said[0] + said[1]
        assert contents(peer, "x") == said[2] + said[3]
    finally:
        peer.stop()


def test_the_comparison_skips_by_name_and_survives_json() -> None:
    told: list[str] = []
    peers = (CasstoreRelaxed, SqliteNormal, Absent)
    *_, results = comparison.compare(TINY, 2, peers, told.append)
    assert results.repeats == 2
    assert results.skipped == {"a peer nobody has": "no_such_module.at_all"}
    assert "a peer nobody has is skipped: no_such_module.at_all is not installed" in told
    assert [column.name for column in results.columns] == ["casstore, `relaxed`", SqliteNormal.name]
    assert comparison.from_json(json.loads(json.dumps(comparison.to_json(results)))) == results
    text = page.markdown(results)
    assert "a peer nobody has was skipped: no_such_module.at_all is not installed." in text
    diff = next(row.title for row in figures(TINY) if row.key == "diff")
    (row,) = [line for line in text.splitlines() if line.startswith(f"| {diff} |")]
    assert row.endswith("| does not do this |")


def column(name: str, median: float) -> Column:
    spread = Spread(median, median, median)
    growth = [Point(1, 4096, median), Point(10, 40_960, median)]
    return Column(name, "flushed to disk", {row.key: spread for row in figures(TINY)}, growth)


def made_up(*columns: Column) -> Results:
    return Results(1, TINY, list(columns), {}, {"Python": "3"}, Spread(1e-3, 1e-3, 1e-3))


def test_the_benchmark_page_lists_measures_in_which_casstore_is_slower_or_larger() -> None:
    slow = page.markdown(made_up(column("casstore", 2.0), column("git", 1.0)))
    assert "takes longer than git (2.0×)" in slow
    assert "takes more room than git (2.0×)" in slow
    assert "behind" not in page.markdown(made_up(column("casstore", 1.0), column("git", 2.0)))


def test_a_chart_is_well_formed_and_every_point_is_inside() -> None:
    lines = [
        Line("one & <only>", [(1, 3e-4), (1000, 2.0)]),
        Line("flat", [(1, 1.0), (10, 1.0)]),
        Line("nothing", []),
    ]
    drawn = draw(
        'quotes " and <tags>', lines, x_label="turns", x_text=str, y_text=page.seconds_text
    )
    root = ElementTree.fromstring(drawn)
    assert root.tag == f"{SVG}svg"
    _, _, width, height = (float(part) for part in root.attrib["viewBox"].split())
    drawn_lines = root.findall(f"{SVG}polyline")
    assert len(drawn_lines) == 2
    for one in drawn_lines:
        for point in one.attrib["points"].split():
            x, y = (float(part) for part in point.split(","))
            assert 0 < x < width
            assert 0 < y < height
    names = [text.text for text in root.iter(f"{SVG}text")]
    assert "one & <only>" in names
    assert "nothing" not in names
    assert "prefers-color-scheme:dark" in drawn


@pytest.mark.parametrize("end", [0.1, 1.0], ids=["at the bottom", "at the top"])
def test_names_of_lines_that_end_together_do_not_cover_each_other(end: float) -> None:
    lines = [Line(f"line {at}", [(1, 0.1), (5, 1.0), (10, end)]) for at in range(8)]
    root = ElementTree.fromstring(draw("t", lines, x_label="x", x_text=str, y_text=str))
    places = sorted(
        float(text.attrib["y"])
        for text in root.iter(f"{SVG}text")
        if text.attrib["class"].startswith("name")
    )
    assert len(places) == 8
    assert 0 < places[0] < places[-1] < float(root.attrib["viewBox"].split()[3])
    assert all(later - sooner >= 12 for sooner, later in pairwise(places))


def test_a_chart_without_points_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one point"):
        draw("t", [Line("a", [])], x_label="x", x_text=str, y_text=str)


def test_writing_keeps_the_rest_of_the_page(tmp_path: Path) -> None:
    before, after = "# Title\n\nwords\n\n", "\n\n## More\n\nlast words\n"
    there = tmp_path / "reference" / "benchmarks.md"
    there.parent.mkdir()
    there.write_text(f"{before}{page.BEGIN}\nold figures\n{page.END}{after}")
    results = made_up(column("casstore", 1.0), column("LangGraph SqliteSaver", 2.0))
    page.write(results, tmp_path)
    once = there.read_text()
    page.write(results, tmp_path)
    assert there.read_text() == once
    assert once.startswith(f"{before}{page.BEGIN}\n")
    assert once.endswith(f"{page.END}{after}")
    assert "old figures" not in once
    for name in ("size-langgraph.svg", "size-over-turns.svg", "turn-flushed.svg"):
        ElementTree.parse(tmp_path / "img" / name)


@pytest.mark.parametrize(
    "text",
    ["no markers", page.BEGIN, page.END, f"{page.END}{page.BEGIN}", page.BEGIN * 2 + page.END],
)
def test_a_page_without_its_markers_is_left_alone(text: str, tmp_path: Path) -> None:
    there = tmp_path / "reference" / "benchmarks.md"
    there.parent.mkdir()
    there.write_text(text)
    with pytest.raises(ValueError, match="the page must have one line"):
        page.write(made_up(column("casstore", 1.0)), tmp_path)
    assert there.read_text() == text
    assert not (tmp_path / "img").exists()


def test_the_page_of_this_repository_has_its_markers_and_its_pictures() -> None:
    documents = Path(__file__).parent.parent.parent / "docs"
    text = (documents / "reference" / "benchmarks.md").read_text()
    assert page.put_between(page.put_between(text, "a"), "b") == page.put_between(text, "b")
    for name in page.CHARTS:
        assert f"(../img/{name})" in text
        ElementTree.parse(documents / "img" / name)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--json", "nowhere/figures.json"], "cannot write nowhere/figures.json: No such file"),
        (["--render", "nowhere.json"], "there is no nowhere.json"),
        (["--corpus", "nowhere"], "there is no nowhere"),
    ],
)
def test_an_unusable_option_is_refused_before_any_measurement(
    options: list[str], why: str, tmp_path: Path
) -> None:
    tool = str(Path(__file__).parent.parent.parent / "tools" / "bench.py")
    ran = subprocess.run(
        [sys.executable, tool, "--quick", "--only", "batches", *options],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.returncode, ran.stdout) == (2, "")
    assert why in ran.stderr
