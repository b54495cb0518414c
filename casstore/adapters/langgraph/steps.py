"""A step of a graph into rows: its checkpoint, and what its tasks have written."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from langgraph.checkpoint.base import WRITES_IDX_MAP, ChannelVersions, Checkpoint

from casstore.adapters.langgraph import care, layout
from casstore.adapters.langgraph.encoding import Codec
from casstore.adapters.langgraph.known_lists import KeptList
from casstore.adapters.langgraph.layout import Channel, PendingRow, Place
from casstore.adapters.langgraph.lists import ListCodec
from casstore.adapters.langgraph.threads import Threads, row_content
from casstore.engine.forks import Lock
from casstore.errors import (
    BranchedThreadError,
    CheckpointGoneError,
    ConditionFailedError,
    CorruptionError,
    ObjectNotFoundError,
)
from casstore.session.attempts import Attempts
from casstore.session.records import Draft

logger = logging.getLogger(__name__)

OnBranch = Literal["keep", "refuse"]

_KEPT_PARENTS: Final = 256
# Steps that say themselves that they leave the path.
_DELIBERATE: Final = ("fork", "update")


class Parents:
    """The channels of the checkpoints put or read last: the next step need not read them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: OrderedDict[Place, dict[str, Channel]] = OrderedDict()

    def remember(self, place: Place, channels: dict[str, Channel]) -> None:
        """Keep the channels of a checkpoint."""
        with self._lock:
            self._known[place] = channels
            self._known.move_to_end(place)
            while len(self._known) > _KEPT_PARENTS:
                self._known.popitem(last=False)

    def recall(self, place: Place) -> dict[str, Channel] | None:
        """The channels of a checkpoint, if they are known."""
        with self._lock:
            return self._known.get(place)

    def forget(self) -> None:
        """Keep nothing."""
        with self._lock:
            self._known.clear()


class Step(NamedTuple):
    """A checkpoint to be put."""

    place: Place
    parent: str | None
    checkpoint: Checkpoint
    metadata: dict[str, Any]
    new_versions: ChannelVersions

    @property
    def above(self) -> Place | None:
        """Where the checkpoint is that it builds on."""
        return None if self.parent is None else self.place._replace(checkpoint=self.parent)


class StepWriter:
    """Writes steps; each is one write, done wholly or not at all."""

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
        """Store a checkpoint on top of its parent."""
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
                # What the parent had was collected, perhaps while it was read: everything is
                # stored anew.
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
        other_head = self._move_head(draft, step, needs_parent=needs_parent)
        link = draft.keep(
            layout.pack_checkpoint(
                step.checkpoint,
                channels,
                self._codec.encode(layout.other_fields(step.checkpoint)),
                self._codec.encode(step.metadata),
            )
        )
        run = step.metadata.get("run_id")
        content = row_content(link, step.parent, None if run is None else str(run))
        before = threads.find(place)
        if before is not None:
            content = before._replace(link=link, parent=step.parent, run=content.get("r")).content()
        draft.expect(threads.checkpoints, place, None if before is None else before.record)
        draft.put(threads.checkpoints, place, content)
        draft.commit()
        self._parents.remember(place, channels)
        if self._lists is not None:
            self._lists.remember(lists)
        if before is not None and before.link != link:
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

    def _known(self, place: Place | None) -> Mapping[str, Channel]:
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
        """Refuse a checkpoint that could only be read with a parent that is gone.

        True if it needs the parent, and that is there.
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

    def _move_head(self, draft: Draft, step: Step, *, needs_parent: bool) -> str | None:
        """Note which checkpoint was put last; the other head if this one leaves its path.

        Whoever takes checkpoints away looks at the head, too: a new one may need them.
        """
        place, heads = step.place, self._threads.heads
        if place.namespace and not needs_parent:
            return None
        key = (place.thread, place.namespace)
        head = heads.find(*key)
        draft.expect(heads, key, head)
        draft.put(heads, key, place.checkpoint)
        if head is None or place.namespace or step.metadata.get("source") in _DELIBERATE:
            # Graphs inside a graph are started again from where they were, as often as need be.
            return None
        latest: str = head.value
        if latest in (step.parent, place.checkpoint):
            return None
        if self._on_branch == "refuse":
            raise BranchedThreadError(place.thread, step.parent, latest)
        return latest

    # --- what tasks have written --------------------------------------------------------

    def put_writes(
        self, place: Place, writes: Sequence[tuple[str, Any]], task: str, path: str
    ) -> None:
        """Store what a task has written; told twice, the first counts, but for special ones."""
        threads = self._threads
        new = [
            PendingRow(task, path, WRITES_IDX_MAP.get(name, at), name, self._codec.encode(value))
            for at, (name, value) in enumerate(writes)
        ]
        replace = all(name in WRITES_IDX_MAP for name, _ in writes)
        key = (*place, task)

        def attempt(draft: Draft) -> None:
            record = threads.writes.find(*key)
            if record is not None:
                known = layout.unpack_task(task, record.value)
            else:
                row = threads.find(place)
                folded = [] if row is None else row.folded_writes
                known = [each for each in folded if each.task == task]
            merged = {each.slot: each for each in known}
            for each in new:
                if replace or each.slot not in merged:
                    merged[each.slot] = each
            if merged:
                draft.expect(threads.writes, key, record)
                draft.put(threads.writes, key, layout.pack_task(merged.values()))

        care.retry(f"task {task}", attempt, threads)
