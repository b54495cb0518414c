"""The viewer's server: a URL for each page, and for each part that a page loads later."""

from __future__ import annotations

import bisect
import json
import threading
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route

from casstore.cli import naming
from casstore.cli.text import json_pieces
from casstore.errors import (
    CasstoreError,
    ConflictError,
    InvalidInputError,
    NotFoundError,
    PathStep,
    SessionDeletedError,
)
from casstore.format.digest import Digest
from casstore.store import Store, shown_place
from casstore.ui import actions
from casstore.ui.live import Changes
from casstore.ui.pages import STATIC, environment, href
from casstore.ui.security import Guard, Keys
from casstore.ui.views import (
    catalogue,
    comparing,
    records,
    search,
    space,
    things,
    timeline,
)
from casstore.ui.views import session as sessions
from casstore.ui.views.lanes import lanes
from casstore.ui.views.space import Health
from casstore.ui.views.viewed import Viewed, ViewedPlace

_ASSETS: Final = {
    "style.css": "text/css",
    "viewer.js": "text/javascript",
    "icon.png": "image/png",
}
_STATUS: Final = (
    (SessionDeletedError, 410, "Deleted"),
    (NotFoundError, 404, "Not found"),
    (InvalidInputError, 400, "Invalid input"),
    (ConflictError, 409, "Conflict"),
)

Given = Mapping[str, str]
Page = Callable[["Viewer", Given], Response]


class Viewer:
    """The pages of one store."""

    def __init__(self, store: Store, place: str, *, write: bool = False) -> None:
        self.store = store
        self.place = shown_place(place)
        self.write = write
        self.viewed = Viewed(store)
        self._templates = environment()
        self._health: Health | None = None
        self._checking = threading.Lock()

    def render(self, template: str, status: int = 200, **data: Any) -> HTMLResponse:
        """A page, or a part of one."""
        made = self._templates.get_template(template)
        text = made.render(
            place=self.place, write=self.write, now_ms=self.viewed.now_ms(), is_file=False, **data
        )
        # "replace" is a safeguard: ids have no lone surrogates, and those in payloads are escaped.
        return HTMLResponse(text.encode("utf-8", "replace"), status)

    # --- pages ----------------------------------------------------------------------------

    def overview(self, given: Given) -> Response:
        """The overview of the store."""
        found = catalogue.listing(
            self.viewed,
            search=given.get("q", "")[:200],
            kind=given.get("kind", ""),
            order=given.get("order", catalogue.BY_TIME),
            start=_number(given, "start") or 0,
        )
        return self.render(
            "overview.html",
            listing=found,
            version=catalogue.version(self.viewed),
            health=space.health(self.viewed, self._health),
        )

    def charts(self, given: Given) -> Response:
        """Size, sharing and growth, loaded after the overview; also measures the list's sizes."""
        is_current = catalogue.measure_sizes(self.viewed)
        return self.render("charts.html", charts=space.charts(self.viewed), is_current=is_current)

    def session(self, given: Given) -> Response:
        """A session, at its head or at an earlier revision."""
        session = _session_in(given)
        if self.store.session(session).head() is None:
            meta = self.store.session(session).meta()
            waits = sessions.waiting(self.viewed, session)
            return self.render("empty_session.html", meta=meta, waiting=waits)
        place = self._place(given)
        rows = None
        if "parts" not in given:
            start = _number(given, "start")
            if "node" in given:
                start = _around(place, given["node"])
            rows = self._timeline(place, given, start)
        return self.render(
            "session.html",
            about=sessions.summary(self.viewed, place),
            picture=lanes(self.viewed, place),
            timeline=rows,
            state=sessions.state(self.viewed, place),
            waiting=sessions.waiting(self.viewed, session),
            at=_at(given),
            leaf=_leaf(given),
            selected=given.get("node", ""),
        )

    def rows(self, given: Given) -> Response:
        """More rows of a timeline; status 205 if the path does not continue the rows shown."""
        place = self._place(given)
        start = _number(given, "start")
        if start and "last" in given and not _continues(place, start, given["last"]):
            return Response(status_code=205)
        return self.render(
            "rows.html",
            timeline=self._timeline(place, given, start),
            about=sessions.summary(self.viewed, place),
            at=_at(given),
            leaf=_leaf(given),
            selected="",
        )

    def _place(self, given: Given) -> ViewedPlace:
        return self.viewed.place(_session_in(given), _at(given), _leaf(given))

    def _timeline(self, place: ViewedPlace, given: Given, start: int | None) -> timeline.Timeline:
        return timeline.timeline(
            self.viewed, place, before=_number(given, "before"), start=start,
            forks=sessions.fork_points(self.viewed, place),
        )  # fmt: skip

    def state(self, given: Given) -> Response:
        """The entries at a path in the state of a session, or in an object."""
        path, start = _path(given), _number(given, "start") or 0
        whose: dict[str, Any]
        if "digest" in given:
            digest = _digest(given)
            found = things.object_level(self.viewed, digest, path, start)
            whose = {"digest": digest.hex()}
        else:
            session, at = _session_in(given), _at(given)
            manifest = self.viewed.place(session, at).state.manifest
            found = sessions.state_level(self.viewed, manifest, path, start)
            whose = {"id": session, "at": at}
        return self.render("level.html", level=found, whose=whose, path=given.get("path", ""))

    def node(self, given: Given) -> Response:
        """A node of a session by its id."""
        session = _session_in(given, "session")
        digest = things.find_node(self.viewed, session, given.get("id", ""), _number(given, "at"))
        return self._thing(digest, session)

    def object(self, given: Given) -> Response:
        """An object by its digest."""
        return self._thing(_digest(given), given.get("session") or None)

    def _thing(self, digest: bytes, session: str | None) -> Response:
        return self.render("thing.html", thing=things.thing(self.viewed, digest, session))

    def reached(self, given: Given) -> Response:
        """What links to an object, and what keeps it: loaded after the page."""
        return self.render("reached.html", reached=things.reached(self.viewed, _digest(given)))

    def raw(self, given: Given) -> Response:
        """A payload or value as JSON, up to ``RAW_CHARACTERS``."""
        found = things.raw_value(self.viewed, _digest(given), given.get("session") or None)
        return StreamingResponse(
            _cut_off(json_pieces(found, ascii_only=True, indented=True), things.RAW_CHARACTERS),
            media_type="text/plain; charset=utf-8",
        )

    def blob(self, given: Given) -> Response:
        """The bytes of a blob, for the browser to save."""
        digest = _digest(given)
        blob = self.store.open_blob(digest)
        return StreamingResponse(
            _parts(blob),
            media_type="application/octet-stream",
            headers={"content-disposition": f'attachment; filename="{digest.hex()[:12]}.bin"'},
        )

    def image(self, given: Given) -> Response:
        """An image of a blob, or inside a payload."""
        media, data = things.image_bytes(
            self.viewed, _digest(given), _path(given), given.get("session") or None
        )
        # An image that is opened by itself must not run or load anything, either.
        return Response(
            data,
            media_type=media,
            headers={"content-security-policy": "default-src 'none'; sandbox"},
        )

    def record(self, given: Given) -> Response:
        """An entry of a record system."""
        found = records.record(
            self.viewed,
            given.get("system", ""),
            given.get("id", ""),
            part=given.get("part", ""),
            start=_number(given, "start") or 0,
        )
        return self.render("record.html", record=found)

    def compare(self, given: Given) -> Response:
        """Compare two places."""
        old, new = given.get("a", ""), given.get("b", "")
        found, problem = None, ""
        if old and new:
            try:
                found = comparing.compare(self.viewed, old, new)
            except naming.AmbiguousNameError as exc:
                problem = f"{exc}: {', '.join(exc.candidates)}"
            except (NotFoundError, InvalidInputError) as exc:
                problem = str(exc)
        status = 404 if problem else 200
        return self.render(
            "compare.html", status, compared=found, old=old, new=new, problem=problem
        )

    def search(self, given: Given) -> Response:
        """The texts in which the given words occur."""
        return self.render("search.html", answer=search.search(self.viewed, given.get("q", "")))

    def space(self, given: Given) -> Response:
        """What gc and retention would remove."""
        return self.render("space.html", space=space.space(self.viewed))

    def find(self, given: Given) -> Response:
        """Redirect to the page of a name; if there is none, to the overview, filtered by it."""
        name = given.get("name", "").strip()
        if not name:
            return _redirect("/")
        try:
            target = naming.resolve_place(self.store, name)
        except naming.AmbiguousNameError as exc:
            raise InvalidInputError(f"{exc}: {', '.join(exc.candidates)}") from exc
        except NotFoundError:
            return _redirect(href("/", q=name))
        if target.system is not None and target.entry is not None:
            return _redirect(href("/record", system=target.system.name, id=target.entry.id))
        if target.kind in (naming.SESSION, naming.REVISION):
            return _redirect(href("/session", id=target.session, at=target.at))
        if target.kind == naming.NODE:
            return _redirect(
                href("/node", session=target.session, id=target.node, at=target.revision)
            )
        assert target.digest is not None
        return _redirect(href("/object", digest=target.digest.hex()))

    # --- writing --------------------------------------------------------------------------

    def check(self, given: Given) -> Response:
        """Check the store and show the findings on the overview."""
        with self._checking:
            self._health = space.run_check(self.viewed)
        return _redirect("/")

    def act(self, given: Given) -> Response:
        """Carry out one of the ``actions``, if the viewer may write."""
        if not self.write:
            raise NotFoundError("this viewer changes nothing: start it with --write")
        address = actions.act(self.store, given.get("action", ""), given)
        self.viewed.forget()
        return _redirect(address)

    def failed(self, exc: CasstoreError) -> Response:
        """The page about an error."""
        status, title = next(
            ((code, title) for kind, code, title in _STATUS if isinstance(exc, kind)),
            (500, "Error"),
        )
        return self.render("error.html", status, title=title, text=str(exc))


# --- parsing requests -------------------------------------------------------------------------


def _session_in(given: Given, name: str = "id") -> str:
    if not given.get(name):
        raise InvalidInputError(f"the URL names no session: its parameter {name} is missing")
    return given[name]


def _number(given: Given, name: str) -> int | None:
    text = given.get(name, "")
    if not text:
        return None
    number = actions.parse_number(text)
    if number is None:
        raise InvalidInputError(f"{name} must be a number, got {text!r:.40}")
    return number


def _at(given: Given) -> int | str | None:
    text = given.get("at", "")
    number = actions.parse_number(text)
    return text or None if number is None else number


def _leaf(given: Given) -> str | None:
    return given.get("leaf") or None


def _digest(given: Given) -> Digest:
    try:
        return Digest.from_hex(given.get("digest", ""))
    except (ValueError, CasstoreError) as exc:
        got = given.get("digest", "")
        raise InvalidInputError(f"digest must be 64 hexadecimal digits, got {got!r:.80}") from exc


def _path(given: Given) -> list[PathStep]:
    try:
        found = json.loads(given.get("path", "[]"))
    except (ValueError, RecursionError) as exc:
        raise InvalidInputError("path must be a JSON list") from exc
    if type(found) is not list or not all(type(step) in (str, int) for step in found):
        raise InvalidInputError("path must be a JSON list of keys and indexes")
    return found


def _around(place: ViewedPlace, node: str) -> int | None:
    """The first position of a window with a node in it; None if the node is not on the path."""
    [found] = place.nodes.find([node])
    if found is None:
        return None
    at = bisect.bisect_left(place.path, found.position)
    is_there = at < len(place.path) and place.path[at] == found.position
    return max(0, at - timeline.PAGE // 4) if is_there else None


def _continues(place: ViewedPlace, start: int, last: str) -> bool:
    if start > len(place.path):
        return False
    return place.nodes.digests([place.path[start - 1]])[0].hex() == last


def _redirect(address: str) -> Response:
    return RedirectResponse(address, 303)


def _cut_off(pieces: Any, limit: int) -> Any:
    for piece in pieces:
        limit -= len(piece)
        yield piece.encode("utf-8", "replace")
        if limit < 0:
            yield b"\n... cut here\n"
            return


def _parts(blob: Any) -> Any:
    with blob:
        while part := blob.read(1 << 18):
            yield part


# --- the application ----------------------------------------------------------------------------

_PAGES: Final[dict[str, Page]] = {
    "/": Viewer.overview,
    "/charts": Viewer.charts,
    "/session": Viewer.session,
    "/session/rows": Viewer.rows,
    "/state": Viewer.state,
    "/node": Viewer.node,
    "/object": Viewer.object,
    "/object/reached": Viewer.reached,
    "/raw": Viewer.raw,
    "/blob": Viewer.blob,
    "/image": Viewer.image,
    "/record": Viewer.record,
    "/compare": Viewer.compare,
    "/search": Viewer.search,
    "/space": Viewer.space,
    "/find": Viewer.find,
}
_POSTS: Final[dict[str, Page]] = {"/check": Viewer.check, "/act": Viewer.act}


class Application(NamedTuple):
    """The pages behind their guard, and the streams to close before the server ends."""

    guard: Guard
    changes: Changes


def application(viewer: Viewer, keys: Keys, hosts: Collection[str]) -> Application:
    """The viewer's pages, behind the guard."""
    changes = Changes(viewer.viewed)

    def page(function: Page) -> Callable[[Request], Any]:
        async def answer(request: Request) -> Response:
            given = dict(request.query_params)
            if request.method == "POST":
                try:
                    body = await request.body()
                except ClientDisconnect:
                    return PlainTextResponse("the request is too long", 413)
                text = body.decode("utf-8", "replace")
                given.update(parse_qsl(text, keep_blank_values=True, max_num_fields=32))
            try:
                return await run_in_threadpool(function, viewer, given)
            except CasstoreError as exc:
                return await run_in_threadpool(viewer.failed, exc)

        return answer

    async def asset(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in _ASSETS:
            return PlainTextResponse("there is no such file", 404)
        headers = {"cache-control": "no-cache"}
        return FileResponse(STATIC / name, media_type=_ASSETS[name], headers=headers)

    async def events(request: Request) -> Response:
        stream = changes.stream(request.query_params.get("session") or None)
        return StreamingResponse(stream, media_type="text/event-stream")

    @asynccontextmanager
    async def life(app: Starlette) -> AsyncIterator[None]:
        yield
        changes.close()

    routes = [Route(path, page(function)) for path, function in _PAGES.items()]
    routes += [Route(path, page(one), methods=["POST"]) for path, one in _POSTS.items()]
    routes += [Route("/static/{name}", asset), Route("/events", events)]

    async def unknown(request: Request, exc: Exception) -> Response:
        missing = NotFoundError(f"the viewer has no page {request.url.path!r}")
        return await run_in_threadpool(viewer.failed, missing)

    app = Starlette(routes=routes, lifespan=life, exception_handlers={404: unknown})
    return Application(Guard(app, keys=keys, hosts=hosts), changes)
