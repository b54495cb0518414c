"""A session as one HTML file: complete, self-contained, redacted, without hidden nodes."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest

for package in ("starlette", "uvicorn", "jinja2", "langgraph", "claude_agent_sdk"):
    pytest.importorskip(package, reason=f"needs {package}: pip install '.[dev]'")

import casstore
from casstore import Checkpoint, Commit, NodeDraft
from casstore.ui.export import write_file
from viewer_store import HOSTILE_ID


def exported(store: casstore.Store, session: str, tmp_path: Path, *patterns: str) -> str:
    target = tmp_path / "out.html"
    write_file(store, session, target, redact=[re.compile(one) for one in patterns])
    assert list(tmp_path.glob(".out*")) == []
    return target.read_text()


def test_the_file_has_the_whole_session_and_loads_nothing(example: Path, tmp_path: Path) -> None:
    with casstore.open(example, readonly=True) as store:
        text = exported(store, "fix-parser", tmp_path)
    assert text.count('<li class="row') == 33
    assert "The cache" not in text
    assert "All 320 tests pass." in text
    assert "data:image/png;base64," in text
    assert "<script" not in text
    assert not re.search(r'(src|href|action)="(?!#|data:image/)', text)
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text
    assert "src/parser.py" in text


def test_hostile_content_is_text_in_the_file(example: Path, tmp_path: Path) -> None:
    with casstore.open(example, readonly=True) as store:
        text = exported(store, HOSTILE_ID, tmp_path)
    body = text.partition("</style>")[2]
    assert "<script" not in body
    assert not re.search(r"<[^>]* on\w+=", body)
    assert "\u202e" not in text
    assert "&lt;script&gt;" in body


def test_hidden_nodes_are_left_out(example: Path, tmp_path: Path) -> None:
    with casstore.open(example, readonly=True) as store:
        target = tmp_path / "out.html"
        done = write_file(store, "with-hidden", target)
        assert (done.nodes, done.hidden) == (2, 1)
        text = target.read_text()
    assert "SECRET-HIDDEN-TEXT" not in text
    assert ">secret<" not in text
    assert "This may be read." in text


def test_patterns_are_redacted_everywhere(tmp_path: Path) -> None:
    key = "sk-" + "a1B2" * 8
    with casstore.open(tmp_path / "s", "relaxed") as store:
        session = store.session(f"id-{key}")
        # Where a row of a page would be cut, on both sides of it, and in every kind of place.
        payloads = [
            {"role": "user", "content": "x" * (1_500 - 10) + key + "y" * 5_000},
            {"role": f"role {key}", "content": [{"type": "text", "text": f'quoted "{key}"'}]},
            {"role": "assistant", "content": [
                {"type": "tool_use", "id": key, "name": f"tool {key}", "input": {key: [key]}}]},
            {key: {"deep": [f"line\n{key}\n"]}},
            {"role": "user", "content": [{"type": "image", "source": {
                "type": "base64", "media_type": "image/png", "data": key}}]},
            {"bytes": key.encode()},
            "z" * 300_000 + key,
            "z" * (200_000 - 7) + key,
            # Escapes of JSON must not hide what a pattern looks for.
            {"deep": ['pass"word', "second\nthought"]},
            {"type": "function_call", "call_id": "c", "name": "f",
             "arguments": json.dumps({"x": 'pass"word', "y": ["second\nthought"]})},
        ]  # fmt: skip
        nodes = [
            NodeDraft(f"n{at}-xxxxxxxxxxxx{key}", one, time=f"at {key}")
            for at, one in enumerate(payloads)
        ]
        state = Checkpoint(tool_state={key: key, "b": key.encode(), "long": "y" * 2_000 + key})
        session.commit(
            Commit(append=nodes, checkpoint=state, label=f"label {key}", turn=f"turn {key}")
        )  # fmt: skip
        store.fork(session.id, f"fork {key}")
        session.update_meta(name=f"name {key}", model=f"model {key}", cwd=key)
        assert key in exported(store, session.id, tmp_path)
        text = exported(store, session.id, tmp_path, r"sk-\w{8,}", 'pass"word', r"second\nthought")
    for part in (key, key[:7], key[-7:], "sk-", "pass", "thought"):
        assert part not in text
    assert "█████" in text
    assert base64.b64encode(key.encode()).decode()[:12] not in text


def test_images_are_left_out_if_anything_is_redacted(example: Path, tmp_path: Path) -> None:
    with casstore.open(example, readonly=True) as store:
        assert "data:image/png" in exported(store, "fix-parser", tmp_path)
        text = exported(store, "fix-parser", tmp_path, "nothing like this")
    assert "data:image/png" not in text
    assert "cannot be redacted" in text


def test_a_failed_export_leaves_the_old_file(
    example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "out.html"
    target.write_text("old")
    monkeypatch.setattr("casstore.ui.export.timeline", lambda *_, **__: 1 / 0)
    with casstore.open(example, readonly=True) as store, pytest.raises(ZeroDivisionError):
        write_file(store, "fix-parser", target)
    assert [one.name for one in tmp_path.iterdir()] == ["out.html"]
    assert target.read_text() == "old"


def test_a_long_session_is_written_in_pages(long: Path, tmp_path: Path) -> None:
    with casstore.open(long, readonly=True) as store:
        done = write_file(store, "long", tmp_path / "out.html", at=10)
    assert (done.revision, done.nodes) == (10, 1_000)
