"""Without the SDKs of agents: casstore works, and each adapter says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

BLOCK = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("agents", "claude_agent_sdk"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("module", "extra"), [("claude", "claude"), ("openai_agents", "openai-agents")]
)
def test_an_adapter_says_what_to_install(module: str, extra: str) -> None:
    answer = run(BLOCK + f"import casstore.adapters.{module}")
    assert answer.returncode == 1
    assert f"pip install '.[{extra}]'" in answer.stderr


def test_the_command_says_what_to_install(tmp_path: Path) -> None:
    answer = run(
        BLOCK + "from casstore.cli.main import cli\n"
        f"cli.main(['import', 'openai-agents', 'a.db', '--store', {str(tmp_path)!r}])"
    )
    assert answer.returncode == 2
    assert "pip install '.[openai-agents]'" in answer.stderr


def test_importing_casstore_and_the_jsonl_adapter_loads_no_sdk() -> None:
    answer = run(
        "import sys, casstore, casstore.adapters.jsonl, casstore.maintenance.gc\n"
        "names = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(names & {'agents', 'claude_agent_sdk', 'anyio', 'openai'}))"
    )
    assert answer.stdout == "[]\n", answer.stderr
