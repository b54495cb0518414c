"""What ``tools/bench.py`` measures: one module a layer, each figure a ratio within one run."""
