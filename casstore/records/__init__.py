"""The record systems of casstore: session logs, runs, scoped state, lifecycles; and schemas.

``schema`` declares rows once: their fields, keys and indexes; ``schema_check`` checks them. Each
system has the modules

    tables    its schemas, and its tables in a store
    system    what maintenance asks of it: entries, the check, expiry, erasure
"""
