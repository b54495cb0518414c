"""A session into one file: a bundle that proves itself, whole or without what another has."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from casstore.engine.files import storage_error
from casstore.engine.paths import path_text
from casstore.engine.protocol import NewObject
from casstore.errors import InvalidInputError, TargetExistsError
from casstore.format import bundle as layout
from casstore.format.bundle import BundleHeader
from casstore.format.digest import Digest
from casstore.maintenance import session_rows
from casstore.maintenance.bundle import BundleWriter
from casstore.maintenance.progress import Progress
from casstore.maintenance.sending import Lacking, Sender, reached_from
from casstore.maintenance.session_rows import SessionRows
from casstore.maintenance.whole_files import whole_file
from casstore.session import catalogue, keys
from casstore.session.arguments import check_flag, list_of
from casstore.session.attachments import COMMITTED, Attachments
from casstore.session.attempts import read_again
from casstore.session.data import Entry
from casstore.session.heads import HeadRow, decode_head
from casstore.session.history import labels_of
from casstore.session.receipts import Receipt, decode_receipt
from casstore.session.scanning import scan
from casstore.session.state import Runtime, State, meta_key
from casstore.store import Store, check_store

#: What the reader of the file has: digests, of which each means all that it links to; a file
#: of them, as ``write_have`` makes it; or a function that gives back those that it lacks.
Have = Iterable[bytes] | str | os.PathLike[str] | Callable[[Sequence[bytes]], Sequence[bytes]]

_HEX_LINE_BYTES: Final = 65
_MAX_HAVE_BYTES: Final = 256 << 20


class ExportReport(NamedTuple):
    """What was written."""

    session: str
    revisions: int
    objects: int
    #: Before compression.
    object_bytes: int
    #: Of the file.
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
    """Write a session into one file, as it stands at this moment.

    ``at`` takes one revision alone, without ``history`` the head alone. ``have`` leaves
    out what the reader has, which makes the file thin. The file appears when it is complete
    and on the disk; an existing one stays, unless ``replace``.

    >>> report = export_session(store, "s", place / "s.bundle")
    >>> report.session, report.revisions
    ('s', 2)
    """
    check_store(store)
    check_flag(history, "whether history comes along")
    check_flag(replace, "whether an existing file is replaced")
    whole = history and at is None
    return read_again(
        lambda: _export(
            store, session, path_text(target_file), at, have, progress, whole=whole, replace=replace
        )
    )


def _export(
    store: Store,
    session: str,
    target_file: str,
    at: int | str | Entry | None,
    have: Have | None,
    progress: Progress | None,
    *,
    whole: bool,
    replace: bool,
) -> ExportReport:
    runtime = Runtime(store)
    rows, state = _gather(runtime, session, at, whole=whole)
    sent: set[bytes] = set()
    lacking = _lacking(runtime, have, sent)
    header = BundleHeader(layout.VERSION, layout.SESSION, thin=have is not None)
    with BundleWriter(target_file, header, replace=replace) as writer:

        def take(item: NewObject) -> None:
            sent.add(item.digest)
            writer.add_object(item.kind, item.digest, item.data)

        Sender(runtime.reader(), lacking, take, progress).send(_names(runtime, rows, state))
        for row in session_rows.encode(rows):
            writer.add_row(row)
    return ExportReport(
        session,
        len(rows.revisions),
        writer.objects,
        writer.object_bytes,
        writer.size_bytes,
        have is not None,
    )


def _names(runtime: Runtime, rows: SessionRows, state: State) -> Iterator[bytes]:
    """Everything that rows name, in an order in which the walk is short."""
    for place in runtime.index(state.manifest).places():
        yield place.digest
    for row in rows.revisions:
        yield row.manifest
        if row.hidden is not None:
            yield row.hidden
    for one in rows.attachments:
        if one.digest is not None:
            yield bytes(one.digest)


# --- rows -------------------------------------------------------------------------------------


def _gather(
    runtime: Runtime, session: str, at: int | str | Entry | None, *, whole: bool
) -> tuple[SessionRows, State]:
    """The rows of a session. The head is read first: what came before it does not change."""
    current = runtime.get(session)
    key = keys.session_key(session)
    state = current if at is None else runtime.at(session, at)
    revisions: list[HeadRow] = []
    if whole:
        first, stop = keys.history(key, 0), keys.history(key, current.head.revision)
        revisions = [decode_head(row.value) for row in scan(runtime.engine, "history", first, stop)]
    # Hidden is what the head hides, in every revision.
    revisions.append(state.head._replace(hidden=current.head.hidden))
    known = {row.revision for row in revisions}
    labels = {
        name: revision
        for revision, names in labels_of(runtime, key).items()
        if revision in known
        for name in names
    }
    has_meta = runtime.rows(session, [meta_key(key)])[1] is not None
    attachments = Attachments(runtime, session).list(state=COMMITTED)
    rows = SessionRows(
        session,
        catalogue.find_meta(runtime, session) if has_meta else None,
        revisions,
        labels,
        attachments,
        _receipts(runtime, key, revisions) if whole else {},
    )
    return rows, state


def _receipts(runtime: Runtime, key: bytes, revisions: Sequence[HeadRow]) -> dict[str, Receipt]:
    """The receipts of the turns that these revisions were committed by."""
    turns = {row.revision: row.turn for row in revisions if row.turn is not None}
    found: dict[str, Receipt] = {}
    for row in scan(runtime.engine, "receipts", key, keys.past(key)):
        receipt = decode_receipt(row.value)
        turn = turns.get(receipt.revision)
        if not isinstance(receipt, Receipt):
            # Settled: its revision is gone, and does not travel.
            continue
        if turn is not None and row.key == key + keys.part(turn, "a turn id"):
            found[turn] = receipt
    return found


# --- what the reader has ------------------------------------------------------------------------


def _lacking(runtime: Runtime, have: Have | None, sent: set[bytes]) -> Lacking:
    if callable(have):
        lacks = have
        return lambda names: lacks([name for name in dict.fromkeys(names) if name not in sent])
    there: set[bytes] = set()
    if have is not None:
        if isinstance(have, str | os.PathLike):
            have = read_have(have)
        names = list_of(have, "digests that the reader has")
        there = reached_from(runtime.reader(), [bytes(Digest(name)) for name in names])
    return lambda names: [
        name for name in dict.fromkeys(names) if name not in sent and name not in there
    ]


def have_of(store: Store, session: str | None = None) -> list[Digest]:
    """What a store has, in short: the manifests of one session, or of all.

    Each stands for all that it links to. An export with them as ``have`` leaves that out.

    >>> have = have_of(store)  # what the reader of the export has
    >>> result = session.commit(Commit(append=[NodeDraft("why", "why left?")], lease=UNFENCED))
    >>> report = export_session(store, "s", place / "thin.bundle", have=have)
    >>> report.thin, report.objects  # a node and a manifest
    (True, 2)
    """
    check_store(store)
    runtime = Runtime(store)
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
    """Write ``have_of`` into a file, a digest a line, to be taken to the exporter; how many.

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
                raise InvalidInputError(f"{path} is too long for a list of digests")
            while line := source.readline(_HEX_LINE_BYTES):
                names.append(Digest.from_hex(line.rstrip(b"\n").decode("ascii", "replace")))
    except OSError as exc:
        raise storage_error(f"cannot read {path}", exc) from exc
    return names
