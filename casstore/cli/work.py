"""Work in progress: ``queue``, ``leases``, ``attachments``, and ``watch`` for new commits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Final

import click

from casstore.cli import naming
from casstore.cli.command import App, command, require_yes
from casstore.cli.fields import Field, Fields, document, nested
from casstore.cli.naming import NameNotFoundError, complete_name
from casstore.cli.options import YES, limit_option
from casstore.cli.output import Printer, dim, good, name, needs_ascii
from casstore.cli.quantities import DURATION, Whole, duration, time_words
from casstore.cli.sessions import ENTRY_FIELDS, entry_documents, operation_words
from casstore.cli.text import json_line, plain, safe
from casstore.errors import ConflictError, NotFoundError, SessionDeletedError
from casstore.maintenance.uncommitted import Uncommitted, list_uncommitted
from casstore.session import catalogue, keys
from casstore.session import leases as session_leases
from casstore.session.catalogue import KnownSession
from casstore.session.data import Attachment, Batch, Lease
from casstore.session.scanning import scan
from casstore.session.state import decode_head, head_key, meta_key
from casstore.store import Store


def _sessions_in(store: Store, table: str) -> Iterator[str]:
    """The sessions with rows in a table, each once, including those without a commit."""
    last = b""
    for row in scan(store.engine, table, b"", None):
        part = keys.session_part(row.key)
        if part == last:
            continue
        last = part
        session = keys.session_of(part)
        if session is None:
            head, meta = store.engine.get_rows([head_key(part), meta_key(part)])
            if head is None and meta is None:
                # The id is too long for the key, and the rows that store it do not exist.
                continue
            session = catalogue.name_of(KnownSession(part, head, meta))
        if session is not None:
            yield session


def _chosen(store: Store, table: str, session: str | None) -> list[str]:
    """The session asked for, or all that have rows in a table."""
    if session is None:
        return [*_sessions_in(store, table)]
    if session in _sessions_in(store, table):
        # A session that was never created may have rows; ``resolve_session`` cannot find it.
        return [session]
    return [naming.resolve_session(store, session)]


def _lease_of(store: Store, session: str) -> Lease | None:
    """The last lease of a session, live or not."""
    [row] = store.engine.get_rows([session_leases.lease_key(keys.session_key(session))])
    return None if row is None else session_leases.decode_lease(session, row)


# --- queue ----------------------------------------------------------------------------------------


_BATCH: Final[Fields] = {
    "id": Field("the batch", "batch"),
    "session": Field("the session that the work is for", "session"),
    "state": Field("queued, delayed or claimed", "state"),
    "owner": Field("the worker that claimed it, null if it is not claimed", "owner"),
    "enqueued_at": "when it was queued",
    "age_ms": Field("how long ago that was", "age"),
    "available_at": Field("when it can be claimed, null: at once", "available"),
    "expires_at": Field("when the claim ends unless the lease is renewed, null: not claimed",
                        "claim expires"),
    "claims": Field("how many times it was claimed", "claims", "claim"),
    "delivery": "after_turn: claimed when the session is idle; earliest: also during a turn",
    "slot": "exclusive: claimed alone; join: together with batches of the same merge_key",
    "merge_key": "batches with the same key can be claimed together, null if none",
    "source_key": "the key that keeps the work from being queued twice, null if none",
    "items": Field("the number of items", "items", "item"),
    "content": "the items themselves, if one BATCH is named; otherwise null",
}  # fmt: skip


def _batch(batch: Batch, lease: Lease | None, now_ms: int, *, whole: bool) -> dict[str, Any]:
    held = lease is not None and lease.fencing == batch.held_by and lease.expires_at_ms > now_ms
    delayed = batch.available_at_ms > now_ms
    return document(
        _BATCH,
        batch,
        {
            "state": "claimed" if held else "delayed" if delayed else "queued",
            "owner": lease.owner if held and lease is not None else None,
            "age_ms": max(0, now_ms - batch.enqueued_at_ms),
            "available_at": batch.available_at_ms or None,
            "expires_at": lease.expires_at_ms if held and lease is not None else None,
            "claims": batch.fence,
            "items": len(batch.items),
            "content": [plain(item) for item in batch.items] if whole else None,
        },
    )


@command(
    {
        "batches": nested("by session, in the order in which they are claimed", _BATCH),
        "changed": "cancelled or null: only listed",
    },
    "casstore queue",
    "casstore queue agent 5f0c",
    "casstore queue agent --cancel 5f0c",
)
@click.argument("session", required=False, shell_complete=complete_name)
@click.argument("batch", required=False)
@click.option("--cancel", metavar="BATCH", help="Remove this batch, unless it is claimed.")
def queue(app: App, session: str | None, batch: str | None, cancel: str | None) -> None:
    """List, show or cancel the work queued for sessions.

    Lists the batches of SESSION, or of all sessions; BATCH shows one batch with its items. A claim
    lasts as long as the lease of the worker that made it.
    """
    if cancel is not None and (session is None or batch is not None):
        raise click.UsageError("--cancel takes the SESSION and no BATCH argument")
    with app.open(write=cancel is not None) as store:
        now_ms = store.engine.now_ms()
        answer: list[dict[str, Any]] = []
        for one in _chosen(store, "queue", session):
            lease = _lease_of(store, one)
            waiting = store.session(one).queue
            for found in waiting.batches():
                if found.id == (cancel or batch or found.id):
                    whole = batch is not None
                    answer.append(_batch(found, lease, now_ms, whole=whole))
            if cancel is not None and answer and waiting.cancel(cancel) is None:
                raise ConflictError(
                    f"batch {cancel!r} of session {one!r} is claimed by {answer[0]['owner']!r} "
                    f"until {answer[0]['expires_at']}; wait, or: "
                    f"casstore leases --release {naming.quoted(one)}"
                )
        missing = cancel or batch
        if missing is not None and not answer:
            raise NameNotFoundError(missing, f"casstore queue {naming.quoted(session or '')}")

    def render(to: Printer) -> None:
        if cancel is not None:
            to.line(good("cancelled "), name(cancel), f" of {answer[0]['session']}")
        elif batch is not None:
            to.report(_BATCH, answer[0])
            to.json(answer[0]["content"])
        else:
            app.rows(to, _BATCH, answer, "no work is queued")

    app.answer({"batches": answer, "changed": None if cancel is None else "cancelled"}, render)


# --- leases ---------------------------------------------------------------------------------------


_LEASE: Final[Fields] = {
    "session": Field("the session", "session"),
    "state": Field("held, expired or released", "state"),
    "owner": Field("the owner that claimed it", "owner"),
    "claimed_at": Field("when it was claimed", "claimed"),
    "age_ms": Field("how long ago that was", "age"),
    "expires_at": Field("when it expires, null if it was released", "expires"),
    "left_ms": Field("the time until then, null if it is not held", "time left"),
    "fencing": Field("the number of leases ever given on the session", "fencing", "lease"),
}


def _lease(lease: Lease, now_ms: int) -> dict[str, Any]:
    held = lease.expires_at_ms > now_ms
    return document(
        _LEASE,
        lease,
        {
            "state": "held" if held else "expired" if lease.expires_at_ms else "released",
            "age_ms": max(0, now_ms - lease.claimed_at_ms),
            "expires_at": lease.expires_at_ms or None,
            "left_ms": lease.expires_at_ms - now_ms if held else None,
        },
    )


@command(
    {
        "leases": nested("by session", _LEASE),
        "changed": "released or null: only listed",
    },
    "casstore leases",
    "casstore leases agent --release --yes",
)
@click.argument("session", required=False, shell_complete=complete_name)
@click.option("--all", "-a", "everything", is_flag=True, help="Include expired and released ones.")
@click.option("--release", is_flag=True, help="Release the lease of SESSION.")
@YES
def leases(app: App, session: str | None, everything: bool, release: bool, yes: bool) -> None:
    """List the leases of sessions, or release one.

    A worker whose lease is released gets an error at its next commit, and its claims in the queue
    end. Leases expire by themselves unless their owners renew them.
    """
    if release and session is None:
        raise click.UsageError("--release needs the SESSION")
    with app.open(write=release) as store:
        now_ms = store.engine.now_ms()
        found = [
            lease
            for one in _chosen(store, "leases", session)
            if (lease := _lease_of(store, one)) is not None
            and (everything or session is not None or lease.expires_at_ms > now_ms)
        ]
        if release:
            if not found or found[0].expires_at_ms <= now_ms:
                raise NameNotFoundError(
                    str(session),
                    "casstore leases --all",
                    f"session {session!r} has no lease that is held",
                )
            left = duration(found[0].expires_at_ms - now_ms)
            owner = safe(found[0].owner)
            require_yes(yes=yes, question=f"Take the lease from {owner}? It expires in {left}.")
            store.session(found[0].session).release_lease(found[0])
            found = [found[0]._replace(expires_at_ms=0)]
    answer = [_lease(one, now_ms) for one in found]

    def render(to: Printer) -> None:
        if release:
            to.line(good("released "), name(found[0].session), f" from {found[0].owner}")
        else:
            app.rows(to, _LEASE, answer, "no lease is held")

    app.answer({"leases": answer, "changed": "released" if release else None}, render)


# --- attachments ----------------------------------------------------------------------------------


_ATTACHMENT: Final[Fields] = {
    "id": Field("the attachment", "attachment"),
    "session": Field(
        "the session, null: it has no commit, and its id is too long for a key", "session"
    ),
    "state": Field(
        "intent: not committed yet; committed; or condemned: no commit may refer to it", "state"
    ),
    "owner": Field("the owner that announced it, null: not given", "owner"),
    "announced_at": Field("when it was last announced", "announced", of="intent_at_ms"),
    "age_ms": Field("how long ago that was", "age"),
    "committed_at": "when a commit referred to it, null: not yet, or condemned",
    "digest": "the digest of its blob in this store, null: it has none",
    "uri": Field("where the bytes are, null: in this store or not known", "bytes at", gives=True),
}


_ATTACHMENT_ALONE: Final[Fields] = {
    **_ATTACHMENT,
    "committed_at": Field("when a commit referred to it", "committed"),
    "digest": Field("the blob of this store", "blob"),
}


def _attachment(one: Attachment | Uncommitted, now_ms: int) -> dict[str, Any]:
    return document(
        _ATTACHMENT,
        one,
        {
            "id": one.attachment if isinstance(one, Uncommitted) else one.id,
            "age_ms": max(0, now_ms - one.intent_at_ms),
            "committed_at": None if isinstance(one, Uncommitted) else one.committed_at_ms,
        },
    )


@command(
    {
        "attachments": nested("by session and id", _ATTACHMENT),
        "changed": "cancelled, released or null: only listed",
    },
    "casstore attachments --older 7d",
    "casstore attachments agent --all",
    "casstore attachments agent video-1",
    "casstore attachments agent --cancel video-1 --yes",
    "casstore prune --attachments 7d --yes",
)
@click.argument("session", required=False, shell_complete=complete_name)
@click.argument("attachment", required=False)
@click.option(
    "--older", "older_ms", type=DURATION, default="0",
    help="Only those announced at least this long ago.",
)  # fmt: skip
@click.option("--all", "-a", "everything", is_flag=True, help="Of SESSION: committed ones as well.")
@click.option("--cancel", metavar="ID", help="Condemn this one: no commit may refer to it.")
@click.option("--release", metavar="ID", help="Remove this one; delete its bytes elsewhere first.")
@YES
def attachments(
    app: App,
    session: str | None,
    attachment: str | None,
    older_ms: int,
    everything: bool,
    cancel: str | None,
    release: str | None,
    yes: bool,
) -> None:
    """List attachments that were never committed, or give one up.

    Those of sessions without any commit are included. ATTACHMENT shows one, committed or not.
    Attachments do not expire: prune --attachments gives up all old ones. Condemned ones stay listed
    until you delete their bytes elsewhere and remove them with --release.
    """
    chosen = cancel or release
    if (chosen is not None or everything) and session is None:
        raise click.UsageError("--all, --cancel and --release need the SESSION")
    if len([one for one in (cancel, release, attachment) if one is not None]) > 1:
        raise click.UsageError("either ATTACHMENT, --cancel or --release")
    with app.open(write=chosen is not None) as store:
        now_ms = store.engine.now_ms()
        before_ms = max(0, now_ms - older_ms)
        found: list[Attachment | Uncommitted]
        if session is None:
            found = [*list_uncommitted(store, older_than_ms=before_ms)]
        else:
            [only] = _chosen(store, "attachments", session)
            own = store.session(only).attachments
            found = [*own.list()] if everything else [*own.uncommitted(older_than_ms=before_ms)]
            wanted = chosen or attachment
            if wanted is not None:
                known = own.find(wanted)
                if known is None:
                    remedy = f"casstore attachments {naming.quoted(only)} --all"
                    raise NameNotFoundError(wanted, remedy)
                if chosen is not None:
                    what = "Condemn" if cancel is not None else "Forget"
                    question = f"{what} attachment {safe(chosen)} of {safe(only)}?"
                    require_yes(yes=yes, question=question)
                if cancel is not None:
                    known = own.condemn(cancel)
                elif release is not None:
                    own.forget(release)
                found = [known]
    changed = "cancelled" if cancel is not None else "released" if release is not None else None
    answer = [_attachment(one, now_ms) for one in found]

    def render(to: Printer) -> None:
        if changed is not None:
            to.line(good(f"{changed} "), name(str(chosen)), f" of {session}")
        elif attachment is not None:
            to.report(_ATTACHMENT_ALONE, answer[0])
        else:
            rows = [
                {**one, "uri": one["uri"] or (one["digest"] and "this store")} for one in answer
            ]
            app.rows(to, _ATTACHMENT, rows, "no attachments")

    app.answer({"attachments": answer, "changed": changed}, render)


# --- watch ----------------------------------------------------------------------------------------


@command(
    {"session": "the session", **ENTRY_FIELDS},
    "casstore watch",
    "casstore watch agent --since 0 --limit 1 --json",
)
@click.argument("session", required=False, shell_complete=complete_name)
@limit_option(0, "End after this many commits; 0: never.")
@click.option("--since", type=Whole(0), help="Of SESSION: begin after this revision.")
def watch(app: App, session: str | None, limit: int, since: int | None) -> None:
    """Print commits as they happen.

    Prints the commits to SESSION, or to all sessions, by any process, until Ctrl-C. With --json
    each commit is one line with one JSON document.
    """
    if since is not None and session is None:
        raise click.UsageError("--since needs the SESSION")
    with app.open() as store:
        only = None if session is None else naming.resolve_session(store, session)
        changes = store.engine.watch()
        known = _revisions(store, only)
        if since is not None and only is not None:
            known[only] = since
        seen = 0
        try:
            app.remark("waiting for commits; Ctrl-C ends it")
            app.write_remarks()
            while True:
                for answer in _news(store, only, known):
                    _write_commit(app, answer)
                    seen += 1
                    if limit and seen >= limit:
                        return
                changes.wait()
        except KeyboardInterrupt:
            # Ctrl-C is the usual way to end it.
            return
        finally:
            changes.close()


def _revisions(store: Store, only: str | None) -> dict[str, int]:
    """The present revision of each session."""
    if only is not None:
        head = store.session(only).head()
        return {only: 0 if head is None else head.revision}
    found: dict[str, int] = {}
    for row in scan(store.engine, "heads", b"", None):
        head_row = decode_head(row.value)
        found[keys.name_of(row.key, head_row.long_id)] = head_row.revision
    return found


def _news(store: Store, only: str | None, known: dict[str, int]) -> Iterator[dict[str, Any]]:
    """The commits since the revisions in ``known``, by time; updates ``known``."""
    news: list[dict[str, Any]] = []
    now = _revisions(store, only)
    for session, revision in now.items():
        last = known.get(session, 0)
        if revision > last:
            try:
                history = store.session(session).history(limit=revision - last)
                entries = [one for one in history if one.revision > last]
                documents = entry_documents(store, session, entries)
            except (NotFoundError, SessionDeletedError):
                # Another process has deleted or pruned the session.
                continue
            news += [{"session": session, **one} for one in documents]
            revision = max([revision, *[one.revision for one in entries]])
        known[session] = revision
    yield from sorted(news, key=lambda one: (one["committed_at"], one["session"], one["revision"]))


def _write_commit(app: App, answer: dict[str, Any]) -> None:
    if app.as_json:
        line = json_line(app.shape.document(answer), ascii_only=needs_ascii(sys.stdout))
        sys.stdout.write(line + "\n")
    else:
        turn = f"  turn {answer['turn']}" if answer["turn"] else ""
        Printer(sys.stdout).line(
            dim(time_words(answer["committed_at"])), "  ",
            name(f"{answer['session']}@{answer['revision']}"), f"  {operation_words(answer)}",
            f"  leaf {answer['leaf']}", turn,
        )  # fmt: skip
    sys.stdout.flush()
