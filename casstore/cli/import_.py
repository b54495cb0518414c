"""``casstore import KIND SOURCE``: data of other systems, and bundles, into a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

import click

from casstore.cli.command import App, Kinds, command
from casstore.cli.fields import Fields, Shape, nested
from casstore.cli.options import keys_option, open_keys, read_secret, secret_option
from casstore.cli.output import Printer, bad, good, name
from casstore.cli.quantities import count, size
from casstore.compat.importing import IMPORTED, UPDATED, ImportReport

_FIELDS: Final[Fields] = {
    "kind": "the kind of the source",
    "source": "the file, or the server without user and password",
    "dry_run": "true: nothing was written",
    "parts": nested(
        "how many rows of each kind",
        {
            "name": "the kind of row",
            "found": "rows in the source",
            "imported": "rows that the store lacked: written, or in a dry run to be written",
            "updated": "rows that the store had in an earlier state: updated, or in a dry run "
            "to be updated",
        },
    ),
    "sessions": nested(
        "the sessions in the source; none if it holds records that belong to no session",
        {
            "session": "the id in the store",
            "outcome": "imported, updated or unchanged",
            "source": "the file it was read from",
        },
    ),
    "notes": nested(
        "rows that were left out, or are stored in another form",
        {
            "what": "which rows, and what became of them",
            "number": "how many rows",
            "examples": "the first of them, at most 100",
        },
    ),
    "source_bytes": "the size of the source",
    "store_bytes_before": "the size of the store before, null if its engine does not know",
    "store_bytes": "the size of the store now, null if its engine does not know",
}
# The most sessions that the text of a report names; the JSON names all.
_SHOWN_SESSIONS: Final = 20


@click.group(
    cls=Kinds,
    name="import",
    options_metavar="",
    subcommand_metavar="KIND SOURCE [OPTIONS]",
    epilog="casstore import KIND --help has the options of a kind.",
)
def import_() -> None:
    """Import a bundle, or the data of another system, into the store.

    KIND is the system that wrote SOURCE, a file, a directory or a URL, which is only read. An
    import compares every row with the store, writes what is missing, and reads it back. Run it
    again after Ctrl-C or a kill: it finishes the rest and does not change what is there. If the
    store holds a row with other content, the import stops. --dry-run reports the same and writes
    nothing.
    """


import_.shape = Shape("import", _FIELDS)

Options = Mapping[str, Any]

#: The importer of each kind, as ``module:name``.
FUNCTIONS: Final[dict[str, str]] = {}


def _kind(
    kind: str, function: str, *examples: str, source: str = "FILE"
) -> Callable[[Callable[..., Options]], None]:
    """Add a kind of import. ``function`` is its importer, as ``module:name``.

    The decorated function gets the options of the kind and ``dry_run``, and returns the arguments
    of the importer.
    """

    def add(options: Callable[..., Options]) -> None:
        def run(app: App, /, source: str, dry_run: bool, **given: Any) -> None:
            module, _, attribute = function.partition(":")
            try:
                importer = getattr(import_module(module), attribute)
                arguments = options(dry_run=dry_run, **given)
                with app.open(write=not dry_run) as store, app.meter() as meter:
                    report = importer(store, source, progress=meter, **arguments)
            except ModuleNotFoundError as exc:
                # An optional package; the message says how to install it.
                raise click.UsageError(str(exc)) from exc
            app.answer(report, lambda to: _render(to, report))

        run.__doc__ = options.__doc__
        made = command(_FIELDS, *examples, name=kind, schema="import")(run)
        dry_run = click.Option(
            ["-n", "--dry-run"], is_flag=True, help="Compare every row, and write nothing."
        )
        place = click.Argument(["source"], metavar=source)
        own = list(reversed(getattr(options, "__click_params__", [])))
        made.params[:0] = [place, dry_run, *own]
        import_.add_command(made)
        FUNCTIONS[kind] = function

    return add


def _render(to: Printer, report: ImportReport) -> None:
    imported, updated = (
        ("would import ", ", would update ") if report.dry_run else ("imported ", ", updated ")
    )
    for part in report.parts:
        more = f"{updated}{part.updated:,}" if part.updated else ""
        to.line(good(imported), f"{part.imported:,} of {part.found:,} ", part.name, more)
    changed = [each for each in report.sessions if each.outcome in (IMPORTED, UPDATED)]
    for each in changed[:_SHOWN_SESSIONS]:
        to.line("  would be " if report.dry_run else "  ", each.outcome, ": ", name(each.session))
    if len(changed) > _SHOWN_SESSIONS:
        to.line(f"  and {count(len(changed) - _SHOWN_SESSIONS, 'more session')}")
    for note in report.notes:
        first = f" (the first: {note.examples[0]})" if note.examples else ""
        to.line(bad("note: "), f"{note.number:,} ", note.what, first)
    sizes = f"{size(report.source_bytes)} in "
    if report.store_bytes is None or report.store_bytes_before is None or report.dry_run:
        to.line(sizes, name(report.source))
    else:
        grown = size(report.store_bytes - report.store_bytes_before)
        to.line(sizes, name(report.source), f", {grown} more in the store")


# --- the kinds ------------------------------------------------------------------------------------

_NAME: Final = click.option("--name", metavar="ID", help="The id that the session gets.")


@_kind(
    "bundle",
    "casstore.compat.bundle_import:import_bundle",
    "casstore import bundle agent.bundle",
    "casstore import bundle agent.bundle --name theirs",
    "casstore import bundle agent.bundle --subject alice",
)
@_NAME
@click.option(
    "--subject",
    "subjects",
    metavar="SUBJECT",
    multiple=True,
    help="A person the session is about, for erase; a bundle has none. May be given again.",
)
@click.option("--fast-forward", is_flag=True, help="Update a session that is in an earlier state.")
def _bundle(**given: Any) -> Options:
    """A session that casstore export wrote.

    FILE is verified as a whole before anything is written. Readers see all of the session or
    nothing. A bundle has no policy, expiry, protections or subjects: name with --subject the
    persons the session is about, or casstore erase will not find it.
    """
    return given


@_kind(
    "jsonl",
    "casstore.adapters.jsonl:import_jsonl",
    "casstore import jsonl transcript.jsonl --store agents",
)
@click.option(
    "--format",
    type=click.Choice(("auto", "claude", "pi", "messages")),
    default="auto",
    show_default=True,
    help="The format of the lines.",
)
@_NAME
@click.option("--leave-out-damaged", is_flag=True, help="Leave out lines that cannot be read.")
def _jsonl(**given: Any) -> Options:
    """A transcript of Claude Code or pi, or messages, in lines of JSON.

    FILE becomes one session, with its branches. Importing the file again adds the lines that were
    added to it since. A line that cannot be read stops the import with its number, before anything
    is written, unless --leave-out-damaged is given.
    """
    return given


@_kind(
    "langgraph-checkpoints",
    "casstore.adapters.langgraph:import_checkpoints",
    "casstore import langgraph-checkpoints checkpoints.sqlite --store agents",
    "casstore import langgraph-checkpoints postgresql://agents@db/app --dry-run --store agents",
    source="FILE|URL",
)
def _langgraph_checkpoints(**given: Any) -> Options:
    """Checkpoints of LangGraph's SqliteSaver or PostgresSaver.

    FILE is a database of SqliteSaver, URL the connection string of PostgresSaver;
    options=-csearch_path%3DNAME in it names a schema. Keep a password in ~/.pgpass or PGPASSWORD:
    other users can see a command line. The tables are read in one snapshot. Of
    ShallowPostgresSaver the latest checkpoint of each thread is imported, which is all it keeps.
    Needs casstore[langgraph], and for a URL casstore[postgres].
    """
    return given


@_kind(
    "langgraph-items",
    "casstore.adapters.langgraph:import_items",
    "casstore import langgraph-items memory.sqlite --dry-run --store agents",
    "casstore import langgraph-items postgresql://agents@db/app --store agents",
    source="FILE|URL",
)
@click.option(
    "--replace", is_flag=True,
    help="Replace an item that the store holds with other content.",
)  # fmt: skip
def _langgraph_items(**given: Any) -> Options:
    """Long-term memory of LangGraph's SqliteStore or PostgresStore.

    FILE is a database of SqliteStore, URL the connection string of PostgresStore;
    options=-csearch_path%3DNAME in it names a schema. Keep a password in ~/.pgpass or PGPASSWORD:
    other users can see a command line. The tables are read in one snapshot. An item that the
    store holds with other content stops the import, unless --replace is given; so does one that
    cannot be stored as it is. Embeddings are left out. Needs casstore[langgraph], and for a URL
    casstore[postgres].
    """
    return given


@_kind(
    "openai-agents",
    "casstore.adapters.openai_agents:import_sessions",
    "casstore import openai-agents conversations.db --dry-run --store agents",
    "casstore import openai-agents conversations.db --store agents",
)
@click.option(
    "--session", "sessions", metavar="ID", multiple=True,
    help="Import this session alone; may be given again.",
)  # fmt: skip
@click.option(
    "--sessions-table", metavar="NAME", default="agent_sessions", show_default=True,
    help="The table of sessions, if SQLiteSession was given another name.",
)  # fmt: skip
@click.option(
    "--messages-table", metavar="NAME", default="agent_messages", show_default=True,
    help="The table of messages, if SQLiteSession was given another name.",
)  # fmt: skip
def _openai_agents(*, sessions: tuple[str, ...], **given: Any) -> Options:
    """Conversations of the OpenAI Agents SDK.

    FILE is a database of its SQLiteSession or AdvancedSQLiteSession. Every session keeps its id,
    items, branches and usage; one that has grown since the last import is continued. Needs
    casstore[openai-agents].
    """
    return {"sessions": sessions or None, **given}


@_kind(
    "lash",
    "casstore.compat.lash_import:import_lash",
    "casstore import lash sessions/ --dry-run --store agents",
    "casstore import lash sessions/ --store agents",
    "casstore import lash root-4813494d137e1631.db --name helper --store agents",
    source="PATH",
)
@_NAME
@click.option(
    "--leave-out-damaged", is_flag=True, help="Leave out damaged nodes and blobs, with a note."
)
def _lash(**given: Any) -> Options:
    """Session databases of lash.

    PATH is a session database, or a directory of them (*.db). Each becomes a session, whole or not
    at all, with its id and revision, nodes, checkpoint, usage, queue, attachments and turns; a
    turn that was committed there is refused here, so that it does not run again. The import stops
    if a lease is valid, or the store holds another session of that id.
    """
    return given


@_kind(
    "power-loop",
    "casstore.compat.power_loop_import:import_power_loop",
    "casstore import power-loop sessions.db --dry-run --store agents",
    "casstore import power-loop sessions.db --store agents",
)
def _power_loop(**given: Any) -> Options:
    """Sessions of power-loop 0.2.0, as session logs.

    FILE is its database. A file in the middle of a write is refused.
    """
    return given


@_kind(
    "agent-harness",
    "casstore.compat.agent_harness_import:import_agent_harness",
    "casstore import agent-harness runtime.sqlite --artifacts workspace --store agents",
)
@click.option(
    "--artifacts",
    type=click.Path(file_okay=False, exists=True),
    help="The directory that holds threads/, if it is not that of the database.",
)
def _agent_harness(**given: Any) -> Options:
    """Threads, runs and artifacts of agent-harness.

    FILE is its runtime database. A file in the middle of a write is refused.
    """
    return given


@_kind(
    "langbot",
    "casstore.compat.langbot_import:import_langbot",
    "casstore import langbot langbot.db --dry-run --store agents",
    "casstore import langbot langbot.db --store agents",
)
def _langbot(**given: Any) -> Options:
    """Runner state of LangBot, as scoped state.

    FILE is its database. A file in the middle of a write is refused.
    """
    return given


@_kind(
    "morrow",
    "casstore.compat.agent_state_import:import_morrow",
    "casstore import morrow user_store.db --keys agent-keys --store agents",
)
@keys_option(
    "Encrypt user data, with keys in this directory; it is created if it does not exist.",
    exists=False,
)
@secret_option("The file whose bytes are the secret to hash users with.")
def _morrow(*, dry_run: bool, key_directory: str | None, secret_file: Any) -> Options:
    """Checkpoints and user data of morrow's agent_state.

    FILE is .agent_state.db or .user_store.db. A file in the middle of a write is refused.
    """
    # FileKeys creates its directory, and a dry run must not; without a directory there are no keys.
    has_keys = not dry_run or os.path.isdir(key_directory or "")
    keys = open_keys(key_directory) if has_keys else None
    return {"dry_run": dry_run, "keys": keys, "secret": read_secret(secret_file)}
