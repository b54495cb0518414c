"""What the workers of the ``sessions`` campaign commit: all of it follows from a few names.

A turn's nodes, usage and checkpoint are drawn from its id, a batch's items from its source
key. So whoever knows the names can make the same content again: a worker to repeat a turn
whose fate it does not know, the examiner to say what must be there.
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
    """One turn of a session, by the names that its content follows from."""

    session: str
    id: str
    batches: tuple[str, ...]
    attachments: tuple[str, ...]
    label: str | None

    @classmethod
    def told(cls, asked: Mapping[str, Any]) -> Turn:
        """The turn that a line of a journal speaks of."""
        return cls(
            asked["session"],
            asked["turn"],
            tuple(asked["batches"]),
            tuple(asked["attachments"]),
            asked["label"],
        )

    def node_ids(self, attempt: int) -> list[str]:
        """The ids of its nodes. A repeated turn makes them anew, and gets the first ones back."""
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
        """The commit of this turn. Without a lease only its receipt can answer."""
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
    """A batch of which nothing is known but the name, which is all that a receipt compares."""
    return Batch(name, turn.session, 0, (), None, "", "", None, 0, 0, 0, 0)


@functools.lru_cache(maxsize=4096)
def payloads(turn: Turn) -> list[dict[str, Any]]:
    """What the nodes of a turn hold."""
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
    """What a turn used."""
    rng = random.Random(f"usage {turn}")
    return [
        Usage("agent", f"model-{model}", *[rng.randrange(1, 1000) for _ in range(4)])
        for model in rng.sample(range(3), rng.choice((1, 2)))
    ]


def add_usage(ledger: Mapping[tuple[str, str], Usage], turn: str) -> dict[tuple[str, str], Usage]:
    """A ledger, by source and model, with what a turn used."""
    added = dict(ledger)
    for entry in usage(turn):
        place = entry.source, entry.model
        before = added.get(place, Usage(*place))
        sums = [a + b for a, b in zip(before[2:], entry[2:], strict=True)]
        added[place] = Usage(*place, *sums)
    return added


@functools.lru_cache(maxsize=4096)
def checkpoint(turn: str) -> Checkpoint:
    """The state after a turn: that of every other turn, but for a few lines."""
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
    """What a queued batch holds."""
    rng = random.Random(f"items {source_key}")
    return tuple([{"from": source_key, "text": _text(rng, 20)} for _ in range(rng.choice((1, 2)))])


def attachment(name: str) -> bytes:
    """The bytes of an attachment."""
    rng = random.Random(f"attachment {name}")
    return name.encode() + rng.randbytes(rng.choice((50, 2_000, 40_000)))


_WORDS: Sequence[str] = "read the file run tests then write what failed and why it did".split()


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=min(words, 100)) * max(1, words // 100))
