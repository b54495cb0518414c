"""Adapters that store the state of agent frameworks; each needs its own extra."""
