"""The shape of the code itself: imports point down, third-party packages have one door each."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "casstore"

# Bottom first. A module may import from its own layer and from those below it.
LAYERS = (
    ("errors", "version"),
    ("format",),
    ("engine",),
    ("objects",),
    ("store", "session", "aio"),
    ("maintenance",),
    ("records",),
    ("compat",),
    ("workspace",),
    ("search",),
    ("adapters", "cli", "mcp", "ui", "__main__"),
    ("testing",),
)
# Nothing in the core loads a module of an extension.
CORE = (
    "errors",
    "version",
    "format",
    "engine",
    "objects",
    "store",
    "session",
    "aio",
    "maintenance",
)
EXTENSIONS = ("records", "compat", "adapters", "workspace", "search", "cli", "mcp", "ui")
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}

# The package itself offers the public names, so it stands on top of all but testing.
HEIGHT["__init__"] = HEIGHT["testing"]

# Where a third-party package may be imported: a module, or everything in a package.
DOORS = {
    "blake3": ("casstore.format.digest",),
    "msgpack": ("casstore.format.canonical",),
    "pyfastcdc": ("casstore.format.chunking",),
    "zstandard": ("casstore.engine.compression",),
    "lmdb": ("casstore.engine.lmdb",),
    "psycopg": ("casstore.engine.postgres", "casstore.compat.postgres_source"),
    "psycopg_pool": ("casstore.engine.postgres",),
    "click": ("casstore.cli",),
    "rich": ("casstore.cli",),
    "langgraph": ("casstore.adapters.langgraph",),
    "langchain_core": ("casstore.adapters.langgraph",),
    "ormsgpack": ("casstore.adapters.langgraph",),
    "numpy": ("casstore.adapters.langgraph.vector_search",),
    "claude_agent_sdk": ("casstore.adapters.claude",),
    # A part of the Claude Agent SDK's own interface: it runs on asyncio and on trio.
    "anyio": ("casstore.adapters.claude",),
    "agents": ("casstore.adapters.openai_agents",),
    "cryptography": ("casstore.records.lifecycles.encryption",),
    "pathspec": ("casstore.workspace.rules",),
    "starlette": ("casstore.ui",),
    "uvicorn": ("casstore.ui.serving",),
    "jinja2": ("casstore.ui.pages",),
    "markupsafe": ("casstore.ui",),
    "mcp": ("casstore.mcp.server",),
    "pytest": ("casstore.testing",),
    "hypothesis": ("casstore.testing",),
}

# Who may know that the engine is LMDB: itself, what opens engines, and what works on closed ones.
LMDB_ENGINE = "casstore.engine.lmdb"
OPENERS = (
    "casstore.engine.lmdb",
    "casstore.engine.postgres.disk_cache",
    "casstore.store",
    "casstore.aio",
    "casstore.maintenance.compact",
    "casstore.maintenance.recover",
    "casstore.maintenance.salvage",
    "casstore.testing",
)

FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "core", "manager"}

# Classes whose name another class has too, and why they may. Each name has one more definition,
# which is the one that a reader of the name alone expects.
_LANGGRAPH = "is a part of how LangGraph's data is stored, and stays within the adapter"
SAME_NAMES = {
    "casstore.adapters.langgraph.layout.HeadRow": _LANGGRAPH,
    "casstore.adapters.langgraph.steps.Step": _LANGGRAPH,
    "casstore.adapters.langgraph.vector_search.Snapshot": _LANGGRAPH,
    "casstore.compat.agent_state.AgentSession": "is the name that morrow's programs import",
}

# Uses of private names by tests outside tests/engine, and why they are allowed.
PRIVATE_USES = {
    "tests/adapters/langgraph/test_items.py: _data": "is LangGraph's own InMemoryStore",
    "tests/adapters/openai_agents/test_compaction.py: _get_compaction_snapshot": (
        "is the name by which the SDK calls it"
    ),
    "tests/faults/test_processes.py: _env": "a process is killed inside a read transaction",
    "tests/maintenance/test_backup.py: _env": "a write transaction is aborted during a copy",
    "tests/search/test_index_file.py: _BUDGET": "sets a limit in another process",
    "tests/ui/test_server.py: _socket": "a server that never runs does not close its socket",
}

# What must not be loaded by importing casstore: each costs as much as casstore itself.
SLOW_MODULES = ("dataclasses", "inspect", "asyncio", "ctypes", "typing_extensions")


class Import(NamedTuple):
    """One import statement, resolved to what it names."""

    module: str
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.target}"


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts)] = path
    return found


MODULES = modules()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def without_init(module: str) -> str:
    return module.removesuffix(".__init__")


def imports_of(module: str, path: Path) -> Iterator[Import]:
    """Every import of a module, wherever it stands: in functions and under TYPE_CHECKING too."""
    names = {without_init(name) for name in MODULES}
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: -node.level]
                base = ".".join([*parents, *filter(None, [base])])
            for alias in node.names:
                # ``from package import module`` names the module, not the package.
                inner = f"{base}.{alias.name}"
                yield Import(module, node.lineno, inner if inner in names else base)


@functools.cache
def imports() -> list[Import]:
    return [found for module, path in MODULES.items() for found in imports_of(module, path)]


def layer(module: str) -> str:
    return [*module.split("."), "__init__"][1]


def inside(module: str, place: str) -> bool:
    return module == place or module.startswith(place + ".")


def test_the_layer_checks_find_modules_and_imports() -> None:
    assert len(MODULES) > 20
    assert len(imports()) > 100


def test_every_module_belongs_to_a_layer() -> None:
    strange = [module for module in MODULES if layer(module) not in HEIGHT]
    assert strange == [], "add the layer to LAYERS, at its height"


def test_imports_point_down_only() -> None:
    wrong = [
        str(found)
        for found in imports()
        if inside(found.target, "casstore")
        and layer(found.target) != layer(found.module)
        and HEIGHT[layer(found.target)] >= HEIGHT[layer(found.module)]
        # The store opens for asyncio callers what it opens for others, and the like.
        and not HEIGHT[layer(found.target)] == HEIGHT[layer(found.module)] > HEIGHT["objects"]
        # ``store.gc()`` and the like load maintenance when they are called.
        and not (found.module == "casstore.store" and layer(found.target) == "maintenance")
    ]
    assert wrong == []


def test_nothing_but_itself_imports_the_testing_package() -> None:
    wrong = [
        str(found)
        for found in imports()
        if inside(found.target, "casstore.testing") and not inside(found.module, "casstore.testing")
    ]
    assert wrong == []


def test_only_the_command_line_imports_the_viewer() -> None:
    wrong = [
        str(found)
        for found in imports()
        if inside(found.target, "casstore.ui")
        and not inside(found.module, "casstore.ui")
        and found.module != "casstore.cli.ui"
    ]
    assert wrong == []


def test_only_modules_that_open_engines_import_the_lmdb_engine() -> None:
    wrong = [
        str(found)
        for found in imports()
        if inside(found.target, LMDB_ENGINE)
        and not any(inside(found.module, opener) for opener in OPENERS)
    ]
    assert wrong == []


def test_only_listed_modules_import_each_third_party_package() -> None:
    wrong = []
    for found in imports():
        package = found.target.split(".")[0]
        if package == "casstore" or package in sys.stdlib_module_names:
            continue
        doors = DOORS.get(package, ())
        if not any(inside(without_init(found.module), door) for door in doors):
            wrong.append(str(found))
    assert wrong == []


def test_the_format_does_no_input_or_output_and_reads_no_clock() -> None:
    outside = {"os", "io", "time", "datetime", "socket", "pathlib", "subprocess", "threading"}
    wrong = [
        str(found)
        for found in imports()
        if layer(found.module) == "format" and found.target.split(".")[0] in outside
    ]
    assert wrong == []


def test_no_module_name_contains_a_meaningless_word() -> None:
    def words(module: str) -> set[str]:
        return {word for part in module.split(".") for word in part.split("_")}

    assert [module for module in MODULES if words(module) & FORBIDDEN_NAMES] == []


def shared_class_names() -> dict[str, list[str]]:
    """Class names that several modules define, and their definitions."""
    defined: dict[str, list[str]] = {}
    for module, path in MODULES.items():
        for node in parsed(path).body:
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, []).append(f"{without_init(module)}.{node.name}")
    return {name: places for name, places in defined.items() if len(places) > 1}


def test_no_private_class_name_has_two_meanings() -> None:
    assert [name for name in shared_class_names() if is_private(name)] == []


def test_no_public_class_name_has_two_meanings() -> None:
    shared = [places for name, places in shared_class_names().items() if not is_private(name)]
    assert SAME_NAMES.keys() <= {place for places in shared for place in places}, "no longer needed"
    unexcused = [[one for one in places if one not in SAME_NAMES] for places in shared]
    assert [places for places in unexcused if len(places) > 1] == []


def test_every_test_module_lies_in_the_folder_of_a_package_whose_name_it_does_not_repeat() -> None:
    tests = ROOT / "tests"
    folders = {path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py")}
    folders |= {Path("faults"), Path("tools")}
    wrong = [
        str(path)
        for path in (each.relative_to(tests) for each in tests.rglob("test_*.py"))
        if path.parent not in folders or path.stem.startswith(f"test_{path.parent.name}_")
    ]
    assert wrong == []


def private_names(tree: ast.AST) -> set[str]:
    """The private names that a module defines, those of its classes included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in found if is_private(name)}


def is_private(name: str) -> bool:
    is_of_tuples = name in ("_replace", "_asdict", "_fields", "_make")
    return name.startswith("_") and not name.startswith("__") and name != "_" and not is_of_tuples


def programs(tree: ast.AST) -> Iterator[ast.AST]:
    """A test module, and the programs in its strings, which it runs in other processes."""
    yield tree
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and "import" in text and "casstore" in text:
            with suppress(SyntaxError):
                yield ast.parse(text)


def private_uses(path: Path, of_casstore: set[str]) -> Iterator[str]:
    """The private names of casstore that a test module uses, as ``path: name``."""
    tree = parsed(path)
    foreign = of_casstore - private_names(tree)
    for program in programs(tree):
        for node in ast.walk(program):
            names = set()
            if isinstance(node, ast.ImportFrom) and inside(node.module or "", "casstore"):
                names = {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute):
                owner = node.value
                if not (isinstance(owner, ast.Name) and owner.id in ("self", "cls")):
                    names = {node.attr} & foreign
            yield from (f"{path.relative_to(ROOT)}: {each}" for each in names if is_private(each))


def test_tests_outside_the_engine_use_no_private_name_of_casstore() -> None:
    """Names in strings are allowed: they replace a limit or a function to inject a fault."""
    of_casstore = set[str]().union(*[private_names(parsed(path)) for path in MODULES.values()])
    assert {"_env", "_runtime", "_objects"} <= of_casstore
    uses = {
        use
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if ROOT / "tests" / "engine" not in path.parents
        for use in private_uses(path, of_casstore)
    }
    assert PRIVATE_USES.keys() <= uses, "no longer needed"
    assert sorted(uses - PRIVATE_USES.keys()) == []


def test_every_module_has_a_docstring_that_begins_with_a_sentence() -> None:
    def begins(path: Path) -> str:
        return (ast.get_docstring(parsed(path)) or "\n").splitlines()[0]

    ends = (".", ":", ")", "?")
    assert [module for module, path in MODULES.items() if not begins(path).endswith(ends)] == []


def loaded_by(module: str) -> set[str]:
    """What a fresh interpreter has loaded after importing ``module``."""
    return set(run_alone(f"import {module}; print('\\n'.join(sys.modules))").split())


def run_alone(script: str) -> str:
    """What a script prints in a fresh interpreter."""
    # -I and -S leave out site-packages' own start-up code, which may import anything.
    paths = [str(ROOT), *[path for path in sys.path if path.endswith("site-packages")]]
    answer = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path += {paths!r}; {script}"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return answer.stdout


def importable() -> list[str]:
    """Everything that an importer of casstore loads, whether or not it asks for it."""
    chosen = [without_init(module) for module in MODULES if layer(module) != "testing"]
    # casstore.aio is for those who have loaded asyncio themselves.
    lean = ("errors", "version", "format", "engine", "objects", "store", "__init__")
    # psycopg is loaded by those who open a store on a server, ctypes by those who watch or fork.
    later = (
        "casstore.engine.postgres",
        "casstore.engine.lmdb.inotify",
        "casstore.engine.lmdb.inheritance",
    )
    return [
        module
        for module in chosen
        if layer(module) in lean and not any(inside(module, one) for one in later)
    ]


def test_importing_casstore_loads_nothing_slow() -> None:
    modules = importable()
    assert "casstore.engine.lmdb.engine" in modules
    loaded = loaded_by(", ".join(modules))
    assert "casstore.engine.lmdb.engine" in loaded
    slow = sorted(loaded & set(SLOW_MODULES))
    if slow:
        # Say which of them is to blame.
        for module in modules:
            culprits = loaded_by(module) & set(slow)
            assert not culprits, f"{module} loads {sorted(culprits)}"
    assert slow == []


def test_importing_casstore_does_not_load_what_only_sessions_and_maintenance_need() -> None:
    loaded = loaded_by(", ".join(importable()))
    unneeded = ("casstore.session", "casstore.maintenance")
    assert [name for name in loaded if any(inside(name, package) for package in unneeded)] == []


# Imports each module alone, in an interpreter that has loaded nothing else of casstore: a fork of
# one that has loaded the third-party packages, which take most of the time.
_ALONE = """
import importlib, os, sys
for package in {packages!r}:
    importlib.import_module(package)
for module in {modules!r}:
    if os.fork() == 0:
        importlib.import_module(module)
        print(module, *[name for name in sys.modules if name.startswith("casstore.")], flush=True)
        os._exit(0)
    status = os.wait()[1]
    assert status == 0, module
"""


def test_importing_a_core_module_alone_loads_no_module_of_an_extension() -> None:
    core = [without_init(module) for module in MODULES if layer(module) in CORE]
    assert "casstore.maintenance.systems" in core
    packages = ["blake3", "lmdb", "msgpack", "psycopg", "psycopg_pool", "zstandard", "asyncio"]
    answer = run_alone(_ALONE.format(packages=packages, modules=core))
    loaded = {line.split()[0]: line.split()[1:] for line in answer.splitlines()}
    assert list(loaded) == core
    assert "casstore.engine.protocol" in loaded["casstore.maintenance.vacuum"]
    foreign = {*EXTENSIONS, "testing"}
    wrong = {
        module: [name for name in names if layer(name) in foreign]
        for module, names in loaded.items()
        if any(layer(name) in foreign for name in names)
    }
    assert wrong == {}


def test_the_core_imports_no_extension_even_inside_a_function() -> None:
    wrong = [
        str(found)
        for found in imports()
        if layer(found.module) in CORE
        and inside(found.target, "casstore")
        and layer(found.target) in EXTENSIONS
    ]
    assert wrong == []


def test_opening_a_store_loads_of_the_page_reader_only_the_meta_pages() -> None:
    place = "casstore.engine.lmdb.page_scan"
    loaded = loaded_by("casstore.engine.lmdb.engine")
    assert {name for name in loaded if inside(name, place)} == {place, f"{place}.meta"}


def test_importing_casstore_does_not_load_what_only_long_blobs_need() -> None:
    assert "pyfastcdc" not in loaded_by(", ".join(importable()))
