"""The node table finds nodes and proves nothing: what it says wrongly is noticed, on every way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest

from casstore.engine.lmdb.engine import LmdbEngine
from casstore.engine.memory import MemoryEngine
from casstore.engine.protocol import DeleteRow, PutRow, Write
from casstore.errors import CorruptionError
from casstore.session import keys
from casstore.session.data import UNFENCED, Commit, Node, NodeDraft
from casstore.session.lineage import PAGE_NODES, Page, decode_page, encode_page
from casstore.session.session import Session
from casstore.store import Store

COUNT = PAGE_NODES + 10
WANTED = 5


@pytest.fixture(params=["memory", "lmdb"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Session]:
    engine: Any = MemoryEngine()
    if request.param == "lmdb":
        engine = LmdbEngine(str(tmp_path / "s"), durability="relaxed")
    with Store(engine) as store:
        session = store.session("s")
        nodes = [NodeDraft(f"n{at}", {"at": at}) for at in range(COUNT)]
        session.commit(Commit(append=nodes, lease=UNFENCED))
        yield session


def asked(session: Session, at: int) -> Node | None:
    """A node, asked for where the head is known, and then where nothing is."""
    known = session.node(f"n{at}")
    unknown = Store(session._runtime.engine).session("s")
    assert unknown.node(f"n{at}") == known == session.node(f"n{at}", at=1)
    return known


def lineage_of(session: Session) -> bytes:
    return session._runtime.get("s").head.lineage


def page_key(session: Session) -> bytes:
    return keys.lineage_page(lineage_of(session), WANTED // PAGE_NODES)


def place_key(session: Session) -> bytes:
    return keys.lineage_node(lineage_of(session), f"n{WANTED}".encode())


def page_of(session: Session) -> Page:
    rows = session._runtime.engine.scan_rows("nodes", start=page_key(session), limit=1)
    return decode_page(rows[0].value)


def swapped(page: Page) -> Page:
    digests = [page.digest(page.first + at) for at in range(len(page.distances))]
    digests[WANTED], digests[WANTED + 1] = digests[WANTED + 1], digests[WANTED]
    return page._replace(digests=b"".join(digests))


def test_a_node_is_found_by_its_id(session: Session) -> None:
    for at in (0, WANTED, PAGE_NODES - 1, PAGE_NODES, COUNT - 1):
        found = asked(session, at)
        assert found == list(session.nodes())[at]
        assert found is not None
        assert (found.id, found.seq, found.payload) == (f"n{at}", at, {"at": at})
    assert session.node("n-1") is None


@pytest.mark.parametrize("place", [b"\6", b"", b"\0\5", b"\xff" * 9])
def test_an_id_that_leads_astray_is_damage(session: Session, place: bytes) -> None:
    row = PutRow("nodes", place_key(session), place)
    session._runtime.engine.write(Write(rows=[row]))
    for ask in ways(session):
        with pytest.raises(CorruptionError):
            ask()


@pytest.mark.parametrize("place", [bytes((COUNT,)), b"\xff" * 8])
def test_an_id_that_leads_behind_the_last_node_gives_none(session: Session, place: bytes) -> None:
    row = PutRow("nodes", place_key(session), place)
    session._runtime.engine.write(Write(rows=[row]))
    known, *others = ways(session)
    with pytest.raises(CorruptionError):
        known()
    # To a revision, it is a node that came later.
    assert [ask() for ask in others] == [None, None]


PAGES: dict[str, Callable[[Page], bytes]] = {
    "two digests in each other's place": lambda page: encode_page(swapped(page)),
    "a page that begins later": lambda page: encode_page(page._replace(first=page.first + 1)),
    "a page that begins behind": lambda page: encode_page(page._replace(first=page.first + 99)),
    "digests of nothing": lambda page: encode_page(page._replace(digests=bytes(len(page.digests)))),
    "a digest too few": lambda page: encode_page(page._replace(digests=page.digests[32:])),
    "no nodes": lambda page: encode_page(Page(page.first, [], b"")),
    "no bytes": lambda page: b"",
    "no page": lambda page: msgpack.packb(1),
    "a field too many": lambda page: msgpack.packb([*page, None]),
    "half a page": lambda page: encode_page(page)[:100],
    "digests as a text": lambda page: msgpack.packb([page.first, page.distances, "x" * 1024]),
    "a first that is none": lambda page: msgpack.packb(["0", page.distances, page.digests]),
    "distances that are none": lambda page: msgpack.packb(
        [page.first, ["1"] * len(page.distances), page.digests]
    ),
    "a link": lambda page: msgpack.packb(
        [page.first, page.distances, msgpack.ExtType(1, bytes(33))]
    ),
}


@pytest.mark.parametrize("why", list(PAGES))
def test_a_page_that_is_wrong_is_damage(session: Session, why: str) -> None:
    row = PutRow("nodes", page_key(session), PAGES[why](page_of(session)))
    session._runtime.engine.write(Write(rows=[row]))
    for ask in ways(session):
        with pytest.raises(CorruptionError):
            ask()


def test_a_page_that_is_missing_is_damage(session: Session) -> None:
    session._runtime.engine.write(Write(rows=[DeleteRow("nodes", page_key(session))]))
    for ask in ways(session):
        with pytest.raises(CorruptionError):
            ask()


def ways(session: Session) -> list[Callable[[], object]]:
    """How a node may be asked for by its id: the head known, unknown, and an earlier revision."""
    unknown = Store(session._runtime.engine).session("s")
    name = f"n{WANTED}"
    return [
        lambda: session.node(name),
        lambda: unknown.node(name),
        lambda: session.node(name, at=1),
    ]


@pytest.mark.parametrize("why", list(PAGES))
def test_a_path_over_a_page_that_is_wrong_is_damage(session: Session, why: str) -> None:
    row = PutRow("nodes", page_key(session), PAGES[why](page_of(session)))
    session._runtime.engine.write(Write(rows=[row]))
    with pytest.raises(CorruptionError):
        list(session.nodes())
