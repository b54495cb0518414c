"""Blobs and values on top of an engine.

A *piece* is an object that holds a value or a part of one. ``pieces`` reads and verifies objects
and batches writes. Above it are ``blobs`` (bytes of any
length), ``values`` (put and get a whole value), ``view`` (read a part), ``edit`` (change a part)
and ``diff`` (compare two values).
"""
