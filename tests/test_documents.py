"""The documents are true: every Python block runs, every link leads somewhere."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from casstore.cli.main import cli

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)[^)]*\)")


def blocks() -> list[tuple[str, str]]:
    return [
        (f"{document.relative_to(ROOT)}:{number}", code)
        for document in DOCUMENTS
        for number, code in enumerate(BLOCK.findall(document.read_text()), 1)
    ]


# What a block must have installed if it imports that.
EXTRAS = {
    "langgraph": "langgraph",
    "claude_agent_sdk": "claude_agent_sdk",
    "casstore.adapters.openai_agents": "agents",
    "FileKeys": "cryptography",
}


def lacks_extra(code: str) -> bool:
    return any(
        named in code and importlib.util.find_spec(package) is None
        for named, package in EXTRAS.items()
    )


@pytest.mark.parametrize(("name", "code"), blocks(), ids=[name for name, _ in blocks()])
def test_every_python_block_runs(name: str, code: str, tmp_path: Path) -> None:
    if lacks_extra(code):
        pytest.skip("needs the extra: pip install '.[dev]'")
    if "postgresql://" in code:
        pytest.skip("needs a server, and is run on one: tests/postgres/test_postgres_doc.py")
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    (tmp_path / "block.py").write_text(code)
    answer = subprocess.run(
        [sys.executable, "-W", "error", "block.py"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr


def test_the_first_example_of_the_readme_is_short() -> None:
    first = BLOCK.findall((ROOT / "README.md").read_text())[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 15


def test_the_console_of_the_readme_is_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(compile(BLOCK.findall(text)[0], "README.md", "exec"), {})
    (console,) = CONSOLE.findall(text)
    export, *steps = re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]
    name, _, value = export.removeprefix("export ").strip().partition("=")
    monkeypatch.setenv(name, value)
    assert len(steps) >= 3
    for step in steps:
        command, _, printed = step.partition("\n")
        program, *arguments = shlex.split(command)
        assert program == "casstore"
        ran = CliRunner().invoke(cli, arguments)
        told = [line.rstrip() for line in ran.stdout.splitlines()]
        assert told == printed.splitlines(), command


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in LINK.findall(document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_no_text_installs_casstore_by_its_name() -> None:
    """It is installed from a clone: pip knows no package of this name elsewhere."""
    sources = [*DOCUMENTS, *(ROOT / "casstore").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    found = [path for path in sources if re.search("pip install '?casstore", path.read_text())]
    assert found == []


def test_every_command_that_a_document_names_exists() -> None:
    for document in DOCUMENTS:
        for name in re.findall(r"\btools/([a-z_]+(?:\.py)?)", document.read_text()):
            assert (ROOT / "tools" / name).exists(), f"{document.name} names tools/{name}"
