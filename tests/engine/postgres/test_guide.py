"""``docs/guides/postgres.md`` is true: its examples run, on a real server."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

psycopg = pytest.importorskip("psycopg")

from servers.postgres import Server
from tests.cli.running import fill, run

ROOT = Path(__file__).parent.parent.parent.parent
DOCUMENT = (ROOT / "docs" / "guides" / "postgres.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
NAMED = "postgresql://db.example/agents"


def test_the_document_has_at_least_three_examples() -> None:
    assert len(BLOCKS) >= 3
    assert all(NAMED in block for block in BLOCKS)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_every_example_runs(number: int, postgres_url: str, tmp_path: Path) -> None:
    (tmp_path / "block.py").write_text(BLOCKS[number].replace(NAMED, postgres_url))
    answer = subprocess.run(
        [sys.executable, "-W", "error", "block.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr


def test_every_command_line_runs(
    postgres_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    fill(tmp_path / "my-store")
    lines = re.findall(r"^\$ casstore (.+)$", DOCUMENT, re.MULTILINE)
    # Those that bring the store to the server go first.
    for line in sorted(lines, key=lambda line: not line.startswith("copy my-store")):
        words = shlex.split(line, comments=True)
        run(*[word.replace(NAMED, postgres_url) for word in words], store=postgres_url)
    assert len(lines) >= 6


def test_the_size_and_snapshot_queries_in_the_document_run(
    postgres_server: Server, postgres_url: str, schema: str
) -> None:
    import casstore

    with casstore.open(postgres_url) as store:
        store.put_blob(b"something")
    [question] = re.findall(r"`(SELECT pg_size_pretty.*?)`", DOCUMENT)
    [snapshots] = re.findall(r"`(SELECT pid, state, xact_start.*?)`", DOCUMENT)
    with psycopg.connect(postgres_server.url()) as connection:
        answer = connection.execute(question.replace("'casstore'", f"'{schema}'")).fetchone()
        assert answer is not None
        assert "kB" in answer[0]
        connection.execute(snapshots)
