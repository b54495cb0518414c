"""``casstore mcp`` as a command; tests/mcp talks to the server itself."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

from tests.cli.running import run


def test_mcp_lists_its_tools(own: str) -> None:
    pytest.importorskip("mcp", reason="needs the extra: pip install '.[dev]'")
    printed = run("mcp", own, "--tools", "--json").json
    assert (printed["store"], printed["write"]) == (own, False)
    assert printed["tools"]["read_state"].startswith("Read the state of a session")
    assert "append_nodes" not in printed["tools"]
    shown = run("mcp", "--tools", "--write", store=own).out
    assert "append_nodes  Append a node for each payload" in shown


def test_mcp_without_the_sdk_says_what_to_install(
    own: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name == "casstore.mcp.server":
            raise ModuleNotFoundError("No module named 'mcp'", name="mcp")
        return imported(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install '.[mcp]'" in run("mcp", own, ends=3).err
