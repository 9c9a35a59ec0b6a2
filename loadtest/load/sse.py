"""A blocking client for streamed completions, one a user: `http.client` on sockets that gevent has made cooperative.

`requests` and Locust's own clients hand a response over when it is complete, or in blocks of a fixed size; only a
read that returns with what is there can tell when a token came.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from loadtest.stream import RequestResult, SSEParser, StreamError, check_complete, take_event

_READ_BYTES = 65536
_FIRST_PAUSE_S = 0.05
_END_TIMEOUT_S = 0.5  # for the end of a body whose last event has come


class BlockingClient:
    """Sends one request at a time to one server, over one connection that is kept while the server keeps it.

    A connection that is reset before anything came back is tried again: servers whose listen backlog is short reset
    bursts of clients. Each such try counts in `RequestResult.retries`, and its time in the request's.
    """

    def __init__(self, base_url: str, *, timeout_s: float = 600.0, api_key: str | None = None, tries: int = 6) -> None:
        """timeout_s bounds each wait for the server, and each request as a whole. Raises ValueError for a bad URL."""
        url = urlsplit(base_url)
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"the host must be a URL such as http://127.0.0.1:8000, not {base_url!r}")
        try:
            port = url.port
        except ValueError as error:
            raise ValueError(f"the host {base_url!r} has no good port: {error}") from None
        kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(url.hostname, port, timeout=timeout_s)
        # OpenAI clients are given a base URL that ends in /v1; both forms name the same server.
        self._root = url.path.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        self._tries = tries
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream, application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def close(self) -> None:
        """Closes the connection; the next request opens another."""
        self._connection.close()

    def get(self, path: str) -> tuple[int, str]:
        """Status and text at a path. Raises OSError or http.client.HTTPException."""
        try:
            self._connection.request("GET", self._root + path, headers=self._headers)
            response = self._connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except BaseException:
            self.close()
            raise

    def stream(
        self, path: str, body: Mapping[str, Any], on_start: Callable[[RequestResult], None] | None = None
    ) -> RequestResult:
        """Sends one request and reads its events. Never raises for what the server does.

        on_start is given the result while it is still growing. An exception from outside (a greenlet that is killed)
        passes through, the result then being marked as hung up.
        """
        content = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        result = RequestResult(time.perf_counter())
        if on_start is not None:
            on_start(result)
        complete = False
        try:
            self._read(self._open(self._root + path, content, result), result)
            complete = True
        except StreamError as error:
            result.error = str(error)
        except (OSError, http.client.HTTPException) as error:
            result.error = f"{type(error).__name__}: {error}"
        finally:
            result.hung_up = not complete and result.error is None
            if result.ended is None:
                result.ended = time.perf_counter()
            if not complete:
                self.close()
        return result

    def _open(self, path: str, content: bytes, result: RequestResult) -> http.client.HTTPResponse:
        pause = _FIRST_PAUSE_S
        while True:
            kept = self._connection.sock is not None
            try:
                self._connection.request("POST", path, body=content, headers=self._headers)
                return self._connection.getresponse()
            except (ConnectionResetError, ConnectionAbortedError, BrokenPipeError, http.client.RemoteDisconnected):
                self.close()
                if kept:
                    continue  # the server had closed an idle connection, which is its right
                result.retries += 1
                if result.retries >= self._tries:
                    raise
                time.sleep(pause)
                pause *= 2

    def _read(self, response: http.client.HTTPResponse, result: RequestResult) -> None:
        result.status = response.status
        if response.status != 200:
            text = response.read(300).decode(errors="replace")
            raise StreamError(f"HTTP {response.status}: {text}")
        parser = SSEParser()
        while chunk := response.read1(_READ_BYTES):
            now = time.perf_counter()
            for data in parser.feed(chunk):
                if data == b"[DONE]":
                    check_complete(result)
                    result.ended = now
                    self._finish(response)
                    return
                take_event(result, data, now)
            if now - result.started > self._timeout_s:
                raise StreamError(f"not done after {self._timeout_s:.0f} s")
        raise StreamError("the stream ended without [DONE]")

    def _finish(self, response: http.client.HTTPResponse) -> None:
        """Reads the body's end, after which the connection serves the next request; gives it up if none comes."""
        connection = self._connection.sock
        try:
            if connection is not None:
                connection.settimeout(_END_TIMEOUT_S)
            response.read()
            if self._connection.sock is not None:
                self._connection.sock.settimeout(self._timeout_s)
        except (OSError, http.client.HTTPException):
            self.close()
