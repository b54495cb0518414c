"""``maintain``: prune, collect, vacuum, pack and compact one store or many, by a policy.

``tools/gc.py`` runs it for cron and systemd. ``maintain_store`` handles one store.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TextIO

import click

from casstore.cli.advice import advice
from casstore.cli.command import App, command
from casstore.cli.configuration import EVERYTHING, Config, Steps, find_stores, read_config
from casstore.cli.fields import PROBLEM, Field, Fields, Shape, document, nested
from casstore.cli.main import BROKEN_PIPE, INTERRUPTED
from casstore.cli.options import ATTACHMENTS, OVERRIDE_POLICIES_HELP, dry_run_option
from casstore.cli.output import is_terminal, let_go
from casstore.cli.progress import Meter
from casstore.cli.quantities import DURATION, Whole, duration, size
from casstore.cli.retention import (
    PRUNE_FIELDS,
    PlannedSession,
    planned,
    policy_of,
    prune_document,
    with_policy,
)
from casstore.cli.space import (
    COMPACT_FIELDS,
    GC_FIELDS,
    PACK_FIELDS,
    VACUUM_FIELDS,
    gc_document,
    gc_exit_code,
    vacuum_document,
    vacuum_exit_code,
)
from casstore.cli.text import json_pieces, safe
from casstore.engine.overlay import OverlayEngine
from casstore.engine.protocol import (
    COLD_AGE_MS,
    DEFAULT_BATCH,
    Measuring,
    PackReport,
)
from casstore.errors import (
    BusyError,
    CasstoreError,
    CorruptionError,
    InvalidInputError,
    StorageError,
    StoreNotFoundError,
)
from casstore.maintenance import compact, expiring, gc, pack, retention, space, vacuum
from casstore.maintenance.contents import AT_ONCE, measure_sessions, moved_at
from casstore.maintenance.files import whole_file
from casstore.maintenance.policy import policy_fields, policy_from
from casstore.maintenance.progress import Progress, Step
from casstore.maintenance.retention import RetentionReport, Tally
from casstore.store import Store, is_server, shown_place
from casstore.store import open as open_store

# A file is compacted if that frees at least this many bytes, and this fraction of the file.
_MIN_COMPACT_BYTES: Final = 1 << 20
_MIN_COMPACT_SHARE: Final = 0.25
# How many sessions a report lists under ``holding``, those that take the most space.
_HOLDING: Final = 5


@contextmanager
def _only_run(path: str) -> Iterator[None]:
    """Lock the directory against a second run; if this process dies, the kernel unlocks it.

    On a server, gc refuses to run twice at once, and the other steps need no lock.
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
            raise BusyError(f"{path} is being maintained by another run; wait for it") from exc
        yield
    finally:
        os.close(handle)


class _Stopped(Exception):
    """The run was asked to stop during a step that can stop anywhere."""


def _stopping(progress: Progress | None, stop: Callable[[], bool]) -> Progress:
    """A progress function that raises ``_Stopped`` when a stop is requested, else reports."""

    def note(step: Step) -> None:
        if stop():
            raise _Stopped
        if progress is not None:
            progress(step)

    return note


class StoreOutcome(NamedTuple):
    """The result for one store."""

    path: str
    exit_code: int
    #: One line for a log.
    summary: str
    report: dict[str, Any]


def maintain_store(
    path: str,
    steps: Steps,
    *,
    dry_run: bool,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> StoreOutcome:
    """Carry out the steps for one store. Errors are reported, not raised."""
    report: dict[str, Any] = dict.fromkeys(_STORE)
    report.update(file_bytes_before=_file_bytes(path), nodes_removed=0, objects_removed=0)
    report["holding"] = []
    words: list[str] = []
    try:
        with _only_run(path):
            with open_store(
                path, durability=steps.durability, readonly=dry_run, create=False
            ) as store:
                code = _steps(
                    store, steps, report, words, dry_run=dry_run, progress=progress, stop=stop
                )
                pays = _measure_rest(store, report, words) if not code else False
            if steps.compact and pays and not dry_run and not stop():
                _compact(path, report, words, progress)
    except _Stopped:
        code = INTERRUPTED
        words.append("stopped; the next run continues")
    except CasstoreError as exc:
        code = exc.exit_code
        report["error"] = exc
        words.append(str(exc))
        if remedy := advice(exc):
            words.append(f"try: {remedy}")
    before, after = report["file_bytes_before"], _file_bytes(path)
    shown = shown_place(path)
    report.update(path=shown, exit_code=code, dry_run=dry_run, file_bytes=after)
    summary = "; ".join(words)
    if before is not None and after is not None:
        summary += f"; file {size(before)} → {size(after)}"
    return StoreOutcome(shown, code, f"{shown}: {summary}", document(_STORE, report))


def _measure_rest(store: Store, report: dict[str, Any], words: list[str]) -> bool:
    """Report what still takes space; True if it pays to compact the file."""
    engine = store.engine
    if not isinstance(engine, Measuring):
        return False
    measured = space.measure(store)
    newest = heapq.nlargest(AT_ONCE, store.sessions(), key=moved_at)
    shares = measure_sessions(store, [info.meta.session for info in newest])
    largest = heapq.nlargest(_HOLDING, shares, key=lambda one: one.own_bytes)
    report["holding"] = [
        {"what": f"session {one.session}", "size_bytes": one.own_bytes} for one in largest
    ]
    if measured.free_bytes:
        report["holding"].append({"what": "free pages", "size_bytes": measured.free_bytes})
    frees = measured.reclaimable_by_compact
    pays = frees >= max(_MIN_COMPACT_BYTES, _MIN_COMPACT_SHARE * measured.file_bytes)
    if pays:
        words.append(f"compact would free {size(frees)}")
    return pays


def _compact(
    path: str, report: dict[str, Any], words: list[str], progress: Progress | None
) -> None:
    words.pop()
    try:
        report["compacted"] = compact.compact(path, progress=progress)
    except BusyError:
        words.append("not compacted: another process has the store open")
    else:
        words.append("compacted")


def _file_bytes(path: str) -> int | None:
    try:
        return os.stat(os.path.join(path, "data.mdb")).st_size
    except OSError:
        return None


def _steps(
    store: Store,
    steps: Steps,
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
        # The steps run on an overlay in memory: each finds what the earlier ones left.
        store = Store(OverlayEngine(store.engine))
    if (steps.prune or steps.attachments_ms is not None) and not stop():
        pruned, listed = _prune(store, steps, dry_run=dry_run, progress=stopping)
        expired = expiring.expire_rows(
            store, attachments_older_than_ms=steps.attachments_ms, progress=stopping
        )
        report["pruned"] = prune_document(pruned, expired, listed)
        words += _pruned(pruned, expired, steps, dry_run=dry_run)
        codes.append(CorruptionError.exit_code if pruned.refused_count else 0)
    packed: PackReport | None = None
    if steps.vacuum:
        done = vacuum.vacuum(
            store, grace_ms=steps.grace_ms, dry_run=dry_run, progress=progress, stop=stop
        )
        report["vacuumed"] = vacuum_document(done, steps.grace_ms)
        words.append(f"vacuum {done.outcome.value}")
        codes.append(vacuum_exit_code(done, interrupted=stop()))
        packed, collected = done.packed, done.collected
        report["nodes_removed"] = sum([one.nodes_removed for one in done.sessions])
    else:
        collected = gc.collect(
            store,
            grace_ms=steps.grace_ms,
            batch=steps.batch,
            dry_run=dry_run,
            progress=progress,
            stop=stop,
        )
        codes.append(gc_exit_code(collected, interrupted=stop()))
    if collected is not None:
        report["collected"] = gc_document(collected, steps.grace_ms)
        report["objects_removed"] = (
            collected.objects_unreached if dry_run else collected.objects_swept
        )
        words.append(_swept(collected))
    if steps.pack and packed is None and not dry_run and not stop() and not max(codes):
        packed = pack.pack(store, progress=stopping)
    if packed is not None:
        report["packed"] = packed
        words.append(_packed(packed, COLD_AGE_MS if report["vacuumed"] is None else 0))
        codes.append(CorruptionError.exit_code if packed.damaged else 0)
    return max(codes)


def _prune(
    store: Store, steps: Steps, *, dry_run: bool, progress: Progress
) -> tuple[RetentionReport, list[PlannedSession] | None]:
    """Prune by the policies, if asked for; for a dry run, return the plan as well."""
    if not steps.prune:
        return Tally(None).report(), [] if dry_run else None
    plan = retention.plan(
        store,
        policy=steps.policy,
        override_policies=steps.override_policies and steps.policy is not None,
        progress=progress,
    )
    if not dry_run:
        return retention.execute(store, plan, progress=progress), None
    counted, listed = planned(plan)
    retention.execute(store, plan, progress=progress)
    return counted, listed


def _pruned(
    pruned: RetentionReport, expired: expiring.ExpiredRows, steps: Steps, *, dry_run: bool
) -> list[str]:
    words: list[str] = []
    if steps.prune:
        words.append(
            f"{'would prune' if dry_run else 'pruned'} {pruned.revisions_removed} revisions, "
            f"{pruned.sessions_deleted} sessions"
        )
    if pruned.overridden:
        names = ", ".join([one.session for one in pruned.overridden])
        words.append(f"{'would override' if dry_run else 'overrode'} the stored policy of {names}")
    if steps.attachments_ms is not None:
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
    summary = f"gc {report.outcome.value}"
    if report.outcome is gc.Outcome.PLANNED:
        return f"{summary}: {report.objects_unreached} objects, {size(report.bytes_unreached)}"
    if report.objects_swept:
        summary += f": {report.objects_swept} objects, {size(report.bytes_swept)}"
    return summary if report.problem is None else f"{summary}: {report.problem}"


# --- the command ----------------------------------------------------------------------------------


_STORE: Final[Fields] = {
    "path": Field("the store", "store"),
    "exit_code": "0 if all steps were done",
    "dry_run": "true: nothing was changed",
    "file_bytes_before": Field("the length of the file before, null on a server", "file before"),
    "file_bytes": Field("its length now", "file now"),
    "nodes_removed": Field("hidden nodes that vacuum removed, or would", "removed", "node"),
    "objects_removed": Field("objects that gc removed, or would", "removed", "object"),
    "holding": nested(
        "what still takes space",
        {
            "what": Field("a session, or the free pages of the file", "still takes space"),
            "size_bytes": Field("its size; of a session, of what only it reaches, uncompressed",
                                "size"),
        },
        "holding",
    ),
    "pruned": nested("the report of prune, null if it did not run", PRUNE_FIELDS),
    "collected": nested("the report of gc, null if it did not run", GC_FIELDS),
    "vacuumed": nested("the report of vacuum, null if it did not run", VACUUM_FIELDS),
    "packed": nested("the report of pack, null if it did not run", PACK_FIELDS),
    "compacted": nested("the report of compact, null if it did not run", COMPACT_FIELDS),
    "error": PROBLEM,
}  # fmt: skip
_PLANNED: Final[Fields] = {
    **_STORE,
    "nodes_removed": Field("hidden nodes that vacuum would remove", "would remove", "node"),
    "objects_removed": Field("objects that gc would remove", "would remove", "object"),
}
_FIELDS: Final[Fields] = {
    "interrupted": "true: Ctrl-C or SIGTERM stopped the run; the next one continues",
    "stores": nested("the stores, in the order given", _STORE),
}


def _configured(stores: tuple[str, ...], config_file: str | None, given: dict[str, Any]) -> Config:
    """The configuration file, if there is one, with the options of the command line applied."""
    config = Config((), EVERYTHING, {}) if config_file is None else read_config(config_file)
    policy = policy_of(given)
    # These options have the names of the fields of Steps.
    changes = {
        key: value for key, value in given.items() if key in Steps._fields and value is not None
    }
    if policy is not None:
        # policy_from raises for an invalid policy before any store is opened.
        changes.update(policy=policy_from(policy_fields(policy)), prune=True)
    if given["override_policies"] and policy is None and config_file is None:
        raise InvalidInputError("--override-policies needs a policy, such as --last 10")
    return Config((*config.stores, *stores), config.steps._replace(**changes), config.own, changes)


def write_report(where: str, answer: Mapping[str, Any]) -> None:
    """Write the JSON document of the command to a file, which is replaced as a whole."""
    found = Shape("maintain", _FIELDS).document(answer)
    text = "".join(json_pieces(found, ascii_only=True)) + "\n"
    with whole_file(where, replace=True) as into:
        into.write(text.encode())


class _Log:
    """Writes lines. A stream that cannot be written to does not stop the maintenance."""

    def __init__(self) -> None:
        #: The exit code after a write failed, if no store failed; 0: no write failed.
        self.exit_code = 0

    def say(self, line: str, stream: TextIO) -> None:
        """Write one line."""
        try:
            print(safe(line), file=stream, flush=True)
        except OSError as exc:
            let_go(stream)
            if isinstance(exc, BrokenPipeError):
                self.exit_code = self.exit_code or BROKEN_PIPE
            else:
                self.exit_code = StorageError.exit_code


@command(
    _FIELDS,
    "casstore maintain",
    "casstore maintain agents --grace 1h --no-compact",
    "casstore maintain 'agents*' --last 20 --daily 14 --idle 90d --dry-run",
    "casstore maintain --config gc.toml --report report.json",
)
@click.argument("stores", nargs=-1, metavar="[STORE]…")
@click.option(
    "--config", "config_file", metavar="FILE", help="A TOML file, see docs/reference/cli.md."
)
@dry_run_option("removed")
@click.option(
    "--grace", "grace_ms", type=DURATION,
    help="Keep objects that were put within this time, and what they link to. Default: 1h.",
)  # fmt: skip
@click.option(
    "--batch", type=Whole(1, gc.MAX_BATCH),
    help=f"Objects that gc removes in one transaction. Default: {DEFAULT_BATCH}.",
)  # fmt: skip
@click.option("--prune/--no-prune", default=None, help="Prune by the policies in the store.")
@with_policy
@click.option(
    "--override-policies/--no-override-policies", default=None,
    help=OVERRIDE_POLICIES_HELP,
)  # fmt: skip
@ATTACHMENTS
@click.option("--vacuum/--no-vacuum", default=None, help="Remove hidden nodes for good.")
@click.option("--pack/--no-pack", default=None, help="Rewrite small slabs into large ones.")
@click.option(
    "--compact/--no-compact", default=None,
    help="Rewrite the file if that frees a quarter of it and no other process has it open.",
)  # fmt: skip
@click.option("--report", metavar="FILE", help="Write the JSON report to FILE as well.")
def maintain(
    app: App,
    /,
    stores: tuple[str, ...],
    config_file: str | None,
    dry_run: bool,
    report: str | None,
    **given: Any,
) -> None:
    """Prune, collect, vacuum, pack and compact stores.

    All steps are carried out unless they are switched off. STORE is a directory, a pattern of
    directories, or a URL; if none is given, the one of --store or CASSTORE_PATH. Options
    override the configuration file. Agents can go on working; compact runs only if no other
    process has the store open. A second run on the same store is refused. Ctrl-C and SIGTERM
    stop between transactions, and the next run continues. The exit code is the highest of all
    stores.
    """
    log, stopped = _Log(), threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        config = _configured(stores, config_file, given)
        named = config.stores or (() if config_file is not None else (app.path,))
        paths = find_stores(named)
    except CasstoreError as exc:
        raise click.UsageError(str(exc)) from exc
    if not paths:
        raise click.UsageError("no store; name one, or list stores in the configuration")
    for path in config.idle(paths):
        # If the path is misspelt, the store that it means gets the common options: report it.
        log.say(
            f'[store."{shown_place(path)}"] is none of the stores that are maintained', sys.stderr
        )
    outcomes: list[StoreOutcome] = []
    silent = app.quiet or not is_terminal(sys.stderr)
    for path in paths:
        if stopped.is_set():
            break
        steps = config.steps_of(path)
        if app.durability_given is not None:
            steps = steps._replace(durability=app.durability_given)
        with Meter(silent=silent, stoppable=False) as meter:
            outcome = maintain_store(
                path, steps, dry_run=dry_run, progress=meter, stop=stopped.is_set
            )
        outcomes.append(outcome)
        if outcome.exit_code:
            log.say(outcome.summary, sys.stderr)
        elif not app.quiet and not app.as_json:
            log.say(outcome.summary, sys.stdout)
    answer = {"interrupted": stopped.is_set(), "stores": [one.report for one in outcomes]}
    if report is not None:
        try:
            write_report(report, answer)
        except (OSError, StorageError) as exc:
            raise StorageError(f"cannot write the report: {exc}") from exc
    worst = max([outcome.exit_code for outcome in outcomes], default=0)
    app.exit_code = INTERRUPTED if stopped.is_set() else worst or log.exit_code
    if app.as_json or (len(outcomes) == 1 and not app.quiet and not app.exit_code):
        fields = _PLANNED if dry_run else _STORE
        app.answer(answer, lambda to: to.report(fields, outcomes[0].report))
