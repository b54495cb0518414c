"""How large a database is that was moved over, and what of it is in the store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Protocol

from casstore.cli.quantities import size

#: What the answer of an import says of it.
SIZES: Final[Mapping[str, str]] = {
    "source_bytes": "how large the database is",
    "store_bytes_before": "how large the store was, null if its engine does not tell",
    "store_bytes": "how large it is, null if its engine does not tell",
}


class Sized(Protocol):
    """The report of an import."""

    @property
    def source_bytes(self) -> int:
        """How large the database is."""
        ...

    @property
    def store_bytes_before(self) -> int | None:
        """How large the store was."""
        ...

    @property
    def store_bytes(self) -> int | None:
        """How large it is."""
        ...


def sizes(report: Sized) -> str:
    """The same for a person."""
    told = f"{size(report.source_bytes)} as a database"
    if report.store_bytes is not None and report.store_bytes_before is not None:
        told += f", {size(report.store_bytes - report.store_bytes_before)} in the store"
    return told
