"""``CasstoreSaver``: LangGraph checkpoints in a store, for sync and async graphs."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, get_args

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
from casstore.adapters.langgraph import layout
from casstore.adapters.langgraph.encoding import Codec, encodes_as_langgraph
from casstore.adapters.langgraph.layout import CheckpointKey, config_of, config_parts
from casstore.adapters.langgraph.lists import KnownLists, ListCodec
from casstore.adapters.langgraph.reading import PAGE, TupleReader
from casstore.adapters.langgraph.serializer import AllowedType, StrictSerializer
from casstore.adapters.langgraph.steps import OnBranch, RecentCheckpoints, Step, StepWriter
from casstore.adapters.langgraph.threads import KEEP_LATEST, Threads
from casstore.aio.pool import StorePool
from casstore.aio.proxies import StoreClient, awaited, iterated
from casstore.errors import InvalidInputError
from casstore.session.arguments import check_choice
from casstore.store import Store


class _Parts(NamedTuple):
    """The objects that read and write the checkpoints of one store."""

    serde: SerializerProtocol
    threads: Threads
    reader: TupleReader
    writer: StepWriter


class CasstoreSaver(StoreClient, BaseCheckpointSaver[str]):
    """A LangGraph checkpointer on a store. Sync and async methods may be mixed freely.

    ``allowed`` are further types that checkpoints may hold, in addition to LangGraph's safe ones:
    classes, or pairs of module and name. ``serde`` replaces the strict serialiser. ``on_branch``
    applies to a step based on a checkpoint from which another step has already continued: ``keep``
    stores it as a branch and logs a warning, ``refuse`` raises BranchedThreadError.

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
        """A saver on a store at ``path`` that it opens and closes.

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
        check_choice(on_branch, "on_branch", get_args(OnBranch))
        if serde is not None and allowed:
            raise InvalidInputError(
                "allowed is for the saver's own serialiser: pass allowed or serde, not both"
            )
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
        self._recent = RecentCheckpoints()
        self._lists = KnownLists()
        self._on_branch = on_branch
        self._made: _Parts | None = None

    @property
    def _parts(self) -> _Parts:
        """The reader and the writer of the open store; built again if LangGraph replaces serde."""
        store, serde = self._pool.store, self.serde
        parts = self._made
        if parts is None or parts.threads.store is not store or parts.serde is not serde:
            threads, codec = Threads(store), Codec(serde)
            lists = None
            # Joining the encoded elements of a list is specific to StrictSerializer.
            if type(serde) is StrictSerializer and encodes_as_langgraph(serde):
                lists = ListCodec(serde, self._lists)
            parts = self._made = _Parts(
                serde,
                threads,
                TupleReader(threads, codec, self._recent, lists),
                StepWriter(threads, codec, self._recent, lists, self._on_branch),
            )
        return parts

    # --- reading ------------------------------------------------------------------------

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The checkpoint that ``config`` names, or the latest; None if it does not exist."""
        return self._parts.reader.find(config)

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Checkpoints, newest first.

        The checkpoints of a namespace; of a thread if ``config`` names no namespace; of all threads
        if ``config`` is None. ``filter`` selects those whose metadata has all of its keys and
        values.
        """
        until = None if before is None else get_checkpoint_id(before)
        found = self._parts.reader.list(config, filter or {}, until)
        return found if limit is None else islice(found, max(limit, 0))

    def get_delta_channel_history(
        self, *, config: RunnableConfig, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        """For delta channels of a checkpoint: the last stored value, and the writes since, oldest
        first.
        """
        return self._parts.reader.histories(config, channels)

    # --- writing ------------------------------------------------------------------------

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Store a checkpoint based on the one that ``config`` names."""
        thread, namespace, parent = config_parts(config)
        place = CheckpointKey(thread, namespace, checkpoint["id"])
        meta: dict[str, Any] = {**get_checkpoint_metadata(config, metadata)}
        above = None if parent is None else place._replace(checkpoint=parent)
        self._parts.writer.put(Step(place, above, checkpoint, meta, new_versions))
        return config_of(place)

    def put_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Store the writes of a task.

        Repeated writes are ignored. If all writes of the call are on LangGraph's special channels,
        such as errors and interrupts, they replace earlier ones.
        """
        thread, namespace, checkpoint = config_parts(config)
        if checkpoint is None:
            raise InvalidInputError("writes belong to a checkpoint, and the config names none")
        self._parts.writer.put_writes(
            CheckpointKey(thread, namespace, checkpoint), writes, task_id, task_path
        )

    def delete_thread(self, thread_id: str) -> None:
        """Delete everything of a thread."""
        self._parts.threads.delete_thread(str(thread_id))

    def delete_for_runs(self, run_ids: Sequence[str]) -> None:
        """Delete the checkpoints of these runs; the others can be read as before."""
        self._parts.threads.delete_for_runs(run_ids)

    def copy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        """Copy all checkpoints of a thread to another thread; they share all objects."""
        self._parts.threads.copy_thread(str(source_thread_id), str(target_thread_id))

    def prune(self, thread_ids: Sequence[str], *, strategy: str = KEEP_LATEST) -> None:
        """Keep only the latest checkpoint of each namespace, or (``delete``) none."""
        self._parts.threads.prune(thread_ids, strategy)

    def get_next_version(self, current: str | int | float | None, channel: None) -> str:
        """The version after ``current``; deterministic, so equal steps give equal versions."""
        if current is None:
            return layout.version_text(1)
        number = current.split(".")[0] if isinstance(current, str) else current
        return layout.version_text(int(number) + 1)

    # --- async --------------------------------------------------------------------------

    aget_tuple = awaited(get_tuple)
    alist = iterated(list, page=PAGE)
    aput = awaited(put)
    aput_writes = awaited(put_writes)
    adelete_thread = awaited(delete_thread)
    adelete_for_runs = awaited(delete_for_runs)
    acopy_thread = awaited(copy_thread)
    aprune = awaited(prune)
    aget_delta_channel_history = awaited(get_delta_channel_history)
