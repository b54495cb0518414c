"""Names that keep objects: tags for good, pins for a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import click

from casstore.cli import naming
from casstore.cli.command import App, command
from casstore.cli.completing import complete_name
from casstore.cli.naming import NameNotFoundError
from casstore.cli.output import Cells, Column, Printer, dim, name
from casstore.cli.quantities import DURATION, clock, moment, moment_or_none
from casstore.cli.shapes import Part, Shape
from casstore.cli.spelling import clip, clip_name
from casstore.errors import InvalidInputError
from casstore.format.digest import Digest
from casstore.session.data import Pin
from casstore.store import Store

_SECTION: Final = "Sessions"

_PIN_FIELDS: Final = {
    "name": "its name",
    "digest": "what it keeps, with all it links to",
    "created_at": "when it was set",
    "expires_at": "until when, null: for good",
    "note": "the note given with it",
}
_NAMES: Final = Part("those listed, or the one that was set or removed", _PIN_FIELDS)
_CHANGED: Final = "set, removed or null: only listed"


def _document(pin: Pin) -> dict[str, Any]:
    return {
        "name": pin.name,
        "digest": pin.digest.hex(),
        "created_at": moment(pin.created_at_ms),
        "expires_at": moment_or_none(pin.expires_at_ms),
        "note": pin.note,
    }


def _kept(store: Store, place: str) -> Digest:
    digest = naming.resolve(store, place).digest
    if digest is None:
        raise InvalidInputError(f"{place!r}: nothing was committed yet, so nothing can be kept")
    return digest


def _remove(app: App, given: str, command_name: str) -> Pin:
    with app.open(write=True) as store:
        pin = store.find_pin(given)
        if pin is None or not store.unpin(given):
            raise NameNotFoundError(given, f"casstore {command_name}")
        return pin


def _keep(
    app: App,
    kind: str,
    given: str | None,
    place: str | None,
    delete: str | None,
    *,
    listed: Callable[[Store], Iterable[Pin]],
    keep: Callable[[Store, str, Digest], Pin],
) -> None:
    """Let a name keep a place, take one away, or list them: what tags and pins have in common."""
    if delete is not None:
        if given is not None:
            raise click.UsageError(f"either set a {kind} or delete one")
        _show(app, [_remove(app, delete, kind)], "removed", f"{kind}s")
    elif place is None:
        with app.open() as store:
            found = list(listed(store))
        _show(app, found, None, f"{kind}s")
    else:
        assert given is not None, "a place is the second of two arguments"
        with app.open(write=True) as store:
            made = keep(store, given, _kept(store, place))
        _show(app, [made], "set", f"{kind}s")


def _show(app: App, pins: list[Pin], changed: str | None, key: str) -> None:
    def render(to: Printer) -> None:
        if changed == "removed":
            to.line("removed ", name(pins[0].name), "  ", dim(pins[0].digest.hex()))
            return
        if not pins:
            app.remark("none yet")
            return
        columns = [
            Column("name"), Column("keeps"), Column("set"), Column("until"),
            Column("note", gives=True),
        ]  # fmt: skip
        rows: list[Cells] = [
            [
                name(clip_name(pin.name)),
                pin.digest.hex()[:16],
                clock(pin.created_at_ms),
                "for good" if pin.expires_at_ms is None else clock(pin.expires_at_ms),
                clip(pin.note or "", 60),
            ]
            for pin in pins
        ]
        to.table(columns, rows)

    app.answer({key: [_document(pin) for pin in pins], "changed": changed}, render)


@command(
    _SECTION,
    Shape("tag", {"tags": _NAMES, "changed": _CHANGED}),
    "casstore tag release agent@41 --note 'what we shipped'",
    "casstore tag --delete release",
    "casstore tag",
)
@click.argument("tag_", metavar="[TAG]", required=False)
@click.argument("place", required=False, shell_complete=complete_name)
@click.option("--move", is_flag=True, help="Take the name over if it keeps something else.")
@click.option("--note", help="What it is for.")
@click.option("--delete", "-d", metavar="TAG", help="Take this tag away.")
def tag(
    app: App, tag_: str | None, place: str | None, move: bool, note: str | None, delete: str | None
) -> None:
    """Let TAG keep PLACE for good, take a tag away, or list tags and pins.

    PLACE is anything that can be named: a session's checkpoint, a revision, a node, a value,
    a blob. With TAG alone, those that begin so are listed.
    """
    _keep(
        app,
        "tag",
        tag_,
        place,
        delete,
        listed=lambda store: store.pins(prefix=tag_ or ""),
        keep=lambda store, given, digest: store.tag(given, digest, move=move, note=note),
    )


@command(
    _SECTION,
    Shape("pin", {"pins": _NAMES, "changed": _CHANGED}),
    "casstore pin resume/worker-1 agent --for 2h",
    "casstore pin --delete resume/worker-1",
    "casstore pin --expired",
)
@click.argument("pin_", metavar="[PIN]", required=False)
@click.argument("place", required=False, shell_complete=complete_name)
@click.option(
    "--for", "for_ms", type=DURATION, help="How long: 30m, 2h, 7d. Until removed if not given."
)
@click.option("--note", help="What it is for.")
@click.option("--delete", "-d", metavar="PIN", help="Take this pin away.")
@click.option("--expired", is_flag=True, help="List also those whose time is up.")
def pin(
    app: App,
    pin_: str | None,
    place: str | None,
    for_ms: int | None,
    note: str | None,
    delete: str | None,
    expired: bool,
) -> None:
    """Let PIN keep PLACE for a time, take a pin away, or list pins and tags.

    Pinning again restarts its time. The name of a tag is refused.
    """
    _keep(
        app,
        "pin",
        pin_,
        place,
        delete,
        listed=lambda store: store.pins(prefix=pin_ or "", expired=expired),
        keep=lambda store, given, digest: store.pin(given, digest, ttl_ms=for_ms, note=note),
    )
