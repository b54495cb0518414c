"""The test suites that every engine and session runtime must pass, shipped for other engines.

Needs pytest (``pip install '.[testing]'`` in a clone of casstore). Nothing in casstore imports this
package.
"""

import pytest

# pytest rewrites asserts only in modules that are registered before their import. Without it a
# failing assert of the suites would not show the compared values.
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
