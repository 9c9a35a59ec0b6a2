"""The ingress deployment: one replica of the OpenAI-compatible server, and the engine that belongs to it."""

from __future__ import annotations

import asyncio
import importlib
import ipaddress
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import ray
from fastapi import FastAPI

from deployments.engine_api import TextModel
from deployments.engine_client import EngineFailed, RayEngineClient
from deployments.metrics import Metrics
from deployments.openai_routes import create_app
from deployments.service import OpenAIService
from deployments.settings import QuireSettings

_TEXT_MODULE = "deployments.text"


class OpenAIServer:
    """What `deployments.app` makes a Serve deployment of. Holds no weights and imports no MLX."""

    async def __init__(self, settings: QuireSettings) -> None:  # type: ignore[misc]
        """Returns when the engine has begun to load, so that /health can say how far it is.

        Raises EngineFailed when the configuration is wrong, which fails the deployment with that message.
        """
        _log_to_terminal()
        self._started = time.monotonic()
        self._settings = settings
        self._client = RayEngineClient(settings, _load_text, _announce)
        self._client.start()
        # Transformers takes a second or two to import: meanwhile the engine's process starts.
        warm_up = asyncio.ensure_future(asyncio.to_thread(importlib.import_module, _TEXT_MODULE))
        self._host, self._port = await _http_address()
        try:
            await self._client.begun()
        except EngineFailed:
            await self._client.close()
            raise
        await warm_up
        self._announcer = asyncio.ensure_future(self._announce_ready())

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve after the constructor."""
        service = OpenAIService(self._settings, self._client, Metrics(self._settings.primary_id))
        return create_app(service, _cors_origins(self._settings, self._host))

    async def check_health(self) -> None:
        """Raises when Serve should replace this replica. A dead engine is started again without that."""
        self._client.check()

    async def __del__(self) -> None:
        """Called by Serve when the replica stops."""
        await self._client.close()

    async def _announce_ready(self) -> None:
        try:
            await self._client.ready()
        except EngineFailed:
            return  # the client has said so
        model = self._client.model
        assert model is not None
        info = model.info
        scheduler = info.policies.get("scheduler", "no")
        host = f"[{self._host}]" if ":" in self._host else self._host
        _announce(
            f"Quire is ready after {time.monotonic() - self._started:.1f} s: http://{host}:{self._port}/v1 serves "
            f"{', '.join(self._settings.served_ids)} ({info.device} {info.dtype}, "
            f"context {info.max_tokens_per_request}, {info.num_blocks} {info.kv_dtype} KV blocks of "
            f"{info.block_size} tokens, {scheduler} scheduler)"
        )


def _announce(line: str) -> None:
    # A replica's own standard output reaches the terminal; what Serve puts in its place may only reach a log file,
    # and so may Serve's own `print`.
    if sys.__stdout__ is not None:
        sys.__stdout__.write(f"[quire] {line}\n")
        sys.__stdout__.flush()


def _log_to_terminal() -> None:
    """Sends our own warnings the same way."""
    package = logging.getLogger("deployments")
    if not package.handlers:
        package.addHandler(logging.StreamHandler(sys.__stderr__))
        package.propagate = False


def _load_text(folder: Path) -> TextModel:
    text: TextModel = importlib.import_module(_TEXT_MODULE).TokenizerText(folder)
    return text


async def _http_address() -> tuple[str, int]:
    """Where Serve's proxy listens. Only for the line that says so and for CORS, hence the defaults."""
    try:
        controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
        options = await controller.get_http_config.remote()
        return str(options.host or "127.0.0.1"), int(options.port)
    except (ValueError, AttributeError, ray.exceptions.RayError):
        return "127.0.0.1", 8000


def _cors_origins(settings: QuireSettings, host: str) -> Sequence[str]:
    if settings.server.cors_origins is not None:
        return settings.server.cors_origins
    return ["*"] if _is_loopback(host) else []


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
