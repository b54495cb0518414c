"""Record systems: packages that store rows of their own in the table ``records``.

A session log, runs, LangGraph threads: each is a record system. The name of a system is the part of
its table names before the first dot, so the tables ``log.sessions`` and ``log.usage`` belong to
the system ``log``. Maintenance reads the names from the rows of a store, and loads the code of a
system only then, by the entry point of that name in the group ``casstore.systems``:

    [project.entry-points."casstore.systems"]
    log = "casstore.records.log.system:SYSTEM"

Rows of a system that is not installed need no code: gc keeps what they link to, and copies carry
them. ``check``, ``expire_rows``, erasure, gc and ``stats`` report the system by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, runtime_checkable

from casstore.engine.protocol import Engine
from casstore.errors import InvalidInputError
from casstore.session import catalogue, entry_points
from casstore.session.arguments import check_text
from casstore.session.record_keys import past
from casstore.session.records import Table
from casstore.session.scanning import scan
from casstore.session.state import Runtime
from casstore.store import Store, check_store

if TYPE_CHECKING:
    from casstore.maintenance.consistency import Facts, Judges
    from casstore.maintenance.erasure import Provider
    from casstore.maintenance.findings import Meaning

#: The group of entry points that systems are registered in.
GROUP: Final = "casstore.systems"
_TABLE: Final = "records"
# Rows of the core itself: ``keepers``.
_OF_CORE: Final = frozenset(("vacuum",))
_MAX_ENTRIES: Final = 10_000
_PAGE: Final = 256
# How many levels of maps ``content_texts`` opens: LangGraph's entries have namespaces and channels.
_TEXT_DEPTH: Final = 2


class SystemEntry(NamedTuple):
    """One thing that a system stores, as a list of the store's content shows it.

    Attributes:
        id: its id within the system
        title: how a person recognises it
        changed_at_ms: when it last changed, null if not known
        size_bytes: keys and values of its rows, without objects that they link to
    """

    id: str
    title: str
    changed_at_ms: int | None
    size_bytes: int


class EntryStep(NamedTuple):
    """One step in the history of an entry, as ``casstore log`` lists it."""

    id: str
    #: When it was made; None if the system does not know.
    made_at_ms: int | None
    #: One line for people.
    summary: str
    #: Its fields in JSON.
    details: Mapping[str, Any]


class EntryText(NamedTuple):
    """One part of an entry that a search can find."""

    #: Names it within its entry; it stays the same while the part does: ``messages/3``.
    position: str
    #: All strings in it are searched.
    value: Any
    #: When it was made; None: when the entry last changed.
    made_at_ms: int | None = None


@runtime_checkable
class RecordSystem(Protocol):
    """What maintenance asks of a record system.

    A subclass overrides what applies to it: without, a method finds nothing and does nothing.
    """

    #: The start of its tables' names, up to the dot, and the name of its entry point.
    name: str
    #: Counts the changes of its row layout.
    version: int
    #: For people: "LangGraph threads".
    title: str
    #: The names of all its tables.
    tables: Collection[str]
    #: What the names of its entries begin with, as in ``langgraph:t0``; "": the system's name.
    prefix: str = ""
    #: Codes of findings that only this system has.
    codes: Mapping[str, Meaning] = {}

    def entries(
        self, store: Store, *, after: str | None = None, limit: int = 100
    ) -> Sequence[SystemEntry]:
        """The next ``limit`` entries after the one with the id ``after``, in a fixed order."""
        ...

    def find_entry(self, store: Store, entry: str) -> SystemEntry | None:
        """One entry by its id. A system that can find it without a scan overrides this."""
        for one in all_entries(self, store):
            if one.id == entry:
                return one
        return None

    def steps(self, store: Store, entry: str, *, limit: int = 100) -> Iterable[EntryStep]:
        """The history of an entry, newest step first; nothing if the system keeps none."""
        return ()

    def content(self, store: Store, entry: str) -> Any:
        """The present content of an entry as a value, for people to read; None: not readable."""
        return None

    def texts(self, store: Store, entry: str) -> Iterable[EntryText]:
        """The parts of an entry that a search can find; by default those of its ``content``."""
        return content_texts(self.content(store, entry))

    def expire(self, store: Store, progress: Callable[[int], None]) -> int:
        """Remove rows that expired, or that an interrupted deletion left; returns how many.

        Calls ``progress`` with the number of records read so far; an exception from it ends the
        work.
        """
        return 0

    def check(self, store: Store, facts: Facts, *, whole: bool) -> Judges:
        """For each table to check, a function that is called with every record of it.

        The function raises CasstoreError or ValueError if the record is damaged, and asks
        ``facts`` whether other rows agree with it. ``whole``: the check reads every object.
        """
        return {}

    def erasure(self) -> Provider | None:
        """What finds and erases records about a subject; None: no record is about a subject."""
        return None

    def rows_of_session(self, store: Store, session: str) -> Iterable[bytes]:
        """The keys of the rows that ``forget_session`` removes."""
        return ()

    def forget_session(self, store: Store, session: str) -> None:
        """Remove the rows about a session of the store that was deleted for good."""
        return

    def after_copy(self, source: Store, target: Store) -> int:
        """Remove rows of ``target`` that contradict those copied from ``source``; returns how many.

        A copy overwrites and adds rows and removes none. Called when ``target`` had rows of this
        system before the copy.
        """
        return 0


def prefix_of(system: RecordSystem) -> str:
    """What the names of a system's entries begin with, without the colon."""
    return system.prefix or system.name


def content_texts(content: Any) -> Iterator[EntryText]:
    """The texts of the content of an entry: each item of a list, and each value in no list.

    >>> [one.position for one in content_texts({"": {"messages": ["a", "b"], "topic": "c"}})]
    ['messages/0', 'messages/1', 'topic']
    """
    return _content_texts(content, ())


def _content_texts(value: Any, path: tuple[str, ...]) -> Iterator[EntryText]:
    if isinstance(value, dict) and len(path) < _TEXT_DEPTH:
        for key, one in value.items():
            yield from _content_texts(one, (*path, key))
    elif isinstance(value, list):
        for at, one in enumerate(value):
            yield EntryText("/".join([*filter(None, path), str(at)]), one)
    elif value is not None:
        yield EntryText("/".join(filter(None, path)), value)


def all_entries(
    system: RecordSystem, store: Store, *, after: str | None = None
) -> Iterator[SystemEntry]:
    """Every entry of a system, read in pages."""
    while page := system.entries(store, after=after, limit=_PAGE):
        yield from page
        after = page[-1].id


class Held(NamedTuple):
    """The systems whose rows a store holds."""

    systems: tuple[RecordSystem, ...]
    #: Those that cannot be used, with the reason.
    missing: dict[str, str]

    def finish_deletion(self, store: Store, runtime: Runtime, session: str) -> None:
        """Remove what is left of a deleted session: the rows of each system about it, then its own.

        Its own rows come last, for they have its subjects: if this is interrupted, an erasure must
        find the session again.
        """
        for system in self.systems:
            system.forget_session(store, session)
        catalogue.finish(runtime, session)


def held_by(store: Store) -> Held:
    """The systems whose rows a store holds, loaded; CorruptionError if a row cannot be read.

    >>> runs.find_thread("t").id  # a thread of the system "runs"
    't'
    >>> [system.title for system in held_by(store).systems]
    ['Runs']
    """
    check_store(store)
    found: list[RecordSystem] = []
    missing: dict[str, str] = {}
    for name in names(store.engine):
        system = load(name)
        if isinstance(system, str):
            missing[name] = system
        else:
            found.append(system)
    return Held(tuple(found), missing)


def names(engine: Engine) -> list[str]:
    """The names of the systems that have rows in a store; reads one row of each."""
    found: list[str] = []
    start = b""
    while rows := engine.scan_rows(_TABLE, start=start, limit=1):
        name, start = _system_part(rows[0].key)
        if name not in _OF_CORE:
            found.append(name)
    # A table "log" and a table "log.usage" are of one system, and others may lie between them.
    return sorted(set(found))


def unregistered(engine: Engine) -> tuple[str, ...]:
    """The names of the systems in a store that no installed package registers; loads no code."""
    return tuple([name for name in names(engine) if not entry_points.registered(GROUP, name)])


def name_of(key: bytes) -> str | None:
    """The system that a row of the table ``records`` belongs to; None: the core itself."""
    name = _system_part(key)[0]
    return None if name in _OF_CORE else name


def _system_part(key: bytes) -> tuple[str, bytes]:
    """The name of the system that a key belongs to, and the first key after all of that prefix."""
    table = key.partition(b"\0")[0]
    name, dot, _ = table.partition(b".")
    return name.decode(errors="backslashreplace"), past(name + (dot or b"\0"))


# --- finding the code ---------------------------------------------------------------------------


def load(name: str) -> RecordSystem | str:
    """The system of this name; else a text with the reason why it cannot be used.

    >>> load("runs").title
    'Runs'
    >>> load("notes")
    'no installed package registers it'
    """
    check_text(name, "the name of a record system")
    values = entry_points.registered(GROUP, name)
    if not values:
        return "no installed package registers it"
    if len(values) > 1:
        return f"several packages register it: {', '.join(values)}"
    try:
        system = entry_points.imported(GROUP, values[0])
    except Exception as exc:
        # Code of any package may raise anything. Maintenance goes on without it, and reports why.
        return f"{values[0]} cannot be loaded: {exc}"
    if not isinstance(system, RecordSystem) or isinstance(system, type) or system.name != name:
        return f"{values[0]} is not a RecordSystem with the name {name!r}"
    return system


# --- what a store holds ---------------------------------------------------------------------------


class SystemSize(NamedTuple):
    """A system in a store, and how much space its rows take.

    Attributes:
        name: its name: its tables are called NAME.table
        title: what it stores, if it is installed
        version: the version of its row layout in the installed code, if it is installed
        rows: its rows
        size_bytes: their keys and values, without objects that they link to
        missing: why its code cannot be used, if it cannot
    """

    name: str
    title: str | None
    version: int | None
    rows: int
    size_bytes: int
    missing: str | None


def measure(store: Store) -> list[SystemSize]:
    """Count the rows of each system in a store; reads the whole table ``records``.

    >>> from casstore.session.records import Draft
    >>> draft = Draft(store)
    >>> row = draft.put(Table(store, "notes.pages", 1), ("1",), "hello")
    >>> draft.commit()
    >>> [(one.name, one.rows, one.missing) for one in measure(store)]
    [('notes', 1, 'no installed package registers it')]
    """
    check_store(store)
    rows: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for row in scan(store.engine, _TABLE, b"", None):
        name = name_of(row.key)
        if name is not None:
            rows[name] = rows.get(name, 0) + 1
            sizes[name] = sizes.get(name, 0) + len(row.key) + len(row.value)
    found: list[SystemSize] = []
    for name in sorted(rows):
        system = load(name)
        if isinstance(system, str):
            found.append(SystemSize(name, None, None, rows[name], sizes[name], system))
        else:
            described = system.title, system.version
            found.append(SystemSize(name, *described, rows[name], sizes[name], None))
    return found


# --- for systems to use ---------------------------------------------------------------------------


def check_limit(limit: int) -> None:
    """Refuse a number of entries that is not from 1 to 10,000."""
    if type(limit) is not int or not 1 <= limit <= _MAX_ENTRIES:
        raise InvalidInputError(f"limit must be from 1 to {_MAX_ENTRIES}, got {limit!r}")


def entry_keys(
    table: Table, depth: int, *, after: str | None, limit: int
) -> Iterator[tuple[str, ...]]:
    """The next ``limit`` entries after ``after``, each as the first ``depth`` texts of its keys."""
    check_limit(limit)
    behind = None if after is None else entry_key(after, depth)
    for _, key in zip(range(limit), table.groups(depth, after=behind), strict=False):
        yield key


def entry_id(key: Sequence[str]) -> str:
    """The texts of a key as the id of an entry: joined by slashes; one alone stays as it is.

    >>> entry_id(["thread/1"]), entry_id(["a/b", "c"])
    ('thread/1', 'a%2Fb/c')
    """
    if len(key) == 1:
        return key[0]
    return "/".join([text.replace("%", "%25").replace("/", "%2F") for text in key])


def entry_key(entry: str, depth: int) -> tuple[str, ...]:
    """The texts that ``entry_id`` was given; InvalidInputError if there are not ``depth``.

    >>> entry_key("a%2Fb/c", 2)
    ('a/b', 'c')
    """
    check_text(entry, "the id of an entry")
    parts = [entry] if depth == 1 else entry.split("/")
    if len(parts) != depth:
        raise InvalidInputError(
            f"the id of an entry must have {depth} parts between slashes, got {entry!r:.80}"
        )
    if depth == 1:
        return (entry,)
    return tuple([part.replace("%2F", "/").replace("%25", "%") for part in parts])
