"""The offline collector as a program: options, a line for each store, a report, an exit code.

``tools/gc.py`` runs it.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from typing import Final, TextIO

from casstore.cli.json_stream import json_pieces
from casstore.cli.main import BROKEN_PIPE, INTERRUPTED
from casstore.cli.offline import (
    SCHEMA,
    Care,
    Config,
    Outcome,
    care_for,
    change_care,
    find_stores,
    read_config,
)
from casstore.cli.output import is_terminal
from casstore.cli.progress import Meter
from casstore.cli.spelling import safe
from casstore.cli.streams import let_go, prepare_streams
from casstore.engine.protocol import DURABILITIES
from casstore.errors import CasstoreError, InvalidInputError, StorageError
from casstore.maintenance.whole_files import whole_file
from casstore.store import shown_place
from casstore.version import __version__

USAGE: Final = 2

DESCRIPTION: Final = """\
Care for stores while nobody watches: prune, collect, vacuum, pack; for cron and systemd.

One store or many; the policy from a TOML file, from options, or both (options win). A second
run on the same store is refused. Each store gets a line of summary on stdout. Ctrl-C and
SIGTERM stop where it is harmless; the next run goes on from there.
"""

_EPILOG: Final = """\
examples:
  tools/gc.py /var/lib/agents/main --grace 1h --pack
  tools/gc.py '/var/lib/agents/*' --last 20 --daily 14 --idle 90d --dry-run
  tools/gc.py --config /etc/casstore/gc.toml --report /var/log/casstore-gc.json

Exit codes: 0 all stores are well cared for; 2 the command line is wrong; otherwise the
highest of all stores: 4 not found, 7 busy, 8 refused because something is damaged,
10 the disk refused … (see docs/cli.md); 130 interrupted. If all stores are well but their
lines could not be written: 141 nobody read them, 10 the disk refused them.
"""


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(
        prog="gc.py",
        description=DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("stores", nargs="*", metavar="STORE", help="directories, or patterns of them")
    made.add_argument("--config", metavar="FILE", help="a TOML file; see docs/cli.md")
    made.add_argument("--dry-run", "-n", action="store_true", help="say what would go")
    made.add_argument("--grace", help="what was put within this time stays (1h)")
    made.add_argument("--batch", type=int, help="objects removed in one transaction (256)")
    made.add_argument("--durability", choices=DURABILITIES,
                      help="what writes wait for (full)")  # fmt: skip
    keep = made.add_argument_group("retention: without any of these nothing is pruned")
    keep.add_argument("--prune", action="store_true", help="by the policies in the store")
    for name in ("last", "hourly", "daily", "weekly", "monthly", "yearly"):
        keep.add_argument(f"--{name}", type=int, metavar="N", help="keep so many")
    keep.add_argument("--within", metavar="TIME", help="keep all that is younger: 7d")
    keep.add_argument("--idle", metavar="TIME", help="take sessions away that are idle so long")
    made.add_argument("--attachments", metavar="TIME",
                      help="give up attachments that were not committed within it")  # fmt: skip
    yes_no = argparse.BooleanOptionalAction
    keep.add_argument("--override-policies", action=yes_no,
                      help="also for sessions that have a policy of their own")  # fmt: skip
    made.add_argument("--vacuum", action=yes_no, help="remove hidden nodes for good as well")
    made.add_argument("--pack", action=yes_no, help="rewrite small slabs into large ones")
    made.add_argument("--report", metavar="FILE", help="write a JSON report there; - for stdout")
    made.add_argument("--quiet", "-q", action="store_true", help="only say what went wrong")
    made.add_argument("--version", action="version", version=f"casstore {__version__}")
    return made


def configured(given: argparse.Namespace) -> Config:
    """The configuration, with what the options say in its place."""
    config = Config((), Care(), {}) if given.config is None else read_config(given.config)
    changes: dict[str, object] = {
        key: getattr(given, key)
        for key in (
            "grace",
            "batch",
            "durability",
            "override_policies",
            "attachments",
            "vacuum",
            "pack",
        )
        if getattr(given, key) is not None
    }
    keep = {
        key: getattr(given, key)
        for key in ("last", "hourly", "daily", "weekly", "monthly", "yearly", "within", "idle")
        if getattr(given, key) is not None
    }
    if keep:
        changes["retention"] = keep
    elif given.prune:
        changes["retention"] = True
    if given.override_policies and not keep and given.config is None:
        raise InvalidInputError("--override-policies needs a policy, such as --last 10")
    own = {path: {**theirs, **changes} for path, theirs in config.own.items()}
    care = change_care(config.care, changes, "options")
    return Config((*config.stores, *given.stores), care, own)


def write_report(where: str, outcomes: list[Outcome], *, interrupted: bool) -> None:
    """One JSON document of all stores; a file is replaced as a whole."""
    document = {
        "schema": SCHEMA,
        "casstore": __version__,
        "interrupted": interrupted,
        "stores": [outcome.report for outcome in outcomes],
    }
    text = "".join(json_pieces(document, ascii_only=True)) + "\n"
    if where == "-":
        print(text, end="", flush=True)
        return
    with whole_file(where, replace=True) as into:
        into.write(text.encode())


class _Log:
    """Lines for whoever reads them. Nobody reading is no reason to leave a store without care."""

    def __init__(self) -> None:
        #: What the run ends with for that, if nothing worse happens.
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


def main() -> int:
    """Care for all stores; the exit code."""
    prepare_streams()
    given = parser().parse_args()
    log = _Log()
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    try:
        config = configured(given)
        paths = find_stores(config.stores)
    except CasstoreError as exc:
        log.say(f"gc.py: {exc}", sys.stderr)
        return USAGE
    if not paths:
        log.say("gc.py: no store; name one, or stores in --config", sys.stderr)
        return USAGE
    for named in config.idle(paths):
        # A slip in a path would let the common policy loose on a store that was to be spared.
        shown = shown_place(named)
        log.say(f'gc.py: [store."{shown}"] is of none of the stores cared for', sys.stderr)
    outcomes: list[Outcome] = []
    silent = given.quiet or not is_terminal(sys.stderr)
    for path in paths:
        if stopped.is_set():
            break
        with Meter(silent=silent, stoppable=False) as meter:
            outcome = care_for(
                path,
                config.care_of(path),
                dry_run=given.dry_run,
                progress=meter,
                stop=stopped.is_set,
            )
        outcomes.append(outcome)
        if outcome.exit_code:
            log.say(outcome.summary, sys.stderr)
        elif not given.quiet and given.report != "-":
            log.say(outcome.summary, sys.stdout)
    if given.report is not None:
        try:
            write_report(given.report, outcomes, interrupted=stopped.is_set())
        except BrokenPipeError:
            let_go(sys.stdout)
            log.exit_code = log.exit_code or BROKEN_PIPE
        except (OSError, StorageError) as exc:
            if given.report == "-":
                let_go(sys.stdout)
            log.say(f"gc.py: cannot write the report: {exc}", sys.stderr)
            return StorageError.exit_code
    if stopped.is_set():
        return INTERRUPTED
    return max(outcome.exit_code for outcome in outcomes) or log.exit_code
