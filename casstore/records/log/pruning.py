"""Folded messages going for good. They are hidden at once; vacuum gives their bytes back."""

from __future__ import annotations

from casstore.records.log.ground import Ground
from casstore.records.log.reading import opened
from casstore.session import tombstones
from casstore.session.arguments import check_count
from casstore.session.attempts import read_again


def prune(ground: Ground, session: str, keep_recent: int, older_than_ms: int | None) -> int:
    """Remove folded messages, but for the newest of them, or those of late; how many went.

    It cannot be undone. What is folded stays folded, so nothing that is shown can be hit.
    """
    check_count(keep_recent, "how many messages to keep")
    if older_than_ms is not None:
        check_count(older_than_ms, "an age in ms")
    going = read_again(lambda: _going(ground, session, keep_recent, older_than_ms))
    if not going:
        return 0
    done = read_again(lambda: tombstones.hide(ground.runtime, session, going))
    return len(done.hidden)


def _going(ground: Ground, session: str, keep_recent: int, older_than_ms: int | None) -> list[str]:
    """The nodes of folded messages that are to go."""
    at, nodes = opened(ground, session, payloads=False)
    limit_ms = None if older_than_ms is None else ground.now_ms() - older_than_ms
    shown = at.state.view.shown(at.last)
    folded: list[str] = []
    ascending = sorted(shown)
    start = 1
    for first, last in [*ascending, (at.last + 1, at.last + 1)]:
        for node in nodes.between(start, first - 1) if start < first else ():
            young = limit_ms is not None and (type(node.time) is not int or node.time > limit_ms)
            folded.append("" if young else node.id)
        start = last + 1
    kept = folded[: max(0, len(folded) - keep_recent)]
    return [node_id for node_id in kept if node_id]
