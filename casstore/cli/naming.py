"""What a name on the command line means.

    SESSION            a session: where it stands now
    SESSION@REVISION   as it was at a revision
    SESSION@LABEL      as it was where the label stands
    PLACE~N            N revisions before that place; ~ alone is ~1
    PLACE#NODE         one node of the graph there
    TAG                what a tag or pin keeps
    DIGEST             an object, by its 64 digits

If nothing has exactly this name, the beginning of a session's id will do, or at least four
digits of a digest, if only one thing begins so. Ids may hold any character, so a text can
mean two things; then it is refused, and the error lists what it could be, each spelled so that
it means only that: ``session:ID``, ``revision:ID@AT``, ``node:PLACE#NODE``, ``tag:NAME``,
``digest:HEX``. ``STORE::NAME`` is a name in another store. A name that begins with a dash goes
behind ``--``, so that it is not taken for an option.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator
from itertools import islice
from typing import Final, NamedTuple

from casstore.engine.protocol import Listing
from casstore.errors import (
    InvalidInputError,
    NodeNotFoundError,
    NotFoundError,
    RevisionNotFoundError,
    SessionDeletedError,
    SessionNotFoundError,
)
from casstore.format.digest import Digest
from casstore.format.hashing import DIGEST_BYTES, KIND_NAMES, Kind
from casstore.objects.pieces import PieceReader
from casstore.session.attempts import read_again
from casstore.session.data import Entry
from casstore.session.state import Runtime
from casstore.store import Store, is_server

SESSION: Final = "session"
REVISION: Final = "revision"
NODE: Final = "node"
TAG: Final = "tag"
OBJECT: Final = "digest"
KINDS: Final = (SESSION, REVISION, NODE, TAG, OBJECT)
STORE_MARK: Final = "::"

_LISTED: Final = 8
# How many of its marks a name is tried to be cut at.
_CUTS: Final = 16
_BACK: Final = re.compile(r"(?s)(.+)~(\d{0,18})")
_HEX: Final = re.compile(r"[0-9a-fA-F]{4,64}")


class AmbiguousNameError(InvalidInputError):
    """A name means more than one thing; ``candidates`` spells each so that it is clear."""

    def __init__(self, text: str, candidates: list[str], more: bool) -> None:
        listed = "more than one thing" if more else f"{len(candidates)} things"
        super().__init__(f"{text!r} could mean {listed}")
        self.candidates = [*candidates, *(["…"] if more else [])]


class NameNotFoundError(NotFoundError):
    """Nothing in the store goes by this name."""

    def __init__(self, text: str, remedy: str) -> None:
        super().__init__(f"nothing is called {text!r}")
        self.remedy = remedy


class NothingCommittedError(SessionNotFoundError):
    """The session is there, and has no revision yet."""

    def __init__(self, session: str) -> None:
        super().__init__(session)
        self.args = (f"session {session!r} is there, but nothing was committed to it yet",)


class Target(NamedTuple):
    """What a name stands for."""

    kind: str
    #: Spelled so that it means nothing else.
    text: str
    #: Of the manifest, node or object; None for a session without a commit.
    digest: Digest | None
    session: str | None = None
    revision: int | None = None
    node: str | None = None
    #: Is this where the session stands now?
    at_head: bool = False

    @property
    def at(self) -> int | None:
        """The revision to ask a session for; None: its head."""
        return None if self.at_head else self.revision


def quoted(text: str) -> str:
    """A name as a shell takes it behind a command: also one that looks like an option."""
    spelled = shlex.quote(text)
    return f"-- {spelled}" if text.startswith("-") else spelled


def split_store(text: str) -> tuple[str | None, str]:
    """The store that a name is in, if it says so, and the name itself.

    Ids may hold ``::`` as well, so what stands before it counts only if it is there, or is a URL.
    """
    if is_server(text):
        # A host may hold the mark, too, as in [::1]; what follows the hosts may not.
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

    Without ``abbreviated`` nothing may be left out: for what changes the thing named.
    """
    if not text:
        # Every id begins so. It is a variable that is not set, and no wish for the only session.
        raise InvalidInputError("the name is empty")
    forced, mark, rest = text.partition(":")
    found: list[Target] = []
    if mark and forced in KINDS:
        found = _distinct(_FORCED[forced](store, rest))
    if not found:
        # Only now: an id may itself begin with session:, and what an error lists, and what
        # commands call things among themselves, must mean one thing.
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


def resolve_session(store: Store, text: str) -> str:
    """The id of a session that is there; it may be shortened if nothing else begins so."""
    target = resolve(store, text)
    if target.session is None or target.kind not in (SESSION, REVISION):
        raise InvalidInputError(f"{text!r} is no session but {described(store, target)}")
    return target.session


def described(store: Store, target: Target) -> str:
    """What a target is, in words."""
    if target.kind == SESSION:
        return f"session {target.session!r}"
    if target.kind == REVISION:
        return f"revision {target.revision} of session {target.session!r}"
    if target.kind == NODE:
        return f"node {target.node!r} of session {target.session!r}"
    assert target.digest is not None
    return f"a {kind_name(store, target.digest)}, {target.digest.hex()}"


def kind_of(store: Store, digest: bytes) -> int:
    """What an object is."""
    return PieceReader(store.engine).get(digest).kind


def kind_name(store: Store, digest: bytes) -> str:
    """What an object is called: a rope is a blob to everybody but the store."""
    kind = kind_of(store, digest)
    return "blob" if kind == Kind.ROPE else KIND_NAMES.get(kind, str(kind))


def _distinct(found: list[Target] | Iterator[Target]) -> list[Target]:
    known: dict[tuple[object, ...], Target] = {}
    for one in found:
        known.setdefault((one.session, one.revision, one.node, one.digest), one)
    return list(known.values())


# --- exactly ------------------------------------------------------------------------------


def _exact(store: Store, text: str) -> Iterator[Target]:
    yield from _session(store, text)
    yield from _revision(store, text)
    yield from _node(store, text)
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
        # Not there, or not a text that an id can be.
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
        for place in (*_session(store, back[1]), *_revision(store, back[1], cuts - 1)):
            found = _back(store, place, steps)
            if found is not None:
                yield found
    for session, at in _cuts(text, "@"):
        for place in _session(store, session):
            yield from _at(store, place, at)


def _cuts(text: str, mark: str) -> Iterator[tuple[str, str]]:
    """All ways to cut a text in two at a mark, the last mark first."""
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
    """So many revisions before a place; None if it has not so many."""
    if place.revision is None or place.session is None or place.digest is None:
        return None
    if steps == 0:
        return _revision_target(place, place.revision, place.digest)
    # Counted as they come: there may be more than memory should hold.
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
        for where in (*_session(store, place), *_revision(store, place)):
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


def _tag(store: Store, text: str) -> Iterator[Target]:
    try:
        pin = store.find_pin(text)
    except InvalidInputError:
        return
    if pin is not None:
        yield Target(TAG, f"tag:{text}", pin.digest)


def _digest(store: Store, text: str) -> Iterator[Target]:
    """An object by its digest, or as much of it as tells it from others."""
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
    """The sessions whose ids begin so; not more than an error can list."""
    try:
        return [info.meta.session for info in store.sessions(prefix=begin, limit=_LISTED + 1)]
    except InvalidInputError:
        return []


def _not_found(store: Store, text: str) -> Exception:
    """The error for a name that means nothing: as precise as can be said."""
    for mark in "#@~":
        for place, rest in _cuts(text, mark):
            for where in (*_session(store, place), *_revision(store, place)):
                assert where.session is not None
                asked = "log" if mark == "#" else "history"
                remedy = f"casstore {asked} {quoted(where.session)}"
                error = NameNotFoundError(text, remedy)
                what = "node" if mark == "#" else "revision or label"
                shown = rest if mark != "~" else f"~{rest}"
                error.args = (f"{described(store, where)} has no {what} {shown!r}",)
                if mark == "#" and rest in _hidden_ids(store, where.session):
                    told = f"node {rest!r} of session {where.session!r} is hidden by a tombstone"
                    error.args = (told,)
                return error
    try:
        store.session(text).head()
    except SessionDeletedError as exc:
        return exc
    except InvalidInputError as exc:
        return exc
    return NameNotFoundError(
        text, "casstore sessions, casstore tag; a digest needs at least 4 digits"
    )


def _hidden_ids(store: Store, session: str) -> Collection[str]:
    runtime = Runtime(store)

    def read() -> Collection[str]:
        state = runtime.find(session)
        return () if state is None else runtime.hidden(state.head).values()

    return read_again(read)
