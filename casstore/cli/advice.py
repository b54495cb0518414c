"""What to do about an error: the next command to try."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from casstore import errors
from casstore.cli.naming import AmbiguousNameError, NameNotFoundError, NothingCommittedError, quoted
from casstore.errors import CasstoreError

_OTHER_ID: Final = "import it under another id: casstore import {} FILE --name ID"
# A text, or a function that makes it from the error.
_Advice = str | Callable[[Any], str]


def _candidates(exc: AmbiguousNameError) -> str:
    return "one of: " + "  ".join([one if one == "…" else quoted(one) for one in exc.candidates])


# The first class that fits decides.
_GENERAL: Final[tuple[tuple[type[CasstoreError], _Advice], ...]] = (
    (AmbiguousNameError, _candidates),
    (NameNotFoundError, lambda exc: exc.remedy),
    (NothingCommittedError, lambda exc: f"casstore show {quoted(exc.session)}"),
    (
        errors.LeaseHeldError,
        lambda exc: f"wait; or if its owner died: casstore leases --release {quoted(exc.session)}",
    ),
    (errors.SessionNotFoundError, "casstore sessions"),
    (errors.RevisionNotFoundError, lambda exc: f"casstore history {quoted(exc.session)}"),
    (errors.NodeNotFoundError, lambda exc: f"casstore log {quoted(exc.session)}"),
    (errors.SourceNotFoundError, "name the file to read from"),
    (errors.StoreNotFoundError, "name another with --store or CASSTORE_PATH, or: casstore init"),
    (errors.SessionDeletedError, "choose another id; casstore sessions lists those in use"),
    (errors.SessionExistsError, "choose another id; casstore sessions lists those in use"),
    (errors.ComponentNotFoundError, "casstore check"),
    (errors.ObjectNotFoundError, "casstore sessions lists what is there"),
    (errors.LeaseLostError, "wait until the lease is released or expires, then run it again"),
    (errors.HeadConflictError, "casstore history shows the present revision; then run it again"),
    (errors.NameTakenError, "choose another name, or say --move"),
    (errors.TargetExistsError, "choose another name, or say --replace or --update"),
    (errors.SessionDivergedError, _OTHER_ID.format("bundle")),
    (
        errors.ItemConflictError,
        "--replace takes the content of the source; with --dry-run it only counts the items",
    ),
    (errors.ObjectsMissingError, "export it again without --have, or import what came before"),
    (
        errors.RestoreConflictError,
        "casstore workspace snapshot first; or --force, which saves the present state itself",
    ),
    (errors.WorkspaceNotFoundError, "name an existing directory"),
    (errors.SnapshotNotFoundError, "casstore workspace log SESSION lists those that have files"),
    (errors.ConflictError, "read the present state, then run it again"),
    (errors.ReadOnlyError, "open it as a user that has write permission"),
    (errors.BundleError, "export or download the file again: casstore export"),
    (errors.CorruptionError, "casstore check; then casstore salvage if it says so"),
    (errors.ForeignBundleError, "name a file that casstore export has written"),
    (
        errors.ForeignSourceError,
        "name a source of that kind; casstore import --help lists them",
    ),
    (errors.ForeignStoreError, "name the directory of a store with --store, or: casstore init"),
    (errors.FormatError, "use a release of casstore that reads this format"),
    (errors.CollectionOvertakenError, "run casstore gc again when fewer writers are active"),
    (errors.BusyError, "wait for the other process, or stop it; then run it again"),
    (errors.StorageFullError, "free space on the disk; casstore gc removes unused objects"),
    (errors.StorageUnavailableError, "check that the server can be reached, then run it again"),
    (errors.AddressSpaceError, "ulimit -v unlimited, then run it again"),
    (errors.StorageError, "check the disk and the permissions, then run it again"),
    (errors.BundleLimitError, "if you trust the file, import it in Python with larger limits="),
    (errors.LimitError, "ask for a part of it: casstore show NAME --path PATH"),
)
# Advice by command, where the general advice is the command that failed, or is about another store.
_OF_COMMAND: Final[dict[str, tuple[tuple[type[CasstoreError], _Advice], ...]]] = {
    "check": (
        (errors.CorruptionError, "casstore salvage DAMAGED NEW, into a new directory; or a backup"),
    ),
    "salvage": (
        (errors.StoreNotFoundError, "name the directory of the damaged store: SOURCE TARGET"),
        (errors.CorruptionError, "restore a backup: nothing in this store can be verified"),
    ),
    "import jsonl": (
        (errors.BadLineError, "--leave-out-damaged leaves the line out, and imports the rest"),
        (errors.SessionExistsError, _OTHER_ID.format("jsonl")),
    ),
    "import lash": (
        (errors.DamagedSourceError, "--leave-out-damaged leaves it out, and imports the rest"),
        (errors.SourceVersionError, "open it with a release of lash that converts it"),
        (errors.SessionExistsError, _OTHER_ID.format("lash")),
        (errors.SessionDeletedError, _OTHER_ID.format("lash")),
        (errors.NameTakenError, "delete the tag, or choose another id with --name"),
        (errors.ConflictError, _OTHER_ID.format("lash")),
    ),
    "pin": ((errors.NameTakenError, "choose another name, or: casstore tag --delete NAME"),),
    "copy": (
        (errors.StoreNotFoundError, "name another; a TARGET that is not there: --create makes it"),
    ),
}


#: An error has this in its message if only the log is lost, so that the store opens without it.
_DISCARD: Final = "casstore recover --discard-log"


def advice(exc: CasstoreError, command: str | None = None) -> str | None:
    """What to try after this command failed; None if the message is sufficient."""
    if isinstance(exc, errors.CorruptionError) and _DISCARD in str(exc):
        return f"put redo.log back, or restore a backup; without either: {_DISCARD}"
    for kind, text in (*_OF_COMMAND.get(command or "", ()), *_GENERAL):
        if isinstance(exc, kind):
            return text if isinstance(text, str) else text(exc)
    return None
