"""The changes that the viewer makes with ``--write``: fork, label, tag, rewind, adopt, delete.

Each action is one call of the store's public interface. Before it, the page asks the user in a
dialog that says what will happen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from casstore.errors import InvalidInputError
from casstore.store import Store
from casstore.ui.pages import href

Given = Mapping[str, str]


def act(store: Store, action: str, given: Given) -> str:
    """Carry out an action; the address of the page to show next.

    InvalidInputError if there is no such action, or a field is missing.
    """
    known = ACTIONS.get(action)
    if known is None:
        raise InvalidInputError(f"unknown action {action!r}; known are {', '.join(ACTIONS)}")
    return known(store, given)


def parse_number(text: str) -> int | None:
    """The number that a text is; None if it is not a number of at most 18 digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def _field(given: Given, name: str) -> str:
    value = given.get(name, "")
    if not value:
        raise InvalidInputError(f"the field {name!r} is empty; fill it in")
    return value


def _revision(given: Given, name: str = "at") -> int | None:
    text = given.get(name, "")
    if not text:
        return None
    number = parse_number(text)
    if number is None:
        raise InvalidInputError(f"a revision must be a number, got {text!r:.40}")
    return number


def _expected(given: Given) -> int | None:
    """The head revision that the page showed: if a newer one exists, the action is refused."""
    return _revision(given, "expected")


def _fork(store: Store, given: Given) -> str:
    target = _field(given, "target")
    node = given.get("node") or None
    store.fork(_field(given, "session"), target, at=_revision(given), node=node)
    return href("/session", id=target)


def _label(store: Store, given: Given) -> str:
    session, at = _field(given, "session"), _revision(given)
    store.session(session).label(_field(given, "name"), at)
    return href("/session", id=session, at=at)


def _unlabel(store: Store, given: Given) -> str:
    session, at = _field(given, "session"), _revision(given)
    store.session(session).unlabel(_field(given, "name"))
    return href("/session", id=session, at=at)


def _tag(store: Store, given: Given) -> str:
    session, at, name = _field(given, "session"), _revision(given), _field(given, "name")
    entry = store.session(session).entry(at)
    store.tag(name, entry.manifest, note=given.get("note") or None)
    return href("/session", id=session, at=at)


def _rewind(store: Store, given: Given) -> str:
    session, to = _field(given, "session"), _revision(given)
    if to is None:
        raise InvalidInputError("the field 'at' is empty; it must name the revision to rewind to")
    store.session(session).rewind(to, expected=_expected(given))
    return href("/session", id=session)


def _adopt(store: Store, given: Given) -> str:
    session = _field(given, "session")
    store.session(session).adopt(_field(given, "other"), expected=_expected(given))
    return href("/session", id=session)


def _delete(store: Store, given: Given) -> str:
    session = _field(given, "session")
    if given.get("confirm") != session:
        raise InvalidInputError(f"the id that you typed is not {session!r}; nothing was deleted")
    if not store.delete_session(session):
        raise InvalidInputError(f"session {session!r} was deleted already")
    return "/"


ACTIONS: Final[dict[str, Callable[[Store, Given], str]]] = {
    "fork": _fork,
    "label": _label,
    "unlabel": _unlabel,
    "tag": _tag,
    "rewind": _rewind,
    "adopt": _adopt,
    "delete": _delete,
}
