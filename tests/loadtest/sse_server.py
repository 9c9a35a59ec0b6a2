"""A small HTTP server whose every byte, and the moment it is sent, is the test's to choose."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

Respond = Callable[["Exchange"], Awaitable[None]]


class Exchange:
    """One request, and the way to answer it piece by piece."""

    def __init__(self, request: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.request = request  # the JSON body
        self.peer = writer.get_extra_info("peername")  # of the connection
        self._reader = reader
        self._writer = writer

    async def start(self, status: int = 200) -> None:
        """Sends the head of a chunked response."""
        head = f"HTTP/1.1 {status} X\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._writer.write(head.encode())
        await self._writer.drain()

    async def send(self, data: bytes) -> None:
        """Sends bytes as one chunk."""
        self._writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self._writer.drain()

    async def event(self, content: dict[str, Any] | str) -> None:
        """Sends one event."""
        await self.send(f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode())

    async def text(self, text: str, finish_reason: str | None = None) -> None:
        """Sends a completion's event with some text."""
        await self.event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})

    async def usage(self, prompt: int, completion: int, cached: int) -> None:
        """Sends the last event before [DONE]."""
        details = {"cached_tokens": cached}
        counts = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
        await self.event({"choices": [], "usage": counts})

    async def finish(self) -> None:
        """Ends the response; the connection may be used again."""
        self._writer.write(b"0\r\n\r\n")
        await self._writer.drain()

    async def gone(self) -> None:
        """Returns when the client has closed its connection."""
        while await self._reader.read(1024):
            pass


class SSEServer:
    """Serves POSTs with `respond` on a port of its own, as an async context manager."""

    def __init__(self, respond: Respond) -> None:
        self._respond = respond
        self._server: asyncio.Server | None = None
        self.requests: list[dict[str, Any]] = []
        self.heads: list[str] = []  # of the requests, in lower case
        self._writers: set[asyncio.StreamWriter] = set()
        self.num_open = 0
        self.most_open = 0
        self.url = ""
        self.count_steps: Callable[[], int] = lambda: 0  # what /metrics says
        self.delays: dict[str, float] = {}  # seconds that a page takes
        self.pages: dict[str, Callable[[], str]] = {  # by path; any other is 404
            "/metrics": lambda: f'quire:engine_steps_total{{model_name="m"}} {self.count_steps()}\n'
        }

    async def __aenter__(self) -> SSEServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()

    def close_connections(self) -> None:
        """Closes all connections, as a server does with idle ones. From another thread it takes a moment."""
        for writer in list(self._writers):
            assert self._server is not None
            self._server.get_loop().call_soon_threadsafe(writer.close)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                method, path, _ = head.split(" ", 2)
                if method == "get":
                    page = self.pages.get(path)
                    await asyncio.sleep(self.delays.get(path, 0.0))
                    content = b"" if page is None else page().encode()
                    status = "404 Not Found" if page is None else "200 OK"
                    writer.write(f"HTTP/1.1 {status}\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content)
                    continue
                length = int(head.split("content-length:")[1].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                self.requests.append(body)
                self.heads.append(head)
                self.num_open += 1
                self.most_open = max(self.most_open, self.num_open)
                try:
                    await self._respond(Exchange(body, reader, writer))
                finally:
                    self.num_open -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
