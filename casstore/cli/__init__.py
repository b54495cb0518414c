"""The command line: what a person or a script can do with a store without writing Python.

``main`` is the group and turns errors into exit codes; ``command`` is what all commands
have; ``naming`` says what a name means; each family of commands has a module of its own.
Only here are environment variables read and terminals written to.
"""
