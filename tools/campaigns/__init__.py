"""Campaigns: long fault runs that ``tools/torture.py`` runs in full and the tests sample."""
