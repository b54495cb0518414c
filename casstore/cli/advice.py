"""What to do about an error: the next command to try."""

from __future__ import annotations

from typing import Final

from casstore import errors
from casstore.cli.naming import AmbiguousNameError, NameNotFoundError, NothingCommittedError, quoted
from casstore.errors import CasstoreError

_OTHER_ID: Final = "import it under another id: casstore import {} FILE --name ID"
_GENERAL: Final[tuple[tuple[type[CasstoreError], str], ...]] = (
    (errors.SourceNotFoundError, "name the file to read from"),
    (errors.StoreNotFoundError, "name another with --store or CASSTORE_PATH, or: casstore init"),
    (errors.SessionDeletedError, "choose another id; casstore sessions lists those in use"),
    (errors.SessionExistsError, "choose another id; casstore sessions lists those in use"),
    (errors.ComponentNotFoundError, "casstore check"),
    (errors.ObjectNotFoundError, "casstore sessions lists what is there"),
    (errors.LeaseHeldError, "wait until the lease is released or expires, then try again"),
    (errors.LeaseLostError, "wait until the lease is released or its time is up, then again"),
    (errors.HeadConflictError, "look at it again with casstore history, then again"),
    (errors.NameTakenError, "choose another name, or say --move"),
    (errors.TargetExistsError, "choose another name, or say --replace or --update"),
    (errors.SessionDivergedError, _OTHER_ID.format("bundle")),
    (
        errors.ItemConflictError,
        "--replace takes the content of the source; with -n it counts them",
    ),
    (errors.ObjectsMissingError, "export it again without --have, or import what came before"),
    (
        errors.RestoreConflictError,
        "casstore workspace snapshot first; or --force, which saves the present state itself",
    ),
    (errors.SnapshotNotFoundError, "casstore workspace log SESSION lists those that have files"),
    (errors.ConflictError, "look at what is there now, then again"),
    (errors.ReadOnlyError, "open it for writing, as a user who may write to it"),
    (errors.BundleError, "export or download the file again: casstore export"),
    (errors.CorruptionError, "casstore check; then casstore salvage if it says so"),
    (errors.ForeignBundleError, "name a file that casstore export has written"),
    (
        errors.ForeignSourceError,
        "name a source of that kind; casstore import --help lists them",
    ),
    (errors.ForeignStoreError, "name the directory of a store with --store, or: casstore init"),
    (errors.FormatError, "use the release of casstore that fits"),
    (errors.CollectionOvertakenError, "casstore gc again, when less is written"),
    (errors.BusyError, "wait for the other process, or stop it, then again"),
    (errors.StorageFullError, "make room on the disk; casstore gc gives back what is unused"),
    (errors.StorageUnavailableError, "see that the server runs and can be reached, then again"),
    (errors.AddressSpaceError, "ulimit -v unlimited, then again"),
    (errors.StorageError, "see to the disk and the permissions, then again"),
    (errors.BundleLimitError, "if you trust the file, import it in Python with larger limits="),
    (errors.LimitError, "ask for a part of it: casstore show NAME --path PATH"),
)
# Cases where the general advice is the command that just failed, or is about another store.
_OF_COMMAND: Final[dict[str, tuple[tuple[type[CasstoreError], str], ...]]] = {
    "check": (
        (errors.CorruptionError, "casstore salvage DAMAGED NEW, into a new directory; or a backup"),
    ),
    "salvage": (
        (errors.StoreNotFoundError, "name the directory of the damaged store: SOURCE TARGET"),
        (errors.CorruptionError, "bring back a backup: nothing here can be proven"),
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


#: What an error says if only the log is lost: the store itself can be opened without it.
_DISCARD: Final = "casstore recover --discard-log"


def advice(exc: CasstoreError, command: str | None = None) -> str | None:
    """What to try after this command failed; None if the message is sufficient."""
    if isinstance(exc, errors.CorruptionError) and _DISCARD in str(exc):
        return f"put redo.log back, or restore a backup; without either: {_DISCARD}"
    for kind, text in _OF_COMMAND.get(command or "", ()):
        if isinstance(exc, kind):
            return text
    if isinstance(exc, AmbiguousNameError):
        return "one of: " + "  ".join(
            [one if one == "…" else quoted(one) for one in exc.candidates]
        )
    if isinstance(exc, NameNotFoundError):
        return exc.remedy
    if isinstance(exc, NothingCommittedError):
        return f"casstore show {quoted(exc.session)}"
    if isinstance(exc, errors.SessionNotFoundError):
        return "casstore sessions"
    if isinstance(exc, errors.RevisionNotFoundError):
        return f"casstore history {quoted(exc.session)}"
    if isinstance(exc, errors.NodeNotFoundError):
        return f"casstore log {quoted(exc.session)}"
    for kind, text in _GENERAL:
        if isinstance(exc, kind):
            return text
    return None
