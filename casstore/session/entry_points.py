"""Finds the code that installed packages register, by group and name; loads it only on request.

Record systems (``casstore.systems``), component formats (``casstore.components``) and calls that a
store forwards (``casstore.calls``) are entry points, so the core never imports an extension.
"""

from __future__ import annotations


def registered(group: str, name: str) -> list[str]:
    """The locations that packages register under a name: ``module:attribute``, each once."""
    from importlib.metadata import entry_points

    found = sorted({point.value for point in entry_points(group=group, name=name)})
    return found or _in_source_tree(group, name)


def _in_source_tree(group: str, name: str) -> list[str]:
    """The locations in casstore's own ``pyproject.toml``, if it runs from its source tree.

    The metadata of an editable installation lacks entry points that were added after installing.
    """
    import tomllib
    from pathlib import Path

    try:
        text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
        project = tomllib.loads(text)["project"]
        own = project["entry-points"][group] if project["name"] == "casstore" else {}
        return [own[name]] if name in own else []
    except (OSError, ValueError, LookupError):
        return []


def imported(group: str, value: str) -> object:
    """Import the object that ``value`` (``module:attribute``) names."""
    from importlib.metadata import EntryPoint

    return EntryPoint("", value, group).load()
