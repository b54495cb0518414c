"""Transcripts in lines of JSON become sessions: all of it, once, or a line that is named."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from casstore import Commit, NodeDraft
from casstore.adapters.jsonl import BAD_LINES, ORPHANS, import_jsonl
from casstore.compat.importing import ImportNote, ImportReport
from casstore.errors import (
    BadLineError,
    InvalidInputError,
    SessionDeletedError,
    SessionExistsError,
    SessionNotFoundError,
    StoreNotFoundError,
)
from casstore.maintenance import gc
from casstore.maintenance.progress import Step
from casstore.store import Store
from tests.adapters.transcripts import transcript


def encoded(entries: Iterable[Any]) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)


def stream(entries: Iterable[Any]) -> io.BytesIO:
    return io.BytesIO(encoded(entries))


def payloads(store: Store, session: str, scope: Any = "path") -> list[Any]:
    return [node.payload for node in store.session(session).nodes(scope)]


MESSAGES: list[Any] = [
    {"role": ("user", "assistant")[n % 2], "content": f"message {n}"} for n in range(7)
]

HEADER: Any = {
    "type": "session", "id": "pi-1", "timestamp": "2026-01-01T00:00:00.000Z", "cwd": "/home/ada",
    "modelId": "model-1", "provider": "p",
}  # fmt: skip
PI: list[Any] = [
    HEADER,
    {"type": "message", "timestamp": "t1", "message": {"role": "user", "content": "hello"}},
    {"type": "model_change", "timestamp": "t2", "modelId": "model-2"},
    {"type": "message", "timestamp": "t3", "message": {"role": "assistant", "content": "hi"}},
]


def told(report: ImportReport) -> tuple[str, str, int, int]:
    """The session, and the only part."""
    [part], [session] = report.parts, report.sessions
    return session.session, part.name, part.found, part.imported


def already(report: ImportReport) -> int:
    [part] = report.parts
    return part.found - part.imported


# --- formats --------------------------------------------------------------------------------


def test_plain_messages_are_imported_as_one_path(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    file.write_bytes(encoded(MESSAGES))
    report = import_jsonl(store, file)
    assert told(report) == ("chat", "messages", 7, 7)
    assert report.source_bytes == file.stat().st_size
    assert payloads(store, "chat") == MESSAGES
    assert store.session("chat").info().user_message_count == 4


def test_entries_of_claude_keep_their_ids_branches_and_titles(store: Store) -> None:
    entries = transcript("s1", 6, chars=30)
    # The user went back to the second entry and asked otherwise.
    entries[4]["parentUuid"] = entries[1]["uuid"]
    side = {**transcript("s1", 1, seed=9, chars=30)[0], "isSidechain": True}
    summary = {"type": "summary", "summary": "a talk", "leafUuid": "x"}
    source = [summary, *entries, side, {"type": "custom-title", "customTitle": "a title"}]
    report = import_jsonl(store, stream(source))
    assert told(report) == ("s1", "entries of Claude Code", 9, 9)
    assert report.notes == ()
    session = store.session("s1")
    assert payloads(store, "s1", "full") == source
    ids = [entry["uuid"] for entry in entries]
    assert [node.id for node in session.nodes()] == [ids[0], ids[1], ids[4], ids[5]]
    assert [node.id for node in session.nodes(leaf=ids[3])] == ids[:4]
    assert session.node(ids[0]).time == entries[0]["timestamp"]  # type: ignore[union-attr]
    assert session.meta().cwd == "/home/ada/project"


def test_pi_without_ids_is_one_path_and_its_header_is_kept(store: Store) -> None:
    report = import_jsonl(store, stream(PI))
    assert told(report) == ("pi-1", "entries of pi", 3, 3)
    assert payloads(store, "pi-1") == PI[1:]
    meta = store.session("pi-1").meta()
    assert (meta.cwd, meta.model, meta.extra["header"]) == ("/home/ada", "model-1", HEADER)
    assert store.session("pi-1").info().first_user_message == "hello"


def test_pi_with_ids_keeps_its_branches(store: Store) -> None:
    def entry(own: str, parent: str | None) -> Any:
        message = {"role": "user", "content": own}
        return {"type": "message", "id": own, "parentId": parent, "message": message}

    source = [{**HEADER, "version": 3}, entry("a", None), entry("b", "a"), entry("c", "b")]
    import_jsonl(store, stream([*source, entry("d", "a")]))
    session = store.session("pi-1")
    assert [node.id for node in session.nodes()] == ["a", "d"]
    assert [node.id for node in session.nodes(leaf="c")] == ["a", "b", "c"]


def test_the_format_may_be_given(store: Store) -> None:
    import_jsonl(store, stream(PI), format="messages", name="all")
    assert payloads(store, "all") == PI
    with pytest.raises(InvalidInputError, match="format"):
        import_jsonl(store, stream([{"a": 1}]), name="what")
    with pytest.raises(InvalidInputError, match="format"):
        import_jsonl(store, stream([]), name="what")
    with pytest.raises(InvalidInputError, match="auto or one of"):
        import_jsonl(store, stream([]), format="xml")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="pass a name"):
        import_jsonl(store, stream(MESSAGES))
    assert [info.meta.session for info in store.sessions()] == ["all"]


class Pipe(io.RawIOBase):
    """Can be read once."""

    def __init__(self, content: bytes) -> None:
        self._content = io.BytesIO(content)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    def readinto(self, buffer: Any) -> int:
        block = self._content.read(min(len(buffer), 1000))
        buffer[: len(block)] = block
        return len(block)


def test_a_stream_that_cannot_seek_is_imported(store: Store) -> None:
    import_jsonl(store, Pipe(encoded(MESSAGES)), name="s")  # type: ignore[arg-type]
    assert payloads(store, "s") == MESSAGES
    with pytest.raises(InvalidInputError, match="binary"):
        import_jsonl(store, io.StringIO("{}"))  # type: ignore[arg-type]
    with pytest.raises(StoreNotFoundError):
        import_jsonl(store, "nowhere.jsonl")


def test_values_that_only_json_can_hold_round_trip(store: Store) -> None:
    deep: Any = "bottom"
    for _ in range(200):
        deep = [deep]
    odd: list[Any] = [
        {"role": "user", "content": "half \ud83d"},
        {"role": "user", "content": 10**50, "timestamp": 10**50},
        {"role": "user", "content": deep, "timestamp": "\udfff"},
    ]
    report = import_jsonl(store, stream([*odd, *odd]), name="s")
    assert report.imported == 6
    assert already(import_jsonl(store, stream([*odd, *odd]), name="s")) == 6
    stored = payloads(store, "s")
    assert [json.loads(payload["json"]) for payload in stored] == [*odd, *odd]


# --- bad lines ------------------------------------------------------------------------------

GOOD = b'{"role": "user", "content": "good"}'
BAD = [
    b'{"role": "user", "content": "cut of',
    b"[1, 2]",
    b'"text"',
    b'{"role": "user", "content": NaN}',
    b'{"role": "user", "content": 1e999}',
    b'{"role": "user", "content": ' + b"9" * 5000 + b"}",
    b'{"role": "user", "content": ' + b"[" * 100_000,
    b'{"role": "user", "content": "\xff"}',
    b"\x00",
    b'{"role": "user", "content": "' + b"x" * 200_000 + b'"}',
]


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named_and_nothing_is_written(store: Store, bad: bytes) -> None:
    content = b"\n".join([GOOD, b"", GOOD, bad, GOOD, GOOD])
    source = io.BytesIO(content)
    with pytest.raises(BadLineError, match="line 4: ") as caught:
        import_jsonl(store, source, name="s", max_line_bytes=150_000)
    assert (caught.value.line, caught.value.committed) == (4, 0)
    with pytest.raises(SessionNotFoundError):
        store.session("s").meta()
    source.seek(0)
    report = import_jsonl(store, source, name="s", max_line_bytes=150_000, leave_out_damaged=True)
    assert (report.imported, report.notes) == (4, (ImportNote(BAD_LINES, 1, ("line 4",)),))
    assert payloads(store, "s") == [json.loads(GOOD)] * 4


def test_no_more_of_a_long_line_is_held_than_allowed(store: Store) -> None:
    class Watched(io.BytesIO):
        longest = 0

        def readline(self, size: Any = -1, /) -> bytes:
            found = super().readline(size)
            Watched.longest = max(Watched.longest, len(found))
            return found

    content = GOOD + b"\n" + b"x" * (8 << 20) + b"\n" + GOOD
    report = import_jsonl(
        store, Watched(content), name="s", max_line_bytes=1000, leave_out_damaged=True
    )
    assert (report.imported, report.note(BAD_LINES).examples) == (2, ("line 2",))
    assert Watched.longest <= 1 << 20
    with pytest.raises(InvalidInputError):
        import_jsonl(store, stream([]), max_line_bytes=0)


@pytest.mark.parametrize("more", [-1, 0, 1, 2, 3])
def test_the_line_after_a_line_that_is_one_byte_too_long_is_read(store: Store, more: int) -> None:
    """One that was too long by its line feed alone took the next line with it."""
    limit = 2 * len(GOOD)
    long = GOOD + b" " * (limit - len(GOOD) + more) + b"\n"
    source = io.BytesIO(GOOD + b"\n" + long + GOOD + b"\n" + GOOD)
    report = import_jsonl(store, source, name="s", max_line_bytes=limit, leave_out_damaged=True)
    bad = ("line 2",) if len(long) > limit else ()
    assert (report.imported, report.note(BAD_LINES).examples) == (4 - len(bad), bad)


def test_only_some_of_many_bad_lines_are_named(store: Store) -> None:
    source = io.BytesIO(b"bad\n" * 500 + GOOD)
    report = import_jsonl(store, source, name="s", leave_out_damaged=True)
    note = report.note(BAD_LINES)
    assert (note.number, len(note.examples), report.imported) == (500, 100, 1)


def test_the_error_for_a_source_that_changes_reports_how_far_the_import_came(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.compat.importing.PAGE_ROWS", 4)
    file = tmp_path / "s.jsonl"
    file.write_bytes((GOOD + b"\n") * 10)

    def spoil(step: Step) -> None:
        if step.phase == "copy":
            file.write_bytes((GOOD + b"\n") * 5 + b"x" * len(GOOD) * 4)

    file_content = file.read_bytes()
    with file.open("rb", buffering=0) as unbuffered, pytest.raises(BadLineError) as caught:
        import_jsonl(store, unbuffered, name="s", progress=spoil)
    assert (caught.value.line, caught.value.committed) == (6, 4)
    assert len(payloads(store, "s")) == 4
    file.write_bytes(file_content)
    report = import_jsonl(store, file)
    assert (already(report), report.imported) == (4, 6)
    assert len(payloads(store, "s")) == 10


def test_lines_written_during_an_import_are_left_for_the_next_import(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.compat.importing.PAGE_ROWS", 2)
    file = tmp_path / "s.jsonl"
    file.write_bytes(encoded(MESSAGES))

    def write_half_a_line(step: Step) -> None:
        with file.open("ab") as growing:
            growing.write(b'{"role": "us')

    with file.open("rb", buffering=0) as unbuffered:
        import_jsonl(store, unbuffered, name="s", progress=write_half_a_line)
    assert payloads(store, "s") == MESSAGES


# --- again ----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 256])
def test_an_import_of_a_grown_file_continues_at_its_former_end(
    store: Store, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.compat.importing.PAGE_ROWS", batch)
    entries = transcript("s1", 10, chars=30)
    title = {"type": "custom-title", "customTitle": "a title"}
    cases: list[tuple[str, list[Any]]] = [
        ("s1", [entries[0], title, *entries[1:], title]),
        ("pi-1", [*PI, *PI[1:], *PI[1:]]),
        ("m", MESSAGES),
    ]
    for session, lines in cases:
        name = session if session == "m" else None
        for until in (4, 4, len(lines), len(lines)):
            report = import_jsonl(store, stream(lines[:until]), name=name)
            assert report.sessions[0].session == session
        assert (report.imported, store.session(session).head().node_count) == (  # type: ignore[union-attr]
            0,
            len(lines) - (session == "pi-1"),
        )
    assert payloads(store, "s1") == entries
    assert payloads(store, "m") == MESSAGES
    assert payloads(store, "pi-1") == [*PI[1:]] * 3


def test_an_import_that_was_stopped_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("casstore.compat.importing.PAGE_ROWS", 2)

    class Stop(Exception):
        pass

    steps: list[Step] = []

    def stop(step: Step) -> None:
        steps.append(step)
        if len(steps) == 2:
            raise Stop

    with pytest.raises(Stop):
        import_jsonl(store, stream(MESSAGES), name="s", progress=stop)
    assert payloads(store, "s") == MESSAGES[:4]
    report = import_jsonl(store, stream(MESSAGES), name="s")
    assert (already(report), report.imported) == (4, 3)
    assert payloads(store, "s") == MESSAGES
    assert steps[0] == Step("copy", 2, 7, "messages")


def test_a_changed_line_starts_a_branch_and_keeps_the_old_lines(store: Store) -> None:
    import_jsonl(store, stream(MESSAGES), name="s")
    changed = [*MESSAGES[:3], {"role": "user", "content": "changed"}, *MESSAGES[4:]]
    for expected in (4, 0):
        report = import_jsonl(store, stream(changed), name="s")
        assert report.imported == expected
    assert payloads(store, "s") == changed
    assert payloads(store, "s", "full")[:7] == MESSAGES
    assert [node.payload for node in store.session("s").nodes(leaf="line-7")] == MESSAGES


def test_a_repeated_id_is_one_node_unless_it_differs(store: Store) -> None:
    entries = transcript("s1", 4, chars=30)
    other = {**entries[1], "message": {"role": "user", "content": "same id, other words"}}
    source = [*entries, entries[1], other, other]
    for imported in (5, 0):
        report = import_jsonl(store, stream(source))
        assert (report.imported, report.imported + already(report)) == (imported, 7)
    found = payloads(store, "s1", "full")
    assert (found[:4], found[4:]) == (entries, [other])


def test_a_parent_that_is_not_there_makes_a_root(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = transcript("s1", 4, chars=30)
    entries[0]["parentUuid"] = "compacted away"
    # They name each other, and one itself.
    entries[2]["parentUuid"] = entries[3]["uuid"]
    loop = {**transcript("s1", 1, seed=3, chars=30)[0]}
    loop["parentUuid"] = loop["uuid"]
    for orphans in (3, 0):
        report = import_jsonl(store, stream([*entries, loop]))
        assert report.note(ORPHANS).number == orphans
    assert already(report) == 5
    session = store.session("s1")
    nodes = {node.id: node.parent for node in session.nodes("full")}
    ids = [entry["uuid"] for entry in entries]
    assert nodes == {ids[0]: None, ids[1]: ids[0], ids[2]: None, ids[3]: ids[2], loop["uuid"]: None}


def test_a_line_with_a_repeated_id_is_recognised_when_its_parent_has_come(store: Store) -> None:
    """Its name was made of its parent, which is another one as soon as it is there."""
    entries = transcript("s1", 3, chars=30)
    later = transcript("s1", 1, seed=3, chars=30)[0] | {"parentUuid": None}
    other = {**entries[1], "parentUuid": later["uuid"]}
    for imported in (5, 0, 0):
        report = import_jsonl(store, stream([*entries, other, later]))
        assert (report.imported, report.imported + already(report)) == (imported, 5)
    assert payloads(store, "s1", "full") == [*entries, other, later]


@pytest.mark.parametrize("batch", [1, 2, 256])
def test_a_line_without_an_id_follows_the_previous_line_and_not_a_renamed_one(
    store: Store, monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    """It followed the last one that was renamed, if both came in one batch."""
    monkeypatch.setattr("casstore.compat.importing.PAGE_ROWS", batch)
    first = transcript("s1", 1, chars=30)[0]
    other = {**first, "message": {"role": "user", "content": "same id, other words"}}
    title = {"type": "custom-title", "customTitle": "t", "sessionId": "s1"}
    import_jsonl(store, stream([first, other, first, title]))
    nodes = {node.id: node.parent for node in store.session("s1").nodes("full")}
    assert nodes["line-4"] == first["uuid"]


def test_a_hidden_node_does_not_come_back(store: Store) -> None:
    import_jsonl(store, stream(MESSAGES), name="s")
    store.session("s").tombstone(["line-3"])
    more = [*MESSAGES, {"role": "user", "content": "more"}]
    report = import_jsonl(store, stream(more), name="s")
    assert report.imported == 1
    assert payloads(store, "s") == [*MESSAGES[:2], *MESSAGES[3:], more[-1]]


def test_a_node_that_is_hidden_during_an_import_stays_hidden(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("casstore.compat.importing.PAGE_ROWS", 2)
    import_jsonl(store, stream(MESSAGES), name="s")
    hidden: list[Step] = []

    def hide(step: Step) -> None:
        if not hidden:
            store.session("s").tombstone(["line-5"])
            hidden.append(step)

    assert import_jsonl(store, stream(MESSAGES), name="s", progress=hide).sessions
    assert payloads(store, "s") == [*MESSAGES[:4], *MESSAGES[5:]]


def test_an_import_into_an_unrelated_session_is_refused(store: Store) -> None:
    store.session("s").commit(Commit(append=[NodeDraft("a", 1)]))
    store.create_session("named")
    import_jsonl(store, stream(PI))
    for session in ("s", "named", "pi-1"):
        with pytest.raises(SessionExistsError):
            import_jsonl(store, stream(MESSAGES), name=session)
    store.delete_session("pi-1")
    with pytest.raises(SessionDeletedError):
        import_jsonl(store, stream(PI))


def test_gc_keeps_what_was_imported_and_deleting_gives_it_back(store: Store) -> None:
    entries = transcript("s1", 20, chars=5000)
    import_jsonl(store, stream(entries))
    gc.collect(store, grace_ms=0)
    assert payloads(store, "s1") == entries
    gone = [node.digest for node in store.session("s1").nodes()]
    store.delete_session("s1")
    gc.collect(store, grace_ms=0)
    assert store.missing(gone) == gone
