"""Transcripts in lines of JSON into sessions: each line a node, branches kept.

    claude      what Claude Code writes: entries with ``uuid`` and ``parentUuid``
    pi          what pi writes: a header of type ``session``, then entries, with ids or without
    messages    a message on each line, one after the other

The source is read twice. The first time every line is checked, so that a bad one is told before
anything is written; the second time lines become nodes, a batch to a commit. Lines that the
session has already are passed over: an import may be repeated, or go on after more was written.
"""

from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NamedTuple, cast, get_args

from casstore.engine.files import storage_error
from casstore.engine.paths import path_text
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
from casstore.format.hashing import plain_hash
from casstore.maintenance.progress import Progress, Step
from casstore.records.json_values import loads, storable
from casstore.session.data import UNFENCED, Commit, NodeDraft
from casstore.session.keys import MAX_ID_BYTES
from casstore.session.session import Session
from casstore.store import Store, check_store

Format = Literal["claude", "pi", "messages"]

DEFAULT_MAX_LINE_BYTES: Final = 64 << 20
_FORMATS: Final = get_args(Format)
_BATCH_NODES: Final = 256
_BATCH_BYTES: Final = 4 << 20
_COPY_BYTES: Final = 1 << 20
_PROGRESS_LINES: Final = 1000
# What a report names of bad lines that were left out.
_TOLD_BAD: Final = 100
# What a header may hold to be kept beside the session.
_MAX_HEADER_BYTES: Final = 1 << 20
_MARK: Final = "imported"
_MAX_TIME: Final = 1 << 53
# Entries of Claude Code that say so by one of these.
_CLAUDE_FIELDS: Final = frozenset(("uuid", "parentUuid", "sessionId", "leafUuid"))


class JsonlReport(NamedTuple):
    """What an import did."""

    session: str
    format: str
    #: Lines that hold something.
    lines: int
    #: Nodes made now, and those that were there.
    imported: int
    already: int
    #: Nodes whose parent is not in the source: they begin a path of their own.
    orphans: int
    #: Bad lines that were left out, and the numbers of the first of them.
    bad: int
    bad_lines: tuple[int, ...]
    source_bytes: int


def import_jsonl(
    store: Store,
    source: str | os.PathLike[str] | BinaryIO,
    *,
    format: Literal["auto", "claude", "pi", "messages"] = "auto",
    session_id: str | None = None,
    skip_bad: bool = False,
    max_line_bytes: int = DEFAULT_MAX_LINE_BYTES,
    progress: Progress | None = None,
) -> JsonlReport:
    """Make a session of a transcript in lines of JSON, from a file or a binary stream.

    The session's id is the one that the transcript names, or that of the file; ``session_id``
    counts before both. BadLineError, with its number, for a line that is no object of JSON, or
    longer than ``max_line_bytes``: nothing was written then. With ``skip_bad`` such lines are
    left out and counted. SessionExistsError if there is a session of that id that was not
    imported. Raising from ``progress`` stops between two commits; the next call goes on there.

    >>> talk = place / "talk.jsonl"
    >>> said = talk.write_text('{"role": "user", "content": "hello"}')
    >>> report = import_jsonl(store, talk)
    >>> report.session, report.imported
    ('talk', 1)
    >>> import_jsonl(store, talk).imported  # again: only what is new
    0
    """
    check_store(store)
    if format != "auto" and format not in _FORMATS:
        raise InvalidInputError(f"a format is auto or one of {', '.join(_FORMATS)}, not {format!r}")
    if type(max_line_bytes) is not int or max_line_bytes < 1:
        raise InvalidInputError(f"a line has a length of 1 or more, not {max_line_bytes!r}")
    with _seekable(source) as (stream, name):
        lines = _Lines(stream, max_line_bytes, skip_bad)
        survey = _survey(lines, None if format == "auto" else format, progress)
        own = session_id or survey.session or name
        if own is None:
            raise InvalidInputError("the transcript names no session; give it a session_id")
        session = _open_session(store, own, survey)
        work = _Import(session, survey, progress)
        work.run(lines)
        return JsonlReport(
            own,
            survey.format,
            survey.lines,
            work.imported,
            work.already,
            work.orphans,
            lines.bad,
            tuple(lines.bad_lines),
            survey.size_bytes,
        )


# --- lines ------------------------------------------------------------------------------------


class _Line(NamedTuple):
    number: int
    raw: bytes
    value: dict[str, Any]


class _Lines:
    """The lines of a source that hold something, as often as they are asked for."""

    def __init__(self, stream: BinaryIO, max_line_bytes: int, skip_bad: bool) -> None:
        self._stream = stream
        self._start = stream.tell()
        self._max_line_bytes = max_line_bytes
        self._skip_bad = skip_bad
        self.bad = 0
        self.bad_lines: list[int] = []

    def read(self, stop: int | None = None) -> Iterator[_Line]:
        """From the beginning, or so many bytes of it."""
        self._stream.seek(self._start)
        self.bad = 0
        self.bad_lines = []
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
                self.bad += 1
                if len(self.bad_lines) < _TOLD_BAD:
                    self.bad_lines.append(number)
                continue
            yield _Line(number, raw, value)

    @property
    def position(self) -> int:
        """How many bytes were read."""
        return self._stream.tell() - self._start

    def _pass_over(self) -> None:
        """Go to the end of a line that is too long to be held."""
        while True:
            raw = self._stream.readline(_COPY_BYTES)
            if not raw or raw.endswith(b"\n"):
                return


def _parse(number: int, raw: bytes) -> dict[str, Any]:
    try:
        value = loads(raw)
        # Whatever parses can be stored; if not, it is told here and not half-way through.
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
) -> Iterator[tuple[BinaryIO, str | None]]:
    """The source as something that can be read twice, and a name for it."""
    if isinstance(source, str | os.PathLike):
        path = Path(path_text(source))
        # Unlike the method of a path, it says no of names that are too long.
        if not os.path.isfile(path):
            raise SourceNotFoundError(f"there is no file {path}")
        try:
            opened = path.open("rb")
        except OSError as exc:
            raise storage_error(f"cannot read {path}", exc) from exc
        with opened:
            yield opened, path.stem or None
        return
    if isinstance(source, io.TextIOBase):
        raise InvalidInputError("a stream of bytes, not of text; open it in binary mode")
    if not callable(getattr(source, "read", None)):
        raise InvalidInputError(f"a file's path, or a stream of bytes, not {source!r:.80}")
    if source.seekable():
        yield source, None
        return
    with tempfile.TemporaryFile() as copy:
        while block := source.read(_COPY_BYTES):
            copy.write(block)
        copy.seek(0)
        yield copy, None


# --- the first reading --------------------------------------------------------------------------


class _Survey(NamedTuple):
    """What is known of a transcript after it was read once."""

    format: Format
    session: str | None
    cwd: str | None
    model: str | None
    header: dict[str, Any] | None
    lines: int
    size_bytes: int


def _survey(lines: _Lines, wanted: Format | None, progress: Progress | None) -> _Survey:
    """Look at every line; which format it is, and whose."""
    format, session, cwd, model, header, count = wanted, None, None, None, None, 0
    for line in lines.read():
        count += 1
        value = line.value
        format = format or _recognised(value)
        if value.get("type") == "session" and count == 1:
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
        raise InvalidInputError("no line says what format this is; give the format")
    if format == "messages":
        session, cwd, model, header = None, None, None, None
    if format == "claude":
        header = None
    return _Survey(format, session, cwd, model, header, count, lines.position)


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
    """Can it name a session or a node?"""
    if type(value) is not str or not value or "\0" in value:
        return False
    try:
        return len(value.encode()) < MAX_ID_BYTES - 64
    except UnicodeEncodeError:
        return False


def _text(value: Any) -> str | None:
    return value if _is_id(value) else None


def _open_session(store: Store, own: str, survey: _Survey) -> Session:
    """The session to write to: a new one, or one that such an import has made."""
    session = store.session(own)
    mark = {_MARK: survey.format, "header": storable(survey.header)}
    try:
        found = session.meta()
    except SessionNotFoundError:
        if session.head() is not None:
            raise SessionExistsError(own) from None
        found = store.create_session(
            own,
            model=survey.model,
            cwd=survey.cwd,
            extra=mark,
        )
    if type(found.extra) is not dict or found.extra.get(_MARK) != survey.format:
        raise SessionExistsError(own)
    return session


# --- the second reading -------------------------------------------------------------------------


# Where a format keeps the id of a line and that of the line it follows.
_LINKS: Final = {
    "claude": ("uuid", "parentUuid"),
    "pi": ("id", "parentId"),
    "messages": (None, None),
}


class _Entry(NamedTuple):
    """A line as it goes into the graph."""

    draft: NodeDraft
    raw: bytes
    #: Is its parent the line before, and not one that it names?
    follows: bool
    #: Does the conversation go on from it?
    on_path: bool


class _Import:
    """Turns lines into nodes, a batch to a commit."""

    def __init__(self, session: Session, survey: _Survey, progress: Progress | None) -> None:
        self._session = session
        self._survey = survey
        self._progress = progress
        self._batch: list[_Entry] = []
        self._batch_bytes = 0
        # The node of the line before, and the one that the conversation is at.
        self._before: str | None = None
        self._leaf: str | None = None
        self._committed_line = 0
        self.imported = 0
        self.already = 0
        self.orphans = 0

    def run(self, lines: _Lines) -> None:
        """Read everything that was surveyed, and commit it."""
        number = 0
        try:
            for at, line in enumerate(lines.read(self._survey.size_bytes)):
                number = line.number
                if self._survey.format == "pi" and at == 0 and line.value.get("type") == "session":
                    # Kept beside the session.
                    continue
                self._batch.append(self._entry(line))
                self._before = self._batch[-1].draft.id
                self._batch_bytes += len(line.raw)
                if len(self._batch) >= _BATCH_NODES or self._batch_bytes >= _BATCH_BYTES:
                    self._flush(number, lines.position)
            self._flush(number, lines.position)
        except BadLineError as exc:
            # It was good when it was looked at: somebody has changed the source since.
            raise BadLineError(exc.line, exc.reason, self._committed_line) from exc

    def _entry(self, line: _Line) -> _Entry:
        value = line.value
        id_field, parent_field = _LINKS[self._survey.format]
        own, parent, follows = f"line-{line.number}", self._before, True
        # A title or a summary stands beside the conversation, and so do subagents.
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

    def _flush(self, line: int, position: int) -> None:
        if self._batch:
            try:
                self._commit(self._batch)
            except (DuplicateNodeError, UnknownParentError, CycleError):
                self._commit_unknown(self._resolved(self._batch))
            self._batch = []
            self._batch_bytes = 0
        self._committed_line = line
        if self._progress is not None:
            self._progress(Step("import", position, self._survey.size_bytes, "bytes"))

    def _commit(self, entries: list[_Entry]) -> None:
        """Commit these nodes as they are, if there are any."""
        leaf = next((each.draft.id for each in reversed(entries) if each.on_path), self._leaf)
        if entries:
            drafts = [each.draft for each in entries]
            self._session.commit(Commit(append=drafts, leaf=leaf, lease=UNFENCED))
        self._leaf = leaf
        self.imported += len(entries)

    # --- the careful way --------------------------------------------------------------------

    def _resolved(self, batch: list[_Entry]) -> list[_Entry]:
        """Those that the session does not have yet, with parents that it has.

        An id that another line has becomes a longer one, by content: the same whenever it is read.
        """
        new: dict[str, _Entry] = {}
        names: dict[str, str] = {}
        for entry in batch:
            draft = entry.draft
            parent = draft.parent
            if type(parent) is str and entry.follows:
                parent = names.get(parent, parent)
            orphan = (
                type(parent) is str and parent not in new and self._session.node(parent) is None
            )
            draft = draft._replace(parent=None if orphan else parent)
            known = self._find(new, draft)
            if known is False:
                own = draft.id
                draft, known = self._renamed(new, entry.raw, draft)
                names[own] = draft.id
            else:
                # What follows, follows this one, and not another that had its id.
                names.pop(draft.id, None)
            if known:
                self.already += 1
                if entry.on_path:
                    self._leaf = draft.id
            else:
                new[draft.id] = entry._replace(draft=draft)
                self.orphans += orphan
        if self._before is not None:
            self._before = names.get(self._before, self._before)
        return list(new.values())

    def _renamed(
        self, new: dict[str, _Entry], raw: bytes, draft: NodeDraft
    ) -> tuple[NodeDraft, bool | None]:
        """A node under a name of its own, and whether it is there."""
        # As it was named if its parent came after it, and then as it is named now.
        for parent in dict.fromkeys((None, draft.parent)):
            content = f"{parent}\0".encode() + raw
            named = draft._replace(id=f"{draft.id}~{plain_hash(content, 6).hex()}")
            known = self._find(new, named)
            if known:
                break
        return named, known

    def _find(self, new: dict[str, _Entry], draft: NodeDraft) -> bool | None:
        """Is this node there? None: no node has its id; False: another has it."""
        entry = new.get(draft.id)
        found = self._session.node(draft.id) if entry is None else entry.draft
        if found is None:
            return None
        # Without a parent: it had none when it came, and may have one by now.
        return found.payload == draft.payload and found.parent in (draft.parent, None)

    def _commit_unknown(self, entries: list[_Entry]) -> None:
        """Commit these nodes but for those that were hidden since they were imported."""
        while True:
            try:
                self._commit(entries)
            except DuplicateNodeError as exc:
                left = [
                    each._replace(draft=each.draft._replace(parent=None))
                    if each.draft.parent == exc.node
                    else each
                    for each in entries
                    if each.draft.id != exc.node
                ]
                if len(left) == len(entries):
                    raise
                self.already += 1
                entries = left
                continue
            return


def _time(value: Any) -> str | int | float | None:
    if type(value) in (int, float) and abs(value) < _MAX_TIME:
        return cast(int | float, value)
    return _text(value)
