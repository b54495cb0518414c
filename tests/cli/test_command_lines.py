"""Every command line that a document shows runs, in a directory that has what it names."""

from __future__ import annotations

import re
import shlex
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("power_loop", reason="needs the extra: pip install '.[dev]'")
pytest.importorskip("langgraph.checkpoint.sqlite", reason="needs casstore[dev]")
pytest.importorskip("agents", reason="needs casstore[dev]")

from agents import SQLiteSession
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.sqlite import SqliteSaver
from langgraph.store.sqlite import SqliteStore
from power_loop.runtime.session_store import SessionStore

import casstore
from casstore import Checkpoint, Commit, NodeDraft
from casstore.adapters.langgraph import CasstoreSaver
from casstore.cli.main import MODULE_OF
from casstore.workspace import Workspace
from tests.cli.running import run
from tests.compat.lash_files import LashFile
from tests.compat.test_agent_harness_import import TABLES
from tests.compat.test_langbot import Source as LangBot
from tests.test_documents import DOCUMENTS, ROOT

SHELL = re.compile(r"^```(?:console|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What stands in documents for the beginning of some digest, and for where backups go.
DIGEST, BACKUPS = "3f2a91", "/backups"
# These need a server, and are run on one: tests/cli/test_postgres.py
SERVER = "postgresql://"


def blocks() -> Iterator[tuple[str, list[list[str]]]]:
    """What each shell block does with ``casstore``: words, line by line."""
    for document in DOCUMENTS:
        for number, block in enumerate(SHELL.findall(document.read_text()), 1):
            # Who exports such a path works on a server from there on.
            lines = [] if f"export CASSTORE_PATH={SERVER}" in block else words_of(block)
            if lines:
                yield f"{document.relative_to(ROOT)}:{number}", lines


def words_of(block: str) -> list[list[str]]:
    lines = []
    for line in re.split(r"\n|&&|\|\||[|;]", block):
        words = shlex.split(re.sub(r"[<>]\s*\S+", "", line.removeprefix("$ ")), comments=True)
        on_server = any(word.startswith(SERVER) for word in words)
        if "ui" in words or ("watch" in words and "--limit" not in words):
            # They end by Ctrl-C: tests/cli/test_viewer.py, tests/cli/test_work.py
            continue
        if words[:1] == ["casstore"] and MODULE_OF.keys() & set(words) and not on_server:
            lines.append(words[1:])
    return lines


BLOCKS = list(blocks())


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the stores, sessions and files of the documents."""
    place = tmp_path_factory.mktemp("world")
    with casstore.open(place / "store") as store:
        agent = store.session("agent")
        for turn in range(50):
            agent.commit(
                Commit(
                    append=[NodeDraft(f"n{turn}", {"role": "user", "text": f"turn {turn}"})],
                    checkpoint=Checkpoint(tool_state={"cwd": "/", "files": [turn]}),
                    label={40: "before-fix", 42: "before-refactoring"}.get(turn),
                )
            )
        for name in ("other", "old-experiment", "about-somebody"):
            store.fork("agent", name, at=30)
        store.session("about-somebody").add_subjects(["user-42"])
        thread: Any = {"configurable": {"thread_id": "t0", "checkpoint_ns": ""}}
        CasstoreSaver(store).put(thread, empty_checkpoint(), {"step": 0}, {})
        (place / "transcripts").mkdir()
        (place / "project").mkdir()
        files = Workspace(place / "project")
        for text in ("pass", "pass\n", "fail\n"):
            (place / "project" / "a.py").write_text(text)
            files.commit(store.session("coder"))
    for name in ("backup", "live", "my-store", "damaged", "agents", "other-store"):
        shutil.copytree(place / "store", place / name)
    (place / BACKUPS.strip("/")).mkdir()
    (place / "report.pdf").write_bytes(b"no real report")
    (place / "known.txt").write_text("")
    (place / "gc.toml").write_text('stores = ["agents"]\n')
    (place / "transcript.jsonl").write_text('{"role": "user", "content": "hello"}\n')
    here = str(place / "store")
    for bundle in ("agent", "monday", "tuesday"):
        run("export", "agent", str(place / f"{bundle}.bundle"), store=here)
    databases(place)
    return place


def databases(place: Path) -> None:
    """Those of other stores, as they make them."""
    with closing(sqlite3.connect(place / "runtime.sqlite")) as database, database:
        database.executescript(TABLES)
    (place / "workspace").mkdir()
    with closing(sqlite3.connect(place / "user_store.db")) as database, database:
        database.execute("CREATE TABLE user_data (user_id, key, value, created_at)")
    LangBot(place / "langbot.db", "runner_state")
    (place / "sessions").mkdir()
    for file in ("sessions/root-4813494d137e1631.db", "root-4813494d137e1631.db"):
        LashFile(place / file, session="root").meta()
    SessionStore.open(place / "sessions.db").close()
    with SqliteSaver.from_conn_string(str(place / "checkpoints.sqlite")) as saver:
        saver.setup()
    with SqliteStore.from_conn_string(str(place / "memory.sqlite")) as memory:
        memory.setup()
    SQLiteSession("talk", place / "conversations.db").close()


@pytest.mark.parametrize(("name", "lines"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_every_command_line_of_a_document_runs(
    name: str, lines: list[list[str]], world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(world, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with casstore.open("store") as store:
        digest = store.put_blob(b"3f2a91")
        store.tag("kept", digest)
        agent = store.session("agent")
        agent.queue.enqueue(["work"], batch_id="5f0c")
        agent.attachments.intend("video-1", uri="s3://bucket/video-1")
        if any(words[0] == "leases" for words in lines):
            agent.claim_lease("worker-1", ttl_ms=600_000)
    for words in lines:
        given = [word.replace(DIGEST, digest.hex()[:12]).replace(f"{BACKUPS}/", f"{BACKUPS[1:]}/")
                 for word in words]  # fmt: skip
        if given[0] == "export":
            Path(given[2]).unlink(missing_ok=True)
        ran = run(*given, store="store", stdin=b'{"a": 1}', ends=None)
        # That two things differ, or that no text has the words, is an answer.
        assert ran.code in (0, 1), (words, ran.err)
        is_answer = "--exit-code" in words or words[0] == "search"
        assert ran.code == 0 or is_answer, (words, ran.err)
