"""``tag`` and ``pin`` name objects, so that gc keeps them: a tag for good, a pin for a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import click

from casstore.cli import naming
from casstore.cli.command import App, command
from casstore.cli.fields import Field, Fields, document, nested
from casstore.cli.naming import NameNotFoundError, complete_name
from casstore.cli.output import Printer, dim, name
from casstore.cli.quantities import DURATION
from casstore.format.digest import Digest
from casstore.session.data import Pin
from casstore.store import Store

_PIN_FIELDS: Final[Fields] = {
    "name": Field("its name", "name"),
    "digest": Field("the object that it keeps, with all it links to", "keeps"),
    "created_at": Field("when it was set", "set"),
    "expires_at": Field("when it expires, null: never", "expires"),
    "note": Field("the note given with it", "note", gives=True),
    "session": "the session whose erasure removes it, null: none",
}
_NAMES: Final = nested("the names listed, or the one that was set or removed", _PIN_FIELDS)
_CHANGED: Final = "set, removed or null: only listed"


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
    """Set, delete or list names: what tags and pins have in common."""
    if delete is not None and given is not None:
        raise click.UsageError(f"either set a {kind} or delete one")
    changed: str | None = None
    with app.open(write=delete is not None or place is not None) as store:
        if delete is not None:
            pin = store.find_pin(delete)
            if pin is None or not store.unpin(delete):
                raise NameNotFoundError(delete, f"casstore {kind}")
            pins, changed = [pin], "removed"
        elif place is None:
            pins = list(listed(store))
        else:
            assert given is not None, "a place is the second of two arguments"
            digest = naming.resolve(store, place).require_digest()
            pins, changed = [keep(store, given, digest)], "set"

    def render(to: Printer) -> None:
        if changed == "removed":
            to.line("removed ", name(pins[0].name), "  ", dim(pins[0].digest.hex()))
        else:
            rows = [document(_PIN_FIELDS, pin) for pin in pins]
            app.rows(to, _PIN_FIELDS, rows, "no tags or pins")

    app.answer({f"{kind}s": pins, "changed": changed}, render)


@command(
    {"tags": _NAMES, "changed": _CHANGED},
    "casstore tag release agent@41 --note 'what we shipped'",
    "casstore tag --delete release",
    "casstore tag",
)
@click.argument("tag_", metavar="[TAG]", required=False)
@click.argument("place", required=False, shell_complete=complete_name)
@click.option("--move", is_flag=True, help="Move the tag if it keeps another object.")
@click.option("--note", help="What the tag is for.")
@click.option("--delete", "-d", metavar="TAG", help="Delete this tag.")
def tag(
    app: App, tag_: str | None, place: str | None, move: bool, note: str | None, delete: str | None
) -> None:
    """Keep PLACE under the name TAG, or list tags and pins.

    PLACE is anything that has a name: a session's checkpoint, a revision, a node, a value, a
    blob. With TAG alone, the names that begin with it are listed.
    """
    _keep(
        app, "tag", tag_, place, delete,
        listed=lambda store: store.pins(prefix=tag_ or ""),
        keep=lambda store, given, digest: store.tag(given, digest, move=move, note=note),
    )  # fmt: skip


@command(
    {"pins": _NAMES, "changed": _CHANGED},
    "casstore pin resume/worker-1 agent --for 2h",
    "casstore pin --delete resume/worker-1",
    "casstore pin --expired",
)
@click.argument("pin_", metavar="[PIN]", required=False)
@click.argument("place", required=False, shell_complete=complete_name)
@click.option(
    "--for", "for_ms", type=DURATION, help="How long: 30m, 2h, 7d. Not given: until deleted."
)
@click.option("--note", help="What the pin is for.")
@click.option("--delete", "-d", metavar="PIN", help="Delete this pin.")
@click.option("--expired", is_flag=True, help="List expired pins as well.")
def pin(
    app: App,
    pin_: str | None,
    place: str | None,
    for_ms: int | None,
    note: str | None,
    delete: str | None,
    expired: bool,
) -> None:
    """Keep PLACE for a time, or list pins and tags.

    Pinning again restarts the time. The name of a tag is refused.
    """
    _keep(
        app, "pin", pin_, place, delete,
        listed=lambda store: store.pins(prefix=pin_ or "", expired=expired),
        keep=lambda store, given, digest: store.pin(given, digest, ttl_ms=for_ms, note=note),
    )  # fmt: skip
