"""Stores the steps of a graph: checkpoints, and the writes of tasks."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from langgraph.checkpoint.base import WRITES_IDX_MAP, ChannelVersions, Checkpoint

from casstore.adapters.langgraph import care, layout
from casstore.adapters.langgraph.encoding import Codec
from casstore.adapters.langgraph.known_lists import KeptList
from casstore.adapters.langgraph.layout import (
    Channel,
    CheckpointKey,
    CheckpointRow,
    HeadRow,
    PendingRow,
    TaskRow,
)
from casstore.adapters.langgraph.lists import ListCodec
from casstore.adapters.langgraph.threads import Threads
from casstore.engine.forks import Lock
from casstore.errors import (
    BranchedThreadError,
    CheckpointGoneError,
    ConditionFailedError,
    CorruptionError,
    ObjectNotFoundError,
)
from casstore.session.attempts import Attempts
from casstore.session.records import Draft, Record, find_records

logger = logging.getLogger(__name__)

OnBranch = Literal["keep", "refuse"]

_KEPT_PARENTS: Final = 256
# Sources of steps that branch off on purpose.
_DELIBERATE: Final = ("fork", "update")


class Parents:
    """A cache of the channels of recent checkpoints, so that the next step need not read them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: OrderedDict[CheckpointKey, dict[str, Channel]] = OrderedDict()

    def remember(self, place: CheckpointKey, channels: dict[str, Channel]) -> None:
        """Keep the channels of a checkpoint."""
        with self._lock:
            self._known[place] = channels
            self._known.move_to_end(place)
            while len(self._known) > _KEPT_PARENTS:
                self._known.popitem(last=False)

    def recall(self, place: CheckpointKey) -> dict[str, Channel] | None:
        """The channels of a checkpoint, if cached."""
        with self._lock:
            return self._known.get(place)

    def forget(self) -> None:
        """Clear the cache."""
        with self._lock:
            self._known.clear()


class Step(NamedTuple):
    """A checkpoint to be put."""

    place: CheckpointKey
    parent: str | None
    checkpoint: Checkpoint
    metadata: dict[str, Any]
    new_versions: ChannelVersions

    @property
    def above(self) -> CheckpointKey | None:
        """The place of the parent checkpoint."""
        return None if self.parent is None else self.place._replace(checkpoint=self.parent)


class StepWriter:
    """Stores steps, each in one transaction."""

    def __init__(
        self,
        threads: Threads,
        codec: Codec,
        parents: Parents,
        lists: ListCodec | None,
        on_branch: OnBranch,
    ) -> None:
        self._threads = threads
        self._codec = codec
        self._parents = parents
        self._lists = lists
        self._on_branch = on_branch

    # --- checkpoints --------------------------------------------------------------------

    def put(self, step: Step) -> None:
        """Store a checkpoint based on its parent."""
        take_over = True
        attempts = Attempts(f"thread {step.place.thread!r}")
        while True:
            attempts.begin()
            try:
                self._put(step, take_over=take_over)
            except ConditionFailedError:
                continue
            except (ObjectNotFoundError, CorruptionError):
                if not take_over:
                    raise
                # The parent's objects were collected, perhaps while they were read: store all
                # channels again.
                self._parents.forget()
                take_over = False
                continue
            return

    def _put(self, step: Step, *, take_over: bool) -> None:
        threads, place = self._threads, step.place
        draft = Draft(threads.store)
        known = self._known(step.above) if take_over else {}
        channels, lists = self._channels(draft, step, known)
        needs_parent = self._expect_parent(draft, step, channels)
        head, before = find_records(
            threads.store,
            [(threads.heads, (place.thread, place.namespace)), (threads.checkpoints, place)],
        )
        other_head = self._move_head(draft, step, head, needs_parent=needs_parent)
        link = draft.keep(
            layout.pack_checkpoint(
                step.checkpoint,
                channels,
                self._codec.encode(layout.other_fields(step.checkpoint)),
                self._codec.encode(step.metadata),
            )
        )
        run = step.metadata.get("run_id")
        row = CheckpointRow(place, link, step.parent, None if run is None else str(run))
        stored = threads.checkpoints.decode_found(before)
        if stored is not None:
            row = stored._replace(link=link, parent=row.parent, run=row.run)
        draft.expect(threads.checkpoints, place, before)
        threads.checkpoints.put(draft, row)
        draft.commit()
        self._parents.remember(place, channels)
        if self._lists is not None:
            self._lists.remember(lists)
        if stored is not None and stored.link != link:
            logger.warning(
                "thread %r: checkpoint %s was put again with other content",
                place.thread, place.checkpoint,
            )  # fmt: skip
        if other_head is not None:
            logger.warning(
                "thread %r: checkpoint %s builds on %s, but the thread had gone on to %s; "
                "both are kept, and only one of them is on the thread's path",
                place.thread, place.checkpoint, step.parent, other_head,
            )  # fmt: skip

    def _channels(
        self, draft: Draft, step: Step, known: Mapping[str, Channel]
    ) -> tuple[dict[str, Channel], list[KeptList]]:
        values = step.checkpoint["channel_values"]
        channels: dict[str, Channel] = {}
        lists: list[KeptList] = []
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
                    was = None if before is None else before.value
                    kept = self._lists.keep(draft, values[name], was)
                if kept is not None:
                    lists.append(kept)
                    channels[name] = Channel(stored, True, kept.value)
                else:
                    value = draft.keep_long(self._codec.encode(values[name]))
                    channels[name] = Channel(stored, True, value)
            else:
                channels[name] = Channel(stored, False, None)
        return channels, lists

    def _known(self, place: CheckpointKey | None) -> Mapping[str, Channel]:
        if place is None:
            return {}
        known = self._parents.recall(place)
        if known is None:
            row = self._threads.find(place)
            if row is None:
                return {}
            known = self._threads.read([row])[0].channels
            self._parents.remember(place, known)
        return known

    def _expect_parent(self, draft: Draft, step: Step, channels: Mapping[str, Channel]) -> bool:
        """Refuse a checkpoint that needs a parent which was deleted.

        True if it needs the parent, and the parent exists.
        """
        counters = step.metadata.get("counters_since_delta_snapshot") or {}
        above = step.above
        if above is None or not any(
            name in channels and not channels[name].has_value for name in counters
        ):
            return False
        row = self._threads.find(above)
        if row is None:
            raise CheckpointGoneError(above.thread, above.checkpoint)
        draft.expect(self._threads.checkpoints, above, row.record)
        return True

    def _move_head(
        self, draft: Draft, step: Step, head: Record | None, *, needs_parent: bool
    ) -> str | None:
        """Record the latest checkpoint; the other head if this step branches off from ``head``.

        Pruning and deleting runs make the head a condition, because a new checkpoint may need the
        deleted ones.
        """
        place, heads = step.place, self._threads.heads
        if place.namespace and not needs_parent:
            return None
        draft.expect(heads, (place.thread, place.namespace), head)
        heads.put(draft, HeadRow(*place))
        if head is None or place.namespace or step.metadata.get("source") in _DELIBERATE:
            # Subgraphs are restarted from earlier checkpoints as often as needed.
            return None
        latest = heads.decode(head).checkpoint
        if latest in (step.parent, place.checkpoint):
            return None
        if self._on_branch == "refuse":
            raise BranchedThreadError(place.thread, step.parent, latest)
        return latest

    # --- what tasks have written --------------------------------------------------------

    def put_writes(
        self, place: CheckpointKey, writes: Sequence[tuple[str, Any]], task: str, path: str
    ) -> None:
        """Store the writes of a task.

        Repeated writes are ignored, unless all writes of the call are on special channels.
        """
        threads = self._threads
        new = [
            PendingRow(task, path, WRITES_IDX_MAP.get(name, at), name, self._codec.encode(value))
            for at, (name, value) in enumerate(writes)
        ]
        replace = all(name in WRITES_IDX_MAP for name, _ in writes)
        key = (*place, task)

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
            merged = {each.slot: each for each in known}
            for each in new:
                if replace or each.slot not in merged:
                    merged[each.slot] = each
            if merged:
                draft.expect(threads.writes, key, record)
                threads.writes.put(draft, TaskRow.of(place, task, merged.values()))

        care.retry(f"task {task}", attempt, threads)
