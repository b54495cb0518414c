"""A dry run counts what the run removes, on every engine, and writes nothing."""

from __future__ import annotations

from casstore.engine.overlay import OverlayEngine
from casstore.maintenance import gc, retention, vacuum
from casstore.maintenance.expiring import expire_rows
from casstore.maintenance.retention import Policy
from casstore.store import Store
from casstore.testing import ManualClock
from casstore.testing.session_fixtures import nothing_written
from tests.maintenance.lifetimes import HOUR_MS, grow


def prune_and_collect(store: Store, *, dry_run: bool) -> tuple[object, ...]:
    pruned = retention.execute(store, retention.plan(store, policy=Policy(last=1)))
    expired = expire_rows(store, attachments_older_than_ms=0)
    done = vacuum.vacuum(store, grace_ms=0, dry_run=dry_run)
    assert done.collected is not None
    found = done.collected
    swept = found.objects_unreached if dry_run else found.objects_swept
    sizes = found.bytes_unreached if dry_run else found.bytes_swept
    removed = [(one.session, one.nodes_removed) for one in done.sessions]
    return pruned, expired, removed, swept, sizes


def test_a_dry_run_on_an_overlay_reports_what_the_real_run_removes(
    store: Store, clock: ManualClock
) -> None:
    for name in ("a", "b", "gone"):
        grow(store, name, 6, text=f"a long text of session {name} " * 40)
    store.fork("a", "fork", at=3)
    store.session("a").tombstone(["n2", "n4"])
    store.session("gone").expire_in(0)
    store.session("never").attachments.put(b"pixels" * 1000)
    store.pin("hour", store.put_blob(b"pinned for an hour"), ttl_ms=HOUR_MS)
    clock.now_ms += HOUR_MS
    with nothing_written(store):
        plan = prune_and_collect(Store(OverlayEngine(store.engine)), dry_run=True)
    done = prune_and_collect(store, dry_run=False)
    assert plan == done
    _, _, removed, swept, _ = done
    assert removed == [("a", 2)]
    assert isinstance(swept, int)
    assert swept > 20
    assert gc.collect(store, grace_ms=0).outcome is gc.Outcome.NOTHING
