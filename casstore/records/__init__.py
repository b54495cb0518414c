"""The record systems of casstore: session logs, runs, scoped state, lifecycles; and schemas."""
