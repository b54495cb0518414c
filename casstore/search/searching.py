"""The calls of the package: ``search``, ``update`` and ``rebuild``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final, NamedTuple

from casstore.errors import InvalidInputError
from casstore.maintenance.progress import Progress, Step
from casstore.search import entries, opening
from casstore.search.answering import SearchAnswer, SearchRequest
from casstore.search.docs import COMPONENT, NODE
from casstore.search.indexing import Updater
from casstore.search.tables import Database
from casstore.search.texts import parse, require_kinds
from casstore.session import keys
from casstore.session.arguments import check_count, check_flag, check_text, list_of
from casstore.session.found import Hit
from casstore.store import Store, check_store

_MAX_HITS: Final = 10_000
_MAX_NAMED: Final = 1000


def search(
    store: Store,
    words: str,
    *,
    kinds: Sequence[str] | None = None,
    sessions: Sequence[str] | None = None,
    since: int | datetime | None = None,
    limit: int = 20,
    max_sessions: int = 16,
    fresh: bool = True,
) -> list[Hit]:
    """What ``Store.search`` returns: the texts with all words, best first.

    >>> [hit.node for hit in search(store, "which way")]
    ['ask']
    """
    check_store(store)
    terms = parse(words)
    check_count(limit, "limit", least=1, most=_MAX_HITS)
    check_count(max_sessions, "max_sessions", least=1)
    check_flag(fresh, "fresh")
    wanted = None if kinds is None else list_of(kinds, "kinds")
    for kind in wanted or ():
        check_text(kind, "a kind")
    if wanted is not None and not {NODE, COMPONENT}.issuperset(wanted):
        # Not for the two kinds above: finding the record systems of a store loads their code.
        known = {NODE: NODE, COMPONENT: COMPONENT, **entries.kinds(store)}
        require_kinds(wanted, list(known))
        wanted = [known[kind] for kind in wanted]
    named = None if sessions is None else list_of(sessions, "sessions")
    if named is not None and len(named) > _MAX_NAMED:
        raise InvalidInputError(f"sessions must have at most {_MAX_NAMED} ids, got {len(named)}")
    within = None if named is None else [keys.session_key(one) for one in dict.fromkeys(named)]
    if wanted == [] or within == []:
        return []
    request = SearchRequest(terms, wanted, within, _time_ms(since), limit, max_sessions)

    def answer(db: Database) -> list[Hit]:
        if fresh and not db.readonly:
            Updater(store, db).run()
        return SearchAnswer(store, db, request).hits()

    return opening.with_index(store, answer)


def _time_ms(since: int | datetime | None) -> int | None:
    if isinstance(since, datetime):
        return int(since.timestamp() * 1000)
    if since is not None:
        check_count(since, "since")
    return since


class SearchIndexReport(NamedTuple):
    """The state of an index after an update.

    >>> update(store).texts_added
    3
    """

    texts_added: int
    texts: int
    sessions: int
    size_bytes: int


def update(store: Store, *, progress: Progress | None = None) -> SearchIndexReport:
    """Bring the index up to date, so that the next search need not; see ``Store.search``.

    It may be interrupted at any time: the next update or search continues where it stopped. For a
    store that is open read-only, it only reports the state of the index.

    >>> update(store).texts_added, update(store).texts_added
    (3, 0)
    """
    check_store(store)

    def report(added: int) -> None:
        if progress is not None:
            progress(Step("index", added, None, "texts"))

    def work(db: Database) -> SearchIndexReport:
        added = 0 if db.readonly else Updater(store, db, report).run()
        [[texts]] = db.rows("SELECT count(*) FROM {s}docs")
        [[sessions]] = db.rows("SELECT count(*) FROM {s}sessions")
        return SearchIndexReport(added, texts, sessions, db.size_bytes())

    return opening.with_index(store, work)


def rebuild(store: Store, *, progress: Progress | None = None) -> SearchIndexReport:
    """Delete the index and build it from the store.

    >>> rebuild(store).texts
    3
    """
    check_store(store)
    opening.remove(store)
    return update(store, progress=progress)


def remove(store: Store) -> None:
    """Delete the index. The next search builds it again.

    >>> update(store).texts
    3
    >>> remove(store)
    """
    check_store(store)
    opening.remove(store)
