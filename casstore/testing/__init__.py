"""The suites that every engine and the runtime on it pass, shipped so that others can run them too.

Needs pytest (``pip install '.[testing]'`` in the clone of casstore). Nothing in casstore imports
this package.
"""

import pytest

# Without this the asserts of the suites would fail without saying what they compared:
# pytest explains only those in modules that it was told of before their import.
pytest.register_assert_rewrite(
    "casstore.testing.engine_fixtures",
    "casstore.testing.engine_objects",
    "casstore.testing.engine_rows",
    "casstore.testing.engine_writes",
    "casstore.testing.engine_inputs",
    "casstore.testing.engine_threads",
    "casstore.testing.engine_watch",
    "casstore.testing.engine_contract",
)

from casstore.testing.engine_contract import EngineContract, PersistentEngineContract  # noqa: E402
from casstore.testing.engine_fixtures import EngineFactory, ManualClock, Reopen  # noqa: E402
from casstore.testing.engine_model import compare_with_reference  # noqa: E402
from casstore.testing.session_conformance import (  # noqa: E402
    PersistentSessionConformance,
    SessionConformance,
)

__all__ = [
    "EngineContract",
    "EngineFactory",
    "ManualClock",
    "PersistentEngineContract",
    "PersistentSessionConformance",
    "Reopen",
    "SessionConformance",
    "compare_with_reference",
]
