"""Nothing can be done on the command line that is not helped with, documented and tested."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from casstore import cli as cli_package
from casstore.cli.command import COMMON, Command, Kinds
from casstore.cli.import_ import import_
from casstore.cli.main import COMMON_TASKS, MODULE_OF, SECTIONS, cli
from casstore.cli.workspace import workspace
from tests.cli.running import run

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = (ROOT / "docs" / "reference" / "cli.md").read_text()


# All commands; those of a group with the kind: "import lash".
GROUPS = {"import": import_, "workspace": workspace}
NAMES = [name for name in MODULE_OF if name not in GROUPS]
NAMES += [f"{name} {kind}" for name, group in GROUPS.items() for kind in group.commands]


def command(name: str) -> Command:
    first, _, kind = name.partition(" ")
    with click.Context(cli, info_name="casstore") as ctx:
        found: click.Command | None = cli.get_command(ctx, first)
        if isinstance(found, Kinds):
            found = found.get_command(ctx, kind)
    assert isinstance(found, Command)
    return found


def options(made: click.Command) -> list[click.Option]:
    return [one for one in made.params if isinstance(one, click.Option)]


def tried() -> dict[str, set[str]]:
    """The options that tests have tried, by command: from what they pass to ``run`` and others."""
    found: dict[str, set[str]] = {}
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call | ast.Tuple):
                parts = node.args if isinstance(node, ast.Call) else node.elts
                words = [
                    one.value for one in parts
                    if isinstance(one, ast.Constant) and isinstance(one.value, str)
                ]  # fmt: skip
                for at, word in list(enumerate(words)):
                    if word in MODULE_OF:
                        name = " ".join(words[at : at + 2]) if word in GROUPS else word
                        found.setdefault(name, set()).update(words)
                        break
    return found


TRIED = tried()


@pytest.mark.parametrize("name", NAMES)
def test_every_command_and_option_has_help(name: str) -> None:
    made = command(name)
    assert made.help
    assert made.examples
    assert all("casstore " in example for example in made.examples)
    # Its first sentence says it, and fits on the list of all commands.
    assert made.get_short_help_str(100).endswith(".")
    assert not made.get_short_help_str(100).endswith("...")
    for option in options(made):
        assert option.help, option.name
        assert option.help.endswith("."), option.name
    for argument in made.params:
        if isinstance(argument, click.Argument):
            for word in (argument.metavar or argument.name or "").split():
                for shown in word.strip("[]….").rstrip("_").upper().split("|"):
                    assert shown in (made.help or "").upper(), f"the help does not name {shown}"


@pytest.mark.parametrize("name", NAMES)
def test_every_command_and_option_is_documented(name: str) -> None:
    section = DOCUMENT.split(f"### `{name}`\n")[1].split("\n### ")[0]
    made = command(name)
    for option in options(made):
        if option not in COMMON:
            assert f"`{option.opts[0]}`" in section
    # All kinds of an import have one answer.
    if name.startswith("import "):
        section = DOCUMENT.split("### `import`\n")[1].split("\n### ")[0]
    for key, meaning in made.shape.lines():
        assert f"`{key}`" in section
        assert meaning or key.startswith("packages.")


def test_the_package_names_the_module_of_every_command() -> None:
    """A module that is not listed has one command, of its own name."""
    listed = {
        name: module
        for module, names in re.findall(r"^    (\w+) {2,}(.+)$", cli_package.__doc__ or "", re.M)
        for name in names.split(", ")
    }
    alone = {name: name for name in MODULE_OF if name not in listed}
    assert {**listed, **alone} == MODULE_OF


@pytest.mark.parametrize("name", NAMES)
def test_every_command_and_option_is_tried_by_a_test(name: str) -> None:
    words = TRIED.get(name, set())
    assert words, f"no test runs casstore {name}"
    for option in options(command(name)):
        if option not in COMMON:
            assert words & set(option.opts), f"no test gives {option.opts} to casstore {name}"
    assert "--json" in words, f"no test asks casstore {name} for JSON"


def test_every_common_option_is_tried_by_a_test() -> None:
    words = set().union(*TRIED.values())
    for option in COMMON:
        assert words & set(option.opts), option.opts


def test_the_help_of_import_lists_every_kind_with_one_line() -> None:
    shown = run("import", "--help").out
    for kind, made in import_.commands.items():
        [line] = [line for line in shown.splitlines() if line.startswith(f"  {kind} ")]
        assert line.split(None, 1)[1] in made.get_short_help_str(100)
        assert "--dry-run" in run("import", kind, "--help").out
    assert run("import", store=None, ends=2).err == shown


def test_a_kind_that_does_not_exist_gets_a_suggestion(tmp_path: Path) -> None:
    for wrong, near in (("langgraph-checkpoint", "langgraph-checkpoints"), ("lsh", "lash")):
        told = run("import", wrong, str(tmp_path), ends=2).err
        assert f"No such kind {wrong!r}" in told
        assert f"Did you mean {near!r}?" in told
        assert "try: casstore import --help" in told
    assert "bundle, jsonl" in run("import", "zzzz", "x", ends=2).err


def test_help_all_lists_every_command_on_one_line() -> None:
    shown = run("help", "all").out
    for name in MODULE_OF:
        [line] = [line for line in shown.splitlines() if line.startswith(f"  {name} ")]
        assert line.endswith(".")
    for section in SECTIONS:
        assert f"{section}:" in shown


def test_help_explains_names_and_describes_commands() -> None:
    assert "SESSION@REVISION" in run("help", "names").out
    assert "langgraph:t0" in run("help", "names").out
    assert run("help", "fork").out == run("fork", "--help").out
    assert run("help", "ls").out == run("sessions", "--help").out
    assert run("help", "import", "lash").out == run("import", "lash", "--help").out
    assert run("help", "--json").json["text"] + "\n" == run("--help").out
    assert "Did you mean 'fork'?" in run("help", "frk", ends=2).err
    run("help", "fork", "log", ends=2)


def test_the_short_help_lists_the_dozen_commands_that_most_people_need() -> None:
    answer = subprocess.run(
        [sys.executable, "-m", "casstore", "--help"],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    wanted = [name for names in COMMON_TASKS.values() for name in names]
    assert len(wanted) == 12
    for name in MODULE_OF:
        assert (f"\n  {name} " in answer.stdout) == (name in wanted)
    bare = subprocess.run(
        [sys.executable, "-m", "casstore"],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    assert (bare.returncode, bare.stdout, bare.stderr) == (2, "", answer.stdout)


def test_the_cli_reference_is_up_to_date() -> None:
    subprocess.run([sys.executable, "tools/cli_docs.py", "--check"], check=True, cwd=ROOT)


def test_only_the_command_line_imports_click_and_rich() -> None:
    script = "import casstore, sys; print({'click', 'rich'} & set(sys.modules))"
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert answer.stdout == "set()\n"
    # Asking for something small does not load what tables need.
    script = "import sys; sys.argv = ['casstore', 'version']\nfrom casstore.cli.main import cli\n"
    script += (
        "try: cli.main()\nexcept SystemExit: print('rich' in sys.modules, 'lmdb' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert answer.stdout.splitlines()[-1] == "False False"
