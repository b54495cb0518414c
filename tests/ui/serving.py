"""A viewer that runs in a thread of the test, and a client that has been let in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

import casstore
from casstore.ui.serving import Serving


class Running:
    """A viewer that serves."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.base = serving.address.partition("/?")[0]
        self.address = serving.address

    def client(self) -> httpx.Client:
        """A client with the cookie."""
        cookies = httpx.get(self.address, timeout=60).raise_for_status().cookies
        return httpx.Client(base_url=self.base, timeout=60, cookies=cookies)


@contextmanager
def serve(place: Path | str, *, write: bool = False) -> Iterator[Running]:
    """Serve a store, read-only unless ``write``."""
    with casstore.open(place, readonly=not write, create=False) as store:
        serving = Serving(store, str(place), port=0, write=write)
        thread = threading.Thread(target=serving.run)
        thread.start()
        try:
            yield Running(serving)
        finally:
            serving.stop()
            thread.join(30)
            assert not thread.is_alive()
