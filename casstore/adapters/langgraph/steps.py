"""Stores the steps of a graph: checkpoints, and the writes of tasks."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple

from langgraph.checkpoint.base import WRITES_IDX_MAP, ChannelVersions, Checkpoint

from casstore.adapters.langgraph import layout
from casstore.adapters.langgraph.encoding import Codec
from casstore.adapters.langgraph.layout import (
    Channel,
    CheckpointKey,
    CheckpointRow,
    HeadRow,
    PendingRow,
    TaskRow,
)
from casstore.adapters.langgraph.lists import KeptList, ListCodec
from casstore.adapters.langgraph.threads import StoredCheckpoint, Threads
from casstore.engine.forks import Lock
from casstore.errors import (
    BranchedThreadError,
    CheckpointGoneError,
    ConditionFailedError,
    CorruptionError,
    ObjectNotFoundError,
)
from casstore.format.canonical import Link
from casstore.format.limits import MAX_DEPTH
from casstore.format.splitting import encode_split
from casstore.session.attempts import Attempts
from casstore.session.records import Draft, Record, find_records

logger = logging.getLogger(__name__)

OnBranch = Literal["keep", "refuse"]

_KEPT_CHECKPOINTS: Final = 256
_MAX_KEPT_BYTES: Final = 64 << 20
# Sources of steps that branch off on purpose.
_DELIBERATE: Final = ("fork", "update")
# Fields of these types do not change while they are cached.
_SCALARS: Final = frozenset((str, int, float, type(None)))


class RecentCheckpoint(NamedTuple):
    """What is cached of a checkpoint that this process has put or read."""

    channels: dict[str, Channel]
    link: Link
    #: Its fields, in stored form; None if the caller could change them.
    fields: Mapping[str, Any] | None = None
    #: The rows of the checkpoint and of its thread's head, as this process has put them. Without
    #: ``row``, the next step must read both.
    row: bytes | None = None
    head: bytes | None = None


def _kept_bytes(known: RecentCheckpoint) -> int:
    """The approximate memory of a checkpoint's long values. Those that are links take little."""
    size = 0
    for channel in known.channels.values():
        held = channel.value.values() if type(channel.value) is dict else (channel.value,)
        size += sum([len(each) for each in held if isinstance(each, str | bytes)])
    return size


class RecentCheckpoints:
    """A cache of recent checkpoints, so that the next step need not read them.

    Another process may have changed or deleted a checkpoint since: a write that relies on it has
    its row as a condition, and a reader reads the row first.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: OrderedDict[CheckpointKey, tuple[RecentCheckpoint, int]] = OrderedDict()
        self._size_bytes = 0

    def remember(self, place: CheckpointKey, known: RecentCheckpoint) -> None:
        """Keep a checkpoint, and drop the oldest ones."""
        size_bytes = _kept_bytes(known)
        with self._lock:
            if place in self._known:
                self._size_bytes -= self._known.pop(place)[1]
            self._known[place] = known, size_bytes
            self._size_bytes += size_bytes
            while len(self._known) > _KEPT_CHECKPOINTS or self._size_bytes > _MAX_KEPT_BYTES:
                self._size_bytes -= self._known.popitem(last=False)[1][1]

    def recall(self, place: CheckpointKey) -> RecentCheckpoint | None:
        """A checkpoint, if cached."""
        with self._lock:
            known = self._known.get(place)
        return None if known is None else known[0]

    def stored(self, row: CheckpointRow) -> StoredCheckpoint | None:
        """The checkpoint of a row, if it is cached with its fields."""
        known = self.recall(row.place)
        if known is None or known.fields is None or known.link != row.link:
            return None
        return StoredCheckpoint(row, known.fields, known.channels)

    def forget(self) -> None:
        """Clear the cache."""
        with self._lock:
            self._known.clear()
            self._size_bytes = 0


class Step(NamedTuple):
    """A checkpoint to be put."""

    place: CheckpointKey
    #: The key of the parent checkpoint.
    above: CheckpointKey | None
    checkpoint: Checkpoint
    metadata: dict[str, Any]
    new_versions: ChannelVersions


class StepWriter:
    """Stores steps, each in one transaction."""

    def __init__(
        self,
        threads: Threads,
        codec: Codec,
        recent: RecentCheckpoints,
        lists: ListCodec | None,
        on_branch: OnBranch,
    ) -> None:
        self._threads = threads
        self._codec = codec
        self._recent = recent
        self._lists = lists
        self._on_branch = on_branch

    # --- checkpoints --------------------------------------------------------------------

    def put(self, step: Step) -> None:
        """Store a checkpoint based on its parent."""
        above = step.above
        known = None if above is None else self._recent.recall(above)
        if above is None or (known is not None and known.row is not None):
            # Usually the parent was put last and the checkpoint is new. The conditions of the write
            # verify that, so no row needs to be read first.
            head = None if known is None else known.head
            latest = None if above is None else above.checkpoint
            try:
                self._put(step, known, head=head, latest=latest, before=None)
            except (ConditionFailedError, ObjectNotFoundError, CorruptionError):
                pass
            else:
                return
        self._put_on_rows(step)

    def _put_on_rows(self, step: Step) -> None:
        """Store a checkpoint after reading the rows that the write has as conditions.

        Not a ``transaction``: a missing object changes what the next attempt stores.
        """
        threads, place = self._threads, step.place
        take_over = True
        attempts = Attempts(f"thread {place.thread!r}")
        while True:
            attempts.begin()
            head, before = find_records(
                threads.store,
                [(threads.heads, (place.thread, place.namespace)), (threads.checkpoints, place)],
            )
            latest = None if head is None else threads.heads.decode(head).checkpoint
            try:
                known = self._known(step.above) if take_over else None
                self._put(step, known, head=head, latest=latest, before=before)
            except ConditionFailedError:
                continue
            except (ObjectNotFoundError, CorruptionError):
                if not take_over:
                    raise
                # The parent's objects were collected, perhaps while they were read: store all
                # channels again.
                self._recent.forget()
                take_over = False
                continue
            return

    def _put(
        self,
        step: Step,
        known: RecentCheckpoint | None,
        *,
        head: Record | bytes | None,
        latest: str | None,
        before: Record | None,
    ) -> None:
        """Write a checkpoint on condition that two rows are unchanged.

        ``head`` is the row of the thread's head, which names the checkpoint ``latest``. ``before``
        is the row of this checkpoint, if it is put again.
        """
        threads, place, checkpoint = self._threads, step.place, step.checkpoint
        draft = Draft(threads.store)
        channels, lists = self._channels(draft, step, {} if known is None else known.channels)
        counters = step.metadata.get("counters_since_delta_snapshot") or {}
        needs_parent = bool(counters) and self._expect_parent(draft, step.above, channels, counters)
        parent = None if step.above is None else step.above.checkpoint
        if step.above is not None and known is not None and known.row is not None:
            # Unchanged channels are copied from this process's cache of the parent, so the write
            # fails unless the parent's row is still the cached one.
            draft.expect(threads.checkpoints, step.above, known.row)
        new_head, branch = None, None
        if needs_parent or not place.namespace:
            # Pruning and deleting runs also have the head as a condition: they fail if a checkpoint
            # is added meanwhile that may need what they delete.
            draft.expect(threads.heads, (place.thread, place.namespace), head)
            new_head = threads.heads.put(draft, HeadRow(*place))
            if latest is not None and latest not in (parent, place.checkpoint):
                branch = self._other_branch(step, parent, latest)
        encode = self._codec.encode
        fields = layout.pack_fields(
            checkpoint, encode(layout.other_fields(checkpoint)), encode(step.metadata)
        )
        link = layout.keep_checkpoint(fields, channels, draft.emit)
        run = step.metadata.get("run_id")
        row = CheckpointRow(place, link, parent, None if run is None else str(run))
        stored = None if before is None else threads.checkpoints.decode(before)
        if stored is not None:
            row = stored._replace(link=link, parent=row.parent, run=row.run)
        draft.expect(threads.checkpoints, place, before)
        new_row = threads.checkpoints.put(draft, row)
        draft.commit()
        is_fixed = _SCALARS.issuperset(map(type, (fields["v"], fields["id"], fields["ts"])))
        self._recent.remember(
            place,
            RecentCheckpoint(
                channels,
                link,
                fields if is_fixed else None,
                None if row.folded_writes else new_row,
                new_head,
            ),
        )
        for name, kept, old in lists:
            kept.cache.remember(channels[name].key, kept.known, None if old is None else old.key)
        if stored is not None and stored.link != link:
            logger.warning(
                "thread %r: checkpoint %s was put again with other content",
                place.thread, place.checkpoint,
            )  # fmt: skip
        if branch is not None:
            logger.warning(
                "thread %r: checkpoint %s is based on %s, but the thread has already continued "
                "to %s; both are kept, and only one of them is on the thread's path",
                place.thread, place.checkpoint, parent, branch,
            )  # fmt: skip

    def _channels(
        self, draft: Draft, step: Step, known: Mapping[str, Channel]
    ) -> tuple[dict[str, Channel], list[tuple[str, KeptList, Channel | None]]]:
        """The channels of a checkpoint, and the lists among them, to be cached once stored."""
        values, emit = step.checkpoint["channel_values"], draft.emit
        channels: dict[str, Channel] = {}
        lists: list[tuple[str, KeptList, Channel | None]] = []
        for name, version in step.checkpoint["channel_versions"].items():
            stored = layout.pack_version(version)
            before = known.get(name)
            if (
                before is not None
                and before.version == stored
                and name not in step.new_versions
                and (before.has_value or name not in values)
            ):
                channels[name] = before
            elif name in values:
                kept = None
                if self._lists is not None:
                    kept = self._lists.keep(draft, values[name], before)
                if kept is not None:
                    lists.append((name, kept, before))
                    value = kept.value
                else:
                    form = self._codec.encode(values[name])
                    value = form, encode_split(form, MAX_DEPTH, emit)
                channels[name] = layout.pack_channel(name, stored, emit, value)
            else:
                channels[name] = layout.pack_channel(name, stored, emit)
        return channels, lists

    def _known(self, place: CheckpointKey | None) -> RecentCheckpoint | None:
        """A parent, from the cache or the store."""
        if place is None:
            return None
        row = self._threads.find(place)
        if row is None:
            return None
        known = self._recent.recall(place)
        if known is None or known.link != row.link:
            known = RecentCheckpoint(self._threads.read([row])[0].channels, row.link)
            self._recent.remember(place, known)
        elif known.row is not None:
            known = known._replace(row=None if row.record is None else row.record.row)
        return known

    def _expect_parent(
        self,
        draft: Draft,
        above: CheckpointKey | None,
        channels: Mapping[str, Channel],
        counters: Iterable[str],
    ) -> bool:
        """Whether a checkpoint needs its parent; the parent's row is then a condition of the write.

        CheckpointGoneError if that parent was deleted. ``counters`` names the delta channels.
        """
        if above is None or not any(
            name in channels and not channels[name].has_value for name in counters
        ):
            return False
        row = self._threads.find(above)
        if row is None:
            raise CheckpointGoneError(above.thread, above.checkpoint)
        draft.expect(self._threads.checkpoints, above, row.record)
        return True

    def _other_branch(self, step: Step, parent: str | None, latest: str) -> str | None:
        """``latest``, unless the step branches off from an earlier checkpoint on purpose: None.

        BranchedThreadError instead of ``latest`` if ``on_branch`` is "refuse".
        """
        place = step.place
        if place.namespace or step.metadata.get("source") in _DELIBERATE:
            # Subgraphs are restarted from earlier checkpoints as often as needed.
            return None
        if self._on_branch == "refuse":
            raise BranchedThreadError(place.thread, parent, latest)
        return latest

    # --- what tasks have written --------------------------------------------------------

    def put_writes(
        self, place: CheckpointKey, writes: Sequence[tuple[str, Any]], task: str, path: str
    ) -> None:
        """Store the writes of a task.

        Repeated writes are ignored. If all writes of the call are on LangGraph's special channels,
        such as errors and interrupts, they replace earlier ones.
        """
        threads = self._threads
        new = [
            PendingRow(task, path, WRITES_IDX_MAP.get(name, at), name, self._codec.encode(value))
            for at, (name, value) in enumerate(writes)
        ]
        replace = all(name in WRITES_IDX_MAP for name, _ in writes)
        key = (*place, task)

        def draft_row(draft: Draft, known: Iterable[PendingRow]) -> None:
            merged = {each.slot: each for each in known}
            for each in new:
                if replace or each.slot not in merged:
                    merged[each.slot] = each
            if merged:
                threads.writes.put(draft, TaskRow.of(place, task, merged.values()))

        recent = self._recent.recall(place)
        if recent is not None and recent.row is not None:
            # Usually the task has not written yet. The conditions of the write verify that.
            draft = Draft(threads.store)
            draft.expect(threads.writes, key, None)
            draft.expect(threads.checkpoints, place, recent.row)
            draft_row(draft, ())
            with suppress(ConditionFailedError):
                draft.commit()
                return

        def attempt(draft: Draft) -> None:
            record, checkpoint = find_records(
                threads.store, [(threads.writes, key), (threads.checkpoints, place)]
            )
            if record is not None:
                known = threads.writes.decode(record).pending()
            else:
                row = threads.checkpoints.decode_found(checkpoint)
                folded = () if row is None else row.folded_writes
                known = [each for each in folded if each.task == task]
            draft.expect(threads.writes, key, record)
            draft_row(draft, known)

        threads.change(f"task {task}", attempt)
