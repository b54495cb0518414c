"""The hits of a full-text search, and the call that forwards a search to ``casstore.search``.

The core does not import that package: the entry point ``search`` of the group ``casstore.calls``
names it, and the first search loads it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from casstore.errors import InvalidInputError
from casstore.session import entry_points

if TYPE_CHECKING:
    from casstore.store import Store

#: The group of entry points of calls that a store forwards to an extension.
GROUP: Final = "casstore.calls"


class Hit(NamedTuple):
    """A text that a search found, and where it can be read: in a session or a record system.

    >>> [hit] = store.search("which")
    >>> hit.kind, hit.session, hit.revision, hit.node
    ('node', 's', 2, 'ask')
    >>> hit.snippet, hit.matches, hit.sessions
    ('which way?', ((0, 5),), ('s',))
    """

    #: ``node``, ``component``, or the name of a record system, such as ``langgraph``.
    kind: str
    #: The oldest session that has the text; None for an entry of a record system.
    session: str | None
    #: The head of that session, in which the text was found.
    revision: int | None
    #: The id of the node; None for anything else.
    node: str | None
    #: The name of the component; None for anything else.
    component: str | None
    #: The entry of a record system, as commands name it: ``langgraph:t0``; else None.
    entry: str | None
    #: Where in that entry the text is: ``messages/3``.
    position: str | None
    #: The part of the text around the words, on one line.
    snippet: str
    #: Where in ``snippet`` the words are: the index of the first character, and of the one after
    #: the last.
    matches: tuple[tuple[int, int], ...]
    #: Higher is better. Scores of different searches cannot be compared.
    score: float
    #: When the text was committed; None if the record system does not know.
    committed_at_ms: int | None
    #: Sessions that have the text, oldest first; at most ``max_sessions`` of the search.
    sessions: tuple[str, ...]
    #: How many sessions have it; counted up to 1,024.
    session_count: int


Searching = Callable[..., list[Hit]]


def search(store: Store, words: str, **options: Any) -> list[Hit]:
    """Forward a search to the package that is registered for it."""
    return _registered("search")(store, words, **options)


@cache
def _registered(name: str) -> Searching:
    values = entry_points.registered(GROUP, name)
    if len(values) != 1:
        raise InvalidInputError(
            f"{name} needs one package that registers it as {GROUP}, found {len(values)}; "
            "install casstore again"
        )
    return cast(Searching, entry_points.imported(GROUP, values[0]))
