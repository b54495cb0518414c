"""Rows of other systems, in the store's own transactions."""
