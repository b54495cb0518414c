#!/usr/bin/env python3
"""``casstore maintain`` from a checkout, for cron and systemd; ``--help`` lists the options."""

from __future__ import annotations

import sys

from checkout import use_checkout

if __name__ == "__main__":
    # Run as a program, with the first Python that cron finds.
    use_checkout()
    from casstore.cli import started
    from casstore.cli.main import main

    sys.argv.insert(1, "maintain")
    main(begin=started)
