"""The examples in docstrings: everything public has one, and every one runs.

An example may use the names of ``casstore``, those of the module that it stands in, and what
``Supplied`` has. All that is new for each docstring, so no example depends on another.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import casstore
from casstore import Checkpoint, Commit, NodeDraft, Usage
from casstore.objects.view import View
from casstore.records.lifecycles import Lifecycles
from casstore.records.lifecycles.kept_records import KeptRecords
from casstore.records.lifecycles.user_data import UserData
from casstore.records.lifecycles.working_state import WorkingState
from casstore.records.log import NewMessage, SessionLog
from casstore.records.runs import Runs, steps
from casstore.records.scoped import Context, ScopedState
from casstore.session.attachments import Attachments
from casstore.session.compare import Comparison
from casstore.session.loading import Nodes, SessionState
from casstore.session.queue import Queue
from casstore.session.session import Session
from casstore.store import Store

ROOT = Path(casstore.__file__).parent
MODULES = sorted(
    info.name
    for info in pkgutil.walk_packages([str(ROOT)], "casstore.")
    if not info.name.startswith("casstore.testing")
)


class Supplied:
    """What examples find there, each made when it is first asked for."""

    def __init__(self, place: Path, closing: ExitStack) -> None:
        self._place = place
        self._closing = closing

    @cached_property
    def place(self) -> Path:
        """An empty directory, but for the store in ``place / "store"``."""
        self._place.mkdir()
        return self._place

    @cached_property
    def store(self) -> Store:
        """An open store, with the session ``s``."""
        store = casstore.open(self.place / "store", "relaxed", auto_train=False)
        self._closing.enter_context(store)
        session = store.session("s")
        ask = NodeDraft("ask", {"role": "user", "text": "which way?"})
        session.commit(Commit(append=[ask], label="start"))
        left = NodeDraft("left", {"role": "assistant", "text": "left"})
        also = Checkpoint(tool_state={"cwd": "/repo"})
        used = Usage("agent", "model-1", input=900, output=120)
        session.commit(Commit(append=[left], checkpoint=also, usage=[used]))
        return store

    @cached_property
    def session(self) -> Session:
        """The session ``s``: a question, labelled ``start``, and then the answer."""
        return self.store.session("s")

    @cached_property
    def other(self) -> Store:
        """Another store, with nothing in it."""
        other = casstore.open(self.place / "other", "relaxed", auto_train=False)
        return self._closing.enter_context(other)

    @cached_property
    def view(self) -> View:
        """A view of a stored map: a title, and a thousand numbered messages."""
        messages = [{"role": "user", "text": f"message {number}"} for number in range(1000)]
        digest = self.store.put_value({"title": "a long talk", "messages": messages})
        view = self.store.view(digest)
        assert isinstance(view, View)
        return view

    @cached_property
    def log(self) -> SessionLog:
        """A session log with the session ``chat``: a question and an answer."""
        log = SessionLog(self.store)
        log.create("chat")
        log.extend("chat", [NewMessage("user", "which way?"), NewMessage("assistant", "left")])
        return log

    @cached_property
    def runs(self) -> Runs:
        """Runs, with the thread ``t`` of the agent ``helper`` and its run ``r``."""
        runs = Runs(self.store)
        runs.create_thread("t", "helper")
        runs.create_run("t", "r", "helper", "stream")
        return runs

    @cached_property
    def state(self) -> ScopedState:
        """Scoped state, with nothing in it."""
        return ScopedState(self.store)

    @cached_property
    def context(self) -> Context:
        """Where things happen: anna talks to the runner ``helper``."""
        return Context("helper", bot_id="bot", conversation_id="c1", actor_id="anna")

    @cached_property
    def life(self) -> Lifecycles:
        """Lifecycles, with nothing in them."""
        return Lifecycles(self.store)


SUPPLIED = {name for name in vars(Supplied) if not name.startswith("_")}


def names_in(test: doctest.DocTest) -> set[str]:
    trees = [ast.parse(example.source) for example in test.examples]
    return {part.id for tree in trees for part in ast.walk(tree) if isinstance(part, ast.Name)}


def public_names(package: ModuleType) -> dict[str, Any]:
    return {name: getattr(package, name) for name in getattr(package, "__all__", ())}


def run_examples(test: doctest.DocTest, place: Path) -> list[str]:
    """Run the examples of one docstring; what they say that they should not."""
    said: list[str] = []
    with ExitStack() as closing:
        supplied = Supplied(place, closing)
        test.globs = {
            "casstore": casstore,
            # What leaving the lease out means; examples of other packages still name it.
            **public_names(casstore),
            **public_names(importlib.import_module(test.globs["__package__"])),
            **test.globs,
            **{name: getattr(supplied, name) for name in sorted(SUPPLIED & names_in(test))},
        }
        doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    return said


def count_examples(module: str) -> int:
    """How many docstrings of a module have examples, without importing it."""
    place = ROOT.parent.joinpath(*module.split("."))
    source = (place / "__init__.py" if place.is_dir() else place.with_suffix(".py")).read_text()
    if ">>>" not in source:
        return 0
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    parts = [part for part in ast.walk(ast.parse(source)) if isinstance(part, kinds)]
    return sum(">>>" in (ast.get_docstring(part) or "") for part in parts)


WITH_EXAMPLES = [module for module in ("casstore", *MODULES) if count_examples(module)]
# What must be installed for a module, or a package, and its examples.
NEEDED = {
    "casstore.adapters.claude": "claude_agent_sdk",
    "casstore.adapters.langgraph": "langgraph.graph",
    "casstore.adapters.langgraph.checkpoint_import": "langgraph.checkpoint.sqlite",
    "casstore.adapters.langgraph.item_import": "langgraph.store.sqlite",
    "casstore.adapters.openai_agents": "agents",
    "casstore.records.lifecycles.key_files": "cryptography",
    "casstore.workspace": "pathspec",
}


def imported(module: str) -> ModuleType:
    for named, package in NEEDED.items():
        if f"{module}.".startswith(f"{named}."):
            pytest.importorskip(package, reason="needs the extra: pip install '.[dev]'")
    return importlib.import_module(module)


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """An empty directory, gone afterwards; in memory if there is such a place, to be quick."""
    memory = Path("/dev/shm")
    kept_in = memory if memory.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="casstore-examples-", dir=kept_in) as place:
        yield Path(place)


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_in_docstrings_run(module: str, scratch: Path) -> None:
    found = doctest.DocTestFinder(exclude_empty=True).find(imported(module), module)
    tests = [test for test in found if test.examples]
    assert len(tests) == count_examples(module)
    said = [run_examples(test, scratch / test.name) for test in tests]
    if any(said):
        pytest.fail("".join(line for lines in said for line in lines), pytrace=False)


def test_no_docstring_example_uses_a_doctest_directive() -> None:
    sources = {path: path.read_text() for path in ROOT.rglob("*.py")}
    assert [str(path) for path, source in sources.items() if "doctest:" in source] == []


# --- what must have one --------------------------------------------------------------------------

# Every class and function that these name, and every method of the classes.
WHOLE = [
    "casstore",
    "casstore.maintenance.retention",
    "casstore.records.lifecycles",
    "casstore.records.log",
    "casstore.records.runs",
    "casstore.records.scoped",
    "casstore.workspace",
]
# Every class and function; their methods are those of others, awaited or under another name.
FACES = [
    "casstore.aio",
    "casstore.records.aio",
    "casstore.adapters.claude",
    "casstore.adapters.langgraph",
    "casstore.adapters.openai_agents",
]
# What calls on the former hand out, with methods of its own.
HANDED_OUT = [
    Attachments, Comparison, KeptRecords, Nodes, Queue, SessionState, UserData, WorkingState,
]  # fmt: skip

REPORT = "a report: the example of what returns it shows it"
PROVIDER = "for maintenance.erasure alone to call; the class has an example with that"
PROTOCOL = "a protocol to implement: FileKeys does, and has examples"
EXCUSED = {
    "casstore.maintenance.files.require_directory": "a check that others here make",
    "casstore.maintenance.files.whole_file": "how others here write their files",
    "casstore.records.lifecycles.key_files.KeyStore": PROTOCOL,
    "casstore.records.lifecycles.key_files.KeyStore.create": PROTOCOL,
    "casstore.records.lifecycles.key_files.KeyStore.destroy": PROTOCOL,
    "casstore.records.lifecycles.key_files.KeyStore.get": PROTOCOL,
    "casstore.records.lifecycles.user_data.UserData.remove": "a part of Lifecycles.remove",
    "casstore.records.scoped.erasure.ActorErasure.erase": PROVIDER,
    "casstore.records.scoped.erasure.ActorErasure.find": PROVIDER,
    "casstore.records.scoped.erasure.ActorErasure.name": PROVIDER,
    "casstore.records.scoped.erasure.ActorErasure.roots": PROVIDER,
    "casstore.records.scoped.erasure.ActorErasure.rows": PROVIDER,
    "casstore.records.scoped.erasure.ActorErasure.stays": PROVIDER,
    "casstore.records.scoped.erasure.ActorErasure.recipients": PROVIDER,
}

Documented = dict[str, str]


def name_of(part: Any) -> str:
    return f"{part.__module__}.{part.__qualname__}"


def documented(part: Any) -> Documented:
    """A class or function by its full name, and what it says of itself."""
    return {name_of(part): part.__doc__ or ""}


def with_methods(kind: type) -> Documented:
    """The same of a class and of its public methods and properties."""
    found = documented(kind)
    for name, part in vars(kind).items():
        method = isinstance(part, property | classmethod | staticmethod)
        if not name.startswith("_") and (method or inspect.isfunction(part)):
            found[f"{name_of(kind)}.{name}"] = part.__doc__ or ""
    return found


def is_documented(part: Any) -> bool:
    return inspect.isclass(part) or inspect.isfunction(part)


def of_package(package: str) -> Documented:
    module = imported(package)
    found: Documented = {}
    for name in module.__all__:
        part = getattr(module, name)
        if inspect.isclass(part) and package in WHOLE:
            found |= with_methods(part)
        elif is_documented(part):
            found |= documented(part)
    return found


def public_in(module: ModuleType) -> list[Any]:
    """Public classes and functions that a module itself defines."""
    return [
        part
        for name, part in vars(module).items()
        if not name.startswith("_") and is_documented(part) and part.__module__ == module.__name__
    ]


def handed_out() -> Documented:
    found: Documented = {}
    for kind in [*HANDED_OUT, *public_in(steps)]:
        found |= with_methods(kind)
    return found


def of_maintenance() -> Documented:
    """What is called with a store, with where one is, or with what is kept in one."""
    given = ("Store", "str | os.PathLike[str]", "Lifecycles")
    found: Documented = {}
    for module in [name for name in MODULES if name.startswith("casstore.maintenance.")]:
        for part in filter(inspect.isfunction, public_in(importlib.import_module(module))):
            asked = list(inspect.signature(part).parameters.values())
            if asked and asked[0].annotation in given:
                found |= documented(part)
    return found


def of_other_stores() -> Documented:
    """What stands in for the stores of others: classes that are made with a store."""
    found: Documented = {}
    for module in [name for name in MODULES if name.startswith("casstore.compat.")]:
        for part in filter(inspect.isclass, public_in(importlib.import_module(module))):
            if "store" in inspect.signature(part.__init__).parameters:
                found |= documented(part)
    return found


def of_guides() -> Documented:
    """What the guides import: whoever reads them calls it."""
    importing = re.compile(r"^from (casstore[\w.]*) import ([\w, ]+)$", re.MULTILINE)
    found: Documented = {}
    for guide in [ROOT.parent / "README.md", *(ROOT.parent / "docs").rglob("*.md")]:
        for module, names in importing.findall(guide.read_text()):
            if module.startswith(("casstore.errors", "casstore.engine", "casstore.testing")):
                continue  # explained by the table of errors; for writers of engines
            try:
                there = imported(module)
            except pytest.skip.Exception:
                continue
            parts = [getattr(there, name, None) for name in names.split(", ")]
            for part in filter(is_documented, parts):
                found |= documented(part)
    return found


WANTED: dict[str, Callable[[], Documented]] = {
    **{package: partial(of_package, package) for package in (*WHOLE, *FACES)},
    "what these hand out": handed_out,
    "maintenance": of_maintenance,
    "other stores": of_other_stores,
    "guides": of_guides,
}


def without_example(wanted: Documented) -> list[str]:
    return [name for name, said in wanted.items() if ">>>" not in said]


@pytest.mark.parametrize("part", WANTED)
def test_everything_public_has_an_example(part: str) -> None:
    wanted = WANTED[part]()
    assert len(wanted) > 1
    assert [name for name in without_example(wanted) if name not in EXCUSED] == []


def test_every_exception_from_the_example_rule_is_still_needed() -> None:
    lacking = {name for part in WANTED.values() for name in without_example(part())}
    assert set(EXCUSED) - lacking == set()


def test_the_example_rule_covers_every_kind_of_method() -> None:
    class Face:
        """Made here.

        >>> Face()
        """

        def said(self) -> None:
            """Has one.

            >>> Face().said()
            """

        def method(self) -> None:
            """Has none."""

        @property
        def asked(self) -> None:
            """Has none."""

        @classmethod
        def made(cls) -> None:
            """Has none."""

        @staticmethod
        def plain() -> None:
            """Has none."""

        def _inner(self) -> None:
            pass

    lacking = [name.rpartition(".")[2] for name in without_example(with_methods(Face))]
    assert lacking == ["method", "asked", "made", "plain"]
