"""The documents are true: every Python block runs, every link leads somewhere."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import casstore
from casstore import errors
from casstore.cli.main import cli

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/**/*.md")])
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"^```console\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]+\]\(([^)#\s]+)[^)]*\)")


# The output that a document shows of its program.
OUTPUT = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Ids of nodes and beginnings of digests differ from run to run.
GENERATED = re.compile(r"\b(?:[0-9a-z]{23}|[0-9a-f]{12}|\d{4}-\d\d-\d\d \d\d:\d\d)\b")
QUICKSTART = ROOT / "docs" / "quickstart.md"


# Runs each directory's block.py in a process of its own. They share the import of frameworks, which
# takes seconds; casstore is imported by each.
RUNNER = """
import importlib, os, runpy, sys
frameworks, directories = sys.argv[1].split(), sys.argv[2:]
for name in frameworks:
    importlib.import_module(name)
for directory in directories:
    child = os.fork()
    if not child:
        os.chdir(directory)
        sys.path[0] = directory
        sys.argv = ["block.py"]
        runpy.run_path("block.py", run_name="__main__")
        sys.exit()
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{directory} failed")
"""
FRAMEWORKS = ("agents", "claude_agent_sdk", "langgraph.graph")


def blocks_of(document: Path) -> list[str]:
    """The examples of a document. The blocks of the quickstart are one program, with a test."""
    return [] if document == QUICKSTART else BLOCK.findall(document.read_text())


def run_program(code: str, directory: Path) -> str:
    """Run a program in a directory, in a process of its own; its output."""
    (directory / "block.py").write_text(code)
    answer = subprocess.run(
        [sys.executable, "-W", "error", "block.py"],
        cwd=directory, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    return answer.stdout


# What a block must have installed if it imports that.
EXTRAS = {
    "langgraph": "langgraph",
    "claude_agent_sdk": "claude_agent_sdk",
    "casstore.adapters.openai_agents": "agents",
    "FileKeys": "cryptography",
    "casstore.workspace": "pathspec",
    "from mcp import": "mcp",
}


def lacks_extra(code: str) -> bool:
    return any(
        named in code and importlib.util.find_spec(package) is None
        for named, package in EXTRAS.items()
    )


@pytest.mark.parametrize(
    "document",
    [document for document in DOCUMENTS if blocks_of(document)],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_python_block_runs(document: Path, tmp_path: Path) -> None:
    directories = []
    needed: set[str] = set()
    for number, code in enumerate(blocks_of(document), 1):
        # Blocks for a server are run on one: tests/engine/postgres/test_guide.py.
        if lacks_extra(code) or "postgresql://" in code:
            continue
        directory = tmp_path / str(number)
        directory.mkdir()
        (directory / "README.md").write_text((ROOT / "README.md").read_text())
        (directory / "block.py").write_text(code)
        directories.append(str(directory))
        needed.update(name for name in FRAMEWORKS if re.search(rf"(from|import) {name}\b", code))
    if not directories:
        pytest.skip("needs the extra: pip install '.[dev]', or a server")
    answer = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUNNER, " ".join(sorted(needed)), *directories],
        cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr


def test_the_quickstart_is_a_program_with_the_output_that_it_shows(tmp_path: Path) -> None:
    text = QUICKSTART.read_text()
    printed = run_program("\n\n".join(BLOCK.findall(text)), tmp_path)
    assert printed == OUTPUT.findall(text)[-1]


def test_the_first_example_of_the_readme_prints_what_the_readme_shows(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    printed = run_program(BLOCK.findall(text)[0], tmp_path)
    assert GENERATED.sub("…", printed) == GENERATED.sub("…", OUTPUT.findall(text)[0])


def test_the_readme_and_its_first_example_are_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert len([line for line in BLOCK.findall(text)[0].splitlines() if line.strip()]) <= 15


def test_every_figure_of_the_readme_is_in_the_benchmarks() -> None:
    readme = (ROOT / "README.md").read_text()
    measured = (ROOT / "docs" / "reference" / "benchmarks.md").read_text()
    figures = re.findall(r"(?<=\| )[\d.]+ (?:µs|ms|KiB|MiB)(?= \|)", readme)
    assert len(figures) > 20
    assert [figure for figure in figures if figure not in measured] == []


def test_the_console_session_of_the_readme_has_the_real_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        shown = [line.rstrip() for line in GENERATED.sub("…", ran.stdout).splitlines()]
        assert shown == GENERATED.sub("…", printed).splitlines(), command


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    for target in LINK.findall(document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_no_document_installs_casstore_from_a_package_index() -> None:
    """It is installed from a clone: pip knows no package of this name elsewhere."""
    sources = [*DOCUMENTS, *(ROOT / "casstore").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    found = [path for path in sources if re.search("pip install '?casstore", path.read_text())]
    assert found == []


def test_every_command_that_a_document_names_exists() -> None:
    for document in DOCUMENTS:
        for name in re.findall(r"\btools/([a-z_]+(?:\.py)?)", document.read_text()):
            assert (ROOT / "tools" / name).exists(), f"{document.name} names tools/{name}"


def commands_in(document: Path) -> list[list[str]]:
    """The words of each casstore command in the shell blocks of a document, without the rest."""
    blocks = "\n".join(SHELL.findall(document.read_text())).replace("\\\n", " ")
    lines = re.findall(r"^casstore (.+)$", blocks, re.MULTILINE)
    return [shlex.split(re.split(r" [|<>;]| && ", line)[0], comments=True) for line in lines]


def check_parses(words: list[str]) -> None:
    """Parse a command line and run nothing; click.UsageError if the command refuses it."""
    with cli.make_context("casstore", list(words)) as ctx:
        group: click.Group = cli
        rest = [*ctx._protected_args, *ctx.args]
        while True:
            name, found, rest = group.resolve_command(ctx, rest)
            assert found is not None
            if not isinstance(found, click.Group):
                found.make_context(name, rest, parent=ctx)
                return
            group = found


@pytest.mark.parametrize(
    "document",
    [document for document in DOCUMENTS if commands_in(document)],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_every_command_of_a_shell_block_parses(document: Path) -> None:
    refused = []
    for words in commands_in(document):
        try:
            check_parses(words)
        except click.UsageError as exc:
            # The files that an example names need not exist.
            if "does not exist" not in exc.format_message():
                refused.append((words, exc.format_message()))
    assert refused == []


def test_the_reference_lists_every_error_class_with_its_group() -> None:
    text = (ROOT / "docs" / "reference" / "errors.md").read_text()
    kinds = [name for name in vars(errors) if name.endswith("Error")]
    missing = [name for name in kinds if f"`{name}`" not in text]
    assert missing == []
    for name, code in re.findall(r"^\| `(\w+)`[^|]*\| (\d+) \|", text, re.MULTILINE):
        assert getattr(errors, name).exit_code == int(code), name


def test_the_api_reference_has_every_public_name() -> None:
    pages = [page.read_text() for page in (ROOT / "docs" / "reference" / "api").glob("*.md")]
    listed = set(re.findall(r"^::: casstore\.(\w+)$", "\n".join(pages), re.MULTILINE))
    assert set(casstore.__all__) - {"__version__"} <= listed


def test_the_site_has_every_page() -> None:
    listed = set(
        re.findall(r"[\w./-]+\.md$", (ROOT / "tools" / "mkdocs.yml").read_text(), re.MULTILINE)
    )
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in ROOT.glob("docs/**/*.md")}
