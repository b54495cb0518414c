"""``mcp``: the sessions of a store for agents, over the Model Context Protocol."""

from __future__ import annotations

from typing import Final

import click

from casstore.cli.command import App, command, needs_extra
from casstore.cli.output import Printer, name
from casstore.store import shown_place

_PACKAGES: Final = ("mcp", "mcp_types", "anyio", "pydantic")


@command(
    {
        "store": "the store that is served",
        "write": "true: the tools can change the store",
        "tools": "the tools by name, and what each does",
    },
    "casstore mcp my-store",
    "casstore mcp my-store --write",
    "casstore mcp my-store --tools",
)
@click.argument("store_", metavar="[STORE]", required=False)
@click.option("--write", is_flag=True, help="Let the client fork, label and append.")
@click.option("--tools", is_flag=True, help="Print the tools, and serve nothing.")
def mcp(app: App, store_: str | None, write: bool, tools: bool) -> None:
    """Serve the store to an agent over MCP.

    The Model Context Protocol is spoken on stdin and stdout. A client starts this command and
    ends it by closing stdin. It can list, read and compare
    sessions; with --write also fork, label and append. STORE is a directory or postgresql://…, as
    for --store, and no other store and no file can be reached. Hidden nodes stay hidden. Without
    --write the store is opened read-only. Needs casstore[mcp].
    """
    with needs_extra("the MCP server", "mcp", _PACKAGES):
        from casstore.mcp.server import describe_tools, serve
    place = app.place_of(store_)
    with app.open(write=write, path=place) as store:
        if not tools:
            serve(store, write=write)
            return
        found = describe_tools(store, write=write)

        def render(to: Printer) -> None:
            for tool, does in found.items():
                to.line(name(tool), f"  {does}")

        app.answer({"store": shown_place(place), "write": write, "tools": found}, render)
