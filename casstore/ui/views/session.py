"""The page of a session: its properties, position, state, and pending work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from casstore.cli.payloads import as_json, without_bytes
from casstore.errors import CasstoreError, ExpansionError, LimitError, NotFoundError, PathStep
from casstore.format.graph import Manifest, link_target
from casstore.format.limits import DEFAULT_MAX_BYTES
from casstore.objects import diff as value_diff
from casstore.objects import graph
from casstore.objects.diff import Change, Field
from casstore.objects.pieces import PieceReader
from casstore.objects.stored import Stored, open_stored, stored_field
from casstore.session import keys, leases
from casstore.session.attempts import read_again
from casstore.session.checkpoint import components_of, ledger_of, read_usage
from casstore.session.component_formats import Detail, describe_fields
from casstore.session.data import Attachment, Batch, Entry, Lease, Origin, SessionMeta, Usage
from casstore.session.history import labels_of
from casstore.session.state import decode_head, head_key
from casstore.ui.texts import one_line
from casstore.ui.views import values
from casstore.ui.views.catalogue import Known, forks_of
from casstore.ui.views.values import Level, ShownChange, ValueBranch
from casstore.ui.views.viewed import Viewed, ViewedPlace, tags_of, turns_before

# The most characters of a component in a file.
_MAX_CHARACTERS: Final = 4 << 20
_LABELS: Final = 100
_QUEUE: Final = 20
_ATTACHMENTS: Final = 20
_FORKS: Final = 200
# The number of levels of the state that are expanded initially.
_OPEN_LEVELS: Final = 1


class Tick(NamedTuple):
    """A labelled revision."""

    revision: int
    labels: tuple[str, ...]


class Work(NamedTuple):
    """A batch in the queue."""

    batch: Batch
    text: str
    is_held: bool


class LeaseShown(NamedTuple):
    """The lease of a session."""

    lease: Lease
    is_live: bool


class Summary(NamedTuple):
    """The properties of a session, without its nodes."""

    session: str
    meta: SessionMeta
    entry: Entry
    first_revision: int
    head_revision: int
    previous: int | None
    following: int | None
    nodes: int
    path_nodes: int
    turns: int
    hidden: int
    leaf: str | None
    usage: tuple[Usage, ...]
    ticks: tuple[Tick, ...]
    origin: Origin | None
    forks: tuple[Known, ...]
    forks_omitted: int
    subjects: tuple[str, ...]
    expires_at_ms: int | None
    tags: tuple[str, ...]

    @property
    def is_head(self) -> bool:
        """Whether the newest revision is shown."""
        return self.entry.revision == self.head_revision


class Waiting(NamedTuple):
    """The current lease, queue and attachments of a session."""

    lease: LeaseShown | None
    queue: tuple[Work, ...]
    queue_more: bool
    attachments: tuple[Attachment, ...]
    attachments_omitted: int


class StateShown(NamedTuple):
    """The state at a revision, and its changes since the revision before."""

    branches: tuple[ValueBranch, ...]
    changes: tuple[ShownChange, ...]
    changes_more: bool
    #: The revision that it is compared with; None: no earlier one is kept.
    compared_with: int | None


def summary(viewed: Viewed, place: ViewedPlace) -> Summary:
    """The properties of a session, and the position of the place in its history."""
    return read_again(lambda: _summary(viewed, place))


def _summary(viewed: Viewed, place: ViewedPlace) -> Summary:
    handle = viewed.store.session(place.session)
    key = keys.session_key(place.session)
    labels = labels_of(viewed.runtime, key)
    entry = handle.entry(place.revision)
    before = next(handle.history(before=place.revision, limit=1), None)
    forks = forks_of(viewed, place.session)
    manifest = place.state.manifest
    return Summary(
        session=place.session,
        meta=handle.meta(),
        entry=entry,
        first_revision=_first_revision(viewed, key, place.head.head.revision),
        head_revision=place.head.head.revision,
        previous=None if before is None else before.revision,
        following=None if place.is_head else _following(viewed, key, place.revision),
        nodes=manifest.nodes,
        path_nodes=len(place.path),
        turns=turns_before(viewed, place, len(place.path)),
        hidden=len(place.hidden),
        leaf=None if manifest.leaf in place.hidden else manifest.leaf_id,
        usage=tuple(read_usage(viewed.reader(), ledger_of(manifest))),
        ticks=tuple([Tick(revision, labels[revision]) for revision in sorted(labels)[-_LABELS:]]),
        origin=place.head.head.origin,
        forks=tuple(forks[:_FORKS]),
        forks_omitted=max(0, len(forks) - _FORKS),
        subjects=handle.subjects(),
        expires_at_ms=handle.expires_at_ms(),
        tags=tags_of(viewed, place.state.head.manifest),
    )


def _first_revision(viewed: Viewed, key: bytes, head: int) -> int:
    rows = viewed.store.engine.scan_rows(
        "history", start=keys.history(key, 0), stop=keys.history(key, head), limit=1
    )
    return decode_head(rows[0].value).revision if rows else head


def _following(viewed: Viewed, key: bytes, revision: int) -> int:
    rows = viewed.store.engine.scan_rows(
        "history",
        start=keys.history(key, revision + 1),
        stop=keys.history(key, (1 << 63) - 1),
        limit=1,
    )
    if rows:
        return decode_head(rows[0].value).revision
    [head] = viewed.store.engine.get_rows([head_key(key)])
    return revision if head is None else decode_head(head).revision


def fork_points(viewed: Viewed, place: ViewedPlace) -> dict[str, list[str]]:
    """The sessions that were forked from this one: {id of the node at the fork: sessions}."""
    found: dict[str, list[str]] = {}
    leaves: dict[int, str | None] = {}
    for fork in forks_of(viewed, place.session)[:_FORKS]:
        assert fork.origin is not None
        node = fork.origin.node
        revision = fork.origin.revision
        if node is None:
            if revision not in leaves:
                try:
                    state = viewed.runtime.at(place.session, revision)
                    leaves[revision] = state.manifest.leaf_id
                except CasstoreError:
                    # Retention has removed the revision.
                    leaves[revision] = None
            node = leaves[revision]
        if node is not None:
            found.setdefault(node, []).append(fork.id)
    return found


def waiting(viewed: Viewed, session: str) -> Waiting:
    """The lease, queue and attachments of a session, now."""
    handle = viewed.store.session(session)
    key = keys.session_key(session)
    [row] = viewed.store.engine.get_rows([leases.lease_key(key)])
    now_ms = viewed.now_ms()
    lease = None
    if row is not None:
        found = leases.decode_lease(session, row)
        lease = LeaseShown(found, found.expires_at_ms > now_ms)
    live = leases.live_generation(row, now_ms)
    batches = handle.queue.batches(limit=_QUEUE + 1)
    work = [
        Work(batch, one_line(values.scalar(list(batch.items)), 200),
             bool(live) and batch.held_by == live)
        for batch in batches[:_QUEUE]
    ]  # fmt: skip
    attachments = handle.attachments.list()
    return Waiting(
        lease, tuple(work), len(batches) > _QUEUE, tuple(attachments[:_ATTACHMENTS]),
        max(0, len(attachments) - _ATTACHMENTS),
    )  # fmt: skip


# --- the state ----------------------------------------------------------------------------


def state(viewed: Viewed, place: ViewedPlace) -> StateShown:
    """The components at a place, and what its revision changed."""
    return read_again(lambda: _state(viewed, place))


def _state(viewed: Viewed, place: ViewedPlace) -> StateShown:
    handle = viewed.store.session(place.session)
    before = next(handle.history(before=place.revision, limit=1), None)
    manifest = place.state.manifest
    changes: list[Change] = []
    details: dict[str, tuple[Detail, ...]] = {}
    shown: tuple[ShownChange, ...] = ()
    more = False
    if before is not None:
        earlier = graph.read_manifest(viewed.reader(), before.manifest)
        fields = _fields(earlier, manifest)
        details, failures = describe_fields(viewed.reader(), fields)
        plain = [field for field in fields if field[0] not in details]
        found = iter(value_diff.diff_fields(viewed.reader(), plain, DEFAULT_MAX_BYTES))
        changes = list(islice(found, values.CHANGES))
        more = next(found, None) is not None
        shown = values.show_difference(changes, details, failures)
        more = more or len(changes) + sum(map(len, details.values())) > values.CHANGES
    changed = frozenset([change.path[:end] for change in changes
                         for end in range(1, len(change.path) + 1)])  # fmt: skip
    changed |= {(name,) for name in details}
    branches = [
        values.branch(name, value, (name,), changed=changed, deeper=_OPEN_LEVELS)
        for name, value in components(viewed, manifest)
    ]
    return StateShown(
        tuple(branches),
        shown,
        more,
        None if before is None else before.revision,
    )


def components(viewed: Viewed, manifest: Manifest) -> Iterator[tuple[str, Any]]:
    """The components of a checkpoint by name, opened."""
    reader = viewed.reader()
    for name, component in sorted(components_of(manifest).items()):
        yield name, _opened(reader, component)


def _opened(reader: PieceReader, component: Any) -> Stored | None:
    target = link_target(component)
    if target is None:
        return stored_field(reader, component)
    return open_stored(reader, target, reader.get(target))


def state_level(
    viewed: Viewed, manifest: Manifest, path: Sequence[PathStep], start: int = 0
) -> Level:
    """The entries of the state at a path, loaded when the reader expands it."""
    if not path:
        raise NotFoundError("the path names no component")
    name, *rest = path
    component = components_of(manifest).get(str(name))
    if component is None:
        raise NotFoundError(f"this revision has no component {name!r}")
    stored = _opened(viewed.reader(), component)
    if stored is None:
        return Level((), 0, 0)
    return values.level(stored.at(rest), tuple(path), start=start)


def _fields(old: Manifest, new: Manifest) -> list[tuple[str, Field, Field]]:
    before, after = components_of(old), components_of(new)
    return [
        (name, _field(before.get(name)), _field(after.get(name)))
        for name in sorted(before.keys() | after.keys())
    ]


def _field(component: Any) -> Field:
    return None if component is None else link_target(component) or component


# --- the whole state, for a file ------------------------------------------------------------------


class Component(NamedTuple):
    """A component of the state."""

    name: str
    #: A plain value, with the length of bytes in their place.
    value: Any

    @property
    def text(self) -> str:
        """Its JSON."""
        return as_json(self.value)


def whole_state(viewed: Viewed, place: ViewedPlace) -> tuple[Component, ...]:
    """All components at a place; one that is too long has a note instead of its value."""
    found: list[Component] = []
    for name, stored in components(viewed, place.state.manifest):
        if not isinstance(stored, Stored):
            found.append(Component(name, stored))
            continue
        try:
            value = without_bytes(stored.beginning(_MAX_CHARACTERS, _MAX_CHARACTERS))
            if len(as_json(value)) >= _MAX_CHARACTERS:
                value = "<too long for this file>"
        except (LimitError, ExpansionError) as exc:
            value = f"<cannot be read: {exc}>"
        found.append(Component(name, value))
    return tuple(found)
