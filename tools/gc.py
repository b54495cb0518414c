#!/usr/bin/env python3
"""Care for stores while nobody watches; ``tools/gc.py --help`` says how."""

from __future__ import annotations

import sys
from pathlib import Path

# Run as a program: from a checkout with any Python that has casstore's dependencies, or where
# casstore is installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from casstore.cli.offline_program import main

if __name__ == "__main__":
    sys.exit(main())
