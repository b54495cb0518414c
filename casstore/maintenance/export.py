"""``export_session``: writes a session into a bundle, the file that ``import_session`` reads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from casstore.engine.files import path_text, storage_error
from casstore.engine.protocol import NewObject
from casstore.errors import InvalidInputError, TargetExistsError
from casstore.format import bundle as layout
from casstore.format.bundle import BundleHeader
from casstore.format.digest import Digest
from casstore.maintenance.bundle_file import BundleWriter
from casstore.maintenance.files import whole_file
from casstore.maintenance.progress import Progress
from casstore.maintenance.transfer import rows as session_rows
from casstore.maintenance.transfer.objects import Lacking, Sender, reached_from
from casstore.session import keys
from casstore.session.arguments import check_flag, list_of
from casstore.session.attempts import read_again
from casstore.session.data import Entry
from casstore.session.scanning import scan
from casstore.session.state import Runtime, decode_head, runtime_of
from casstore.store import Store, check_store

#: The objects that the reader of the file has: digests, each of which stands for all that it links
#: to; a file of digests (``write_have``); or a function that returns those that the reader lacks.
Have = Iterable[bytes] | str | os.PathLike[str] | Callable[[Sequence[bytes]], Sequence[bytes]]

_HEX_LINE_BYTES: Final = 65
_MAX_HAVE_BYTES: Final = 256 << 20


class ExportReport(NamedTuple):
    """What ``export_session`` wrote: a bundle.

    Attributes:
        session: the session in it
        revisions: revisions in it
        objects: objects in it, each verified
        object_bytes: their size, uncompressed
        size_bytes: the size of the file
        thin: true: it leaves out objects that the reader has
    """

    session: str
    revisions: int
    objects: int
    object_bytes: int
    size_bytes: int
    thin: bool


def export_session(
    store: Store,
    session: str,
    target_file: str | os.PathLike[str],
    *,
    at: int | str | Entry | None = None,
    history: bool = True,
    have: Have | None = None,
    replace: bool = False,
    progress: Progress | None = None,
) -> ExportReport:
    """Write a session, as it is at this moment, into one file.

    ``at`` exports one revision alone; without ``history`` that is the head. ``have`` leaves out
    the objects that the reader of the file has, which makes the file *thin*. The file appears when
    it is complete and on the disk. TargetExistsError if it exists, unless ``replace``.

    >>> report = export_session(store, "s", place / "s.bundle")
    >>> report.session, report.revisions
    ('s', 2)
    """
    check_store(store)
    check_flag(history, "history")
    check_flag(replace, "replace")
    path, runtime = path_text(target_file), runtime_of(store)
    header = BundleHeader(layout.VERSION, layout.SESSION, thin=have is not None)

    def export() -> ExportReport:
        whole = history and at is None
        rows, state = session_rows.read_session(runtime, session, at, history=whole)
        sent: set[bytes] = set()
        lacking = _lacking(runtime, have, sent)
        with BundleWriter(path, header, replace=replace) as writer:

            def take(item: NewObject) -> None:
                sent.add(item.digest)
                writer.add_object(item.kind, item.digest, item.data)

            names = session_rows.ordered_names(runtime, state, rows.named())
            Sender(runtime.reader(), lacking, take, progress).send(names)
            for row in session_rows.encode(rows):
                writer.add_row(row)
        counts = writer.objects, writer.object_bytes, writer.size_bytes
        return ExportReport(session, len(rows.revisions), *counts, have is not None)

    return read_again(export)


# --- what the reader has ------------------------------------------------------------------------


def _lacking(runtime: Runtime, have: Have | None, sent: set[bytes]) -> Lacking:
    if callable(have):
        lacks = have
        return lambda names: lacks([name for name in dict.fromkeys(names) if name not in sent])
    there: set[bytes] = set()
    if have is not None:
        if isinstance(have, str | os.PathLike):
            have = read_have(have)
        names = list_of(have, "have")
        there = reached_from(runtime.reader(), [bytes(Digest(name)) for name in names])
    return lambda names: [
        name for name in dict.fromkeys(names) if name not in sent and name not in there
    ]


def have_of(store: Store, session: str | None = None) -> list[Digest]:
    """The digests of the manifests of one session, or of all, to describe what a store has.

    Each stands for all that it links to: an export with them as ``have`` leaves all that out.

    >>> have = have_of(store)  # what the reader of the export has
    >>> result = session.commit(Commit(append=[NodeDraft("why", "why left?")]))
    >>> report = export_session(store, "s", place / "thin.bundle", have=have)
    >>> report.thin, report.objects  # a node and a manifest
    (True, 2)
    """
    check_store(store)
    runtime = runtime_of(store)
    found: dict[Digest, None] = {}
    key = b"" if session is None else keys.session_key(session)
    stop = None if session is None else keys.past(key)
    for table in ("heads", "history"):
        for row in scan(runtime.engine, table, key, stop):
            if table == "heads" or not keys.is_label(row.key):
                found[Digest(decode_head(row.value).manifest)] = None
    return list(found)


def write_have(
    store: Store, target_file: str | os.PathLike[str], session: str | None = None
) -> int:
    """Write ``have_of`` into a file for an exporter, one digest on a line; returns how many.

    >>> write_have(store, place / "have.txt")  # as many as there are revisions
    2
    """
    names = have_of(store, session)
    try:
        with whole_file(target_file) as target:
            target.writelines(f"{name.hex()}\n".encode() for name in names)
    except FileExistsError as exc:
        raise TargetExistsError(path_text(target_file)) from exc
    return len(names)


def read_have(source_file: str | os.PathLike[str]) -> list[Digest]:
    """Read what ``write_have`` wrote; InvalidInputError if it is anything else.

    >>> count = write_have(store, place / "have.txt")
    >>> read_have(place / "have.txt") == have_of(store)
    True
    """
    path = path_text(source_file)
    names: list[Digest] = []
    try:
        with open(path, "rb") as source:
            if os.fstat(source.fileno()).st_size > _MAX_HAVE_BYTES:
                raise InvalidInputError(
                    f"{path} is longer than a list of digests may be: {_MAX_HAVE_BYTES:,} bytes"
                )
            while line := source.readline(_HEX_LINE_BYTES):
                names.append(Digest.from_hex(line.rstrip(b"\n").decode("ascii", "replace")))
    except OSError as exc:
        raise storage_error(f"cannot read {path}", exc) from exc
    return names
