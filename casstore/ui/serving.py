"""Runs the viewer: the socket, the server and the address to open."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from typing import Final

import uvicorn

from casstore.errors import CasstoreError, InvalidInputError, StorageError
from casstore.store import Store
from casstore.ui.security import Keys
from casstore.ui.server import Viewer, application
from casstore.ui.views.catalogue import contents

LOOPBACK: Final = "127.0.0.1"
#: The default port. If another program listens there, a free one is taken.
USUAL_PORT: Final = 8642


class Serving:
    """A viewer that listens, and serves when ``run`` is called."""

    def __init__(
        self,
        store: Store,
        place: str,
        *,
        host: str = LOOPBACK,
        port: int | None = None,
        write: bool = False,
    ) -> None:
        self._socket = _listen(host, port)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self.keys = Keys(self.port)
        viewer = Viewer(store, place, write=write)
        self._viewed = viewer.viewed
        app = application(viewer, self.keys, _hosts(host, self.port))
        self._changes = app.changes
        self._server = uvicorn.Server(
            uvicorn.Config(
                app.guard,
                proxy_headers=False,
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=False,
                ws="none",
                lifespan="on",
                timeout_graceful_shutdown=1,
                timeout_keep_alive=30,
            )
        )

    @property
    def address(self) -> str:
        """The URL to open in a browser; it has the token."""
        shown = "localhost" if is_any(self.host) else _bracketed(self.host)
        return f"http://{shown}:{self.port}/?token={self.keys.token}"

    def run(self) -> None:
        """Serve until the process is interrupted, which is the usual end, or ``stop`` is called."""
        # The overview imports the SDKs whose entries it lists, which takes seconds: begin now.
        threading.Thread(target=self._warm_up, daemon=True).start()
        try:
            asyncio.run(self._serve())
        except KeyboardInterrupt:
            return
        finally:
            self._socket.close()

    def _warm_up(self) -> None:
        try:
            contents(self._viewed)
        except CasstoreError:
            # The overview will fail with the same error, and show it.
            return

    async def _serve(self) -> None:
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._socket]))
        # The server waits for open streams of events, which last as long as pages: end them first.
        while not serving.done():
            if self._server.should_exit:
                self._changes.close()
                break
            await asyncio.wait([serving], timeout=0.1)
        await serving

    def stop(self) -> None:
        """Let ``run`` return; may be called by another thread."""
        self._server.should_exit = True


def _listen(host: str, port: int | None) -> socket.socket:
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port or 0, type=socket.SOCK_STREAM)[0]
    except OSError as exc:
        raise InvalidInputError(f"host {host!r} is not an address of this machine: {exc}") from exc
    tried = [port] if port is not None else [USUAL_PORT, 0]
    for number in tried:
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((where[0], number, *where[2:]))
            made.listen(64)
            return made
        except OSError as exc:
            made.close()
            if number == tried[-1]:
                raise StorageError(
                    f"cannot listen on {host} port {number}: {exc.strerror}; choose another --port"
                ) from exc
    raise AssertionError("the last attempt returns or raises")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_any(host: str) -> bool:
    """Whether the host stands for all addresses of this machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False


def _hosts(host: str, port: int) -> list[str]:
    """The values of the ``Host`` header that requests may have."""
    names = [host]
    if is_loopback(host):
        names += [LOOPBACK, "localhost", "::1"]
    elif is_any(host):
        # Every name of this machine that a browser on another machine may use.
        names = [LOOPBACK, "localhost", "::1", socket.gethostname(), socket.getfqdn()]
        names += [str(found[4][0]) for found in socket.getaddrinfo(socket.gethostname(), None)]
    found = [f"{_bracketed(name)}:{port}" for name in names]
    # Browsers leave out port 80, the default of http.
    return found + ([_bracketed(name) for name in names] if port == 80 else [])


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
