"""LangGraph's own conformance suite: every clause, through the async methods and the sync ones."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "langgraph.checkpoint.conformance", reason="needs the extra: pip install '.[dev]'"
)

from langgraph.checkpoint.base import BaseCheckpointSaver, CheckpointTuple, DeltaChannelHistory
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.checkpoint.conformance.report import CapabilityReport, ProgressCallbacks

from casstore.adapters.langgraph import CasstoreSaver

CLAUSES = {
    "put": 17,
    "put_writes": 10,
    "get_tuple": 10,
    "list": 16,
    "delete_thread": 5,
    "delete_for_runs": 7,
    "copy_thread": 8,
    "prune": 8,
}


class SyncFace(CasstoreSaver):
    """Async methods that do nothing but call the sync ones."""

    async def aget_tuple(self, config: Any) -> CheckpointTuple | None:
        return self.get_tuple(config)

    async def alist(self, config: Any, **options: Any) -> AsyncIterator[CheckpointTuple]:
        for found in self.list(config, **options):
            yield found

    async def aput(self, *args: Any) -> Any:
        return self.put(*args)

    async def aput_writes(self, *args: Any, **options: Any) -> None:
        self.put_writes(*args, **options)

    async def adelete_thread(self, thread_id: str) -> None:
        self.delete_thread(thread_id)

    async def adelete_for_runs(self, run_ids: Sequence[str]) -> None:
        self.delete_for_runs(run_ids)

    async def acopy_thread(self, source_thread_id: str, target_thread_id: str) -> None:
        self.copy_thread(source_thread_id, target_thread_id)

    async def aprune(self, thread_ids: Sequence[str], *, strategy: str = "keep_latest") -> None:
        self.prune(thread_ids, strategy=strategy)

    async def aget_delta_channel_history(
        self, *, config: Any, channels: Sequence[str]
    ) -> Mapping[str, DeltaChannelHistory]:
        return self.get_delta_channel_history(config=config, channels=channels)


def run_suite(face: type[CasstoreSaver]) -> tuple[CapabilityReport, Counter[str], list[str]]:
    passed: Counter[str] = Counter()
    failed: list[str] = []

    def note(capability: str, name: str, ok: bool, trace: str | None) -> None:
        if ok:
            passed[capability] += 1
        else:
            failed.append(f"{capability}: {name}\n{trace}")

    @checkpointer_test(name=face.__name__)
    async def make() -> AsyncIterator[BaseCheckpointSaver[str]]:
        with tempfile.TemporaryDirectory() as place:
            async with face.from_path(Path(place, "store"), "relaxed") as saver:
                yield saver

    report = asyncio.run(validate(make, progress=ProgressCallbacks(on_test_result=note)))
    return report, passed, failed


@pytest.mark.parametrize("face", [CasstoreSaver, SyncFace])
def test_every_clause_passes_and_every_capability_is_found(face: type[CasstoreSaver]) -> None:
    report, passed, failed = run_suite(face)
    assert failed == []
    # FULL alone would also be said of a saver that has half of the methods.
    assert all(each.detected and each.passed for each in report.results.values())
    assert report.passed_all_base()
    assert report.passed_all()
    # A later suite may have more clauses; none of those known may be missing.
    assert all(passed[name] >= count for name, count in CLAUSES.items()), passed
    assert sum(CLAUSES.values()) == 81
