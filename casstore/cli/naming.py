"""Resolves names on the command line.

    SESSION            a session at its present revision
    SESSION@REVISION   a session at a revision
    SESSION@LABEL      a session at the revision that has the label
    TAG                the object that a tag or pin keeps
    PLACE~N            N revisions before PLACE, one of the names above; ~ alone is ~1
    PLACE#NODE         one node of the graph at PLACE
    SYSTEM:ENTRY       an entry of a record system, as in langgraph:t0
    DIGEST             an object, by its 64 digits

If nothing has exactly this name, the beginning of a session's id is enough, or at least four
digits of a digest, as long as only one thing begins so. Ids may hold any character, so a text can
mean two things; then it is refused, and the error lists what it could be, each as an unambiguous
name: ``session:ID``, ``revision:ID@AT``, ``node:PLACE#NODE``, ``entry:SYSTEM:ENTRY``,
``tag:NAME``, ``digest:HEX``. ``STORE::NAME`` is a name in another store. A name that begins with
a dash is written after ``--``, so that it is not taken for an option.

As a PLACE, a tag or pin must keep a session's checkpoint: it stands for the newest revision that
has this checkpoint. ``TAG~2`` and ``TAG#NODE`` start from there.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Final, NamedTuple

import click
from click.shell_completion import CompletionItem

from casstore.cli.command import PATH_VARIABLE
from casstore.cli.text import safe
from casstore.engine.protocol import Listing
from casstore.errors import (
    CasstoreError,
    InvalidInputError,
    NodeNotFoundError,
    NotFoundError,
    RevisionNotFoundError,
    SessionDeletedError,
    SessionNotFoundError,
)
from casstore.format.digest import DIGEST_BYTES, KIND_NAMES, Digest, Kind
from casstore.maintenance import systems
from casstore.maintenance.systems import RecordSystem, SystemEntry
from casstore.maintenance.systems import prefix_of as prefix_of
from casstore.objects.pieces import PieceReader
from casstore.session.attempts import read_again
from casstore.session.data import Entry
from casstore.session.state import runtime_of
from casstore.store import Store, is_server
from casstore.store import open as open_store

SESSION: Final = "session"
REVISION: Final = "revision"
NODE: Final = "node"
TAG: Final = "tag"
OBJECT: Final = "digest"
ENTRY: Final = "entry"
STORE_MARK: Final = "::"

# The most meanings of an ambiguous name that an error lists.
_LISTED: Final = 8
# The most names that a misspelt one is compared with.
_COMPARED: Final = 2000
# The most positions of ``@``, ``~`` or ``#`` at which a name is split.
_CUTS: Final = 16
_BACK: Final = re.compile(r"(?s)(.+)~(\d{0,18})")
_HEX: Final = re.compile(r"[0-9a-fA-F]{4,64}")


class AmbiguousNameError(InvalidInputError):
    """A name has several meanings; ``candidates`` has an unambiguous name of each."""

    def __init__(self, text: str, candidates: list[str], more: bool) -> None:
        listed = "more than one thing" if more else f"{len(candidates)} things"
        super().__init__(f"{text!r} could mean {listed}")
        self.candidates = [*candidates, *(["…"] if more else [])]


class NameNotFoundError(NotFoundError):
    """Nothing in the store has this name; ``remedy`` is what to try."""

    def __init__(self, text: str, remedy: str, message: str | None = None) -> None:
        super().__init__(message or f"nothing is called {text!r}")
        self.remedy = remedy


class NothingCommittedError(SessionNotFoundError):
    """The session exists, and has no revision yet."""

    def __init__(self, session: str) -> None:
        super().__init__(session)
        self.args = (f"session {session!r} is there, but nothing was committed to it yet",)


class Target(NamedTuple):
    """What a name refers to."""

    kind: str
    #: The unambiguous name.
    text: str
    #: The digest of the manifest, node or object; None for a session without a commit.
    digest: Digest | None
    session: str | None = None
    revision: int | None = None
    node: str | None = None
    #: True if this is the session's present revision.
    at_head: bool = False
    #: For an entry: its record system.
    system: RecordSystem | None = None
    entry: SystemEntry | None = None

    def require_digest(self) -> Digest:
        """The digest; InvalidInputError if the target has none."""
        if self.digest is None:
            name = self.text.partition(":")[2]
            why = "nothing was committed yet"
            if self.entry is not None:
                why = "the entry of a record system is not one object; use show, log or diff"
            raise InvalidInputError(f"{name!r}: {why}")
        return self.digest

    @property
    def at(self) -> int | None:
        """The revision to read; None: the head."""
        return None if self.at_head else self.revision


def quoted(text: str) -> str:
    """A name quoted for a shell, and after ``--`` if it begins with a dash."""
    encoded = shlex.quote(text)
    return f"-- {encoded}" if text.startswith("-") else encoded


def split_store(text: str) -> tuple[str | None, str]:
    """Split ``STORE::NAME``; the store is None if the text names none.

    Ids may contain ``::`` as well, so the part before it is a store only if it is an existing
    path or a URL.
    """
    if is_server(text):
        # A host may contain ``::`` too, as in [::1], so search after the hosts.
        hosts_end = text.find("/", text.index("://") + 3)
        at = text.find(STORE_MARK, max(hosts_end, 0))
        if hosts_end < 0 or at < 0:
            return None, text
        return text[:at], text[at + len(STORE_MARK) :]
    place, mark, rest = text.partition(STORE_MARK)
    if mark and place and os.path.exists(place):
        return place, rest
    return None, text


def resolve(store: Store, text: str, *, abbreviated: bool = True) -> Target:
    """What ``text`` means in this store.

    Without ``abbreviated`` the name must be complete: for commands that change the target.
    """
    if not text:
        # Every id starts with the empty text, so it would find the only session. An empty name
        # usually comes from an unset variable.
        raise InvalidInputError("the name is empty")
    forced, mark, rest = text.partition(":")
    found: list[Target] = []
    if mark and forced in _FORCED:
        found = _distinct(_FORCED[forced](store, rest))
    if not found:
        # Qualified names take precedence: an id may itself start with "session:", but the names
        # in error messages, and those that commands pass to each other, must have one meaning.
        found = _distinct(_exact(store, text))
    more = False
    if not found and abbreviated:
        found = _distinct(_abbreviated(store, text))
        more = len(found) > _LISTED
    if len(found) == 1:
        return found[0]
    if found:
        raise AmbiguousNameError(text, [one.text for one in found[:_LISTED]], more)
    raise _not_found(store, text)


def resolve_place(store: Store, text: str, *, abbreviated: bool = True) -> Target:
    """Like ``resolve``, but a tag or pin on a session's checkpoint means that revision."""
    target = resolve(store, text, abbreviated=abbreviated)
    return _tagged_place(store, target) or target if target.kind == TAG else target


def _tagged_place(store: Store, tag: Target) -> Target | None:
    """The newest revision of the first session that has the checkpoint which a tag keeps."""
    manifest = tag.digest
    if manifest is None or kind_of(store, manifest) != Kind.MANIFEST:
        return None
    for info in store.sessions():
        session = info.meta.session
        for entry in store.session(session).history():
            if entry.manifest == manifest:
                place = Target(
                    SESSION, "", manifest, session, info.head and info.head.revision, at_head=True
                )
                return _revision_target(place, entry.revision, entry.manifest)
    return None


def resolve_session(store: Store, text: str) -> str:
    """The id of an existing session; it may be abbreviated if it stays unique."""
    target = resolve_place(store, text)
    if target.session is None or target.kind not in (SESSION, REVISION):
        raise InvalidInputError(f"{text!r} is not a session but {described(store, target)}")
    return target.session


class NamedRevision(NamedTuple):
    """A revision that a name refers to, or a node of the graph at it."""

    session: str
    revision: int
    node: str | None
    #: The revision to read; None: the head.
    at: int | None
    #: True if the name is that of the session alone.
    is_session: bool


def resolve_revision(
    store: Store, text: str, otherwise: str, *, abbreviated: bool = True, nodes: bool = False
) -> NamedRevision:
    """Resolve a name to a session with a commit, or a revision; with ``nodes`` also to a node.

    ``otherwise`` ends the error for names of other things.
    """
    found = resolve_place(store, text, abbreviated=abbreviated)
    if found.session is None or (found.node is not None and not nodes):
        raise InvalidInputError(f"{text!r} is {described(store, found)}; {otherwise}")
    if found.revision is None:
        raise NothingCommittedError(found.session)
    return NamedRevision(found.session, found.revision, found.node, found.at, found.kind == SESSION)


def described(store: Store, target: Target) -> str:
    """A description of a target."""
    if target.kind == SESSION:
        return f"session {target.session!r}"
    if target.kind == REVISION:
        return f"revision {target.revision} of session {target.session!r}"
    if target.kind == NODE:
        return f"node {target.node!r} of session {target.session!r}"
    if target.entry is not None and target.system is not None:
        return f"entry {target.entry.id!r} of {target.system.title}"
    assert target.digest is not None
    return f"a {kind_name(store, target.digest)}, {target.digest.hex()}"


def kind_of(store: Store, digest: bytes) -> int:
    """The kind of an object."""
    return PieceReader(store.engine).get(digest).kind


def kind_name(store: Store, digest: bytes) -> str:
    """The kind of an object for people: a rope is shown as a blob."""
    kind = kind_of(store, digest)
    return "blob" if kind == Kind.ROPE else KIND_NAMES.get(kind, str(kind))


def _distinct(found: list[Target] | Iterator[Target]) -> list[Target]:
    known: dict[tuple[object, ...], Target] = {}
    for one in found:
        which = None if one.entry is None else one.text
        known.setdefault((one.session, one.revision, one.node, one.digest, which), one)
    return list(known.values())


# --- exactly ------------------------------------------------------------------------------


def _exact(store: Store, text: str) -> Iterator[Target]:
    yield from _session(store, text)
    yield from _revision(store, text)
    yield from _node(store, text)
    yield from _entry(store, text)
    yield from _tag(store, text)
    if len(text) == 2 * DIGEST_BYTES:
        yield from _digest(store, text)


def _session(store: Store, text: str) -> Iterator[Target]:
    try:
        handle = store.session(text)
        head = handle.head()
        if head is None:
            handle.meta()
    except (SessionNotFoundError, SessionDeletedError, InvalidInputError):
        # It does not exist, or the text is not a valid id.
        return
    if head is None:
        yield Target(SESSION, f"session:{text}", None, text, at_head=True)
    else:
        yield Target(SESSION, f"session:{text}", head.manifest, text, head.revision, at_head=True)


def _revision(store: Store, text: str, cuts: int = _CUTS) -> Iterator[Target]:
    """``session@at``, ``place~n``."""
    back = _BACK.fullmatch(text)
    if back is not None and cuts:
        steps = int(back[2] or 1)
        for place in _places(store, back[1], cuts - 1):
            found = _back(store, place, steps)
            if found is not None:
                yield found
    for session, at in _cuts(text, "@"):
        for place in _session(store, session):
            yield from _at(store, place, at)


def _places(store: Store, text: str, cuts: int = _CUTS) -> Iterator[Target]:
    """Sessions, revisions, and tags on checkpoints of sessions: what ``~`` and ``#`` follow."""
    yield from _session(store, text)
    yield from _revision(store, text, cuts)
    for tag in _tag(store, text):
        place = _tagged_place(store, tag)
        if place is not None:
            yield place


def _cuts(text: str, mark: str) -> Iterator[tuple[str, str]]:
    """All ways to split a text at a mark, the last mark first."""
    end = len(text)
    for _ in range(_CUTS):
        end = text.rfind(mark, 0, end)
        if end < 1:
            return
        if end + 1 < len(text):
            yield text[:end], text[end + 1 :]


def _at(store: Store, place: Target, at: str) -> Iterator[Target]:
    assert place.session is not None
    handle = store.session(place.session)
    choices: list[int | str] = [at]
    if at.isascii() and at.isdigit() and len(at) < 19:
        choices.insert(0, int(at))
    for choice in choices:
        try:
            entry = handle.entry(choice)
        except (RevisionNotFoundError, SessionNotFoundError, InvalidInputError):
            continue
        yield _revision_target(place, entry.revision, entry.manifest)
        return


def _revision_target(place: Target, revision: int, manifest: Digest) -> Target:
    head = place.at_head and place.revision == revision
    return Target(
        REVISION,
        f"revision:{place.session}@{revision}",
        manifest,
        place.session,
        revision,
        at_head=head,
    )


def _back(store: Store, place: Target, steps: int) -> Target | None:
    """The revision that is ``steps`` before a place; None if the history is too short."""
    if place.revision is None or place.session is None or place.digest is None:
        return None
    if steps == 0:
        return _revision_target(place, place.revision, place.digest)
    # Count while iterating: the history may be too long to hold in memory.
    last: Entry | None = None
    seen = 0
    for entry in store.session(place.session).history(before=place.revision, limit=steps):
        last = entry
        seen += 1
    if last is None or seen < steps:
        return None
    return _revision_target(place, last.revision, last.manifest)._replace(at_head=False)


def _node(store: Store, text: str) -> Iterator[Target]:
    for place, node in _cuts(text, "#"):
        for where in _places(store, place):
            found = _node_target(store, where, node)
            if found is not None:
                yield found


def _node_target(store: Store, where: Target, node: str) -> Target | None:
    assert where.session is not None
    try:
        found = find_node(store, where.session, node, where.at)
    except (RevisionNotFoundError, SessionNotFoundError, InvalidInputError):
        return None
    if found is None:
        return None
    inner = where.text.partition(":")[2]
    return Target(
        NODE, f"node:{inner}#{node}", found, where.session, where.revision, node,
        at_head=where.at_head,
    )  # fmt: skip


def find_node(store: Store, session: str, node: str, at: int | None) -> Digest | None:
    """The digest of a visible node, or None; does not read its payload."""
    try:
        return store.session(session).nodes(leaf=node, at=at, payloads=False)[-1].digest
    except NodeNotFoundError:
        return None


def _entry(store: Store, text: str) -> Iterator[Target]:
    """``system:entry``."""
    prefix, mark, rest = text.partition(":")
    if not mark or not rest:
        return
    for system in systems.held_by(store).systems:
        if prefix in (system.name, system.prefix):
            try:
                found = system.find_entry(store, rest)
            except InvalidInputError:
                # The text is not a valid id of this system.
                continue
            if found is not None:
                name = f"entry:{prefix_of(system)}:{rest}"
                yield Target(ENTRY, name, None, system=system, entry=found)


def _tag(store: Store, text: str) -> Iterator[Target]:
    try:
        pin = store.find_pin(text)
    except InvalidInputError:
        return
    if pin is not None:
        yield Target(TAG, f"tag:{text}", pin.digest)


def _digest(store: Store, text: str) -> Iterator[Target]:
    """An object by its digest, or by a unique prefix of it."""
    if _HEX.fullmatch(text) is None:
        return
    low = bytes.fromhex(text.ljust(2 * DIGEST_BYTES, "0"))
    high = bytes.fromhex(text.ljust(2 * DIGEST_BYTES, "f"))
    engine = store.engine
    if isinstance(engine, Listing):
        found = engine.digests(low, high, limit=_LISTED + 1)
    else:
        found = [] if engine.missing([low]) else [low]
    for digest in found:
        yield Target(OBJECT, f"digest:{digest.hex()}", Digest(digest))


_FORCED: Final[dict[str, Callable[[Store, str], Iterator[Target]]]] = {
    SESSION: _session,
    REVISION: _revision,
    NODE: _node,
    ENTRY: _entry,
    TAG: _tag,
    OBJECT: _digest,
}


# --- shortened ----------------------------------------------------------------------------


def _abbreviated(store: Store, text: str) -> Iterator[Target]:
    for session in _beginning(store, text):
        yield from _session(store, session)
    for cut in islice(re.finditer("(?<!^)[@~#]", text), _CUTS):
        begin, rest = text[: cut.start()], text[cut.start() :]
        for session in _beginning(store, begin):
            whole = session + rest
            yield from _revision(store, whole)
            yield from _node(store, whole)
    yield from _digest(store, text)


def _beginning(store: Store, begin: str) -> list[str]:
    """The sessions whose ids start with this text, at most one more than an error lists."""
    try:
        return [info.meta.session for info in store.sessions(prefix=begin, limit=_LISTED + 1)]
    except InvalidInputError:
        return []


def _not_found(store: Store, text: str) -> Exception:
    """The most precise error for a name that does not exist."""
    for mark in "#@~":
        for place, rest in _cuts(text, mark):
            for where in _places(store, place):
                assert where.session is not None
                asked = "log" if mark == "#" else "history"
                what = "node" if mark == "#" else "revision or label"
                shown = rest if mark != "~" else f"~{rest}"
                near = _similar_at(store, where.session, rest) if mark == "@" else []
                message = f"{described(store, where)} has no {what} {shown!r}{_did_you_mean(near)}"
                if mark == "#" and rest in _hidden_ids(store, where.session):
                    message = f"node {rest!r} of session {where.session!r} is hidden by a tombstone"
                return NameNotFoundError(text, f"casstore {asked} {quoted(where.session)}", message)
    try:
        store.session(text).head()
    except (SessionDeletedError, InvalidInputError) as exc:
        return exc
    return NameNotFoundError(
        text,
        "casstore sessions; a digest needs at least 4 digits",
        f"nothing is called {text!r}{_did_you_mean(_similar(store, text))}",
    )


def _did_you_mean(near: list[str]) -> str:
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _similar(store: Store, text: str) -> list[str]:
    """Names in the store that are similar to a misspelt one, most similar first."""
    from difflib import get_close_matches

    names = [info.meta.session for info in islice(store.sessions(), _COMPARED)]
    names += [pin.name for pin in islice(store.pins(), _COMPARED)]
    for system in systems.held_by(store).systems:
        entries = islice(systems.all_entries(system, store), _COMPARED)
        names += [f"{prefix_of(system)}:{entry.id}" for entry in entries]
    # Of SESSION@REVISION and the like only the session is compared, then the whole.
    cut = re.search("(?<!^)[@~#]", text)
    for end in (cut.start() if cut else len(text), len(text)):
        near = [one + text[end:] for one in get_close_matches(text[:end], names, 3)]
        if near and near != [text]:
            return near
    return []


def _similar_at(store: Store, session: str, label: str) -> list[str]:
    """Labels of a session that are similar to a misspelt one, as SESSION@LABEL."""
    from difflib import get_close_matches

    entries = islice(store.session(session).history(), _HISTORY_OFFERED)
    labels = [label for entry in entries for label in entry.labels]
    return [f"{session}@{near}" for near in get_close_matches(label, labels, 3)]


def _hidden_ids(store: Store, session: str) -> Collection[str]:
    runtime = runtime_of(store)

    def read() -> Collection[str]:
        state = runtime.find(session)
        return () if state is None else runtime.hidden(state.head).values()

    return read_again(read)


_OFFERED: Final = 50
# The most revisions of a session that are searched for labels.
_HISTORY_OFFERED: Final = 1000


def complete_name(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete a name to sessions, entries and tags; after ``session@`` to labels and revisions.

    Empty if the store cannot be read: the command itself reports why.
    """
    given = ctx.params.get("store") or ctx.find_root().params.get("store")
    path = given or os.environ.get(PATH_VARIABLE) or os.curdir
    try:
        with open_store(path, readonly=True, create=False) as store:
            found = [*islice(_completions(store, incomplete), _OFFERED)]
    except CasstoreError:
        return []
    # An id that would have to be escaped cannot be typed as it is shown.
    return [CompletionItem(one) for one in found if one == safe(one)]


def _completions(store: Store, begin: str) -> Iterator[str]:
    for info in store.sessions(prefix=begin, limit=_OFFERED):
        yield info.meta.session
    session, mark, rest = begin.rpartition("@")
    if mark:
        try:
            for entry in islice(store.session(session).history(), _HISTORY_OFFERED):
                for place in (*entry.labels, str(entry.revision)):
                    if place.startswith(rest):
                        yield f"{session}@{place}"
        except (NotFoundError, SessionDeletedError):
            return
    for system in systems.held_by(store).systems:
        prefix = f"{prefix_of(system)}:"
        if begin.startswith(prefix):
            for one in systems.all_entries(system, store):
                if (prefix + one.id).startswith(begin):
                    yield prefix + one.id
        elif prefix.startswith(begin):
            yield prefix
    for pin in store.pins(prefix=begin):
        yield pin.name
