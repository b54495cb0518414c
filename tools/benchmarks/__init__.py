"""The measurements of ``tools/bench.py``: one module per layer, each figure a ratio in one run."""
