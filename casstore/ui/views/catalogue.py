"""Everything in a store as one list: sessions, and the entries of its record systems."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final, NamedTuple

from casstore.errors import CasstoreError, CorruptionError
from casstore.maintenance import systems
from casstore.maintenance.check import last_check
from casstore.maintenance.contents import measure_own
from casstore.session import catalogue, keys
from casstore.session.data import Origin
from casstore.session.state import decode_head
from casstore.ui.texts import one_line
from casstore.ui.views.viewed import MAX_ROWS, Viewed

#: Rows on one page of the list.
PAGE: Final = 100
# The most sessions, and entries of each system, that are sorted and searched.
_MAX_SESSIONS: Final = 20_000
_MAX_ENTRIES: Final = 1_000
# The key of the sizes in the cache, and the shortest time before they are measured again.
_SIZES: Final = "sizes"
_KEEP_SIZES_S: Final = 2.0
SESSIONS: Final = "session"
BY_TIME: Final = "time"
BY_NAME: Final = "name"
AS_TREE: Final = "tree"


class Known(NamedTuple):
    """A session or an entry of a record system, as its rows show it."""

    #: "session", or the name of the record system.
    kind: str
    id: str
    name: str
    parent: str | None
    origin: Origin | None
    model: str | None
    changed_at_ms: int | None
    revision: int | None
    title: str = ""
    size_bytes: int | None = None


class Listed(NamedTuple):
    """A row of the list."""

    known: Known
    #: The first message of the user.
    says: str
    nodes: int | None
    turns: int | None
    #: Its depth in the tree of forks.
    depth: int = 0
    #: The bytes that only it reaches; of an entry, those of its rows. None: not measured yet.
    own_bytes: int | None = None
    #: True: the search matches it. False: it is listed because a fork of it matches.
    is_match: bool = True


class Catalogue(NamedTuple):
    """The content of a store."""

    entries: tuple[Known, ...]
    #: Kinds with their titles and how many entries of them are listed.
    kinds: tuple[tuple[str, str, int], ...]
    #: Systems whose code cannot be used, with the reason.
    missing: tuple[tuple[str, str], ...]
    #: Kinds of which there are more than are listed.
    cut: tuple[str, ...]


class CataloguePage(NamedTuple):
    """A page of the list."""

    rows: tuple[Listed, ...]
    start: int
    total: int
    order: str
    search: str
    kind: str
    kinds: tuple[tuple[str, str, int], ...]
    missing: tuple[tuple[str, str], ...]
    cut: tuple[str, ...]

    @property
    def earlier(self) -> int:
        """The start of the page before this one."""
        return max(self.start - PAGE, 0)

    @property
    def stop(self) -> int:
        """The position after the last row."""
        return self.start + len(self.rows)


def contents(viewed: Viewed, since: float | None = None) -> Catalogue:
    """Everything that a store holds, from rows alone; cached, but not read before ``since``."""
    return viewed.remembered("contents", lambda: _contents(viewed), keep_s=0.2, since=since)


def version(viewed: Viewed, since: float | None = None) -> str:
    """A text that changes when the overview does."""
    return f"{hash((contents(viewed, since).entries, last_check(viewed.store))):x}"


def measure_sizes(viewed: Viewed) -> bool:
    """Measure what each session alone reaches, in one pass over all objects, for the list.

    False if the cached sizes are of an earlier version, and too recent to be measured again.
    """
    found = viewed.remembered(
        _SIZES, lambda: (version(viewed), measure_own(viewed.store)), keep_s=_KEEP_SIZES_S
    )
    return found[0] == version(viewed)


def _contents(viewed: Viewed) -> Catalogue:
    found: list[Known] = []
    cut: list[str] = []
    for known in islice(catalogue.scan_sessions(viewed.runtime, b"", None), _MAX_SESSIONS + 1):
        if len(found) == _MAX_SESSIONS:
            cut.append(SESSIONS)
            break
        one = _session(known)
        if one is not None:
            found.append(one)
    kinds = [(SESSIONS, "Sessions", len(found))]
    held = systems.held_by(viewed.store)
    missing = list(held.missing.items())
    for system in held.systems:
        try:
            entries = system.entries(viewed.store, limit=_MAX_ENTRIES)
        except CasstoreError as exc:
            missing.append((system.name, str(exc)))
            continue
        if len(entries) == _MAX_ENTRIES:
            cut.append(system.name)
        kinds.append((system.name, system.title, len(entries)))
        found += [
            Known(
                system.name, one.id, one.id, None, None, None, one.changed_at_ms, None, one.title,
                one.size_bytes,
            )
            for one in entries
        ]  # fmt: skip
    return Catalogue(tuple(found), tuple(kinds), tuple(missing), tuple(cut))


def _session(known: catalogue.KnownSession) -> Known | None:
    try:
        head = None if known.head is None else decode_head(known.head)
        meta = None if known.meta is None else catalogue.decode_meta(known.key, known.meta)
    except CorruptionError:
        return None
    session = (head.long_id if head else None) or keys.session_of(known.key)
    session = session or (meta.session if meta else "")
    origin = None if head is None else head.origin
    parent = origin.session if origin is not None else None if meta is None else meta.parent
    changed = head.committed_at_ms if head else meta.created_at_ms if meta else None
    return Known(
        SESSIONS, session, session if meta is None else meta.name, parent, origin,
        None if meta is None else meta.model, changed, None if head is None else head.revision,
    )  # fmt: skip


def listing(
    viewed: Viewed,
    *,
    search: str = "",
    kind: str = "",
    order: str = BY_TIME,
    start: int = 0,
    page: int = PAGE,
) -> CataloguePage:
    """A page of the list of entries of a kind whose id, name, title or model has all words."""
    all_of_it = contents(viewed)
    chosen: list[tuple[Known, int, bool]]
    wanted = [one for one in all_of_it.entries if not kind or one.kind == kind]
    matches = [one for one in wanted if _matches(one, search)]
    if order == AS_TREE:
        chosen = _as_tree(wanted, matches)
    elif order == BY_NAME:
        chosen = [(one, 0, True) for one in sorted(matches, key=lambda one: (one.kind, one.id))]
    else:
        order = BY_TIME
        chosen = [(one, 0, True) for one in sorted(matches, key=_newest_first)]
    start = min(max(start, 0), len(chosen))
    rows = [_listed(viewed, *one) for one in chosen[start : start + min(max(page, 1), MAX_ROWS)]]
    return CataloguePage(
        tuple(rows), start, len(chosen), order, search, kind, all_of_it.kinds, all_of_it.missing,
        all_of_it.cut,
    )  # fmt: skip


def _matches(one: Known, search: str) -> bool:
    words = search.casefold().split()
    text = " ".join((one.kind, one.id, one.name, one.title, one.model or "")).casefold()
    return all(word in text for word in words)


def _newest_first(one: Known) -> tuple[int, str]:
    return -(one.changed_at_ms or 0), one.id


def _as_tree(wanted: Sequence[Known], matches: Sequence[Known]) -> list[tuple[Known, int, bool]]:
    """The entries that match, below the sessions that they were forked from."""
    by_id = {one.id: one for one in wanted if one.kind == SESSIONS}
    shown: dict[tuple[str, str], bool] = {(one.kind, one.id): True for one in matches}
    for one in matches:
        above = by_id.get(one.parent or "") if one.kind == SESSIONS else None
        while above is not None and (SESSIONS, above.id) not in shown:
            shown[SESSIONS, above.id] = False
            above = by_id.get(above.parent or "")
    below: dict[str | None, list[Known]] = {}
    for one in sorted(wanted, key=_newest_first):
        if (one.kind, one.id) in shown:
            has_parent = one.kind == SESSIONS and one.parent in by_id and one.parent != one.id
            below.setdefault(one.parent if has_parent else None, []).append(one)
    found: list[tuple[Known, int, bool]] = []
    seen: set[tuple[str, str]] = set()
    # Depth first. Parents may form a ring, so each entry is taken once.
    ready = [(one, 0) for one in reversed(below.get(None, []))]
    while ready:
        one, depth = ready.pop()
        if (one.kind, one.id) in seen:
            continue
        seen.add((one.kind, one.id))
        found.append((one, depth, shown[one.kind, one.id]))
        if one.kind == SESSIONS:
            ready += [(child, depth + 1) for child in reversed(below.get(one.id, []))]
    ring = [one for one in wanted if (one.kind, one.id) in shown]
    found += [(one, 0, True) for one in ring if (one.kind, one.id) not in seen]
    return found


def _listed(viewed: Viewed, known: Known, depth: int, is_match: bool) -> Listed:
    if known.kind != SESSIONS:
        return Listed(known, known.title, None, None, depth, known.size_bytes, is_match)
    try:
        info = viewed.store.session(known.id).info()
    except CasstoreError as exc:
        says = f"cannot be read: {one_line(str(exc))}"
        return Listed(known, says, None, None, depth, None, is_match)
    nodes = 0 if info.head is None else info.head.node_count
    says = one_line(info.first_user_message or "", 160)
    _, sizes = viewed.known(_SIZES) or ("", None)
    own_bytes = None if sizes is None else sizes.get(keys.session_key(known.id))
    if info.head is None:
        own_bytes = 0
    return Listed(known, says, nodes, info.user_message_count, depth, own_bytes, is_match)


def forks_of(viewed: Viewed, session: str) -> list[Known]:
    """The sessions that were forked from one, the newest first."""
    found = [
        one
        for one in contents(viewed).entries
        if one.origin is not None and one.origin.session == session and one.id != session
    ]
    return sorted(found, key=_newest_first)
