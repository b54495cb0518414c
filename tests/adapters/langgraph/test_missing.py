"""Without LangGraph: casstore works, and the adapter says what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

BLOCK = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("langgraph", "langchain_core", "ormsgpack"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


def run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_casstore_works_without_it(tmp_path: Path) -> None:
    answer = run(
        BLOCK
        + f"import casstore\nwith casstore.open({str(tmp_path / 's')!r}, 'relaxed') as store:\n"
        "    print(store.get_value(store.put_value([1])))"
    )
    assert answer.stdout == "[1]\n", answer.stderr


def test_the_adapter_says_what_to_install() -> None:
    answer = run(BLOCK + "import casstore.adapters.langgraph")
    assert answer.returncode == 1
    assert "pip install '.[langgraph]'" in answer.stderr


def test_importing_casstore_does_not_load_it() -> None:
    answer = run(
        "import sys, casstore, casstore.session.records, casstore.maintenance.gc\n"
        "print([name for name in sys.modules if name.split('.')[0] in ('langgraph', 'ormsgpack')])"
    )
    assert answer.stdout == "[]\n", answer.stderr


def test_an_index_without_numpy_says_what_to_install() -> None:
    answer = run(
        "import sys; sys.modules['numpy'] = None\n"
        "from casstore.adapters.langgraph import CasstoreStore\n"
        "from casstore.engine.memory import MemoryEngine\n"
        "from casstore.store import Store\n"
        "store = Store(MemoryEngine())\n"
        "print(CasstoreStore(store).search(('a',)))\n"
        "CasstoreStore(store, index={'dims': 2, 'embed': lambda texts: []})"
    )
    assert answer.stdout == "[]\n", answer.stderr
    assert "pip install '.[vectors]'" in answer.stderr
