"""``CasstoreSaver``: LangGraph checkpoints in a store, for sync and async graphs."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
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

from casstore import store as stores
from casstore.adapters.langgraph import care, layout
from casstore.adapters.langgraph.encoding import Codec, encodes_as_langgraph
from casstore.adapters.langgraph.known_lists import KnownLists
from casstore.adapters.langgraph.layout import Place
from casstore.adapters.langgraph.lists import ListCodec
from casstore.adapters.langgraph.reading import PAGE, TupleReader, config_of, config_parts
from casstore.adapters.langgraph.serializer import AllowedType, StrictSerializer
from casstore.adapters.langgraph.steps import OnBranch, Parents, Step, StepWriter
from casstore.adapters.langgraph.threads import Threads
from casstore.aio.pool import StorePool
from casstore.aio.proxies import StoreClient, awaited, iterated
from casstore.errors import InvalidInputError
from casstore.store import Store


class CasstoreSaver(StoreClient, BaseCheckpointSaver[str]):
    """A LangGraph checkpointer on a store. Sync and async methods may be mixed freely.

    ``allowed`` are types, beside LangGraph's own safe ones, that checkpoints may hold: classes,
    or pairs of module and name. ``serde`` replaces the strict serialiser altogether.
    ``on_branch`` says what becomes of a step on a checkpoint from which somebody else has gone
    on: ``keep`` stores it beside and warns in the log, ``refuse`` raises BranchedThreadError.

    >>> from langgraph.graph import START, MessagesState, StateGraph
    >>> builder = StateGraph(MessagesState)
    >>> node = builder.add_node("answer", lambda state: {"messages": ["hello to you"]})
    >>> edge = builder.add_edge(START, "answer")
    >>> graph = builder.compile(checkpointer=CasstoreSaver(store))
    >>> thread = {"configurable": {"thread_id": "a conversation"}}
    >>> done = graph.invoke({"messages": ["hello"]}, thread)
    >>> [message.content for message in graph.get_state(thread).values["messages"]]
    ['hello', 'hello to you']
    """

    def __init__(
        self,
        store: Store,
        *,
        allowed: Collection[AllowedType] = (),
        serde: SerializerProtocol | None = None,
        on_branch: OnBranch = "keep",
    ) -> None:
        self._begin(StorePool.borrowing(store), allowed, serde, on_branch)

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
        opener = partial(stores.open, path, durability, **options)
        saver._begin(StorePool(opener, on_demand=True), allowed, serde, on_branch)
        return saver

    def _begin(
        self,
        pool: StorePool,
        allowed: Collection[AllowedType],
        serde: SerializerProtocol | None,
        on_branch: OnBranch,
    ) -> None:
        if on_branch not in ("keep", "refuse"):
            raise InvalidInputError(f"on_branch is 'keep' or 'refuse', not {on_branch!r}")
        if serde is not None and allowed:
            raise InvalidInputError("allowed types are for the saver's own serialiser: leave serde")
        inner: Any = serde
        while inner is not None:
            if getattr(inner, "pickle_fallback", False):
                raise InvalidInputError(
                    f"serde must not fall back to pickle, which runs code on loading: {inner!r:.80}"
                )
            # EncryptedSerializer wraps another serialiser.
            inner = getattr(inner, "serde", None)
        super().__init__(serde=serde or StrictSerializer(allowed))
        self._pool = pool
        self._parents = Parents()
        self._lists = KnownLists()
        self._on_branch = on_branch

    @property
    def _threads(self) -> Threads:
        return Threads(self._pool.store)

    @property
    def _reader(self) -> TupleReader:
        return TupleReader(self._threads, Codec(self.serde), self._list_codec)

    @property
    def _writer(self) -> StepWriter:
        return StepWriter(
            self._threads, Codec(self.serde), self._parents, self._list_codec, self._on_branch
        )

    @property
    def _list_codec(self) -> ListCodec | None:
        serde = self.serde
        # Joining the encoded elements of a list is specific to StrictSerializer.
        if type(serde) is StrictSerializer and encodes_as_langgraph(serde):
            return ListCodec(serde, self._lists)
        return None

    # --- reading ------------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that ``config`` names, or the latest; None if there is none."""
        return self._reader.find(config)

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
        until = None if before is None else get_checkpoint_id(before)
        found = self._reader.list(config, filter or {}, until)
        return found if limit is None else islice(found, max(limit, 0))

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """What a checkpoint's delta channels start from, and the writes since, oldest first."""
        return self._reader.histories(config, channels)

    # --- writing ------------------------------------------------------------------------

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint on top of the one that ``config`` names."""
        thread, namespace, parent = config_parts(config)
        place = Place(thread, namespace, checkpoint["id"])
        meta: dict[str, Any] = {**get_checkpoint_metadata(config, metadata)}
        self._writer.put(Step(place, parent, checkpoint, meta, new_versions))
        return config_of(place)

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store what a task has written; told twice, the first counts, but for special ones."""
        thread, namespace, checkpoint = config_parts(config)
        if checkpoint is None:
            raise InvalidInputError("writes belong to a checkpoint, and the config names none")
        self._writer.put_writes(Place(thread, namespace, checkpoint), writes, task_id, task_path)

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

    # --- the same, awaited --------------------------------------------------------------

    aget_tuple = awaited(get_tuple)
    alist = iterated(list, page=PAGE)
    aput = awaited(put)
    aput_writes = awaited(put_writes)
    adelete_thread = awaited(delete_thread)
    adelete_for_runs = awaited(delete_for_runs)
    acopy_thread = awaited(copy_thread)
    aprune = awaited(prune)
    aget_delta_channel_history = awaited(get_delta_channel_history)
