#!/usr/bin/env python3
"""Care for stores while nobody watches; ``tools/gc.py --help`` says how."""

from __future__ import annotations

import sys

from checkout import use_checkout

if __name__ == "__main__":
    # Run as a program, with whatever Python cron finds first.
    use_checkout()
    from casstore.cli.offline_program import main

    sys.exit(main())
