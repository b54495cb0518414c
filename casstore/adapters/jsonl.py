"""Imports transcripts in lines of JSON: each line becomes a node, branches included.

    claude      what Claude Code writes: entries with ``uuid`` and ``parentUuid``
    pi          what pi writes: a header of type ``session``, then entries, with ids or without
    messages    one message on each line

A first pass checks every line, so that a bad line is reported before anything is written. Lines
that the session holds are not written again: a transcript that has grown can be imported again.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NamedTuple, cast, get_args

from casstore.compat.importing import (
    IMPORTED,
    UNCHANGED,
    UPDATED,
    ImportedSession,
    ImportNote,
    ImportReport,
    Notes,
    Part,
    PartReport,
    Unit,
    Wrote,
    paged,
    run,
)
from casstore.engine.files import path_text, storage_error
from casstore.engine.overlay import OverlayEngine
from casstore.errors import (
    BadLineError,
    CycleError,
    DuplicateNodeError,
    InvalidInputError,
    SessionExistsError,
    SessionNotFoundError,
    SourceNotFoundError,
    UnknownParentError,
)
from casstore.format.digest import plain_hash
from casstore.maintenance.progress import Progress, Step
from casstore.records.json_values import loads, storable
from casstore.session.arguments import check_count, check_flag
from casstore.session.attempts import Attempts
from casstore.session.data import Commit, NodeDraft
from casstore.session.keys import MAX_ID_BYTES
from casstore.session.session import Session
from casstore.session.state import runtime_of
from casstore.store import Store, check_store

Format = Literal["claude", "pi", "messages"]

DEFAULT_MAX_LINE_BYTES: Final = 64 << 20
_FORMATS: Final = get_args(Format)
_COPY_BYTES: Final = 1 << 20
_PROGRESS_LINES: Final = 1000
# A longer header is not stored in the session's meta.
_MAX_HEADER_BYTES: Final = 1 << 20
_MARK: Final = "imported"
_MAX_TIME: Final = 1 << 53
# An entry of Claude Code has one of these.
_CLAUDE_FIELDS: Final = frozenset(("uuid", "parentUuid", "sessionId", "leafUuid"))
# How a report calls the lines of each format.
PARTS: Final[dict[Format, str]] = {
    "claude": "entries of Claude Code",
    "pi": "entries of pi",
    "messages": "messages",
}
BAD_LINES: Final = "lines that cannot be read, left out"
ORPHANS: Final = "entries whose parent is not in the transcript, stored as roots"


def import_jsonl(
    store: Store,
    source: str | os.PathLike[str] | BinaryIO,
    *,
    format: Literal["auto", "claude", "pi", "messages"] = "auto",
    name: str | None = None,
    leave_out_damaged: bool = False,
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
    dry_run: bool = False,
    progress: Progress | None = None,
) -> ImportReport:
    """Import a transcript in lines of JSON as one session, from a file or a binary stream.

    The session's id is ``name``, or the id that the transcript names, or the file's name.
    BadLineError, with its number, if a line is not a JSON object or is longer than
    ``max_line_bytes``: nothing is written then. With ``leave_out_damaged`` such lines are noted
    and left out. SessionExistsError if the store has a session of that id that was not imported.
    A dry run holds the nodes in memory.

    >>> talk = place / "talk.jsonl"
    >>> written = talk.write_text('{"role": "user", "content": "hello"}')
    >>> report = import_jsonl(store, talk)
    >>> report.sessions[0].session, report.imported
    ('talk', 1)
    >>> import_jsonl(store, talk).imported  # again: only what is new
    0
    """
    check_store(store)
    check_flag(dry_run, "dry_run")
    check_flag(leave_out_damaged, "leave_out_damaged")
    if format != "auto" and format not in _FORMATS:
        raise InvalidInputError(
            f"format must be auto or one of {', '.join(_FORMATS)}, got {format!r}"
        )
    check_count(max_line_bytes, "max_line_bytes", least=1)
    with _seekable(source) as (stream, file):
        lines = _Lines(stream, max_line_bytes, leave_out_damaged)
        survey = _survey(lines, None if format == "auto" else format, progress)
        session = name or survey.session or (file.stem if file is not None else None)
        if session is None:
            raise InvalidInputError("the transcript names no session; pass a name for it")
        # The parent of a line may be any line before it, so a dry run writes too: to an overlay in
        # memory.
        target = Store(OverlayEngine(store.engine)) if dry_run else store
        part = _Entries(target, session, lines, survey)
        transcript = _Transcript("a stream" if file is None else str(file), survey.size_bytes)
        return run(
            "jsonl", transcript, target, [part],
            notes=lines.notes(), dry_run=dry_run, overlay=dry_run, progress=progress,
        )  # fmt: skip


class _Transcript(NamedTuple):
    """A transcript as a ``Source``."""

    name: str
    size_bytes: int

    def require_unchanged(self) -> None:
        """Do nothing: lines that were added since the first pass are not read."""


# --- lines ------------------------------------------------------------------------------------


class _Line(NamedTuple):
    number: int
    raw: bytes
    value: dict[str, Any]


class _Lines:
    """The lines of a source that are not empty; they can be read more than once."""

    def __init__(self, stream: BinaryIO, max_line_bytes: int, skip_bad: bool) -> None:
        self._stream = stream
        self._start = stream.tell()
        self._max_line_bytes = max_line_bytes
        self._skip_bad = skip_bad
        self._notes = Notes()

    def notes(self) -> tuple[ImportNote, ...]:
        """Notes about the bad lines of the last reading."""
        return self._notes.all()

    def read(self, stop: int | None = None) -> Iterator[_Line]:
        """Read from the beginning, up to ``stop`` bytes."""
        self._stream.seek(self._start)
        self._notes = Notes()
        number = 0
        while stop is None or self.position < stop:
            raw = self._stream.readline(self._max_line_bytes + 1)
            if not raw:
                return
            number += 1
            try:
                if len(raw) > self._max_line_bytes:
                    if not raw.endswith(b"\n"):
                        self._pass_over()
                    raise BadLineError(number, f"longer than {self._max_line_bytes} bytes")
                if not raw.strip():
                    continue
                value = _parse(number, raw)
            except BadLineError:
                if not self._skip_bad:
                    raise
                self._notes.add(BAD_LINES, f"line {number}")
                continue
            yield _Line(number, raw, value)

    @property
    def position(self) -> int:
        """The number of bytes that were read."""
        return self._stream.tell() - self._start

    def _pass_over(self) -> None:
        """Skip the rest of a line that is too long."""
        while True:
            raw = self._stream.readline(_COPY_BYTES)
            if not raw or raw.endswith(b"\n"):
                return


def _parse(number: int, raw: bytes) -> dict[str, Any]:
    try:
        value = loads(raw)
        # Raises for a value that cannot be stored, before anything is written.
        storable(value)
    except RecursionError as exc:
        raise BadLineError(number, "nested too deeply") from exc
    except ValueError as exc:
        raise BadLineError(number, f"not JSON: {exc}"[:200]) from exc
    if type(value) is not dict:
        raise BadLineError(number, f"an object was expected, not {type(value).__name__}")
    return value


@contextmanager
def _seekable(
    source: str | os.PathLike[str] | BinaryIO,
) -> Iterator[tuple[BinaryIO, Path | None]]:
    """The source as a stream that can be read twice, and its path."""
    if isinstance(source, str | os.PathLike):
        path = Path(path_text(source))
        # Unlike Path.is_file, this returns False for a name that is too long.
        if not os.path.isfile(path):
            raise SourceNotFoundError(f"there is no file {path}")
        try:
            opened = path.open("rb")
        except OSError as exc:
            raise storage_error(f"cannot read {path}", exc) from exc
        with opened:
            yield opened, path
        return
    if isinstance(source, io.TextIOBase):
        raise InvalidInputError(
            "source must be a stream of bytes, not of text; open it in binary mode"
        )
    if not callable(getattr(source, "read", None)):
        raise InvalidInputError(f"source must be a path or a stream of bytes, got {source!r:.80}")
    if source.seekable():
        yield source, None
        return
    with tempfile.TemporaryFile() as copy:
        while block := source.read(_COPY_BYTES):
            copy.write(block)
        copy.seek(0)
        yield copy, None


# --- the first pass ----------------------------------------------------------------------------


class _Survey(NamedTuple):
    """What the first pass found out about a transcript."""

    format: Format
    session: str | None
    cwd: str | None
    model: str | None
    header: dict[str, Any] | None
    has_header: bool
    lines: int
    size_bytes: int


def _survey(lines: _Lines, wanted: Format | None, progress: Progress | None) -> _Survey:
    """Check every line, and find the format and the session."""
    format, session, cwd, model, header, count = wanted, None, None, None, None, 0
    has_header = False
    for line in lines.read():
        count += 1
        value = line.value
        format = format or _recognised(value)
        if value.get("type") == "session" and count == 1:
            has_header = True
            if _is_id(value.get("id")):
                session = value["id"]
            header = value if len(line.raw) <= _MAX_HEADER_BYTES else None
            model = _text(value.get("modelId"))
        if session is None and _is_id(value.get("sessionId")):
            session = value["sessionId"]
        cwd = cwd or _text(value.get("cwd"))
        if progress is not None and count % _PROGRESS_LINES == 0:
            progress(Step("check", lines.position, None, "bytes"))
    if format is None:
        raise InvalidInputError("no line shows the format of the transcript; pass the format")
    if format == "messages":
        session, cwd, model, header = None, None, None, None
    if format == "claude":
        header = None
    return _Survey(
        format=format,
        session=session,
        cwd=cwd,
        model=model,
        header=header,
        has_header=has_header,
        lines=count,
        size_bytes=lines.position,
    )


def _recognised(value: dict[str, Any]) -> Format | None:
    if value.get("type") == "session" and "id" in value:
        return "pi"
    if not _CLAUDE_FIELDS.isdisjoint(value):
        return "claude"
    if type(value.get("role")) is str:
        return "messages"
    message = value.get("message")
    if type(message) is dict and type(message.get("role")) is str:
        return "messages"
    return None


def _is_id(value: Any) -> bool:
    """Whether a value can be the id of a session or a node."""
    if type(value) is not str or not value or "\0" in value:
        return False
    try:
        return len(value.encode()) < MAX_ID_BYTES - 64
    except UnicodeEncodeError:
        return False


def _text(value: Any) -> str | None:
    return value if _is_id(value) else None


def _open_session(store: Store, own: str, survey: _Survey) -> tuple[Session, bool]:
    """Find or create the session to write to; also returns whether it is new.

    SessionExistsError if a session with this id was not imported from the same format.
    """
    session, is_new = store.session(own), False
    mark = {_MARK: survey.format, "header": storable(survey.header)}
    try:
        found = session.meta()
    except SessionNotFoundError:
        if session.head() is not None:
            raise SessionExistsError(own) from None
        found = store.create_session(own, model=survey.model, cwd=survey.cwd, extra=mark)
        is_new = True
    if type(found.extra) is not dict or found.extra.get(_MARK) != survey.format:
        raise SessionExistsError(own)
    return session, is_new


# --- the import --------------------------------------------------------------------------------


# The keys of a line's id and of the id of the line it follows.
_LINKS: Final = {
    "claude": ("uuid", "parentUuid"),
    "pi": ("id", "parentId"),
    "messages": (None, None),
}


class _Entry(NamedTuple):
    """A line as a node."""

    draft: NodeDraft
    raw: bytes
    #: Whether its parent is the line before, not one that it names.
    follows: bool
    #: Whether the conversation continues from it.
    on_path: bool


class _Entries(Part):
    """The lines of a transcript, in batches; a batch is a commit."""

    def __init__(self, store: Store, own: str, lines: _Lines, survey: _Survey) -> None:
        self._lines = lines
        self._survey = survey
        self._runtime = runtime_of(store)
        self.name = PARTS[survey.format]
        self.session, self.is_new = _open_session(store, own, survey)
        self.has_imported = False
        self.found = Notes()
        # The node of the line before, and the leaf of the conversation.
        self.before: str | None = None
        self.leaf: str | None = None
        self.hidden: frozenset[str] = frozenset()

    def count(self) -> int:
        return self._survey.lines - (self._survey.format == "pi" and self._survey.has_header)

    def units(self) -> Iterator[Unit]:
        self.before = self.leaf = None
        self.read_hidden()
        committed = 0
        try:
            for page in paged(self._read(), lambda each: len(each[1].raw)):
                yield _LineBatch(self, [entry for _, entry in page])
                committed = page[-1][0]
        except BadLineError as exc:
            # The line was valid in the first pass: another process changed the source.
            raise BadLineError(exc.line, exc.reason, committed) from exc

    def read_hidden(self) -> None:
        """Read the ids of hidden nodes, which another process may add to."""
        state = self._runtime.find(self.session.id)
        if state is not None:
            self.hidden = frozenset(self._runtime.hidden(state.head).values())

    def notes(self) -> Sequence[ImportNote]:
        return self.found.all()

    def _read(self) -> Iterator[tuple[int, _Entry]]:
        """The number and the entry of each line that the first pass read."""
        for at, line in enumerate(self._lines.read(self._survey.size_bytes)):
            if at == 0 and self._survey.format == "pi" and self._survey.has_header:
                # The header is in the session's meta.
                continue
            entry = self._entry(line)
            self.before = entry.draft.id
            yield line.number, entry

    def _entry(self, line: _Line) -> _Entry:
        value = line.value
        id_field, parent_field = _LINKS[self._survey.format]
        own, parent, follows = f"line-{line.number}", self.before, True
        # Titles, summaries and subagents are not on the path of the conversation.
        on_path = value.get("isSidechain") is not True
        if id_field is not None and _is_id(value.get(id_field)):
            own = value[id_field]
            if parent_field in value:
                named = value[parent_field]
                parent, follows = named if _is_id(named) else None, False
        elif self._survey.format == "claude":
            on_path = False
        draft = NodeDraft(own, storable(value), parent, time=_time(value.get("timestamp")))
        return _Entry(draft, line.raw, follows, on_path)


class _LineBatch(Unit):
    """Lines that become the nodes of one commit."""

    def __init__(self, part: _Entries, entries: list[_Entry]) -> None:
        self._part = part
        self._session = part.session
        self._entries = entries
        self._missing: list[_Entry] = []
        self._orphans: list[str] = []
        self._leaf = part.leaf
        self.size = len(entries)

    def session(self) -> ImportedSession:
        part = self._part
        outcome = IMPORTED if part.is_new else UPDATED if part.has_imported else UNCHANGED
        return ImportedSession(self._session.id, outcome, "")

    def compare(self) -> Sequence[PartReport]:
        if self._is_unknown():
            self._missing = self._entries
        else:
            self._resolve()
        self._part.leaf = self._leaf
        self._part.has_imported |= bool(self._missing)
        return [PartReport(self._part.name, self.size, len(self._missing))]

    def write(self, wrote: Wrote) -> None:
        # Not a ``transaction``: a conflict may also be a fault of the file, and has its own remedy.
        attempts = Attempts(f"session {self._session.id!r}", "import it when no agent uses it")
        while True:
            attempts.begin()
            leaf = next((each.draft.id for each in reversed(self._missing) if each.on_path), None)
            drafts = [each.draft for each in self._missing]
            try:
                if drafts:
                    self._session.commit(Commit(append=drafts, leaf=leaf or self._leaf))
            except (DuplicateNodeError, UnknownParentError, CycleError):
                # A parent is missing or comes later, or another process changed the session.
                self._part.read_hidden()
                self._resolve()
                continue
            self._part.leaf = leaf or self._leaf
            for orphan in self._orphans:
                self._part.found.add(ORPHANS, orphan)
            return

    def _is_unknown(self) -> bool:
        """Whether the session has none of these entries' ids, and no two entries have the same."""
        ids = {entry.draft.id for entry in self._entries}
        return (
            len(ids) == len(self._entries)
            and ids.isdisjoint(self._part.hidden)
            and all(self._session.node(node) is None for node in ids)
        )

    def _resolve(self) -> None:
        """Find the entries that the session lacks, and give each a parent that exists.

        If another line has the id of an entry, the entry gets a longer id, made from its content,
        so that it is the same in every import.
        """
        new: dict[str, _Entry] = {}
        names: dict[str, str] = {}
        self._orphans = []
        for entry in self._entries:
            draft = entry.draft
            parent = draft.parent
            if type(parent) is str and entry.follows:
                parent = names.get(parent, parent)
            hidden = parent in self._part.hidden
            orphan = (
                type(parent) is str
                and parent not in new
                and not hidden
                and self._session.node(parent) is None
            )
            draft = draft._replace(parent=None if orphan else parent)
            known = self._find(new, draft)
            if known is False:
                own = draft.id
                draft, known = self._renamed(new, entry.raw, draft)
                names[own] = draft.id
            else:
                # The next line follows this entry, and not another that had its id.
                names.pop(draft.id, None)
            if known:
                if entry.on_path:
                    self._leaf = draft.id
            else:
                if hidden:
                    # A hidden node cannot get children.
                    draft = draft._replace(parent=None)
                new[draft.id] = entry._replace(draft=draft)
                if orphan:
                    self._orphans.append(draft.id)
        before = self._part.before
        if before is not None:
            self._part.before = names.get(before, before)
        self._missing = list(new.values())

    def _renamed(
        self, new: dict[str, _Entry], raw: bytes, draft: NodeDraft
    ) -> tuple[NodeDraft, bool | None]:
        """A node under an id of its own, and whether it exists."""
        # The id depends on the parent, which may have been missing when the node was imported.
        for parent in dict.fromkeys((None, draft.parent)):
            content = f"{parent}\0".encode() + raw
            named = draft._replace(id=f"{draft.id}~{plain_hash(content, 6).hex()}")
            known = self._find(new, named)
            if known:
                break
        return named, known

    def _find(self, new: dict[str, _Entry], draft: NodeDraft) -> bool | None:
        """Whether this node exists. None: no node has its id; False: another node has it."""
        if draft.id in self._part.hidden:
            # It was imported, and hidden since.
            return True
        entry = new.get(draft.id)
        found = self._session.node(draft.id) if entry is None else entry.draft
        if found is None:
            return None
        # Its parent may have been missing when the node was imported.
        return found.payload == draft.payload and found.parent in (draft.parent, None)


def _time(value: Any) -> str | int | float | None:
    if type(value) in (int, float) and abs(value) < _MAX_TIME:
        return cast(int | float, value)
    return _text(value)
