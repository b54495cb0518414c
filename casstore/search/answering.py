"""Answers a search: matches in the index become hits that can be read in the store now.

The index only says where a text may be. Each hit is proven with the current head rows: a session
that was deleted has none, a node that is not in the head's graph or is hidden there is left out,
and the text itself is read from the store and must contain the words. So an index that is out of
date, damaged or of another store leads to missing hits, and never to wrong ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

from casstore.errors import InvalidInputError
from casstore.objects.node_index import NodeIndex
from casstore.objects.pieces import PieceReader
from casstore.search import contents, lineage
from casstore.search.docs import COMPONENT, NODE
from casstore.search.entries import EntryFinder
from casstore.search.tables import NODES, SHORT, Database, listed
from casstore.search.texts import Term
from casstore.session import keys
from casstore.session.attempts import read_again
from casstore.session.found import Hit
from casstore.session.state import HeadRow, Runtime, decode_head, head_key, manifest_in
from casstore.store import Store

# How many sessions that may have one text are looked up at most.
_MAX_SESSIONS: Final = 1024
# The most ranges of ids in one query: each takes two of the 32,766 values that SQLite allows.
_MAX_SPANS: Final = 15_000
_FIRST_PAGE: Final = 64
_PAGE_GROWTH: Final = 4
_MAX_PAGE: Final = 30_000


class SearchRequest(NamedTuple):
    """The checked arguments of a search."""

    terms: Sequence[Term]
    kinds: Sequence[str] | None
    #: Keys of sessions.
    sessions: Sequence[bytes] | None
    since_ms: int | None
    limit: int
    max_sessions: int


class _Doc(NamedTuple):
    """A row of ``docs``."""

    id: int
    digest: bytes
    at_ms: int | None
    kind: str | None


class _ReachedSession(NamedTuple):
    """A session that has a text now."""

    head: HeadRow
    name: str


class _ProvenHit(NamedTuple):
    """A proven hit without its snippet, and its text: for a node, the digest to read it with."""

    hit: Hit
    text: str
    digest: bytes | None = None


class SearchAnswer:
    """One search."""

    def __init__(self, store: Store, db: Database, request: SearchRequest) -> None:
        self._store = store
        self._runtime: Runtime = store._runtime
        self._reader: PieceReader = self._runtime.reader()
        self._db = db
        self._request = request
        self._entries = EntryFinder(store, db)
        # Head rows as this search has read them, None for sessions that have none.
        self._rows: dict[bytes, tuple[bytes, HeadRow] | None] = {}
        self._indexes: dict[bytes, NodeIndex] = {}
        # The digests of the hits so far: docs of two segments may be of the same node.
        self._seen: set[bytes] = set()

    def hits(self) -> list[Hit]:
        """The hits, best first."""
        # If a session is committed to meanwhile, gc may remove what its old head refers to.
        return read_again(self._attempt)

    def _attempt(self) -> list[Hit]:
        self._rows.clear()
        self._seen.clear()
        request = self._request
        found: list[_ProvenHit] = []
        matches = self._matches()
        while len(found) < request.limit and (page := list(islice(matches, request.limit))):
            sessions = self._sessions([doc for doc, _ in page])
            self._read_rows({key for reaching in sessions for key in reaching})
            for (doc, score), reaching in zip(page, sessions, strict=True):
                one = self._proven(doc, score, reaching)
                if one is not None:
                    self._seen.add(doc.digest)
                    found.append(one)
        found = self._with_texts(found[: request.limit])
        snippets = self._db.snippets(request.terms, [one.text for one in found])
        return [
            one.hit._replace(snippet=snippet.text, matches=snippet.matches)
            for one, snippet in zip(found, snippets, strict=True)
            if snippet is not None
        ]

    def _with_texts(self, found: list[_ProvenHit]) -> list[_ProvenHit]:
        """The hits with the ids and texts of nodes, which are read together."""
        digests = [one.digest for one in found if one.digest is not None]
        nodes = contents.node_texts(self._reader, digests)
        complete: list[_ProvenHit] = []
        for one in found:
            if one.digest is not None:
                node_id, text = next(nodes)
                one = _ProvenHit(one.hit._replace(node=node_id), text)
            complete.append(one)
        return complete

    # --- matches ------------------------------------------------------------------------

    def _matches(self) -> Iterator[tuple[_Doc, float]]:
        """The docs with all terms, best first, read in pages."""
        where, values = self._condition()
        page, skip = max(_FIRST_PAGE, min(_MAX_PAGE, 2 * self._request.limit)), 0
        while True:
            matches = self._db.matches(self._request.terms, where, values, page, skip)
            if not matches:
                return
            docs = {
                row[0]: _Doc(row[0], bytes(row[1]), *row[2:])
                for row in self._db.rows(
                    f"SELECT id, digest, at_ms, kind FROM {{s}}docs "
                    f"WHERE id IN ({listed(len(matches))})",
                    [doc for doc, _ in matches],
                )
            }
            for doc, score in matches:
                # A removed doc has no row, but its words stay in the index until a rebuild.
                if doc in docs:
                    yield docs[doc], score
            if len(matches) < page:
                return
            skip += page
            page = min(_MAX_PAGE, page * _PAGE_GROWTH)

    def _condition(self) -> tuple[str, list[Any]]:
        """The condition on the ids of matches that the request sets, as SQL with its values."""
        request = self._request
        parts: list[str] = []
        values: list[Any] = []
        if request.kinds is not None:
            others = [kind for kind in request.kinds if kind != NODE]
            ways = [f"{{id}} >= {NODES}"] if NODE in request.kinds else []
            if others:
                ways.append(
                    "{id} IN (SELECT id FROM {s}docs WHERE id < 4294967296 "
                    f"AND kind IN ({listed(len(others))}))"
                )
                values += others
            parts.append(f"({' OR '.join(ways)})")
        if request.sessions is not None:
            ways = []
            spans = self._spans(request.sessions)
            if spans:
                # Not a chain of OR: engines limit its length.
                ways.append(
                    f"EXISTS (SELECT 1 FROM (VALUES {', '.join(['(?, ?)'] * len(spans))}) AS v "
                    "WHERE {id} BETWEEN v.column1 AND v.column2)"
                )
                values += [end for span in spans for end in span]
            ways.append(
                "{id} IN (SELECT p.doc FROM {s}parts p JOIN {s}sessions s ON s.state = p.state "
                f"WHERE s.key IN ({listed(len(request.sessions))}))"
            )
            values += request.sessions
            parts.append(f"({' OR '.join(ways)})")
        if request.since_ms is not None:
            # Docs of components have no time: that of the head is checked when a hit is proven.
            parts.append(
                "EXISTS (SELECT 1 FROM {s}docs d WHERE d.id = {id} "
                "AND (d.at_ms IS NULL OR d.at_ms >= ?))"
            )
            values.append(request.since_ms)
        return " AND ".join(parts), values

    def _spans(self, sessions: Sequence[bytes]) -> list[tuple[int, int]]:
        """Ranges of ids: the docs of all nodes of these sessions, shared ones once."""
        longest: dict[int, tuple[int, int]] = {}
        for key in sessions:
            rows = self._db.rows(
                "SELECT t.segment, t.nodes FROM {s}sessions s JOIN {s}states t "
                "ON t.id = s.state WHERE s.key = ?",
                (key,),
            )
            for segment, nodes in rows:
                for low, high in lineage.spans(self._db, segment, nodes):
                    if low not in longest or longest[low][1] < high:
                        longest[low] = low, high
        if len(longest) > _MAX_SPANS:
            raise InvalidInputError(
                f"the {len(sessions)} sessions to search in have {len(longest)} separate runs of "
                f"nodes, more than the {_MAX_SPANS} of one search; name fewer sessions"
            )
        return list(longest.values())

    # --- proofs -------------------------------------------------------------------------

    def _proven(self, doc: _Doc, score: float, sessions: Sequence[bytes]) -> _ProvenHit | None:
        """The hit of a match; None if the text cannot be read in the store now."""
        if doc.digest in self._seen:
            return None
        if doc.id >= NODES:
            return self._prove_node(doc, score, sessions)
        if doc.kind == COMPONENT:
            return self._prove_component(doc, score, sessions)
        return self._prove_entry(doc, score)

    def _prove_entry(self, doc: _Doc, score: float) -> _ProvenHit | None:
        if self._request.sessions is not None:
            return None
        found = self._entries.prove(doc.id, doc.digest, score)
        if found is None or not self._is_recent(found[0].committed_at_ms):
            return None
        return _ProvenHit(*found)

    def _is_recent(self, time_ms: int | None) -> bool:
        since_ms = self._request.since_ms
        return since_ms is None or (time_ms is not None and time_ms >= since_ms)

    def _prove_node(self, doc: _Doc, score: float, sessions: Sequence[bytes]) -> _ProvenHit | None:
        _, position = lineage.doc_place(doc.id)
        digest: bytes | None = None
        reached: list[_ReachedSession] = []
        count = 0
        for key, row, head in self._present(sessions):
            is_listed = len(reached) < self._request.max_sessions
            name = self._node_at(key, row, position) if is_listed else digest
            if name is None or name[:SHORT] != doc.digest or name in self._runtime.hidden(head):
                continue
            digest = name
            count += 1
            if is_listed:
                reached.append(_ReachedSession(head, keys.name_of(key, head.long_id)))
        if digest is None:
            return None
        hit = self._hit(NODE, score, reached, count, doc.at_ms)
        return _ProvenHit(hit, "", digest)

    def _node_at(self, key: bytes, row: bytes, position: int) -> bytes | None:
        """The digest of the node at a position of a head's graph; None if it is shorter."""
        manifest = manifest_in(row)
        index = self._indexes.get(manifest)
        if index is None:
            index = self._runtime.index(self._runtime.state_of(key, row).manifest)
            self._indexes[manifest] = index
        return index.place(position).digest if position < index.count else None

    def _prove_component(
        self, doc: _Doc, score: float, sessions: Sequence[bytes]
    ) -> _ProvenHit | None:
        reached: list[_ReachedSession] = []
        component = text = None
        count = 0
        # Whether a manifest has the component: forks share manifests, so each is read once.
        proven: dict[bytes, bool] = {}
        for key, row, head in self._present(sessions):
            is_listed = len(reached) < self._request.max_sessions
            manifest = manifest_in(row)
            if is_listed and manifest not in proven:
                proven[manifest] = False
                found = self._runtime.state_of(key, row).manifest
                for name, digest, encoded in contents.components(found):
                    if digest == doc.digest:
                        proven[manifest] = True
                        if text is None:
                            component = name
                            text = contents.component_text(self._reader, encoded)
                        break
            if proven.get(manifest, not is_listed) and self._is_recent(head.committed_at_ms):
                count += 1
                if is_listed:
                    reached.append(_ReachedSession(head, keys.name_of(key, head.long_id)))
        if not reached or text is None:
            return None
        at_ms = reached[0].head.committed_at_ms
        hit = self._hit(COMPONENT, score, reached, count, at_ms)
        return _ProvenHit(hit._replace(component=component), text)

    def _hit(
        self, kind: str, score: float, reached: list[_ReachedSession], count: int, at_ms: int | None
    ) -> Hit:
        """A hit in sessions, still without its node or component, and its snippet."""
        oldest = reached[0]
        names = tuple([one.name for one in reached])
        place = oldest.name, oldest.head.revision
        return Hit(kind, *place, None, None, None, None, "", (), score, at_ms, names, count)

    # --- sessions -----------------------------------------------------------------------

    def _sessions(self, docs: Sequence[_Doc]) -> list[list[bytes]]:
        """For each of these docs, the keys of the sessions that may have its text."""
        places = [lineage.doc_place(doc.id) for doc in docs if doc.id >= NODES]
        reached = self._node_sessions(places) if places else {}
        return [
            reached.get(lineage.doc_place(doc.id), [])
            if doc.id >= NODES
            else self._component_sessions(doc.id)
            if doc.kind == COMPONENT
            else []
            for doc in docs
        ]

    def _node_sessions(
        self, places: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], list[bytes]]:
        """The sessions that reach nodes, as far as the index knows, by segment and position."""
        found: dict[tuple[int, int], list[bytes]] = {}
        # One query for the sessions whose graphs end in these segments. Graphs that end in a
        # later segment are rarer, and take one query for each place, below.
        rows = self._db.rows(
            "SELECT v.column1, v.column2, s.key "
            f"FROM (VALUES {', '.join(['(?, ?)'] * len(places))}) AS v "
            "JOIN {s}states t ON t.segment = v.column1 AND t.nodes > v.column2 "
            f"JOIN {{s}}sessions s ON s.state = t.id WHERE 1 = 1{self._only()}",
            [*[number for place in places for number in place], *self._keys()],
        )
        for segment, position, key in rows:
            known = found.setdefault((segment, position), [])
            if len(known) < _MAX_SESSIONS:
                known.append(bytes(key))
        segments = {segment for segment, _ in places}
        parents = self._db.rows(
            f"SELECT DISTINCT parent FROM {{s}}segments WHERE parent IN ({listed(len(segments))})",
            list(segments),
        )
        continued = {row[0] for row in parents}
        for place in places:
            known = found.setdefault(place, [])
            if place[0] in continued and len(known) < _MAX_SESSIONS:
                known += self._later_sessions(*place, _MAX_SESSIONS - len(known))
        return found

    def _later_sessions(self, segment: int, position: int, limit: int) -> list[bytes]:
        """Sessions whose graphs end in a segment that continues this one after ``position``."""
        rows = self._db.rows(
            "WITH RECURSIVE later (segment) AS ("
            "SELECT id FROM {s}segments WHERE parent = ? AND start > ? UNION ALL "
            "SELECT g.id FROM {s}segments g JOIN later l ON g.parent = l.segment) "
            "SELECT s.key FROM later l "
            "JOIN {s}states t ON t.segment = l.segment "
            f"JOIN {{s}}sessions s ON s.state = t.id WHERE 1 = 1{self._only()} LIMIT {limit}",
            (segment, position, *self._keys()),
        )
        return [bytes(row[0]) for row in rows]

    def _component_sessions(self, doc: int) -> list[bytes]:
        rows = self._db.rows(
            "SELECT DISTINCT s.key FROM {s}parts p JOIN {s}states t ON t.id = p.state "
            "JOIN {s}sessions s ON s.state = t.id "
            f"WHERE p.doc = ?{self._only()} LIMIT {_MAX_SESSIONS}",
            (doc, *self._keys()),
        )
        return [bytes(row[0]) for row in rows]

    def _only(self) -> str:
        sessions = self._request.sessions
        return "" if sessions is None else f" AND s.key IN ({listed(len(sessions))})"

    def _keys(self) -> Sequence[bytes]:
        return self._request.sessions or ()

    def _read_rows(self, sessions: set[bytes]) -> None:
        """Read the head rows of sessions, as they are now."""
        unread = sorted(sessions - self._rows.keys())
        if unread:
            rows = self._runtime.engine.get_rows([head_key(key) for key in unread])
            for key, row in zip(unread, rows, strict=True):
                self._rows[key] = None if row is None else (row, decode_head(row))

    def _present(self, sessions: Sequence[bytes]) -> list[tuple[bytes, bytes, HeadRow]]:
        """Those of the sessions that have a head now, oldest first: key, head row, head."""
        present = [(key, *found) for key in sessions if (found := self._rows[key]) is not None]
        return sorted(present, key=_age)


def _age(present: tuple[bytes, bytes, HeadRow]) -> tuple[int, bool, bytes]:
    key, _, head = present
    # Of two sessions of one millisecond, a fork is the younger one.
    return head.created_at_ms, head.origin is not None, key
