"""What the tests of maintenance share: the modules beside this one are importable."""

from __future__ import annotations

import sys
from pathlib import Path

# At the end: an installed casstore must not be hidden by the one beside the tests.
sys.path.append(str(Path(__file__).parent.parent.parent))
