"""``diff``: compares two sessions, revisions, nodes, records or objects."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Final, NamedTuple

import click

from casstore.cli import naming
from casstore.cli.command import App, command
from casstore.cli.differences import (
    BLOB,
    CHECKPOINT,
    RECORD,
    Difference,
    Place,
    compare,
    open_bundle,
    unified,
)
from casstore.cli.fields import Field, Fields, nested
from casstore.cli.naming import complete_name
from casstore.cli.output import (
    Printer,
    Styled,
    bad,
    bold,
    diff_line,
    dim,
    good,
    name,
    needs_ascii,
    other,
)
from casstore.cli.places import checkpoint_document, node_fields, node_summary, read_nodes
from casstore.cli.quantities import Whole, count, size
from casstore.cli.text import brief, clip_name, json_pieces, short
from casstore.errors import InvalidInputError, render_path
from casstore.format.digest import Digest
from casstore.objects.diff import ADDED, CHANGED, REMOVED, Change
from casstore.session.compare import NodeRef
from casstore.session.data import Node, Usage
from casstore.store import Store, is_server, shown_place

_SHOWN: Final = 100
_TEXT_LINES: Final = 12
# Texts up to this length are compared line by line.
_TEXT_CHARACTERS: Final = 1_000_000
_NODE: Final = node_fields("id", "parent", "seq", "depth", "digest", "summary", "hidden")
_SIDE: Final[Fields] = {
    "name": Field("the unambiguous name", of="target.text"),
    "store": Field("the directory of its store, or the exported file", of="where"),
    "digest": Field(
        "its digest; null for a record",
        of=lambda place: None if place.kind == RECORD else place.digest,
    ),
}

_FIELDS: Final[Fields] = {
    "kind": "what was compared: checkpoint, node, value, blob or record",
    "equal": "true if they have the same content",
    "old": nested("the first one", _SIDE),
    "new": nested("the second one", _SIDE),
    "counts": nested(
        "how much differs",
        {
            "nodes_added": "nodes that only the new one has",
            "nodes_dropped": "nodes that only the old one has",
            "added": "paths that only the new one has",
            "removed": "paths that only the old one has",
            "changed": "paths with another value",
        },
    ),
    "by_part": "the same for each component: {name: {added, removed, changed}}",
    "nodes": nested(
        "of checkpoints, else null",
        {
            "ancestor": "the last node on both paths, null if they share none",
            "old_leaf": "where the old one ends",
            "new_leaf": "where the new one ends",
            "added": nested("by insertion order", _NODE),
            "dropped": nested("by insertion order", _NODE),
        },
    ),
    "changes": nested(
        "in order; empty with --stat",
        {
            "op": "added, removed or changed",
            "path": "the path in the new one; of a removed value, in the old one",
            "old_path": "the path in the old one; null if the value was added",
            "before": "the old value, null if there was none",
            "after": "the new value, null if it was deleted",
            "usage": nested(
                "of a change of token usage, which count; else null",
                {
                    "source": "the source of the usage, as it was committed",
                    "model": "the model",
                    "field": "input, output …; null: the whole entry",
                },
            ),
        },
    ),
    "details": nested(
        "of components whose format is known, such as the files of a workspace; "
        "in no count; empty with --stat and --patch",
        {
            "component": "the component; changes and counts have it as a plain value",
            "kind": "added, removed, changed, mode or renamed",
            "path": "the path of the file in the new one; of a removed one, in the old one",
            "old_path": "what a renamed file was called before, else null",
            "old_mode": "its permission bits before, null if it was absent",
            "new_mode": "its permission bits, null if it is absent",
            "text": Field(
                "lines of a unified diff, at most 201; empty if the content is the same",
                of=lambda one: one.lines(),
            ),
        },
    ),
    "failures": "components without details because of an error: {component: reason}",
    "omitted": nested(
        "how many are not listed because of --limit",
        {"nodes": "nodes", "changes": "changes", "details": "details"},
    ),
    "text": "of two short text blobs, a unified diff by lines; else null",
    "first_difference": "of other blobs, the first byte that differs; else null",
    "patch": "with --patch, a JSON Patch; else null",
}


@command(
    _FIELDS,
    "casstore diff agent@41 agent",
    "casstore diff agent other --stat",
    "casstore diff agent~5 agent --patch",
    "casstore diff backup::agent live::agent --exit-code",
    "casstore diff monday.bundle tuesday.bundle --stat",
)
@click.argument("old", shell_complete=complete_name)
@click.argument("new", shell_complete=complete_name)
@click.option("--stat", is_flag=True, help="Only the number of differences in each part.")
@click.option("--patch", is_flag=True, help="A JSON Patch (RFC 6902).")
@click.option("--exit-code", is_flag=True, help="End with exit code 1 if they differ.")
@click.option(
    "--limit", "-n", type=Whole(0),
    help=f"List at most this many nodes and changes; 0: all. Default: {_SHOWN}, with --json all.",
)  # fmt: skip
@click.option("--full", is_flag=True, help="Do not cut long values.")
def diff(
    app: App,
    old: str,
    new: str,
    stat: bool,
    patch: bool,
    exit_code: bool,
    limit: int | None,
    full: bool,
) -> None:
    """Compare two sessions, revisions, nodes, records or objects.

    OLD and NEW are names as for show, STORE::NAME for one in another store, or exported files:
    FILE for the session in it, FILE::SESSION@REVISION for a revision. Equal parts of sessions are
    skipped unread, so the time it takes grows with the difference. A JSON Patch of two
    checkpoints applies to a document {leaf, nodes: {id: node}, tool_state, …}.
    """
    if stat and patch:
        raise click.UsageError("either --stat or --patch")
    with ExitStack() as stack:
        opened: dict[str, tuple[Store, str]] = {}
        places = [_place(app, stack, opened, text) for text in (old, new)]
        found = compare(*places, describe=not (stat or patch))
        if patch and found.kind == BLOB:
            # Check this before printing, so that no partial answer is written.
            raise InvalidInputError("a JSON Patch is for values; two blobs have none")
        if exit_code and not found.equal:
            app.exit_code = 1
        shown = limit if limit is not None else (0 if app.as_json or patch else _SHOWN)
        if patch and not app.as_json:
            _print_patch(found)
            return
        listing = _Listing(found, 0 if stat else shown, stat=stat)
        document = listing.document(with_values=app.as_json and not stat)
        document["patch"] = list(found.patch()) if patch else None
        app.answer(document, lambda to: _Page(listing, to, full=full).write())


def _place(app: App, stack: ExitStack, opened: dict[str, tuple[Store, str]], text: str) -> Place:
    """Resolve a name: in the store, in ``STORE::NAME``, or in an exported file."""
    where, rest = naming.split_store(text)
    if where is None and os.path.isfile(text):
        where, rest = text, ""
    shown = app.path if where is None else where
    path = shown if is_server(shown) else os.path.realpath(shown)
    if path not in opened:
        if os.path.isfile(path):
            with app.meter() as meter:
                opened[path] = open_bundle(stack, path, meter)
        else:
            opened[path] = stack.enter_context(app.open(path=where)), ""
    store, session = opened[path]
    if not rest and not session:
        raise InvalidInputError(f"{text!r} names only a store; add a name in it: {text}SESSION")
    target = naming.resolve(store, rest or f"session:{session}")
    if target.entry is None:
        target.require_digest()
    store_name = shown_place(shown) if is_server(shown) else os.path.abspath(shown)
    return Place(store, target, text, store_name)


def _print_patch(found: Difference) -> None:
    """Write one operation a line, so that a long patch needs little memory."""
    ascii_only = needs_ascii(sys.stdout)
    click.echo("[", nl=False)
    between = "\n"
    for operation in found.patch():
        click.echo(between, nl=False)
        for piece in json_pieces(operation, ascii_only=ascii_only, indented=False):
            sys.stdout.write(piece)
        between = ",\n"
    click.echo("\n]")


class _Listing:
    """A difference, and how much of it to list."""

    def __init__(self, found: Difference, limit: int, *, stat: bool) -> None:
        self.found = found
        self.stat = stat
        self._limit = limit
        comparison = found.comparison
        self.added: Sequence[NodeRef] = () if comparison is None else comparison.added
        self.dropped: Sequence[NodeRef] = () if comparison is None else comparison.dropped
        self.changes = found.changes
        described = {} if comparison is None else comparison.details
        self.described = frozenset(described)
        self.details = [one for details in described.values() for one in details]
        self.failures = {} if comparison is None else comparison.failures
        # The usage entries of a checkpoint, by its digest; read only if usage changed.
        self._ledgers: dict[Digest, list[dict[str, Any]]] = {}

    def usage_of(self, change: Change) -> _UsageField | None:
        """The usage entry and field that a change is in; None for changes of other components."""
        found = self.found
        if found.kind != CHECKPOINT or change.path[:1] != ("usage",) or len(change.path) < 2:
            return None
        place = found.old if change.op == REMOVED else found.new
        if place.digest not in self._ledgers:
            document = checkpoint_document(place.store, place.digest, hydrate=False)
            self._ledgers[place.digest] = document["usage"]
        _, at, *rest = change.path
        assert isinstance(at, int)
        entry = self._ledgers[place.digest][at]
        field = Usage._fields[rest[0]] if rest and isinstance(rest[0], int) else None
        return _UsageField(entry["source"], entry["model"], field)

    def cut(self, what: Sequence[Any]) -> Sequence[Any]:
        """The items that are listed: none with --stat, else the first ``limit``."""
        if self.stat:
            return ()
        return what[: self._limit] if self._limit else what

    def is_plain(self, change: Change) -> bool:
        """True if the change is listed itself: ``details`` do not describe its component."""
        return not change.path or change.path[0] not in self.described

    def by_part(self) -> dict[str, Counter[str]]:
        """How many entries of ``changes`` each component has."""
        found: dict[str, Counter[str]] = {}
        for change in self.changes:
            part = ""
            if self.found.kind == CHECKPOINT and change.path:
                part = str(change.path[0])
            found.setdefault(part, Counter())[change.op] += 1
        return found

    def document(self, *, with_values: bool) -> dict[str, Any]:
        """The difference as JSON."""
        found = self.found
        totals: Counter[str] = Counter()
        for counts in self.by_part().values():
            totals += counts
        comparison = found.comparison
        nodes = None
        if comparison is not None:
            nodes = {
                "ancestor": None if comparison.ancestor is None else comparison.ancestor.id,
                "old_leaf": comparison.old_leaf,
                "new_leaf": comparison.new_leaf,
                "added": self._nodes(found.new, self.added) if with_values else [],
                "dropped": self._nodes(found.old, self.dropped) if with_values else [],
            }
        listed = self.cut(self.changes)
        listed_nodes = len(self.cut(self.added)) + len(self.cut(self.dropped))
        return {
            "kind": found.kind,
            "equal": found.equal,
            "old": found.old,
            "new": found.new,
            "counts": {
                "nodes_added": len(self.added),
                "nodes_dropped": len(self.dropped),
                **{op: totals[op] for op in (ADDED, REMOVED, CHANGED)},
            },
            "by_part": {
                part: {op: counts[op] for op in (ADDED, REMOVED, CHANGED)}
                for part, counts in self.by_part().items()
            },
            "nodes": nodes,
            "changes": [self._change(change) for change in listed] if with_values else [],
            "details": self.cut(self.details) if with_values else [],
            "failures": self.failures,
            "omitted": {
                "nodes": len(self.added) + len(self.dropped) - listed_nodes,
                "changes": len(self.changes) - len(listed),
                "details": len(self.details) - len(self.cut(self.details)),
            },
            "text": None if found.blobs is None or self.stat else found.blobs.lines,
            "first_difference": None
            if found.blobs is None or found.blobs.lines is not None or found.equal
            else found.blobs.first_difference,
            "patch": None,
        }

    def _nodes(self, place: Place, nodes: Sequence[NodeRef]) -> list[Node]:
        digests = [node.digest for node in self.cut(nodes)]
        return [*read_nodes(place.store, digests, place.target.session)]

    def _change(self, change: Change) -> dict[str, Any]:
        return {
            "op": change.op,
            "path": change.path,
            "old_path": change.old_path,
            "before": change.stored_before(),
            "after": change.stored_after(),
            "usage": self.usage_of(change),
        }


def _digest_of(place: Place) -> str:
    return "" if place.kind == RECORD else f" {short(place.digest)}"


class _UsageField(NamedTuple):
    """A count in the usage ledger that differs; field None: all counts of the entry."""

    source: str
    model: str
    field: str | None

    def __str__(self) -> str:
        return f"{self.source}, {self.model}" + ("" if self.field is None else f": {self.field}")


def _usage_words(entry: Any) -> str:
    """The counts of a stored usage entry in words."""
    counts = zip(Usage._fields[2:], entry[2:], strict=False)
    return ", ".join([f"{name} {number:,}" for name, number in counts if number]) or "nothing"


def _label(op: str, where: str) -> Styled:
    return good(f"  + {where}") if op == ADDED else bad(f"  - {where}")


class _Page:
    """Writes a difference as text."""

    def __init__(self, listing: _Listing, to: Printer, *, full: bool) -> None:
        self._listing = listing
        self._found = listing.found
        self._to = to
        self._full = full

    def write(self) -> None:
        """Write the difference."""
        found = self._found
        self._to.line(
            name(found.old.asked), dim(_digest_of(found.old)), " → ",
            name(found.new.asked), dim(_digest_of(found.new)),
        )  # fmt: skip
        if found.equal:
            self._to.line("the same")
            return
        if found.kind == BLOB:
            self._blobs()
        if found.comparison is not None:
            self._nodes()
        if self._listing.stat:
            self._stat()
        else:
            self._changes()

    # --- nodes ----------------------------------------------------------------------------

    def _nodes(self) -> None:
        comparison = self._found.comparison
        assert comparison is not None
        listing = self._listing
        if comparison.ancestor is not None:
            self._to.line(
                dim("they share the path to "), comparison.ancestor.id,
                dim(f", {count(comparison.ancestor.depth, 'node')}"),
            )  # fmt: skip
        elif comparison.old_leaf is not None and comparison.new_leaf is not None:
            self._to.line(dim("their paths share no node"))
        if comparison.old_leaf != comparison.new_leaf:
            self._to.line(
                dim("leaf "), bad(str(comparison.old_leaf)), " → ", good(str(comparison.new_leaf))
            )
        self._to.line(
            bold("nodes"), "  ", good(f"{len(listing.added):,} added"), ", ",
            bad(f"{len(listing.dropped):,} dropped"),
        )  # fmt: skip
        for mark, colour, place, nodes in (
            ("-", "red", self._found.old, listing.dropped),
            ("+", "green", self._found.new, listing.added),
        ):
            shown = listing.cut(nodes)
            digests = [node.digest for node in shown]
            for node in read_nodes(place.store, digests, place.target.session):
                node_id = clip_name(node.id)
                said = node_summary(node, self._to.room(len(node_id) + 6, 120))
                self._to.line(Styled(f"  {mark} {node_id}  {said}", fg=colour))
            if len(nodes) > len(shown) and not listing.stat:
                more = len(nodes) - len(shown)
                self._to.line(dim(f"  {mark} … {more:,} more: --limit 0"))

    def _more(
        self,
        before: str,
        what: str,
        found: Sequence[Any],
        shown: Sequence[Any],
        remedy: str = "--limit 0",
    ) -> None:
        """Report how many items are not shown, if there are any."""
        if len(found) > len(shown):
            left = count(len(found) - len(shown), what)
            self._to.line(dim(f"{before}{left}: {remedy}"))

    # --- values ---------------------------------------------------------------------------

    def _stat(self) -> None:
        for part, counts in self._listing.by_part().items():
            self._to.line(
                bold(part or self._found.kind), "  ", good(f"{counts[ADDED]:,} added"), ", ",
                bad(f"{counts[REMOVED]:,} removed"), ", ", other(f"{counts[CHANGED]:,} changed"),
            )  # fmt: skip
        if self._found.comparison is not None and not self._found.changes:
            self._to.line(dim("the components outside the graph are the same"))

    def _changes(self) -> None:
        listing = self._listing
        part: str | None = None
        counts = listing.by_part()
        plain = [one for one in listing.changes if listing.is_plain(one)]
        shown = listing.cut(plain)
        for change in shown:
            path = change.path
            if self._found.kind == CHECKPOINT and path:
                if path[0] != part:
                    part = str(path[0])
                    total = sum(counts[part].values())
                    self._to.line(bold(part), dim(f"  {count(total, 'change')}"))
                path = path[1:]
            usage = listing.usage_of(change)
            if usage is not None:
                self._usage(change, usage)
            elif part == "usage" and not path:
                # The whole ledger, if the other side has none.
                for entry in change.after if change.op == ADDED else change.before:
                    self._entry(change.op, f"{entry[0]}, {entry[1]}", entry)
            else:
                self._change(change, render_path(path))
        self._more("… ", "more change", plain, shown, "--limit 0, or --stat")
        self._details()
        if self._found.comparison is not None and not listing.changes:
            self._to.line(dim("the components outside the graph are the same"))

    def _details(self) -> None:
        details = self._listing.details
        shown = self._listing.cut(details)
        totals = Counter([one.component for one in details])
        part: str | None = None
        for one in shown:
            if one.component != part:
                part = one.component
                self._to.line(bold(part), dim(f"  {count(totals[part], 'change')}"))
            style = {"added": good, "removed": bad}.get(one.kind, other)
            self._to.line(style(f"  {one.summary}"))
            self._lines(one.lines())
        self._more("… ", "more change", details, shown)
        for component, why in self._listing.failures.items():
            self._to.line(bad(f"! {component}: {why}"))

    def _usage(self, change: Change, usage: _UsageField) -> None:
        if usage.field is not None or change.op == CHANGED:
            self._change(change, str(usage))
        else:
            entry = change.after if change.op == ADDED else change.before
            self._entry(change.op, str(usage), entry)

    def _entry(self, op: str, where: str, entry: Any) -> None:
        self._to.line(_label(op, where), "  ", _usage_words(entry))

    def _change(self, change: Change, where: str) -> None:
        room = 1_000_000 if self._full else self._to.room(6, 160)
        if change.op == CHANGED:
            self._changed(change, where, room)
            return
        value = change.stored_after() if change.op == ADDED else change.stored_before()
        self._to.line(_label(change.op, where), "  ", brief(value, max(20, room - len(where))))

    def _changed(self, change: Change, where: str, room: int) -> None:
        before, after = change.stored_before(), change.stored_after()
        assert before is not None
        assert after is not None
        left, right = before.whole_text(_TEXT_CHARACTERS), after.whole_text(_TEXT_CHARACTERS)
        if left is not None and right is not None and "\n" in left + right:
            self._to.line(other(f"  ~ {where}"))
            self._lines(unified(left, right, around=1)[2:])
            return
        old, new = brief(before, max(20, room)), brief(after, max(20, room))
        if len(where) + len(old) + len(new) + 8 <= room:
            self._to.line(other(f"  ~ {where}"), "  ", bad(old), " → ", good(new))
        else:
            self._to.line(other(f"  ~ {where}"))
            self._to.line(bad(f"      - {old}"))
            self._to.line(good(f"      + {new}"))

    def _lines(self, lines: Sequence[str]) -> None:
        """The lines of a unified diff, cut unless --full is given."""
        shown = lines if self._full else lines[:_TEXT_LINES]
        for line in shown:
            text = line if self._full else line[: self._to.room(8, 160)]
            self._to.line(diff_line(text, "      "))
        self._more("      … ", "more line", lines, shown, "--full")

    # --- blobs ----------------------------------------------------------------------------

    def _blobs(self) -> None:
        blobs = self._found.blobs
        assert blobs is not None
        self._to.line(dim(f"{size(blobs.old_bytes)} → {size(blobs.new_bytes)}"))
        if blobs.lines is None:
            self._to.line(f"they differ from byte {blobs.first_difference:,} on")
        elif not self._listing.stat:
            shown = self._listing.cut(blobs.lines)
            for line in shown:
                self._to.line(diff_line(line))
            self._more("… ", "more line", blobs.lines, shown)
