"""Answers that end when the client goes away: plain ones and server-sent events."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.errors import APIError, to_api_error

_T = TypeVar("_T")
DONE = b"data: [DONE]\n\n"


class ClientGone(Exception):
    """The client closed the connection; nobody reads the answer."""


async def run_until_disconnect(
    receive: Receive, work: Coroutine[Any, Any, _T], discard: Callable[[_T], None] | None = None
) -> _T:
    """The result of `work`, cancelled when the client leaves: then raises ClientGone. The body must have been read.

    Ray Serve cancels the request's task instead of, or as well as, sending `http.disconnect`: both end the work. A
    result that came too late for this to return it is given to `discard`.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
    except BaseException:
        if discard is not None:
            task.add_done_callback(functools.partial(_discard_result, discard))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    finally:
        watcher.cancel()
    # Nothing is awaited from here on: a cancellation would lose the result.
    return task.result()


def _discard_result(discard: Callable[[_T], None], task: asyncio.Task[_T]) -> None:
    if not task.cancelled() and task.exception() is None:
        discard(task.result())


async def _disconnected(receive: Receive) -> None:
    while True:
        try:
            message = await receive()
        except Exception:  # Serve's proxy is gone: so is the way to the client
            return
        if message["type"] == "http.disconnect":
            return


class EventStream(Response):
    """Server-sent events. Calls `on_close` however it ends: at the end, on an error, when the client leaves.

    An exception in `events` becomes an event with the error envelope; then the stream closes, without `[DONE]`.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], on_close: Callable[[], None]) -> None:
        # Proxies must pass each event on at once, and keep none.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._on_close = on_close

    def discard(self) -> None:
        """Gives up what it would have streamed; for one that is never sent."""
        self._on_close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it all."""
        try:
            await run_until_disconnect(receive, self._send(send))
        except ClientGone:
            pass
        finally:
            self._on_close()
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            event = error_event(to_api_error(error))
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def error_event(error: APIError) -> bytes:
    """The envelope as an event."""
    return b"data: " + json.dumps(error.body()).encode() + b"\n\n"
