"""Care without anybody watching: many stores, one policy each, a line and a report of each.

For each store in turn: prune what the policy does not keep, collect, vacuum, pack. The
steps and how far they go are the options; nothing happens that was not asked for.
"""

from __future__ import annotations

import fcntl
import glob
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from casstore.cli.advice import advice
from casstore.cli.main import INTERRUPTED
from casstore.cli.quantities import duration, parse_duration, size
from casstore.cli.reclaiming import gc_document, gc_exit_code, pack_document
from casstore.cli.retaining import planned, prune_document
from casstore.engine.overlay import OverlayEngine
from casstore.engine.protocol import COLD_AGE_MS, DURABILITIES, PackReport
from casstore.errors import (
    BusyError,
    CasstoreError,
    InvalidInputError,
    StorageError,
    StoreNotFoundError,
)
from casstore.maintenance import expiring, gc, pack, retention
from casstore.maintenance.policy import policy_from
from casstore.maintenance.progress import Progress, Step
from casstore.maintenance.retention import Policy, RetentionReport
from casstore.maintenance.retention_execution import Tally
from casstore.store import Store, is_server, shown_place
from casstore.store import open as open_store

SCHEMA: Final = "casstore.offline-gc/1"
_DURATIONS: Final = {"within": "within_ms", "idle": "idle_ms"}


class Care(NamedTuple):
    """What is done to a store."""

    grace_ms: int = gc.DEFAULT_GRACE_MS
    batch: int = gc.DEFAULT_BATCH
    #: Prune by this policy; None: by those that the store has, if ``prune``.
    policy: Policy | None = None
    prune: bool = False
    #: Does ``policy`` decide also for sessions that have a policy of their own?
    override_policies: bool = False
    #: Give up attachments announced longer ago than this and never committed; None: none.
    attachments_ms: int | None = None
    vacuum: bool = False
    pack: bool = False
    durability: str = "full"


# What a configuration may say of a store, and of what type it is.
_KEYS: Final[dict[str, type | tuple[type, ...]]] = {
    "grace": str, "batch": int, "retention": (dict, bool), "override_policies": bool,
    "attachments": str, "vacuum": bool, "pack": bool, "durability": str,
}  # fmt: skip


class Config(NamedTuple):
    """What a configuration file says."""

    stores: tuple[str, ...]
    care: Care
    #: By the path of the store, what is other for it.
    own: Mapping[str, Mapping[str, Any]]

    def care_of(self, path: str) -> Care:
        """What is done to one store."""
        for named, changes in self.own.items():
            if _same(named, path):
                return change_care(self.care, changes, f'store."{named}"')
        return self.care

    def idle(self, paths: Sequence[str]) -> list[str]:
        """The stores that something is said of, and that are none of these."""
        return [one for one in self.own if not any(_same(one, path) for path in paths)]


def _same(one: str, other: str) -> bool:
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def read_config(path: str) -> Config:
    """Read a TOML file; whatever it says that is not known is refused by name."""
    try:
        with open(path, "rb") as source:
            found = tomllib.load(source)
    except OSError as exc:
        raise StorageError(f"cannot read {path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise InvalidInputError(f"{path} is no TOML: {exc}") from exc
    stores = found.pop("stores", [])
    own = found.pop("store", {})
    if not isinstance(own, dict) or not all(isinstance(one, dict) for one in own.values()):
        raise InvalidInputError(f'{path}: store is a table for each path, [store."PATH"]')
    if not isinstance(stores, list) or not all(isinstance(one, str) for one in stores):
        raise InvalidInputError(f"{path}: stores is a list of paths")
    if any("\0" in one for one in (*stores, *own)):
        raise InvalidInputError(f"{path}: a path holds no NUL")
    care = change_care(Care(), found, path)
    for pattern, changes in own.items():
        change_care(care, changes, f'{path}: store."{pattern}"')
    return Config(tuple(stores), care, own)


def change_care(care: Care, changes: Mapping[str, Any], where: str) -> Care:
    """What is done, with changes as a configuration spells them."""
    for key, given in changes.items():
        value: Any = given
        if key not in _KEYS:
            raise InvalidInputError(f"{where}: no {key!r}; there are {', '.join(_KEYS)}")
        if not isinstance(given, _KEYS[key]) or (key == "batch" and isinstance(given, bool)):
            raise InvalidInputError(f"{where}: {key} cannot be {value!r}")
        if key == "batch" and not 1 <= value <= gc.MAX_BATCH:
            # Now: a run that finds out when it collects has pruned already.
            raise InvalidInputError(f"{where}: batch is 1 to {gc.MAX_BATCH:,}, not {value}")
        if key == "durability" and value not in DURABILITIES:
            raise InvalidInputError(f"{where}: durability is one of {', '.join(DURABILITIES)}")
        if key == "grace":
            care = care._replace(grace_ms=_duration(value, f"{where}: grace"))
        elif key == "attachments":
            care = care._replace(attachments_ms=_duration(value, f"{where}: attachments"))
        elif key == "retention":
            care = _with_retention(care, value, where)
        else:
            care = care._replace(**{key: value})
    return care


def _with_retention(care: Care, value: Mapping[str, Any] | bool, where: str) -> Care:
    if isinstance(value, bool):
        # True: by the policies in the store itself.
        return care._replace(policy=None, prune=value)
    fields = {
        _DURATIONS.get(key, key): _duration(given, f"{where}: {key}")
        if key in _DURATIONS
        else given
        for key, given in value.items()
    }
    try:
        return care._replace(policy=policy_from(fields), prune=True)
    except InvalidInputError as exc:
        raise InvalidInputError(f"{where}: retention: {exc}") from exc


def _duration(text: object, where: str) -> int:
    try:
        return parse_duration(text if isinstance(text, str) else "")
    except ValueError as exc:
        raise InvalidInputError(f"{where}: {exc}") from exc


def find_stores(patterns: Sequence[str]) -> list[str]:
    """The stores that paths and patterns name, each once, in order.

    A pattern finds only directories that hold a store; a path must be one. What is there by
    exactly this name is a path, whatever characters it has.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        if is_server(pattern):
            found.setdefault(pattern, pattern)
            continue
        if glob.has_magic(pattern) and not os.path.lexists(pattern):
            paths = [
                path
                for path in sorted(glob.glob(pattern, recursive=True))
                if os.path.exists(os.path.join(path, "data.mdb"))
            ]
        else:
            paths = [pattern]
        for path in paths:
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())


@contextmanager
def _only_run(path: str) -> Iterator[None]:
    """Hold the directory against a second run of this; the kernel lets go if we die.

    On a server two collections exclude each other, and nothing else needs to.
    """
    if is_server(path):
        yield
        return
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError as exc:
        raise StoreNotFoundError(f"no store at {path}") from exc
    except NotADirectoryError as exc:
        raise InvalidInputError(f"{path} is a file; a store is a directory") from exc
    except OSError as exc:
        raise StorageError(f"cannot open {path}: {exc.strerror}") from exc
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise BusyError(f"{path} is being cared for by another run") from exc
        yield
    finally:
        os.close(handle)


class _Stopped(Exception):
    """The run was asked to stop, in the middle of something that stops anywhere."""


def _stopping(progress: Progress | None, stop: Callable[[], bool]) -> Progress:
    """Tell of progress, and end what has no other way to be stopped once that is asked for."""

    def told(step: Step) -> None:
        if stop():
            raise _Stopped
        if progress is not None:
            progress(step)

    return told


class Outcome(NamedTuple):
    """What became of one store."""

    path: str
    exit_code: int
    #: One line for a log.
    summary: str
    report: dict[str, Any]


def care_for(
    path: str,
    care: Care,
    *,
    dry_run: bool,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Do to one store what is asked for. What goes wrong is told, not raised."""
    report: dict[str, Any] = dict.fromkeys(("pruned", "collected", "vacuumed", "packed", "error"))
    words: list[str] = []
    try:
        with _only_run(path), _opened(path, care, dry_run=dry_run) as store:
            code = _steps(store, care, report, words, dry_run=dry_run, progress=progress, stop=stop)
    except _Stopped:
        code = INTERRUPTED
        words.append("stopped; the next run goes on")
    except CasstoreError as exc:
        code = exc.exit_code
        report["error"] = {"error": type(exc).__name__, "message": str(exc), "try": advice(exc)}
        words.append(f"{type(exc).__name__}: {exc}")
    file_bytes = _file_bytes(path)
    shown = shown_place(path)
    report.update(path=shown, exit_code=code, dry_run=dry_run, file_bytes=file_bytes)
    told = "; ".join(words) + ("" if file_bytes is None else f"; file {size(file_bytes)}")
    return Outcome(shown, code, f"{shown}: {told}", report)


def _opened(path: str, care: Care, *, dry_run: bool) -> Store:
    if dry_run:
        return open_store(path, readonly=True, create=False)
    return open_store(path, durability=care.durability, create=False)


def _file_bytes(path: str) -> int | None:
    try:
        return os.stat(os.path.join(path, "data.mdb")).st_size
    except OSError:
        return None


def _steps(
    store: Store,
    care: Care,
    report: dict[str, Any],
    words: list[str],
    *,
    dry_run: bool,
    progress: Progress | None,
    stop: Callable[[], bool],
) -> int:
    codes = [0]
    stopping = _stopping(progress, stop)
    if dry_run:
        # The steps are carried out in memory: each finds what the ones before it have left.
        store = Store(OverlayEngine(store.engine))
    if (care.prune or care.attachments_ms is not None) and not stop():
        pruned, listed = _prune(store, care, dry_run=dry_run, progress=stopping)
        expired = expiring.expire_rows(
            store, attachments_older_than_ms=care.attachments_ms, progress=stopping
        )
        report["pruned"] = prune_document(pruned, expired, listed)
        words += _pruned(pruned, expired, care, dry_run=dry_run)
        codes.append(8 if pruned.refused_count else 0)
    packed: PackReport | None = None
    if care.vacuum:
        from casstore.cli.vacuuming import vacuum_document, vacuum_exit_code
        from casstore.maintenance import vacuum

        done = vacuum.vacuum(
            store, grace_ms=care.grace_ms, dry_run=dry_run, progress=progress, stop=stop
        )
        report["vacuumed"] = vacuum_document(done, care.grace_ms)
        words.append(f"vacuum {done.outcome.value}")
        codes.append(vacuum_exit_code(done, interrupted=stop()))
        packed = done.packed
        if done.collected is not None:
            words.append(_swept(done.collected))
    else:
        collected = gc.collect(
            store,
            grace_ms=care.grace_ms,
            batch=care.batch,
            dry_run=dry_run,
            progress=progress,
            stop=stop,
        )
        report["collected"] = gc_document(collected, care.grace_ms)
        words.append(_swept(collected))
        codes.append(gc_exit_code(collected, interrupted=stop()))
    if care.pack and packed is None and not dry_run and not stop() and not max(codes):
        packed = pack.pack(store, progress=stopping)
    if packed is not None:
        report["packed"] = pack_document(packed)
        words.append(_packed(packed, COLD_AGE_MS if report["vacuumed"] is None else 0))
        codes.append(8 if packed.damaged else 0)
    return max(codes)


def _prune(
    store: Store, care: Care, *, dry_run: bool, progress: Progress
) -> tuple[RetentionReport, list[dict[str, Any]] | None]:
    """Prune by the policies, if that is asked for; of a dry run also the plan."""
    if not care.prune:
        return Tally(None).report(), [] if dry_run else None
    plan = retention.plan(
        store,
        policy=care.policy,
        override_policies=care.override_policies and care.policy is not None,
        progress=progress,
    )
    if not dry_run:
        return retention.execute(store, plan, progress=progress), None
    counted, listed = planned(plan)
    retention.execute(store, plan, progress=progress)
    return counted, listed


def _pruned(
    pruned: RetentionReport, expired: expiring.ExpiredRows, care: Care, *, dry_run: bool
) -> list[str]:
    words: list[str] = []
    if care.prune:
        words.append(
            f"{'would prune' if dry_run else 'pruned'} {pruned.revisions_removed} revisions, "
            f"{pruned.sessions_deleted} sessions"
        )
    if pruned.overridden:
        names = ", ".join([one.session for one in pruned.overridden])
        words.append(f"{'would override' if dry_run else 'overrode'} the stored policy of {names}")
    if care.attachments_ms is not None:
        words.append(
            f"{'would give up' if dry_run else 'gave up'} {expired.attachments} attachments, "
            f"{'would condemn' if dry_run else 'condemned'} {expired.condemned}"
        )
    return words


def _packed(report: PackReport, min_age_ms: int) -> str:
    if report.slabs_before:
        return f"packed {report.slabs_before} slabs into {report.slabs_after}"
    if not min_age_ms:
        return "nothing to pack"
    return f"nothing to pack that is older than {duration(min_age_ms)}"


def _swept(report: gc.GcReport) -> str:
    told = f"gc {report.outcome.value}"
    if report.outcome is gc.Outcome.PLANNED:
        return f"{told}: {report.objects_unreached} objects, {size(report.bytes_unreached)}"
    if report.objects_swept:
        told += f": {report.objects_swept} objects, {size(report.bytes_swept)}"
    return told if report.problem is None else f"{told}: {report.problem}"
