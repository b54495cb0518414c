"""The data of the viewer's pages: right, bounded, and read without a browser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

for package in ("starlette", "uvicorn", "jinja2", "langgraph", "claude_agent_sdk"):
    pytest.importorskip(package, reason=f"needs {package}: pip install '.[dev]'")

import casstore
from casstore import Commit, NodeDraft
from casstore.cli.payloads import CALL, IMAGE, JSON, RESULT, TEXT, THINKING, read_message
from casstore.errors import NotFoundError
from casstore.store import Store
from casstore.ui.texts import one_line, shown
from casstore.ui.views import catalogue, comparing, records, space, things, timeline, values
from casstore.ui.views import session as sessions
from casstore.ui.views.lanes import Lane, draw, lanes
from casstore.ui.views.viewed import MAX_ROWS, Viewed
from viewer_store import HOSTILE_ID, HOSTILE_TEXT, png


def kinds(payload: Any) -> tuple[str, list[str]]:
    message = read_message(payload)
    return message.role, [block.kind for block in message.blocks]


# --- texts and payloads -------------------------------------------------------------------


def test_characters_that_a_browser_obeys_are_shown_escaped() -> None:
    assert shown("a\u202eb\u200bc\x07\x1b\x00\ud800") == ("a\\u202eb\\u200bc\\x07\\x1b\\x00\\ud800")
    assert shown("line\n\ttext é 漢 👩‍💻") == "line\n\ttext é 漢 👩‍💻"
    assert one_line("x" * 10_000_000, 20) == "x" * 19 + "…"


def test_messages_of_known_shapes_are_taken_apart() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "text", "is_error": True}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    thought = {"type": "thinking", "thinking": "hm"}
    assert kinds({"role": "user", "text": "hello"}) == ("user", [TEXT])
    assert kinds({"role": "assistant", "content": [thought, "text", call]}) == (
        "assistant", [THINKING, TEXT, CALL],
    )  # fmt: skip
    assert kinds({"role": "user", "content": [result]}) == ("tool", [RESULT])
    assert kinds({"message": {"role": "user", "content": [image]}}) == ("user", [IMAGE])
    openai = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c", "function": {"name": "run", "arguments": '{"x": 1}'}}]}  # fmt: skip
    assert kinds(openai) == ("assistant", [CALL])
    assert kinds({"role": "tool", "tool_call_id": "c", "content": "ok"}) == ("tool", [RESULT])
    assert kinds({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}) == (
        "assistant", [CALL],
    )  # fmt: skip
    assert kinds({"type": "function_call_output", "call_id": "c", "output": "ok"}) == (
        "tool", [RESULT],
    )  # fmt: skip
    assert kinds({"type": "ai", "content": "hello"}) == ("assistant", [TEXT])
    assert kinds("plain") == ("", [TEXT])
    assert kinds({"anything": [1, b"bytes"]}) == ("", [JSON])
    assert read_message({"role": "user", "content": [result]}).blocks[0].is_error
    block = read_message({"message": {"role": "user", "content": [image]}}).blocks[0]
    assert block.path == ("message", "content", 0, "source", "data")


@pytest.mark.parametrize(
    "payload",
    [None, 1, 1.5, True, b"bytes", [], {}, {"role": 1}, {"role": "user"}, {"type": []},
     {"role": "user", "content": [None, 1, [], {"type": 5}, {"type": "tool_use"}]},
     {"role": "tool", "tool_call_id": None, "content": {"a": 1}},
     {"role": "assistant", "tool_calls": [1, {}, {"function": 3}]},
     {"role": "user", "content": [{"type": "image"}, {"type": "image", "source": {"data": 3}}]}],
)  # fmt: skip
def test_no_payload_is_too_odd_to_be_shown(payload: Any) -> None:
    for block in read_message(payload).blocks:
        assert isinstance(block.text, str)


# --- the list -----------------------------------------------------------------------------


def test_the_list_has_sessions_and_entries_of_record_systems(viewed: Viewed) -> None:
    found = catalogue.listing(viewed, page=MAX_ROWS)
    ids = {(row.known.kind, row.known.id) for row in found.rows}
    assert ("session", "fix-parser") in ids
    assert ("session", HOSTILE_ID) in ids
    assert ("lg", "trip-to-rome") in ids
    assert ("claude", "app/5e55a0b1-0000-4000-8000-000000000001") in ids
    assert found.total == len(found.rows) >= 53
    assert [row.known.changed_at_ms or 0 for row in found.rows] == sorted(
        [row.known.changed_at_ms or 0 for row in found.rows], reverse=True
    )


def test_the_list_is_paged_searched_and_filtered(viewed: Viewed) -> None:
    first = catalogue.listing(viewed, order="name", page=10)
    rest = catalogue.listing(viewed, order="name", page=10, start=10)
    assert len(first.rows) == len(rest.rows) == 10
    assert not {row.known.id for row in first.rows} & {row.known.id for row in rest.rows}
    assert [row.known.id for row in catalogue.listing(viewed, search="PARSER").rows] == [
        "fix-parser"
    ]
    assert [row.known.kind for row in catalogue.listing(viewed, kind="lg").rows] == ["lg"]
    assert catalogue.listing(viewed, start=10**9).rows == ()
    assert len(catalogue.listing(viewed, page=10**9).rows) <= MAX_ROWS


def test_forks_stand_below_what_they_were_forked_from(viewed: Viewed) -> None:
    rows = catalogue.listing(viewed, order="tree", page=MAX_ROWS).rows
    depths = {row.known.id: row.depth for row in rows}
    order = [row.known.id for row in rows]
    chain = ("fix-parser", "strict-mode", "strict-by-default", "strict-with-switch")
    assert [depths[one] for one in chain] == [0, 1, 2, 3]
    assert [order.index(one) for one in chain] == sorted([order.index(one) for one in chain])
    found = catalogue.listing(viewed, order="tree", search="with-switch").rows
    assert [(row.known.id, row.is_match) for row in found] == [
        ("fix-parser", False), ("strict-mode", False), ("strict-by-default", False),
        ("strict-with-switch", True),
    ]  # fmt: skip


def test_a_session_that_names_itself_as_parent_is_still_listed(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s") as store:
        for name, parent in (("one", "two"), ("two", "one"), ("self", "self")):
            store.create_session(name, parent=parent)
        rows = catalogue.listing(Viewed(store), order="tree").rows
        assert sorted([row.known.id for row in rows]) == ["one", "self", "two"]


# --- sessions -----------------------------------------------------------------------------


def test_the_timeline_groups_nodes_by_turns_and_names_their_commits(viewed: Viewed) -> None:
    place = viewed.place("fix-parser")
    found = timeline.timeline(viewed, place, forks=sessions.fork_points(viewed, place))
    rows = {row.id: row for row in found.rows}
    assert [row.id for row in found.rows if row.begins_turn] == [
        "u1", "u2", "u3", "u4", "u5", "u6", "u6.i",
    ]  # fmt: skip
    assert rows["a3.2"].turn == 3
    mark = rows["a2.1"].commit
    assert mark is not None
    assert (mark.revision, mark.turn, mark.labels) == (4, "turn-2", ())
    assert str(mark.tokens) == "3,600 tokens in · 300 out"
    assert rows["r2.1"].commit is None
    assert [event.text for event in rows["u6"].events] == ["rewound to revision 10"]
    assert rows["a2.3"].forks == ("strict-mode",)
    [result] = rows["r1.1"].blocks
    assert (result.kind, result.name, result.call) == (RESULT, "read", "call_1a")


def test_nodes_of_a_fork_name_the_commits_of_its_source(viewed: Viewed) -> None:
    found = timeline.timeline(viewed, viewed.place("strict-with-switch"))
    marks = {row.id: row.commit for row in found.rows}
    assert [
        (one.session, one.revision) for name in ("u1", "f0", "d1", "e1") if (one := marks[name])
    ] == [
        ("fix-parser", 1),
        ("strict-mode", 5),
        ("strict-by-default", 7),
        ("strict-with-switch", 8),
    ]
    adopted = timeline.timeline(viewed, viewed.place("strict-by-default")).rows[-1].commit
    assert adopted is not None
    assert (adopted.operation, adopted.other) == ("adopt", "strict-with-switch")


def test_an_earlier_revision_shows_its_nodes_and_what_it_changed(viewed: Viewed) -> None:
    place = viewed.place("fix-parser", 8)
    found = timeline.timeline(viewed, place)
    assert [row.id for row in found.rows if row.is_new] == [
        "a4.1", "r4.1", "a4.2", "r4.2", "a4.3",
    ]  # fmt: skip
    state = sessions.state(viewed, place)
    changes = {change.where: change for change in state.changes}
    assert changes["tool_state.tests.passed"].before == "316"
    assert changes["tool_state.tests.passed"].after == "318"
    lines = changes['tool_state.files["README.md"]'].lines
    assert ("+", "    parse(text, strict=True)") in lines
    assert ("-", "    parse(text)") in lines
    [tool_state] = [branch for branch in state.branches if branch.name == "tool_state"]
    assert tool_state.children is not None
    assert {one.name for one in tool_state.children if one.is_changed} == {
        "files", "plan", "tests",
    }  # fmt: skip


def test_a_window_of_the_timeline_is_bounded_in_rows_and_bytes(viewed: Viewed, long: Path) -> None:
    with casstore.open(long, readonly=True) as store:
        lasting = Viewed(store)
        place = lasting.place("long")
        last = timeline.timeline(lasting, place)
        assert last.stop == last.total == 20_000
        assert 0 < len(last.rows) <= timeline.PAGE <= MAX_ROWS
        before = timeline.timeline(lasting, place, before=last.first)
        assert before.stop == last.first
        middle = timeline.timeline(lasting, place, start=10_000)
        assert middle.rows[0].turn == 5_001
        mark = middle.rows[0].commit
        assert mark is not None
        assert mark.revision == 101
    evil = timeline.timeline(viewed, viewed.place(HOSTILE_ID))
    assert sum([len(block.text) for row in evil.rows for block in row.blocks]) < 20_000
    assert evil.rows[-1].is_cut


def test_long_nodes_make_a_window_shorter(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        drafts = [NodeDraft(f"n{at}", ["<&>" * 500] * 9) for at in range(100)]
        store.session("s").commit(Commit(append=drafts))
        viewed = Viewed(store)
        found = timeline.timeline(viewed, viewed.place("s"))
        assert 1 <= len(found.rows) < timeline.PAGE
        assert found.stop == 100


def test_hidden_nodes_are_shown_as_hidden_and_without_their_content(viewed: Viewed) -> None:
    found = timeline.timeline(viewed, viewed.place("with-hidden"))
    assert [(row.id, row.is_hidden) for row in found.rows] == [
        ("open", False), ("secret", True), ("after", False),
    ]  # fmt: skip
    assert "SECRET" not in repr(found)
    digest = things.find_node(viewed, "with-hidden", "secret")
    for session in ("with-hidden", None):
        page = things.thing(viewed, digest, session)
        assert page.is_hidden
        assert "SECRET" not in repr(page)
        with pytest.raises(NotFoundError):
            things.raw_value(viewed, digest, session)
        with pytest.raises(NotFoundError):
            things.image_bytes(viewed, digest, (), session)


def test_lanes_show_branches_forks_and_what_rewinds_left(viewed: Viewed) -> None:
    picture = lanes(viewed, viewed.place("fix-parser"))
    found = {lane.lane.label: lane.lane for lane in picture.lanes}
    assert (found["fix-parser"].start, found["fix-parser"].end) == (0, 33)
    assert (found["revision 12"].kind, found["revision 12"].start, found["revision 12"].end) == (
        "left", 30, 32,
    )  # fmt: skip
    assert (found["alt.1"].kind, found["alt.1"].start, found["alt.1"].nodes) == ("branch", 25, 1)
    assert (found["strict-mode"].kind, found["strict-mode"].start) == ("fork", 12)
    assert found["strict-with-switch"].start == 17
    source = lanes(viewed, viewed.place("rewrite")).lanes[-1].lane
    assert (source.kind, source.label, source.start) == ("source", "fix-parser", 24)


def test_no_line_of_a_picture_crosses_another() -> None:
    made = [Lane("active", "main", 0, 50, None, "main")]
    made += [Lane("fork", f"f{at}", 5 * at, 60 + at, 0, f"f{at}") for at in range(9)]
    made += [Lane("fork", f"g{at}", 30 + at, 70, 1 + at % 4, f"g{at}") for at in range(9)]
    drawn = draw(made).lanes
    for one in drawn:
        if one.parent_y is None:
            continue
        for other in drawn:
            if one.parent_y < other.y < one.y:
                assert not other.x1 < one.x1 < other.x2, (one, other)
    assert len({one.y for one in drawn}) == len(drawn)


def test_more_lanes_than_fit_are_counted(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        drafts = [NodeDraft("root", 0), *[NodeDraft(f"n{at}", at, parent="root")
                                          for at in range(100)]]  # fmt: skip
        store.session("s").commit(Commit(append=drafts))
        viewed = Viewed(store)
        picture = lanes(viewed, viewed.place("s"))
        assert len(picture.lanes) + picture.omitted == 100


def test_queue_lease_and_attachments_are_shown(viewed: Viewed) -> None:
    found = sessions.waiting(viewed, "fix-parser")
    assert found.lease is not None
    assert found.lease.is_live
    assert found.lease.lease.owner == "worker-7"
    assert [(work.batch.id, work.is_held) for work in found.queue] == [
        ("notes", True), ("review", False),
    ]  # fmt: skip
    assert sorted([one.state for one in found.attachments]) == ["committed", "intent"]


def test_a_long_queue_is_read_in_part(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        queue = store.session("s").queue
        for at in range(30):
            queue.enqueue([at])
        assert len(queue.batches(limit=7)) == 7
        found = sessions.waiting(Viewed(store), "s")
        assert (len(found.queue), found.queue_more) == (20, True)


def test_the_state_is_opened_level_by_level(viewed: Viewed) -> None:
    place = viewed.place("fix-parser")
    level = sessions.state_level(viewed, place.state.manifest, ["tool_state", "files"])
    assert [branch.name for branch in level.branches] == [
        "README.md", "src/parser.py", "tests/test_parser.py",
    ]  # fmt: skip
    with pytest.raises(NotFoundError):
        sessions.state_level(viewed, place.state.manifest, ["nothing"])
    with pytest.raises(NotFoundError):
        sessions.state_level(viewed, place.state.manifest, ["tool_state", "nothing"])


def test_a_level_with_many_entries_is_listed_in_pages(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s", "relaxed") as store:
        state = casstore.Checkpoint(tool_state={"many": list(range(1_000))})
        store.session("s").commit(Commit(checkpoint=state))
        viewed = Viewed(store)
        level = sessions.state_level(
            viewed, viewed.place("s").state.manifest, ["tool_state", "many"], 900
        )
        assert (len(level.branches), level.branches[0].text, level.stop) == (100, "900", 1_000)
        assert len(sessions.state(viewed, viewed.place("s")).branches) == 1


# --- nodes, objects, comparing, space -----------------------------------------------------------


def test_an_object_shows_what_links_to_it_and_what_keeps_it(viewed: Viewed) -> None:
    digest = things.find_node(viewed, "fix-parser", "a2.3")
    page = things.thing(viewed, digest, "fix-parser")
    assert page.node is not None
    assert (page.node.id, page.node.parent, page.node.depth) == ("a2.3", "r2.2", 12)
    assert [link.kind for link in page.links] == ["node"]
    reached = things.reached(viewed, digest)
    assert "node" in {link.kind for link in reached.parents}
    assert {"fix-parser", "strict-mode", "strict-with-switch", "release-1.4"} <= {
        keeper.name for keeper in reached.keepers
    }


def test_blobs_are_shown_as_text_image_or_bytes(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s") as store:
        viewed = Viewed(store)
        picture, text = store.put_blob(png()), store.put_blob("é\n".encode() * 50_000)
        other = store.put_blob(bytes(range(256)))
        assert things.thing(viewed, picture).image == "image/png"
        assert things.image_bytes(viewed, picture) == ("image/png", png())
        assert things.thing(viewed, text).text.startswith("é\né")
        assert things.thing(viewed, text).is_cut
        assert things.thing(viewed, other).text.startswith("000000  00 01 02")
        svg = store.put_blob(b"<svg onload=alert(1)>")
        with pytest.raises(NotFoundError):
            things.image_bytes(viewed, svg)


def test_an_image_inside_a_message_is_found_by_its_path(viewed: Viewed) -> None:
    digest = things.find_node(viewed, "fix-parser", "u6.i")
    page = things.thing(viewed, digest, "fix-parser")
    assert page.message is not None
    [block] = [one for one in page.message.blocks if one.kind == IMAGE]
    assert things.image_bytes(viewed, digest, block.path) == ("image/png", png())
    with pytest.raises(NotFoundError):
        things.image_bytes(viewed, digest, ("content", 0))


def test_a_value_that_holds_html_is_data(viewed: Viewed) -> None:
    place = viewed.place(HOSTILE_ID)
    state = sessions.state(viewed, place)
    [branch] = state.branches
    assert branch.children is not None
    assert branch.children[0].name == HOSTILE_TEXT


def test_two_places_are_compared_where_they_diverged(viewed: Viewed) -> None:
    found = comparing.compare(viewed, "fix-parser@6", "warn-only")
    assert found.ancestor is not None
    assert found.ancestor.id == "a3.3"
    assert (found.dropped_total, found.added_total) == (0, 8)
    assert [node.id for node in found.added[:2]] == ["f0", "g0"]
    assert found.changes_total == len(found.changes) > 0
    assert comparing.compare(viewed, "release-1.4", "fix-parser@6").is_equal
    with pytest.raises(casstore.errors.InvalidInputError, match="compare sessions"):
        comparing.compare(viewed, "notes", "fix-parser")


def test_hidden_nodes_are_compared_without_their_content(tmp_path: Path) -> None:
    with casstore.open(tmp_path / "s") as store:
        session = store.session("s")
        session.commit(Commit(append=[NodeDraft("a", "open")]))
        session.commit(Commit(append=[NodeDraft("b", "SECRET")]))
        session.tombstone(["b"])
        found = comparing.compare(Viewed(store), "s@1", "s@2")
        assert [(node.id, node.is_hidden) for node in found.added] == [("b", True)]
        assert "SECRET" not in repr(found)


def test_space_reports_what_gc_and_retention_would_remove(tmp_path: Path) -> None:
    from casstore.maintenance import retention

    with casstore.open(tmp_path / "s", "relaxed") as store:
        for at in range(10):
            store.session("s").commit(Commit(append=[NodeDraft(f"n{at}", at)]))
        retention.set_policy(store, retention.Policy(last=3))
        found = space.space(Viewed(store))
        assert (found.planned_revisions, found.policy) == (7, "last 3")
        assert [(one.session, one.removed, one.kept) for one in found.planned] == [("s", 7, 3)]
        assert found.planned[0].reasons == ("last 3", "head 1")
        assert found.gc is not None
        assert found.gc.objects_unreached == 0
        assert [one.session for one in found.shares] == ["s"]
        assert found.charts.revisions == 10
        assert "blob" not in [one.kind for one in found.charts.kinds]
        store.put_blob(bytes(3_000_000))
        found = space.space(Viewed(store))
        kinds = [one.kind for one in found.charts.kinds]
        assert (kinds.count("blob"), "rope" in kinds) == (1, False)
        assert len(list(store.session("s").history())) == 10


def test_health_is_the_result_of_the_newest_check(own: Path) -> None:
    with casstore.open(own, readonly=True) as store:
        viewed = Viewed(store)
        assert space.health(viewed, None) is None
        version = catalogue.version(viewed)
        # The viewer's own check on a store that is open read-only is known to it alone.
        mine = space.run_check(viewed)
        assert mine.last.sound
        assert (space.health(viewed, None), space.health(viewed, mine)) == (None, mine)
    with casstore.open(own) as store:
        viewed = Viewed(store)
        store.check(level="full")
        found = space.health(viewed, mine)
        assert found is not None
        assert (found.last.level, found.last.sound, found.findings) == ("full", True, ())
        assert catalogue.version(viewed) != version


# --- record systems -------------------------------------------------------------------------------


def test_a_langgraph_thread_shows_its_checkpoints_and_changed_channels(viewed: Viewed) -> None:
    found = records.record(viewed, "lg", "trip-to-rome")
    assert [row.title for row in found.rows] == ["step 2", "step 1", "step 0", "step -1"]
    newest = {channel.name: channel for channel in found.rows[0].channels}
    assert newest["messages"].is_changed
    assert not newest["city"].is_changed
    [message] = newest["messages"].messages
    assert (message.role, message.blocks[0].text) == (
        "assistant", "Saturday: the Forum. Sunday: Trastevere.",
    )  # fmt: skip
    assert ("pending writes", "1") in found.rows[0].facts
    with pytest.raises(NotFoundError):
        records.record(viewed, "lg", "nothing")


def test_a_transcript_shows_its_entries(viewed: Viewed) -> None:
    found = records.record(viewed, "claude", "app/5e55a0b1-0000-4000-8000-000000000001")
    assert [row.message.role for row in found.rows if row.message] == ["user", "assistant"] * 2
    assert found.total == 4


def test_entries_of_any_other_system_show_their_rows(any_store: Store) -> None:
    from casstore.records.log import SessionLog

    log = SessionLog(any_store)
    log.create("agent-1")
    viewed = Viewed(any_store)
    [known] = [one for one in catalogue.contents(viewed).entries if one.kind == "log"]
    found = records.record(viewed, "log", known.id)
    assert any("agent-1" in row.title for row in found.rows)
    with pytest.raises(NotFoundError):
        records.record(viewed, "nowhere", "x")


def test_text_changes_are_cut(tmp_path: Path) -> None:
    lines = list(values.diff_lines("\n".join(map(str, range(500))), "x\n" * 500))
    assert len(lines) <= 61
    assert lines[-1].text == "…"


def test_pages_show_the_files_that_changed_and_name_a_package_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from casstore.session import entry_points
    from casstore.workspace import Workspace

    files = tmp_path / "files"
    files.mkdir()
    with casstore.open(tmp_path / "store", "relaxed") as store:
        ws = Workspace(files)
        (files / "a").write_text("one\n")
        (files / "m").write_text("moved")
        store.session("s").append("x", workspace=ws)
        (files / "a").write_text("two\n")
        (files / "m").rename(files / "n")
        store.session("s").append("y", workspace=ws)
        seen = Viewed(store)
        compared = comparing.compare(seen, "s@1", "s@2")
        state = sessions.state(seen, seen.place("s"))
        assert compared.changes_total == 2
        assert compared.changes == state.changes
        changed, renamed = state.changes
        assert [(line.sign, line.text) for line in changed.lines[1:]] == [
            ("-", "one"), ("+", "two"),
        ]  # fmt: skip
        assert (renamed.where, renamed.before, renamed.after) == ("workspace.n", "m", "n")
        monkeypatch.setattr(entry_points, "registered", lambda *_: ["no_such_package:FORMAT"])
        for changes in (
            comparing.compare(seen, "s@1", "s@2").changes,
            sessions.state(seen, seen.place("s")).changes,
        ):
            assert "no_such_package:FORMAT of the format 'workspace' failed" in str(
                changes[-1].after
            )


def test_growth_is_drawn_to_the_scale_of_time(tmp_path: Path) -> None:
    from viewer_store import DAY_MS, Clock, open_store

    clock = Clock()
    with open_store(tmp_path / "s", clock) as store:
        for pause in (0, 1, 8):
            clock.advance(pause * DAY_MS)
            store.session("s").append({"role": "user", "content": f"after {pause} days"})
        days = space.charts(Viewed(store)).days
        # The first day, the eight days in which nothing was added, the last day.
        assert [(day.start, day.stop) for day in days] == [(0, 0.1), (0.1, 0.9), (0.9, 1)]
        assert days[0].total_bytes < days[1].total_bytes < days[2].total_bytes
