"""What ``maintain`` does to which store: the steps, their configuration file, and the stores.

``read_config`` reads a TOML file, ``change_steps`` applies one table of it, and ``find_stores``
expands patterns. ``docs/reference/cli.md`` describes the file.
"""

from __future__ import annotations

import glob
import os
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from casstore.cli.quantities import parse_duration
from casstore.engine.protocol import DEFAULT_BATCH, DEFAULT_GRACE_MS, DURABILITIES
from casstore.errors import InvalidInputError, StorageError
from casstore.maintenance import gc
from casstore.maintenance.policy import policy_from
from casstore.maintenance.retention import Policy
from casstore.store import is_server

# The keys whose values are durations, and the fields that they set: of Steps, and of a policy.
_STEP_DURATIONS: Final = {"grace": "grace_ms", "attachments": "attachments_ms"}
_POLICY_DURATIONS: Final = {"within": "within_ms", "idle": "idle_ms"}


class Steps(NamedTuple):
    """Which steps of maintenance a store gets, and their parameters."""

    grace_ms: int = DEFAULT_GRACE_MS
    batch: int = DEFAULT_BATCH
    #: Prune by this policy; None: by the stored policies, if ``prune``.
    policy: Policy | None = None
    prune: bool = False
    #: Apply ``policy`` to sessions that have their own policy as well.
    override_policies: bool = False
    #: Give up attachments announced longer ago than this and never committed; None: none.
    attachments_ms: int | None = None
    vacuum: bool = False
    pack: bool = False
    #: Compact if that frees enough of the file, and no other process has the store open.
    compact: bool = False
    durability: str = "full"


#: Every step, with defaults.
EVERYTHING: Final = Steps(prune=True, vacuum=True, pack=True, compact=True)
# The keys of a configuration, and their types.
_KEYS: Final[dict[str, type | tuple[type, ...]]] = {
    "grace": str, "batch": int, "retention": (dict, bool), "override_policies": bool,
    "attachments": str, "vacuum": bool, "pack": bool, "compact": bool, "durability": str,
}  # fmt: skip


class Config(NamedTuple):
    """A configuration file."""

    stores: tuple[str, ...]
    steps: Steps
    #: The options of single stores by path: the tables ``[store."PATH"]``.
    own: Mapping[str, Mapping[str, Any]]
    #: Fields of the steps that options have set, for every store.
    options: Mapping[str, Any] = {}

    def steps_of(self, path: str) -> Steps:
        """The steps of one store."""
        for named, changes in self.own.items():
            if _same(named, path):
                own = change_steps(self.steps, changes, f'store."{named}"')
                return own._replace(**self.options)
        return self.steps

    def idle(self, paths: Sequence[str]) -> list[str]:
        """The paths of tables ``[store."PATH"]`` that name none of these stores."""
        return [one for one in self.own if not any(_same(one, path) for path in paths)]


def _same(one: str, other: str) -> bool:
    return one == other or os.path.realpath(one) == os.path.realpath(other)


def read_config(path: str) -> Config:
    """Read a TOML file; InvalidInputError for an unknown key or a value of the wrong type."""
    try:
        with open(path, "rb") as source:
            found = tomllib.load(source)
    except OSError as exc:
        raise StorageError(f"cannot read {path}: {exc.strerror}") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise InvalidInputError(f"{path} is not TOML: {exc}") from exc
    stores = found.pop("stores", [])
    own = found.pop("store", {})
    if not isinstance(own, dict) or not all(isinstance(one, dict) for one in own.values()):
        raise InvalidInputError(
            f'{path}: store must be a table for each path, [store."PATH"], got {own!r}'
        )
    if not isinstance(stores, list) or not all(isinstance(one, str) for one in stores):
        raise InvalidInputError(f"{path}: stores must be a list of paths, got {stores!r}")
    if any("\0" in one for one in (*stores, *own)):
        raise InvalidInputError(f"{path}: a path of a store contains a NUL character; remove it")
    steps = change_steps(EVERYTHING, found, path)
    for pattern, changes in own.items():
        change_steps(steps, changes, f'{path}: store."{pattern}"')
    return Config(tuple(stores), steps, own)


def change_steps(steps: Steps, changes: Mapping[str, Any], where: str) -> Steps:
    """The steps with the keys of one table of a file applied; errors begin with ``where``."""
    for key, given in changes.items():
        value: Any = given
        if key not in _KEYS:
            raise InvalidInputError(f"{where}: unknown key {key!r}; known are {', '.join(_KEYS)}")
        if not isinstance(given, _KEYS[key]) or (key == "batch" and isinstance(given, bool)):
            raise InvalidInputError(
                f"{where}: {key} cannot be {value!r}; docs/reference/cli.md has an example"
            )
        if key == "batch" and not 1 <= value <= gc.MAX_BATCH:
            # gc would refuse it as well, but only after pruning.
            raise InvalidInputError(
                f"{where}: batch must be from 1 to {gc.MAX_BATCH:,}, got {value}"
            )
        if key == "durability" and value not in DURABILITIES:
            raise InvalidInputError(
                f"{where}: durability must be one of {', '.join(DURABILITIES)}, got {value!r}"
            )
        if key == "retention":
            steps = _with_retention(steps, value, where)
        else:
            steps = steps._replace(**_with_durations({key: value}, _STEP_DURATIONS, where))
    return steps


def _with_retention(steps: Steps, value: Mapping[str, Any] | bool, where: str) -> Steps:
    if isinstance(value, bool):
        # True: by the policies in the store itself.
        return steps._replace(policy=None, prune=value)
    fields = _with_durations(value, _POLICY_DURATIONS, where)
    try:
        return steps._replace(policy=policy_from(fields), prune=True)
    except InvalidInputError as exc:
        raise InvalidInputError(f"{where}: retention: {exc}") from exc


def _with_durations(
    table: Mapping[str, Any], durations: Mapping[str, str], where: str
) -> dict[str, Any]:
    """The fields that the keys of a table set, with durations in milliseconds."""
    fields: dict[str, Any] = {}
    for key, value in table.items():
        if key not in durations:
            fields[key] = value
            continue
        try:
            fields[durations[key]] = parse_duration(value if isinstance(value, str) else "")
        except ValueError as exc:
            raise InvalidInputError(f"{where}: {key}: {exc}") from exc
    return fields


def find_stores(patterns: Sequence[str]) -> list[str]:
    """The stores that paths and patterns name, each once, in order.

    A pattern matches only directories that hold a store; a path must be a store. A name that exists
    literally is a path, whatever characters it contains.
    """
    found: dict[str, str] = {}
    for pattern in patterns:
        if is_server(pattern):
            found.setdefault(pattern, pattern)
            continue
        if glob.has_magic(pattern) and not os.path.lexists(pattern):
            paths = [
                path
                for path in sorted(glob.glob(pattern, recursive=True))
                if os.path.exists(os.path.join(path, "data.mdb"))
            ]
        else:
            paths = [pattern]
        for path in paths:
            found.setdefault(os.path.realpath(path), path)
    return list(found.values())
