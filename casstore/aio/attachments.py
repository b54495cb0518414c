"""The attachments of a session, awaited."""

from __future__ import annotations

import builtins
from collections.abc import Sequence

from casstore.aio.threads import Run
from casstore.session.attachments import Attachments
from casstore.session.data import Attachment


class AsyncAttachments:
    """``Attachments`` whose operations are awaited.

    >>> import asyncio, casstore.aio
    >>> async def main():
    ...     async with casstore.aio.open(place / "new") as store:
    ...         session = store.session("s")
    ...         image = await session.attachments.put(b"pixels")
    ...         await session.commit(Commit(attachments=[image.id], lease=UNFENCED))
    ...         return (await session.attachments.find(image.id)).state
    >>> asyncio.run(main())
    'committed'
    """

    def __init__(self, run: Run, attachments: Attachments) -> None:
        self._run = run
        self._attachments = attachments

    async def intend(
        self,
        attachment_id: str,
        *,
        uri: str | None = None,
        digest: bytes | None = None,
        owner: str | None = None,
    ) -> Attachment:
        """As ``Attachments.intend``."""
        return await self._run(
            self._attachments.intend, attachment_id, uri=uri, digest=digest, owner=owner
        )

    async def put(self, content: bytes, *, owner: str | None = None) -> Attachment:
        """As ``Attachments.put``."""
        return await self._run(self._attachments.put, content, owner=owner)

    async def commit(self, attachment_ids: Sequence[str]) -> tuple[Attachment, ...]:
        """As ``Attachments.commit``."""
        return await self._run(self._attachments.commit, attachment_ids)

    async def find(self, attachment_id: str) -> Attachment | None:
        """As ``Attachments.find``."""
        return await self._run(self._attachments.find, attachment_id)

    async def list(self, *, state: str | None = None) -> builtins.list[Attachment]:
        """As ``Attachments.list``."""
        return await self._run(self._attachments.list, state=state)

    async def uncommitted(self, *, older_than_ms: int) -> builtins.list[Attachment]:
        """As ``Attachments.uncommitted``."""
        return await self._run(self._attachments.uncommitted, older_than_ms=older_than_ms)

    async def condemn(self, attachment_id: str) -> Attachment:
        """As ``Attachments.condemn``."""
        return await self._run(self._attachments.condemn, attachment_id)

    async def forget(self, attachment_id: str) -> bool:
        """As ``Attachments.forget``."""
        return await self._run(self._attachments.forget, attachment_id)
