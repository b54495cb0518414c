"""Are two handles handles on one store?

Neither paths nor addresses tell: a directory has many names, a server is reached in many ways, and
a copy of all the files says of itself whatever the original does. So one handle leaves a sign, and
the other is asked for it. The sign is a row of its own, which no copy carries and which never has
the same value twice.
"""

from __future__ import annotations

import secrets
from typing import Final

from casstore.engine.protocol import Engine, PutRow, Write
from casstore.session import keys
from casstore.session.attempts import Attempts

_SIGN_BYTES: Final = 8


def is_same_store(source: Engine, target: Engine) -> bool:
    """Does what is written to ``target`` stand in ``source``?

    Writes to ``target`` only if the two cannot be told apart by reading.
    """
    if source is target:
        return True
    attempts = Attempts("the target")
    while True:
        attempts.begin()
        before, there, after = _sign(target), _sign(source), _sign(target)
        if before != after:
            continue  # somebody else has put one: of which moment the source's is, nobody knows
        if there != before:
            return False
        put = PutRow(*keys.sign(), secrets.token_bytes(_SIGN_BYTES))
        target.write(Write(rows=[put]))
        if _sign(source) == put.value:
            return True
        if _sign(target) == put.value:
            # It stood there all the while, and not in the source.
            return False


def _sign(engine: Engine) -> bytes | None:
    return engine.get_rows([keys.sign()])[0]
