"""``CasstoreSaver``: LangGraph checkpoints in a store, for sync and async graphs."""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any, Final, Literal

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    DeltaChannelHistory,
    get_checkpoint_id,
    get_checkpoint_metadata,
)
from langgraph.checkpoint.serde.base import SerializerProtocol
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from casstore import store as stores
from casstore.adapters.langgraph import care, encoding, layout
from casstore.adapters.langgraph.history import ChannelHistory, channel_histories
from casstore.adapters.langgraph.holding import StoreHolder
from casstore.adapters.langgraph.layout import Channel, PendingRow, Place
from casstore.adapters.langgraph.serializer import AllowedType, StrictSerializer
from casstore.adapters.langgraph.threads import (
    CheckpointRow,
    StoredCheckpoint,
    Threads,
    row_content,
)
from casstore.aio.threads import Parameters, Result, iterate
from casstore.errors import (
    BranchedThreadError,
    BusyError,
    CheckpointGoneError,
    ConditionFailedError,
    CorruptionError,
    InvalidInputError,
    ObjectNotFoundError,
)
from casstore.records.rows import Draft
from casstore.store import Store

logger = logging.getLogger(__name__)

OnBranch = Literal["keep", "refuse"]

_MAX_ATTEMPTS: Final = 64
# Checkpoints whose channels are remembered, so that the next step need not read them.
_KEPT_PARENTS: Final = 256
# Tuples that a listing reads at once.
_PAGE: Final = 16
# Steps that say themselves that they leave the path.
_DELIBERATE: Final = ("fork", "update")


class _Parents:
    """The channels of the checkpoints put or read last: the next step need not read them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[Place, dict[str, Channel]] = OrderedDict()

    def remember(self, place: Place, channels: dict[str, Channel]) -> None:
        with self._lock:
            self._known[place] = channels
            self._known.move_to_end(place)
            while len(self._known) > _KEPT_PARENTS:
                self._known.popitem(last=False)

    def recall(self, place: Place) -> dict[str, Channel] | None:
        with self._lock:
            return self._known.get(place)

    def forget(self) -> None:
        with self._lock:
            self._known.clear()


class CasstoreSaver(BaseCheckpointSaver[str]):
    """A LangGraph checkpointer on a store. Sync and async methods may be mixed freely.

    ``allowed`` are types, beside LangGraph's own safe ones, that checkpoints may hold: classes,
    or pairs of module and name. ``serde`` replaces the strict serialiser altogether.
    ``on_branch`` says what becomes of a step on a checkpoint from which somebody else has gone
    on: ``keep`` stores it beside and warns in the log, ``refuse`` raises BranchedThreadError.
    """

    def __init__(
        self,
        store: Store,
        *,
        allowed: Collection[AllowedType] = (),
        serde: SerializerProtocol | None = None,
        on_branch: OnBranch = "keep",
    ) -> None:
        self._begin(StoreHolder(lambda: store, owned=False), allowed, serde, on_branch)

    @classmethod
    def from_path(
        cls,
        path: str | os.PathLike[str],
        durability: str = "full",
        *,
        allowed: Collection[AllowedType] = (),
        serde: SerializerProtocol | None = None,
        on_branch: OnBranch = "keep",
        **options: Any,
    ) -> CasstoreSaver:
        """A saver on the store at ``path``, which it opens and closes itself.

        Use it in ``with`` or ``async with``, or call ``close``. Options as for ``casstore.open``.
        """
        saver = cls.__new__(cls)
        holder = StoreHolder(partial(stores.open, path, durability, **options), owned=True)
        saver._begin(holder, allowed, serde, on_branch)
        return saver

    def _begin(
        self,
        holder: StoreHolder,
        allowed: Collection[AllowedType],
        serde: SerializerProtocol | None,
        on_branch: OnBranch,
    ) -> None:
        if on_branch not in ("keep", "refuse"):
            raise InvalidInputError(f"on_branch is 'keep' or 'refuse', not {on_branch!r}")
        if serde is not None and allowed:
            raise InvalidInputError("allowed types are for the saver's own serialiser: leave serde")
        if getattr(serde, "pickle_fallback", False):
            raise InvalidInputError("a serialiser that falls back to pickle runs what it loads")
        super().__init__(serde=serde or StrictSerializer(allowed))
        self._holder = holder
        self._parents = _Parents()
        self._on_branch = on_branch

    @property
    def _threads(self) -> Threads:
        return Threads(self._holder.store)

    # --- opening and closing ------------------------------------------------------------

    def close(self) -> None:
        """Let go of the store, and close it if this saver has opened it."""
        self._holder.close()

    def __enter__(self) -> CasstoreSaver:
        _ = self._holder.store
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> CasstoreSaver:
        await self._run(lambda: self._holder.store)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._holder.aclose()

    # --- reading ------------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that ``config`` names, or the latest; None if there is none."""
        threads = self._threads
        thread, namespace, checkpoint = _parts(config)
        if checkpoint is None:
            row = threads.find_latest(thread, namespace)
        else:
            row = threads.find(Place(thread, namespace, checkpoint))
        return None if row is None else self._tuples(threads, threads.read([row]))[0]

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Checkpoints, newest first.

        Of a namespace, of a thread if ``config`` names none, or of all threads if it is None;
        with ``filter``, those whose metadata has all of its keys and values.
        """
        found = self._listed(config, filter or {}, before)
        return found if limit is None else islice(found, max(limit, 0))

    def _listed(
        self, config: RunnableConfig | None, wanted: dict[str, Any], before: RunnableConfig | None
    ) -> Iterator[CheckpointTuple]:
        threads = self._threads
        rows = _rows(threads, config, None if before is None else get_checkpoint_id(before))
        # One first, for many ask for no more; then in pages.
        page = 1
        while batch := list(islice(rows, page)):
            chosen = [
                stored
                for stored in threads.read(batch)
                if not wanted or self._matches(stored, wanted)
            ]
            yield from self._tuples(threads, chosen)
            page = _PAGE

    def _matches(self, stored: StoredCheckpoint, wanted: dict[str, Any]) -> bool:
        metadata = self._fields(stored, "meta")
        # Compared here, in Python: a key is only ever looked up, never part of a query.
        return all(metadata.get(key) == value for key, value in wanted.items())

    def _fields(self, stored: StoredCheckpoint, part: str) -> dict[str, Any]:
        """A part of a checkpoint that is a dict."""
        fields = self._decode(stored.value.get(part))
        if type(fields) is not dict:
            raise CorruptionError(f"checkpoint {stored.row.place} is damaged")
        return fields

    def _tuples(
        self, threads: Threads, found: Sequence[StoredCheckpoint]
    ) -> Sequence[CheckpointTuple]:
        channels = [stored.channels for stored in found]
        values = iter(
            threads.resolve(
                each.value for own in channels for each in own.values() if each.has_value
            )
        )
        return [
            self._tuple(threads, stored, own, values)
            for stored, own in zip(found, channels, strict=True)
        ]

    def _tuple(
        self,
        threads: Threads,
        stored: StoredCheckpoint,
        channels: dict[str, Channel],
        values: Iterator[Any],
    ) -> CheckpointTuple:
        row, value = stored
        checkpoint: dict[str, Any] = {
            "v": value.get("v"),
            "id": value.get("id"),
            "ts": value.get("ts"),
            "channel_values": {
                name: self._decode(next(values))
                for name, each in channels.items()
                if each.has_value
            },
            "channel_versions": {
                name: layout.unpack_version(each.version)
                for name, each in channels.items()
                if each.version is not None
            },
            "versions_seen": layout.unpack_seen(value),
            **self._fields(stored, "more"),
        }
        return CheckpointTuple(
            config=_config(row.place),
            checkpoint=checkpoint,  # type: ignore[arg-type]
            metadata=self._fields(stored, "meta"),  # type: ignore[arg-type]
            parent_config=(
                None if row.parent is None else _config(row.place._replace(checkpoint=row.parent))
            ),
            pending_writes=[
                (each.task, each.channel, self._decode(each.value)) for each in threads.pending(row)
            ],
        )

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """What a checkpoint's delta channels start from, and the writes since, oldest first."""
        threads = self._threads
        thread, namespace, checkpoint = _parts(config)
        if checkpoint is None:
            row = threads.find_latest(thread, namespace)
        else:
            row = threads.find(Place(thread, namespace, checkpoint))
        if row is None:
            return {channel: {"writes": []} for channel in channels}
        found = channel_histories(threads, row, channels)
        return {channel: self._history(threads, channel, found[channel]) for channel in channels}

    def _history(
        self, threads: Threads, channel: str, found: ChannelHistory
    ) -> DeltaChannelHistory:
        history: DeltaChannelHistory = {
            "writes": [(task, channel, self._decode(value)) for task, value in found.writes]
        }
        if found.has_seed:
            history["seed"] = self._decode(threads.resolve([found.seed])[0])
        return history

    # --- writing ------------------------------------------------------------------------

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint on top of the one that ``config`` names."""
        threads = self._threads
        thread, namespace, parent = _parts(config)
        place = Place(thread, namespace, checkpoint["id"])
        meta: dict[str, Any] = dict(get_checkpoint_metadata(config, metadata))
        above = None if parent is None else place._replace(checkpoint=parent)
        take_over = True
        for _ in range(_MAX_ATTEMPTS):
            draft = Draft(threads.store)
            known = self._channels_of(threads, above) if above and take_over else {}
            channels = self._channels(draft, checkpoint, new_versions, known)
            self._expect_parent(threads, draft, place, above, meta, channels)
            branches = self._move_head(threads, draft, place, parent, meta)
            link = draft.keep(
                layout.pack_checkpoint(
                    checkpoint,
                    channels,
                    self._encode(layout.other_fields(checkpoint)),
                    encoding.encode(meta, self.serde.dumps_typed),
                )
            )
            run = meta.get("run_id")
            row = threads.find(place)
            draft.expect(threads.checkpoints, place, None if row is None else row.record)
            content = row_content(
                link,
                parent,
                None if run is None else str(run),
                () if row is None else row.folded_writes,
                None if row is None else row.folded_history,
            )
            draft.put(threads.checkpoints, place, content)
            try:
                draft.commit()
            except ConditionFailedError:
                continue
            except ObjectNotFoundError:
                if not take_over:
                    raise
                # What the parent had was collected: everything is stored anew.
                self._parents.forget()
                take_over = False
                continue
            self._parents.remember(place, channels)
            if row is not None and row.link != link:
                logger.warning(
                    "thread %r: checkpoint %s was put again with other content",
                    thread, place.checkpoint,
                )  # fmt: skip
            if branches is not None:
                logger.warning(
                    "thread %r: checkpoint %s builds on %s, but the thread had gone on to %s; "
                    "both are kept, and only one of them is on the thread's path",
                    thread, place.checkpoint, parent, branches,
                )  # fmt: skip
            return _config(place)
        raise BusyError(f"thread {thread!r} kept changing")

    def _channels(
        self,
        draft: Draft,
        checkpoint: Checkpoint,
        new_versions: ChannelVersions,
        known: Mapping[str, Channel],
    ) -> dict[str, Channel]:
        values = checkpoint["channel_values"]
        channels: dict[str, Channel] = {}
        for name, version in checkpoint["channel_versions"].items():
            stored = layout.pack_version(version)
            before = known.get(name)
            if before is not None and before.version == stored and name not in new_versions:
                channels[name] = before
            elif name in values:
                channels[name] = Channel(stored, True, draft.keep_long(self._encode(values[name])))
            else:
                channels[name] = Channel(stored, False, None)
        return channels

    def _channels_of(self, threads: Threads, place: Place) -> Mapping[str, Channel]:
        known = self._parents.recall(place)
        if known is None:
            row = threads.find(place)
            if row is None:
                return {}
            known = threads.read([row])[0].channels
            self._parents.remember(place, known)
        return known

    def _expect_parent(
        self,
        threads: Threads,
        draft: Draft,
        place: Place,
        above: Place | None,
        meta: Mapping[str, Any],
        channels: Mapping[str, Channel],
    ) -> None:
        """Refuse a checkpoint that could only be read with a parent that is gone."""
        counters = meta.get("counters_since_delta_snapshot") or {}
        if above is None or not any(
            name in channels and not channels[name].has_value for name in counters
        ):
            return
        row = threads.find(above)
        if row is None:
            raise CheckpointGoneError(place.thread, above.checkpoint)
        draft.expect(threads.checkpoints, above, row.record)

    def _move_head(
        self,
        threads: Threads,
        draft: Draft,
        place: Place,
        parent: str | None,
        meta: Mapping[str, Any],
    ) -> str | None:
        """Note which checkpoint was put last; the other head if this one leaves its path."""
        if place.namespace:
            # Graphs inside a graph are started again from where they were, as often as need be.
            return None
        key = (place.thread, "")
        head = threads.heads.find(*key)
        draft.expect(threads.heads, key, head)
        draft.put(threads.heads, key, place.checkpoint)
        if head is None or meta.get("source") in _DELIBERATE:
            return None
        latest: str = head.value
        if latest in (parent, place.checkpoint):
            return None
        if self._on_branch == "refuse":
            raise BranchedThreadError(place.thread, parent, latest)
        return latest

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store what a task has written; told twice, the first counts, but for special ones."""
        threads = self._threads
        thread, namespace, checkpoint = _parts(config)
        if checkpoint is None:
            raise InvalidInputError("writes belong to a checkpoint, and the config names none")
        place = Place(thread, namespace, checkpoint)
        new = [
            PendingRow(task_id, task_path, WRITES_IDX_MAP.get(name, at), name, self._encode(value))
            for at, (name, value) in enumerate(writes)
        ]
        replace = all(name in WRITES_IDX_MAP for name, _ in writes)
        key = (*place, task_id)

        def attempt(draft: Draft) -> None:
            record = threads.writes.find(*key)
            if record is not None:
                known = layout.unpack_task(task_id, record.value)
            else:
                row = threads.find(place)
                folded = [] if row is None else row.folded_writes
                known = [each for each in folded if each.task == task_id]
            merged = {each.slot: each for each in known}
            for each in new:
                if replace or each.slot not in merged:
                    merged[each.slot] = each
            if merged:
                draft.expect(threads.writes, key, record)
                draft.put(threads.writes, key, layout.pack_task(merged.values()))

        care.retry(f"task {task_id}", attempt, threads)

    def delete_thread(self, thread_id: str) -> None:
        """Take everything of a thread away."""
        care.delete_thread(self._threads, str(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Take away the checkpoints of these runs; those that stay read as before."""
        care.delete_for_runs(self._threads, run_ids)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Give another thread all checkpoints of this one, sharing everything."""
        care.copy_thread(self._threads, str(source_thread_id), str(target_thread_id))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = care.KEEP_LATEST) -> None:
        """Keep only the latest checkpoint of each namespace, or (``delete``) none."""
        care.prune(self._threads, thread_ids, strategy)

    def get_next_version(self, current: str | int | float | None, channel: None) -> str:
        """The version after ``current``; equal work gives equal versions."""
        if current is None:
            return layout.version_text(1)
        number = current.split(".")[0] if isinstance(current, str) else current
        return layout.version_text(int(number) + 1)

    def _encode(self, value: Any) -> Any:
        # Only of LangGraph's own serialiser it is known that parts may go through it alone.
        if isinstance(self.serde, JsonPlusSerializer):
            return encoding.encode(value, self.serde.dumps_typed)
        return encoding.opaque(value, self.serde.dumps_typed)

    def _decode(self, stored: Any) -> Any:
        return encoding.decode(stored, self.serde.loads_typed)

    # --- the same, awaited --------------------------------------------------------------

    async def _run(
        self,
        call: Callable[Parameters, Result],
        /,
        *args: Parameters.args,
        **options: Parameters.kwargs,
    ) -> Result:
        return await self._holder.run(call, *args, **options)

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """As ``get_tuple``."""
        return await self._run(self.get_tuple, config)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """As ``list``."""
        make = partial(self.list, config, filter=filter, before=before, limit=limit)
        async for found in iterate(self._run, make, _PAGE):
            yield found

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """As ``put``."""
        return await self._run(self.put, config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """As ``put_writes``."""
        await self._run(self.put_writes, config, writes, task_id, task_path)

    async def adelete_thread(self, thread_id: str) -> None:
        """As ``delete_thread``."""
        await self._run(self.delete_thread, thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        """As ``delete_for_runs``."""
        await self._run(self.delete_for_runs, run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """As ``copy_thread``."""
        await self._run(self.copy_thread, source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = care.KEEP_LATEST) -> None:
        """As ``prune``."""
        await self._run(self.prune, thread_ids, strategy=strategy)

    async def aget_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """As ``get_delta_channel_history``."""
        return await self._run(self.get_delta_channel_history, config=config, channels=channels)


def _parts(config: RunnableConfig) -> tuple[str, str, str | None]:
    """Thread, namespace and checkpoint id that a config names."""
    names = config.get("configurable") or {}
    if names.get("thread_id") is None:
        raise InvalidInputError('the config names no thread: {"configurable": {"thread_id": …}}')
    checkpoint = get_checkpoint_id(config)
    namespace = names.get("checkpoint_ns")
    return (
        str(names["thread_id"]),
        "" if namespace is None else str(namespace),
        str(checkpoint) if checkpoint else None,
    )


def _config(place: Place) -> RunnableConfig:
    return {
        "configurable": {
            "thread_id": place.thread,
            "checkpoint_ns": place.namespace,
            "checkpoint_id": place.checkpoint,
        }
    }


def _rows(
    threads: Threads, config: RunnableConfig | None, before: str | None
) -> Iterator[CheckpointRow]:
    """The rows that a listing is about, newest first."""
    if config is None:
        return threads.merged_rows(None, before)
    thread, namespace, checkpoint = _parts(config)
    if checkpoint is not None:
        everywhere = config["configurable"].get("checkpoint_ns") is None
        namespaces = threads.namespaces(thread) if everywhere else [namespace]
        found = [threads.find(Place(thread, each, checkpoint)) for each in namespaces]
        return iter([row for row in found if row and (before is None or checkpoint < before)])
    if config["configurable"].get("checkpoint_ns") is None:
        return threads.merged_rows(thread, before)
    return threads.rows(thread, namespace, before)
