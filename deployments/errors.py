"""The error envelope, `{"error": {"message", "type", "param", "code"}}`, and what becomes of every exception."""

from __future__ import annotations

import json
import logging
from typing import Any

from pydantic import ValidationError
from starlette.responses import Response

from mlx_engine.errors import EngineDeadError, RequestError

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
# Messages stay small whatever the client sent.
_MAX_MESSAGE = 2000
_MAX_REASONS = 3
RETRY_AFTER_S = 5


class APIError(Exception):
    """An answer other than 200, decided by the HTTP side."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:_MAX_MESSAGE]
        self.type = type
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The envelope."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer."""
        # ASCII only: a message may quote a lone surrogate of the client's, which UTF-8 can't carry.
        return Response(
            json.dumps(self.body()), status_code=self.status, headers=self.headers, media_type="application/json"
        )


def bad_request(message: str, param: str | None = None, code: str | None = None) -> APIError:
    """400: the request can't be served as it is."""
    return APIError(400, message, param=param, code=code)


def unavailable(message: str, *, code: str = "engine_unavailable", retry: bool = True) -> APIError:
    """503: the engine is loading, dead or stopped. `retry` says that waiting helps."""
    headers = {"Retry-After": str(RETRY_AFTER_S)} if retry else {}
    return APIError(503, message, type="server_error", code=code, headers=headers)


def too_many(message: str) -> APIError:
    """429: the queue is full."""
    return APIError(
        429, message, type="rate_limit_error", code="queue_full", headers={"Retry-After": str(RETRY_AFTER_S)}
    )


def to_api_error(error: BaseException) -> APIError:
    """What the client is told of any exception. Unexpected ones are logged, and tell nothing of our inside."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, RequestError):
        return APIError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, EngineDeadError):
        reason = str(error).rstrip(".")
        return unavailable(
            f"The engine ended while it worked on this request: {reason}. Try again.", code="engine_dead"
        )
    if isinstance(error, ValidationError):
        return _from_validation(error)
    logger.error("unexpected error while answering a request", exc_info=error)
    return APIError(500, "The server failed on this request; its log says why.", type="server_error", code="internal")


def _from_validation(error: ValidationError) -> APIError:
    """Names the first few fields at fault; never echoes what was in them."""
    reasons: list[str] = []
    fields: list[str] = []
    for item in error.errors(include_url=False, include_context=False, include_input=False):
        field = ".".join(str(part) for part in item["loc"] if not _is_union_branch(part))
        if field in fields:
            continue  # one field, several branches of a union
        fields.append(field)
        message = str(item["msg"]).removeprefix("Value error, ")
        reasons.append(f"{field}: {message}" if field else message)
    rest = len(reasons) - _MAX_REASONS
    text = "; ".join(reason[:300] for reason in reasons[:_MAX_REASONS]) + (f"; and {rest} more" if rest > 0 else "")
    return bad_request(text, param=fields[0].split(".")[0] or None)


def _is_union_branch(part: object) -> bool:
    return isinstance(part, str) and (part in ("str", "int", "float", "bool") or "[" in part or part[:1].isupper())
