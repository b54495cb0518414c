"""Decides which paths a snapshot leaves out, by patterns in ``.gitignore`` syntax.

The last pattern that matches decides, and ``!`` includes again. From the lowest precedence to the
highest: ``DEFAULT_IGNORE``, the ``.gitignore`` files of the tree if asked for, the caller's
patterns. As in git, nothing below an ignored directory can be included again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from casstore.errors import InvalidInputError
from casstore.format.digest import plain_hash
from casstore.workspace.beneath import Parts

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

#: Repositories, virtual environments, installed dependencies and caches.
DEFAULT_IGNORE: Final = (
    ".git", ".hg", ".svn", ".jj",
    ".venv/", "venv/", "node_modules/",
    "__pycache__/", ".mypy_cache/", ".ruff_cache/", ".pytest_cache/", ".hypothesis/",
    ".tox/", ".nox/", ".cache/",
)  # fmt: skip
GITIGNORE: Final = ".gitignore"


def _compile(lines: Iterable[str]) -> GitIgnoreSpec:
    try:
        from pathspec import GitIgnoreSpec
    except ModuleNotFoundError as exc:
        raise InvalidInputError(
            "ignore rules need pathspec: pip install '.[workspace]' in the clone of casstore"
        ) from exc
    try:
        return GitIgnoreSpec.from_lines(lines)
    except ValueError as exc:
        raise InvalidInputError(f"ignore has a pattern that cannot be used: {exc}") from exc


class Rules:
    """The patterns that apply in one directory and below it."""

    def __init__(self, ignore: Any = (), *, defaults: bool = True, more: str = "") -> None:
        """Compile the patterns; ``more`` has other settings that affect what is left out."""
        if isinstance(ignore, str | bytes) or not isinstance(ignore, Iterable):
            raise InvalidInputError(f"ignore must be a list of patterns, got {ignore!r:.80}")
        given = list(ignore)
        for pattern in given:
            if type(pattern) is not str or "\n" in pattern:
                raise InvalidInputError(
                    f"a pattern in ignore must be one line of text, got {pattern!r:.80}"
                )
        lowest = list(DEFAULT_IGNORE) if defaults else []
        #: Rules with equal ids leave out the same paths.
        self.id = plain_hash(
            "\n".join([more, *lowest, "", *given]).encode("utf-8", "surrogatepass")
        )
        # The defaults and the caller's patterns as one list: enough where no .gitignore file, which
        # ranks between them, applies.
        self._both = _compile([*lowest, *given]) if lowest or given else None
        self._lowest = _compile(lowest) if lowest else None
        self._given = _compile(given) if given else None
        self._files: tuple[tuple[int, GitIgnoreSpec], ...] = ()

    def with_file(self, above: Parts, content: bytes) -> Rules:
        """These rules with the ``.gitignore`` file of the directory ``above``."""
        rules = object.__new__(Rules)
        rules._both, rules._lowest, rules._given = self._both, self._lowest, self._given
        lines = content.decode("utf-8", "surrogateescape").splitlines()
        try:
            rules._files = (*self._files, (len(above), _compile(lines)))
        except InvalidInputError:
            # As git does, skip the lines of the file that are not valid patterns.
            rules._files = (*self._files, (len(above), _compile(_valid(lines))))
        rules.id = plain_hash(self.id + b"/".join([b"", *_raw(above)]) + b"\0" + content)
        return rules

    def ignores(self, parts: Parts, *, is_directory: bool) -> bool:
        """Whether this path is left out, given that its directory is not."""
        if self._both is None and not self._files:
            return False
        if not self._files:
            assert self._both is not None
            return bool(self._both.check_file(_encoded(parts, is_directory)).include)
        for depth, spec in (
            (0, self._given), *[(at, spec) for at, spec in reversed(self._files)],
            (0, self._lowest),
        ):  # fmt: skip
            if spec is not None:
                found = spec.check_file(_encoded(parts[depth:], is_directory)).include
                if found is not None:
                    return found
        return False


def _encoded(parts: Parts, is_directory: bool) -> str:
    return "/".join(parts) + ("/" if is_directory else "")


def _raw(parts: Parts) -> list[bytes]:
    return [part.encode("utf-8", "surrogateescape") for part in parts]


def _valid(lines: list[str]) -> list[str]:
    found = []
    for line in lines:
        try:
            _compile([line])
        except InvalidInputError:
            continue
        found.append(line)
    return found
