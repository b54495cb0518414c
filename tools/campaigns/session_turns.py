"""The content that the workers of the ``sessions`` campaign commit, derived from names.

A turn's nodes, usage and checkpoint are derived from its id, a batch's items from its source key.
So the same content can be generated again: by a worker that repeats a turn with an unknown outcome,
and by the examiner.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from casstore import LEAF, Checkpoint, Commit, Digest, Link, NodeDraft, Usage
from casstore.session.data import Batch, Claim, Lease

SHARED = ("alpha", "beta", "gamma")
_FILES = 60


class Turn(NamedTuple):
    """One turn of a session: the names from which its content is derived."""

    session: str
    id: str
    batches: tuple[str, ...]
    attachments: tuple[str, ...]
    label: str | None

    @classmethod
    def from_journal(cls, asked: Mapping[str, Any]) -> Turn:
        """The turn in a line of a journal."""
        return cls(
            asked["session"],
            asked["turn"],
            tuple(asked["batches"]),
            tuple(asked["attachments"]),
            asked["label"],
        )

    def node_ids(self, attempt: int) -> list[str]:
        """The ids of its nodes. A repeated turn generates new ids; its result has the first."""
        return [f"{self.id}.{attempt}.{at}" for at in range(len(payloads(self)))]

    def commit(
        self,
        attempt: int,
        *,
        parent: str | None = None,
        claim: Claim | None = None,
        lease: Lease | None = None,
        release: bool = False,
    ) -> Commit:
        """The commit of this turn. Without a lease only a replay can succeed."""
        if claim is None and self.batches:
            claim = Claim("", self.session, 0, tuple([_named(self, name) for name in self.batches]))
        drafts = [
            NodeDraft(name, payload)
            for name, payload in zip(self.node_ids(attempt), payloads(self), strict=True)
        ]
        drafts[0] = drafts[0]._replace(parent=LEAF if parent is None else parent)
        return Commit(
            append=drafts,
            checkpoint=checkpoint(self.id),
            lease=lease,
            release=release,
            turn=self.id,
            label=self.label,
            usage=usage(self.id),
            completes=() if claim is None else (claim,),
            attachments=self.attachments,
            session=self.session,
        )


def _named(turn: Turn, name: str) -> Batch:
    """A batch with only a name, which is all that a receipt compares."""
    return Batch(name, turn.session, 0, (), None, "", "", None, 0, 0, 0, 0)


@functools.lru_cache(maxsize=4096)
def payloads(turn: Turn) -> list[dict[str, Any]]:
    """The payloads of a turn's nodes."""
    rng = random.Random(f"payloads {turn.id}")
    made: list[dict[str, Any]] = []
    for at in range(rng.choice((1, 1, 2, 3))):
        text = _text(rng, rng.choice((10, 10, 80, 1500)))
        made.append({"role": "assistant" if at else "user", "text": text, "turn": turn.id})
    for name in turn.attachments:
        if not name.startswith("elsewhere"):
            made[0].setdefault("shows", []).append(Link(Digest(bytes.fromhex(name))))
    return made


def usage(turn: str) -> list[Usage]:
    """The usage of a turn."""
    rng = random.Random(f"usage {turn}")
    return [
        Usage("agent", f"model-{model}", *[rng.randrange(1, 1000) for _ in range(4)])
        for model in rng.sample(range(3), rng.choice((1, 2)))
    ]


def add_usage(ledger: Mapping[tuple[str, str], Usage], turn: str) -> dict[tuple[str, str], Usage]:
    """A ledger by source and model, with the usage of a turn added."""
    added = dict(ledger)
    for entry in usage(turn):
        place = entry.source, entry.model
        before = added.get(place, Usage(*place))
        sums = [a + b for a, b in zip(before[2:], entry[2:], strict=True)]
        added[place] = Usage(*place, *sums)
    return added


@functools.lru_cache(maxsize=4096)
def checkpoint(turn: str) -> Checkpoint:
    """The checkpoint after a turn: it differs from those of other turns in a few lines."""
    rng = random.Random(f"checkpoint {turn}")
    files: dict[str, Any] = dict(_files())
    for _ in range(3):
        files[f"file-{rng.randrange(_FILES)}"] = _text(rng, 12)
    return Checkpoint(
        turn_state={"turn": turn},
        tool_state={"cwd": "/repo", "files": files, "last": turn},
        config={"model": "model-1"},
    )


@functools.lru_cache(maxsize=1)
def _files() -> dict[str, str]:
    rng = random.Random("files")
    return {f"file-{at}": _text(rng, 12) for at in range(_FILES)}


def items(source_key: str) -> tuple[dict[str, Any], ...]:
    """The items of a queued batch."""
    rng = random.Random(f"items {source_key}")
    return tuple([{"from": source_key, "text": _text(rng, 20)} for _ in range(rng.choice((1, 2)))])


def attachment(name: str) -> bytes:
    """The bytes of an attachment."""
    rng = random.Random(f"attachment {name}")
    return name.encode() + rng.randbytes(rng.choice((50, 2_000, 40_000)))


_WORDS: Sequence[str] = "read the file run tests then write what failed and why it did".split()


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=min(words, 100)) * max(1, words // 100))
