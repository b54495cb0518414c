"""Completion of names by the shell: sessions and tags of the store at hand."""

from __future__ import annotations

import os
from itertools import islice
from typing import Final

import click
from click.shell_completion import CompletionItem

from casstore.cli.command import PATH_VARIABLE
from casstore.cli.spelling import safe
from casstore.errors import CasstoreError
from casstore.store import open as open_store

_OFFERED: Final = 50


def complete_name(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Sessions and tags that begin so. Where nothing can be read nothing is offered."""
    given = ctx.params.get("store") or ctx.find_root().params.get("store")
    path = given or os.environ.get(PATH_VARIABLE) or os.curdir
    try:
        with open_store(path, readonly=True, create=False) as store:
            found = [
                info.meta.session for info in store.sessions(prefix=incomplete, limit=_OFFERED)
            ]
            found += [pin.name for pin in islice(store.pins(prefix=incomplete), _OFFERED)]
    except CasstoreError:
        # A shell waits for an answer; why there is none is said when the command runs.
        return []
    # An id that would have to be escaped cannot be typed as it is shown.
    return [CompletionItem(one) for one in found if one == safe(one)]
