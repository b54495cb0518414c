"""A session store of the Claude Agent SDK."""

from __future__ import annotations

from typing import Any

import pytest

from casstore.store import Store


@pytest.fixture
def sessions(store: Store) -> Any:
    # Here: where the SDK is not installed, each module of tests is skipped by name.
    from casstore.adapters.claude import CasstoreSessionStore

    return CasstoreSessionStore(store)
