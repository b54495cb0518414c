"""The changes that the viewer makes with ``--write``: fork, label, tag, rewind, adopt, delete.

Each action is one call of the store's public interface. Before it, the page asks the user in a
dialog that says what will happen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from casstore.errors import InvalidInputError
from casstore.store import Store
from casstore.ui.pages import href


class Done(NamedTuple):
    """The result of an action, and the page to show next."""

    text: str
    address: str


def act(store: Store, action: str, given: Mapping[str, str]) -> Done:
    """Carry out an action; InvalidInputError if there is no such action, or a field is missing."""
    known = _ACTIONS.get(action)
    if known is None:
        raise InvalidInputError(f"unknown action {action!r}; known are {', '.join(_ACTIONS)}")
    return known(store, given)


def _field(given: Mapping[str, str], name: str) -> str:
    value = given.get(name, "")
    if not value:
        raise InvalidInputError(f"the field {name!r} is empty; fill it in")
    return value


def _revision(given: Mapping[str, str]) -> int | None:
    text = given.get("at", "")
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise InvalidInputError(f"a revision must be a number, got {text!r:.40}")
    return int(text)


def _fork(store: Store, given: Mapping[str, str]) -> Done:
    source, target = _field(given, "session"), _field(given, "target")
    node = given.get("node") or None
    store.fork(source, target, at=_revision(given), node=node)
    return Done(f"Forked {source} as {target}.", href("/session", id=target))


def _label(store: Store, given: Mapping[str, str]) -> Done:
    session, name = _field(given, "session"), _field(given, "name")
    entry = store.session(session).label(name, _revision(given))
    where = href("/session", id=session, at=_revision(given))
    return Done(f"Revision {entry.revision} has the label {name}.", where)


def _unlabel(store: Store, given: Mapping[str, str]) -> Done:
    session, name = _field(given, "session"), _field(given, "name")
    where = href("/session", id=session, at=_revision(given))
    store.session(session).unlabel(name)
    return Done(f"Removed the label {name}.", where)


def _tag(store: Store, given: Mapping[str, str]) -> Done:
    session, name = _field(given, "session"), _field(given, "name")
    entry = store.session(session).entry(_revision(given))
    store.tag(name, entry.manifest, note=given.get("note") or None)
    where = href("/session", id=session, at=_revision(given))
    return Done(f"The tag {name} keeps revision {entry.revision}.", where)


def _rewind(store: Store, given: Mapping[str, str]) -> Done:
    session = _field(given, "session")
    to = _revision(given)
    if to is None:
        raise InvalidInputError("the field 'at' is empty; it must name the revision to rewind to")
    result = store.session(session).rewind(to, expected=_expected(given))
    where = href("/session", id=session)
    return Done(f"Revision {result.revision} is like revision {to}.", where)


def _adopt(store: Store, given: Mapping[str, str]) -> Done:
    session, other = _field(given, "session"), _field(given, "other")
    result = store.session(session).adopt(other, expected=_expected(given))
    where = href("/session", id=session)
    return Done(f"Revision {result.revision} is the head of {other}.", where)


def _expected(given: Mapping[str, str]) -> int | None:
    """The head revision that the page showed: if a newer one exists, the action is refused."""
    return _revision({"at": given.get("expected", "")})


def _delete(store: Store, given: Mapping[str, str]) -> Done:
    session = _field(given, "session")
    if given.get("confirm") != session:
        raise InvalidInputError(f"the id that you typed is not {session!r}; nothing was deleted")
    if not store.delete_session(session):
        raise InvalidInputError(f"session {session!r} was deleted already")
    return Done(f"Deleted {session}.", "/")


_ACTIONS: Final[dict[str, Callable[[Store, Mapping[str, str]], Done]]] = {
    "fork": _fork,
    "label": _label,
    "unlabel": _unlabel,
    "tag": _tag,
    "rewind": _rewind,
    "adopt": _adopt,
    "delete": _delete,
}
NAMES: Final[tuple[str, ...]] = tuple(_ACTIONS)
