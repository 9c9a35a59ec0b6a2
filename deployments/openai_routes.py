"""The FastAPI application: routes, CORS, and the error envelope for whatever goes wrong."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from importlib import metadata

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.engine_api import HealthStatus
from deployments.errors import APIError, to_api_error
from deployments.metrics import CONTENT_TYPE
from deployments.openai_params import check_model
from deployments.openai_types import ModelCard, ModelList
from deployments.service import OpenAIService
from deployments.streaming import ClientGone, EventStream, run_until_disconnect

Endpoint = Callable[[bytes], Awaitable[Response]]


def create_app(service: OpenAIService, cors_origins: Sequence[str]) -> FastAPI:
    """The application over a service. Needs neither Ray nor a model: tests call it through ASGI."""
    # The page at /docs would load its scripts from the network.
    app = FastAPI(title="Quire", version=version(), docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_exception_handler(HTTPException, _http_error)
    # The last one added is the outermost: errors get their CORS headers too.
    app.add_middleware(_LastResort)
    if cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(cors_origins), allow_methods=["GET", "POST", "HEAD"], allow_headers=["*"]
        )
    _add_openai_routes(app, service)
    _add_operator_routes(app, service)
    return app


def version() -> str:
    """Quire's own version."""
    return metadata.version("mlx-quire")


def _add_openai_routes(app: FastAPI, service: OpenAIService) -> None:
    started = int(time.time())

    def card(model_id: str) -> ModelCard:
        model = service.engine.model
        length = model.info.max_tokens_per_request if model is not None else None
        return ModelCard(id=model_id, created=started, root=service.settings.primary_id, max_model_len=length)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _answer(service, request, service.chat)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(service, request, service.completion)

    @app.get("/v1/models")
    async def models() -> ModelList:
        return ModelList(data=[card(model_id) for model_id in service.settings.served_ids])

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        try:
            check_model(model_id, service.settings.served_ids)
        except APIError as error:
            return error.response()
        return JSONResponse(card(model_id).model_dump())


def _add_operator_routes(app: FastAPI, service: OpenAIService) -> None:
    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        now = service.engine.health()
        body = {
            "status": now.status.value,
            "stage": now.stage,
            "progress": round(now.progress, 3),
            "error": now.error,
            "engine_restarts": now.num_restarts,
            "engine_pid": now.pid,
        }
        return JSONResponse(body, status_code=200 if now.status is HealthStatus.OK else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        model = service.engine.model
        page = service.metrics.render(
            await service.engine.stats(), service.engine.health(), None if model is None else model.info
        )
        return Response(page, media_type=CONTENT_TYPE)

    @app.get("/version")
    async def get_version() -> dict[str, str]:
        return {"version": version()}


async def _answer(service: OpenAIService, request: Request, endpoint: Endpoint) -> Response:
    """The endpoint's answer to the request's body, or the envelope; ends with the client."""
    try:
        _check_content_type(request)
        body = await _read_body(request, service.settings.server.max_body_bytes)
        response = await run_until_disconnect(request.receive, _call(endpoint, body), _discard)
    except ClientGone:
        return Response(status_code=499)  # for the log: nobody reads it
    except Exception as error:
        response = to_api_error(error).response()
    service.metrics.answered(request.url.path, response.status_code)
    return response


async def _call(endpoint: Endpoint, body: bytes) -> Response:
    return await endpoint(body)


def _discard(response: Response) -> None:
    if isinstance(response, EventStream):
        response.discard()


def _check_content_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise APIError(415, f"The body must be application/json, not {media_type[:100]}.")


async def _read_body(request: Request, limit: int) -> bytes:
    parts = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise APIError(413, f"The body is larger than {limit} bytes.")
        parts.append(part)
    return b"".join(parts)


async def _http_error(request: Request, error: Exception) -> Response:
    """404 for unknown paths, 405 for wrong methods."""
    assert isinstance(error, HTTPException)
    what = {404: f"There is nothing at {request.url.path[:200]}.", 405: f"{request.method} is not allowed here."}
    message = what.get(error.status_code, str(error.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    headers = dict(error.headers or {})
    return APIError(error.status_code, message, code=code, headers=headers).response()


class _LastResort:
    """Turns what no route caught into a 500 with the envelope, inside CORS, and doesn't pass it on to the server."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            await to_api_error(error).response()(scope, receive, send)
