#!/usr/bin/env python3
"""Make the pictures of the viewer in docs/img, with the Chromium of this machine.

tools/screenshots.py            all of them
tools/screenshots.py session    those whose names begin so
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from playwright.sync_api import Browser, sync_playwright  # noqa: E402

import viewer_store  # noqa: E402

TARGET = ROOT / "docs" / "img"
WIDE = (1280, 800)
NARROW = (420, 800)


class Shot(NamedTuple):
    """A picture: a page, a window, and what to click before."""

    name: str
    path: str
    dark: bool = False
    window: tuple[int, int] = WIDE
    click: str = ""
    write: bool = False


SHOTS = (
    Shot("viewer-overview", "/"),
    Shot("viewer-tree", "/?order=tree&q=strict"),
    Shot("viewer-session", "/session?id=fix-parser&at=10"),
    Shot("viewer-session-dark", "/session?id=fix-parser", dark=True),
    Shot("viewer-node", "/node?session=fix-parser&id=a2.3"),
    Shot("viewer-compare", "/compare?a=fix-parser@6&b=strict-mode"),
    Shot("viewer-space", "/space"),
    Shot("viewer-thread", "/record?system=lg&id=trip-to-rome"),
    Shot("viewer-dialog", "/session?id=fix-parser&at=6", click="Rewind…", write=True),
    Shot("viewer-narrow", "/session?id=fix-parser", window=NARROW),
)


def take(browser: Browser, address: str, shot: Shot) -> None:
    """Make one picture."""
    width, height = shot.window
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if shot.dark else "light",
        device_scale_factor=1,
    )
    page = context.new_page()
    base = address.partition("/?")[0]
    page.goto(address)
    page.wait_for_url(f"{base}/")
    page.goto(base + shot.path)
    page.wait_for_selector("html[data-ready]")
    page.wait_for_timeout(900)
    if shot.click:
        page.get_by_role("button", name=shot.click).click()
    page.screenshot(path=TARGET / f"{shot.name}.png")
    context.close()


@contextmanager
def served(directory: str, *, write: bool) -> Iterator[str]:
    """A viewer of the example, as a process of its own; gives its address."""
    command = [sys.executable, "-m", "casstore", "ui", "my-store", "--no-browser", "--json"]
    server = subprocess.Popen(
        [*command, "--port", "0", *(["--write"] if write else [])],
        cwd=directory,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert server.stdout is not None
    told = ""
    while not told.rstrip().endswith("}"):
        told += server.stdout.readline()
    try:
        yield json.loads(told)["address"]
    finally:
        server.terminate()
        server.communicate(timeout=30)


def main() -> None:
    """Serve an example, and make the pictures that are asked for."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("screenshots need a Chromium: apt-get install chromium")
    begins = sys.argv[1] if len(sys.argv) > 1 else ""
    wanted = [shot for shot in SHOTS if shot.name.removeprefix("viewer-").startswith(begins)]
    TARGET.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as directory,
        sync_playwright() as playwright,
    ):
        viewer_store.build(Path(directory) / "my-store", hostile=False)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for write in (False, True):
            with served(directory, write=write) as address:
                for shot in wanted:
                    if shot.write is write:
                        take(browser, address, shot)
                        print(TARGET / f"{shot.name}.png")
        browser.close()


if __name__ == "__main__":
    main()
