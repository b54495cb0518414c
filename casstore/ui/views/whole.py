"""The whole state of a revision as JSON, component by component: for a file."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from casstore.cli.payloads import as_json, without_bytes
from casstore.errors import ExpansionError, LimitError
from casstore.objects.stored import Stored
from casstore.ui.views.session import components
from casstore.ui.views.viewed import Place, Viewed

_MAX_CHARACTERS: Final = 4 << 20


class Component(NamedTuple):
    """A component of the state."""

    name: str
    #: A plain value; bytes by their length.
    value: Any

    @property
    def text(self) -> str:
        """Its JSON."""
        return as_json(self.value)


def whole_state(viewed: Viewed, place: Place) -> tuple[Component, ...]:
    """All components at a place; one that is too long is named only."""
    found: list[Component] = []
    for name, stored in components(viewed, place.state.manifest):
        if not isinstance(stored, Stored):
            found.append(Component(name, stored))
            continue
        try:
            value = without_bytes(stored.beginning(_MAX_CHARACTERS, _MAX_CHARACTERS))
            if len(as_json(value)) >= _MAX_CHARACTERS:
                value = "<too long for this file>"
        except (LimitError, ExpansionError) as exc:
            value = f"<cannot be read: {exc}>"
        found.append(Component(name, value))
    return tuple(found)
