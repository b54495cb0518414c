"""Access control of the viewer: a token once, then a cookie; the right host and origin.

Every request passes ``Guard`` before anything else sees it. A page of another site can make a
browser send requests here, and a name that resolves to this machine can make them look local. So
the ``Host`` must be one that the viewer was started for, the ``Origin`` (of every write, and of
every other request that has one) must be the viewer's own, and the cookie is sent along only by
pages of the viewer itself.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Collection
from http.cookies import CookieError, SimpleCookie
from typing import Final
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: No script but the viewer's own file, nothing from elsewhere, and no page around this one.
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_HEADERS: Final = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Without any referrer, Chromium sends the origin "null" along with forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "interest-cohort=()",
    "cache-control": "no-store",
}
_SAFE_METHODS: Final = frozenset(("GET", "HEAD"))
_MAX_BODY_BYTES: Final = 64 << 10
# The answer to the URL with the token: a page that sets the cookie and then loads "/". A redirect
# would not do: browsers do not send a strict cookie with one that a link of another site began.
_WELCOME: Final = (
    '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=/">'
    '<link rel="icon" href="/static/icon.png"><title>casstore</title>'
    '<p><a href="/">Continue to the store</a></p>'
)


class Keys:
    """The secrets of one run of the viewer."""

    def __init__(self, port: int) -> None:
        #: In the URL that is opened first.
        self.token = secrets.token_urlsafe(32)
        #: The value of the cookie.
        self.session = secrets.token_urlsafe(32)
        #: The name of the cookie. It has the port, because browsers share cookies between ports.
        self.cookie = f"casstore_{port}"


class Guard:
    """Passes on the requests of browsers that have presented the token; refuses all others."""

    def __init__(self, app: ASGIApp, *, keys: Keys, hosts: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._hosts = frozenset([host.lower() for host in hosts])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse a request."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        refused = self._refusal(scope)
        if refused is not None:
            await refused(scope, receive, send_guarded)
            return
        await self._app(scope, _Limited(receive), send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        """The refusal of a request, or None if it is allowed."""
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return PlainTextResponse(
                "this viewer has another host name; open the address that casstore ui has printed",
                421,
            )
        if scope["method"] not in _SAFE_METHODS | {"POST"}:
            return PlainTextResponse("GET and POST only", 405)
        if not self._is_own_origin(headers, scope["method"]):
            return PlainTextResponse("requests that another site began are refused", 403)
        token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if token and scope["path"] == "/" and scope["method"] == "GET":
            if not hmac.compare_digest(token.encode(), self._keys.token.encode()):
                return _locked("This token is of another run; open the address printed last.")
            answer = HTMLResponse(_WELCOME)
            answer.set_cookie(
                self._keys.cookie, self._keys.session, httponly=True, samesite="strict", path="/"
            )
            return answer
        if not self._has_cookie(headers):
            return _locked("This viewer needs the address that casstore ui has printed.")
        return None

    def _is_own_origin(self, headers: Headers, method: str) -> bool:
        origin = headers.get("origin")
        host = headers["host"].lower()
        if origin is not None and origin.lower() != f"http://{host}":
            return False
        if method not in _SAFE_METHODS and origin is None:
            return False
        site = headers.get("sec-fetch-site", "same-origin")
        # Another site may link to a page here, but the browser does not send the cookie with it.
        is_navigation = headers.get("sec-fetch-mode") == "navigate" and method in _SAFE_METHODS
        return site in ("same-origin", "none") or is_navigation

    def _has_cookie(self, headers: Headers) -> bool:
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return False
        found = cookies.get(self._keys.cookie)
        return found is not None and hmac.compare_digest(
            found.value.encode(), self._keys.session.encode()
        )


class _Limited:
    """Receives a body up to a length; of a longer one it reports that the client disconnected."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._left = _MAX_BODY_BYTES

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._left -= len(message.get("body", b""))
            if self._left < 0:
                return {"type": "http.disconnect"}
        return message


def _locked(text: str) -> Response:
    return PlainTextResponse(text + "\n", 403)
