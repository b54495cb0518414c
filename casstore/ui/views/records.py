"""The page of an entry of a record system: a LangGraph thread, a transcript, or plain rows.

What a checkpoint or transcript holds is shown without building any object of it: the types that
LangGraph's serialiser names are shown by name, and nothing that they name is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from casstore.cli.payloads import JSON, Block, ParsedPayload, as_json, read_message
from casstore.cli.quantities import count
from casstore.errors import CasstoreError, InvalidInputError, NotFoundError
from casstore.maintenance import systems
from casstore.session.attempts import read_again
from casstore.session.record_keys import past, split_texts
from casstore.session.records import Table
from casstore.ui.texts import cut, one_line
from casstore.ui.views.timeline import PAGE, TEXT_CHARACTERS, WEIGHT_BYTES, node_time
from casstore.ui.views.viewed import Viewed

LANGGRAPH: Final = "lg"
CLAUDE: Final = "claude"
_NAMESPACES: Final = 50
_CHANNELS: Final = 40
_MESSAGES: Final = 8
_BLOCKS: Final = 12
# Fields of a transcript's entry that are shown elsewhere, or not at all.
_KNOWN_FIELDS: Final = frozenset(("uuid", "parentUuid", "sessionId", "timestamp", "type"))


class ChannelRow(NamedTuple):
    """A channel of a checkpoint."""

    name: str
    version: str
    is_changed: bool
    messages: tuple[ParsedPayload, ...]
    text: str


class RecordRow(NamedTuple):
    """A checkpoint, an entry of a transcript, or a row."""

    at: int
    id: str
    title: str
    facts: tuple[tuple[str, str], ...]
    time: str
    message: ParsedPayload | None
    channels: tuple[ChannelRow, ...] = ()
    is_cut: bool = False


class RecordPage(NamedTuple):
    """A page of an entry."""

    system: str
    title: str
    id: str
    facts: tuple[tuple[str, str], ...]
    rows: tuple[RecordRow, ...]
    start: int
    total: int | None
    #: The part that is shown, and all parts: a thread's namespaces, a transcript's subagents.
    part: str
    parts: tuple[str, ...]
    has_more: bool

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.start + len(self.rows)


def record(
    viewed: Viewed, system: str, entry: str, *, part: str = "", start: int = 0
) -> RecordPage:
    """The rows of an entry, from ``start`` on; of a thread, the newest checkpoint first."""
    known = systems.load(system)
    if isinstance(known, str):
        raise NotFoundError(f"record system {system!r} cannot be shown: {known}")
    start = max(0, start)
    if system == LANGGRAPH:
        return read_again(lambda: _thread(viewed, known.title, entry, part, start))
    if system == CLAUDE:
        return read_again(lambda: _transcript(viewed, known.title, entry, part, start))
    return read_again(lambda: _rows(viewed, known, entry, start))


def _fitting(rows: Iterator[RecordRow]) -> tuple[list[RecordRow], bool]:
    """The first rows, as many as fit on a page, and whether there are more."""
    found: list[RecordRow] = []
    left = WEIGHT_BYTES
    for row in rows:
        weight = 600 + sum([len(block.text.encode(errors="replace")) + 100
                            for block in (row.message.blocks if row.message else ())])  # fmt: skip
        for channel in row.channels:
            texts = [channel.text] + [b.text for m in channel.messages for b in m.blocks]
            weight += 200 + sum([len(text.encode(errors="replace")) for text in texts])
        if len(found) == PAGE or (found and weight > left):
            return found, True
        found.append(row)
        left -= weight
    return found, False


def _brief(message: ParsedPayload) -> tuple[ParsedPayload, bool]:
    """The first blocks of a message, their texts cut, and whether a part of it is left out."""
    found = message.blocks[:_BLOCKS]
    blocks = tuple([block._replace(text=cut(block.text, TEXT_CHARACTERS)) for block in found])
    return message._replace(blocks=blocks), blocks != message.blocks


# --- LangGraph ----------------------------------------------------------------------------


def _thread(viewed: Viewed, title: str, thread: str, namespace: str, start: int) -> RecordPage:
    from casstore.adapters.langgraph.threads import Threads

    threads = Threads(viewed.store)
    namespaces = threads.namespaces(thread)
    if not namespaces:
        raise NotFoundError(f"there is no LangGraph thread {thread!r}")
    if namespace not in namespaces:
        namespace = namespaces[0]
    rows, has_more = _fitting(
        _checkpoints(threads, islice(threads.rows(thread, namespace), start, None), start)
    )
    return RecordPage(
        LANGGRAPH, title, thread, (("namespaces", str(len(namespaces))),), tuple(rows), start,
        None, namespace, tuple(namespaces[:_NAMESPACES]), has_more,
    )  # fmt: skip


def _checkpoints(threads: Any, rows: Iterator[Any], start: int) -> Iterator[RecordRow]:
    """Checkpoints, each with the channels that differ from those of its parent."""
    while page := list(islice(rows, 16)):
        stored = threads.read(page)
        parents: dict[str, Any] = {}
        wanted = [row.place._replace(checkpoint=row.parent) for row in page if row.parent]
        known = [found for place in dict.fromkeys(wanted) if (found := threads.find(place))]
        for one in threads.read(known):
            parents[one.row.place.checkpoint] = one.channels
        for at, one in enumerate(stored):
            yield _checkpoint(threads, one, parents.get(one.row.parent or "", {}), start + at)
        start += len(page)


def _checkpoint(threads: Any, stored: Any, before: dict[str, Any], at: int) -> RecordRow:
    meta = _decoded(stored.value.get("meta"))
    facts: list[tuple[str, str]] = []
    if isinstance(meta, dict):
        for key in ("step", "source"):
            if key in meta:
                facts.append((key, one_line(str(meta[key]), 40)))
    pending = threads.pending(stored.row)
    if pending:
        facts.append(("pending writes", str(len(pending))))
    channels: list[ChannelRow] = []
    for name, channel in list(stored.channels.items())[:_CHANNELS]:
        earlier = before.get(name)
        is_changed = earlier is None or earlier.version != channel.version
        if not channel.has_value:
            continue
        version = channel.version if isinstance(channel.version, int) else channel.version[0]
        shown: tuple[tuple[ParsedPayload, ...], str] = ((), "")
        if is_changed:
            shown = _channel(threads, channel.value, earlier)
        channels.append(ChannelRow(name, one_line(str(version), 20), is_changed, *shown))
    step = dict(facts).get("step", "?")
    return RecordRow(
        at, stored.row.place.checkpoint, f"step {step}", tuple(facts),
        node_time(stored.value.get("ts")), None, tuple(channels),
    )  # fmt: skip


def _channel(threads: Any, value: Any, earlier: Any) -> tuple[tuple[ParsedPayload, ...], str]:
    """A channel's value: of a list of messages those that are new; of anything else its JSON."""
    try:
        found = _decoded(threads.resolve([value])[0])
    except CasstoreError as exc:
        return (), f"cannot be read: {one_line(str(exc))}"
    if isinstance(found, list) and found:
        known = 0
        if earlier is not None and earlier.has_value:
            before = threads.resolve([earlier.value])[0]
            known = len(before) if isinstance(before, list) and len(before) < len(found) else 0
        messages = [read_message(one) for one in found[known:][-_MESSAGES:]]
        if all(message.role for message in messages):
            new = f", {len(found) - known} new" if known else ""
            shown = tuple([_brief(message)[0] for message in messages])
            return shown, f"{count(len(found), 'message')}{new}"
    return (), cut(as_json(found), TEXT_CHARACTERS)


def _decoded(stored: Any) -> Any:
    """A stored form as plain values; objects by the name of their type and their fields."""
    from casstore.adapters.langgraph.encoding import decode, load_raw

    def load(data: tuple[str, bytes]) -> Any:
        try:
            return _plain(load_raw(data))
        except CasstoreError:
            return f"<{len(data[1]):,} bytes of {data[0]}>"

    try:
        return _plain(decode(stored, load))
    except CasstoreError as exc:
        return f"<cannot be read: {exc}>"


def _plain(value: Any, depth: int = 0) -> Any:
    from casstore.adapters.langgraph.encoding import Raw, load_raw

    if depth > 24:
        return "…"
    if isinstance(value, Raw):
        try:
            inner = _plain(load_raw(("msgpack", value.data)), depth + 1)
        except CasstoreError:
            return f"<object, {len(value.data):,} bytes>"
        # The serialiser writes [module, name, arguments, method?] for most objects.
        if isinstance(inner, list) and len(inner) >= 3 and isinstance(inner[1], str):
            fields = inner[2]
            if isinstance(fields, dict) and isinstance(fields.get("content"), str | list):
                return {name: one for name, one in fields.items() if one not in (None, [], {})}
            return {inner[1]: fields}
        return inner
    if isinstance(value, dict):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if hasattr(value, "value") and type(value).__name__ == "_DeltaSnapshot":
        return _plain(value.value, depth + 1)
    return value


# --- Claude -------------------------------------------------------------------------------


def _transcript(viewed: Viewed, title: str, entry: str, subpath: str, start: int) -> RecordPage:
    from casstore.adapters.claude.transcripts import TranscriptKey, Transcripts

    transcripts = Transcripts(viewed.store)
    project, session = systems.entry_key(entry, 2)
    own = list(transcripts.below(TranscriptKey(project, session)))
    if not own:
        raise NotFoundError(f"there is no transcript {entry!r}")
    parts = [one.place.subpath for one in own]
    if subpath not in parts:
        subpath = parts[0]
    entries = transcripts.load(TranscriptKey(project, session, subpath)) or []
    rows, has_more = _fitting(_entries(entries, start))
    facts = (("project", project), ("session", session), ("transcripts", str(len(own))))
    return RecordPage(
        CLAUDE, title, entry, facts, tuple(rows), start, len(entries), subpath, tuple(parts),
        has_more,
    )  # fmt: skip


def _entries(entries: Sequence[dict[str, Any]], start: int) -> Iterator[RecordRow]:
    for at, entry in enumerate(entries[start:], start):
        message = read_message(entry)
        kind = str(entry.get("type", ""))
        if not message.role:
            body = {key: value for key, value in entry.items() if key not in _KNOWN_FIELDS}
            message = message._replace(role=kind, blocks=(Block(JSON, as_json(body)),))
        message, is_cut = _brief(message)
        facts = tuple(
            [(name, one_line(str(entry[name]), 60)) for name in ("cwd", "gitBranch", "version")
             if entry.get(name)]
        )  # fmt: skip
        yield RecordRow(
            at, str(entry.get("uuid", "")), kind, facts, node_time(entry.get("timestamp")),
            message, (), is_cut,
        )  # fmt: skip


# --- anything else ------------------------------------------------------------------------


def _rows(viewed: Viewed, system: systems.RecordSystem, entry: str, start: int) -> RecordPage:
    """A page of the rows of an entry, by table: an entry is named by the first texts of keys."""
    rows, has_more = _fitting(_plain_rows(viewed, system, entry, start))
    if not rows and not start:
        raise NotFoundError(f"{system.title} has no entry {entry!r}")
    return RecordPage(
        system.name, system.title, entry, (), tuple(rows), start, None, "", (), has_more
    )


def _plain_rows(
    viewed: Viewed, system: systems.RecordSystem, entry: str, start: int
) -> Iterator[RecordRow]:
    """The rows of an entry from number ``start`` on, by table."""
    at = -1
    for name in sorted(system.tables):
        for key, value in _of_table(viewed, name, entry):
            at += 1
            if at < start:
                continue
            message, is_cut = _brief(ParsedPayload("", (Block(JSON, as_json(value)),)))
            title = f"{name} / {' / '.join(key)}"
            yield RecordRow(at, "", one_line(title, 200), (), "", message, (), is_cut)


def _of_table(viewed: Viewed, name: str, entry: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    # Each system chooses how many of the first texts of a key name an entry: try 1, 2 and 3.
    prefixes: set[tuple[str, ...]] = {(entry,)}
    for depth in (2, 3):
        try:
            prefixes.add(systems.entry_key(entry, depth))
        except InvalidInputError:
            continue
    # How many texts the keys of the table have is known from its first row.
    parts = _parts(viewed, name)
    if parts is None:
        return
    for prefix in sorted(prefixes, key=len):
        if parts < len(prefix):
            continue
        table = Table(viewed.store, name, parts)
        found = False
        for one in table.scan(*prefix):
            found = True
            yield one.key, one.value
        if found:
            return


def _parts(viewed: Viewed, name: str) -> int | None:
    """How many texts the keys of a table have; None if the table has no row with a valid key."""
    start = name.encode() + b"\0"
    rows = viewed.store.engine.scan_rows("records", start=start, stop=past(start), limit=1)
    try:
        return len(split_texts(rows[0].key[len(start) :])) if rows else None
    except UnicodeDecodeError:
        return None
