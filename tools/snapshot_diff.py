#!/usr/bin/env python3
"""Compare two snapshots: checkpoints of one store, of two stores, or two exported files.

    tools/snapshot_diff.py --store agents main@41 main
    tools/snapshot_diff.py before-store::main after-store::main --stat
    tools/snapshot_diff.py monday.bundle tuesday.bundle --exit-code

What changed in nodes, tool state, plugin snapshot and execution state, as text, as JSON or as
a JSON Patch: the same as ``casstore diff``, which has all options and exit codes.
"""

from __future__ import annotations

import sys

from checkout import use_checkout

if __name__ == "__main__":
    # Run as a program, with whatever Python is found first.
    use_checkout()
    from casstore.cli import started
    from casstore.cli.main import main

    if len(sys.argv) == 1:
        sys.argv.append("--help")
    sys.argv.insert(1, "diff")
    main(begin=started)
