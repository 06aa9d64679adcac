"""How errors are told to clients: OpenAI's envelope, for every path and every cause.

{"error": {"message": "...", "type": "invalid_request_error", "param": "temperature", "code": null}}
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from millstream.errors import EngineDeadError, OverloadedError, RequestError
from millstream.log import log

MAX_MESSAGE_LEN = 600
MAX_VALUE_LEN = 80
RETRY_AFTER_SECONDS = 1


class PayloadTooLargeError(RequestError):
    """The body is larger than --max-request-bytes."""

    status = 413
    code = "request_too_large"


class NotReadyError(RequestError):
    """The model is still being loaded."""

    status = 503
    type = "server_error"
    code = "not_ready"


class ServerStoppingError(RequestError):
    """The server is being stopped, the answer is cut off."""

    status = 503
    type = "server_error"
    code = "server_stopping"


class InternalError(RequestError):
    """Something went wrong here; the log has the detail."""

    status = 500
    type = "server_error"
    code = "internal_error"


class ErrorBody(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorEnvelope(msgspec.Struct):
    error: ErrorBody


_short = reprlib.Repr()
_short.maxstring = _short.maxother = MAX_VALUE_LEN
_short.maxlong = 40
_short.maxlevel = 3


def shown(value: object) -> str:
    """`value` as it may stand in an error message: its repr, cut. Quick for a body of megabytes too."""
    text = _short.repr(value)
    return text if len(text) <= MAX_VALUE_LEN else text[: MAX_VALUE_LEN - 3] + "..."


def as_request_error(error: BaseException, *, request_id: str) -> RequestError:
    """What a client is told of `error`. One that nobody foresaw is logged here and told without detail."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineDeadError):
        return _EngineDead("the engine has ended and can't answer; the server must be restarted")
    log.error("request %s failed", request_id, exc_info=error)
    return InternalError(f"the server failed to answer this request; its log has the detail for id {request_id}")


class _EngineDead(RequestError):
    status = 503
    type = "server_error"
    code = "engine_dead"


def envelope(error: RequestError) -> bytes:
    message = error.message
    if len(message) > MAX_MESSAGE_LEN:
        message = message[: MAX_MESSAGE_LEN - 3] + "..."
    return msgspec.json.encode(ErrorEnvelope(ErrorBody(message, error.type, error.param, error.code)))


def error_headers(error: RequestError) -> dict[str, str]:
    """What the official client's retry logic goes by."""
    if isinstance(error, _EngineDead):
        return {"x-should-retry": "false"}
    if isinstance(error, OverloadedError | NotReadyError):
        return {"retry-after": str(RETRY_AFTER_SECONDS)}
    if error.status == 401:
        return {"www-authenticate": "Bearer"}
    return {}


def error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    return Response(
        envelope(error),
        status_code=error.status,
        media_type="application/json",
        headers={**error_headers(error), **(headers or {})},
    )


def request_id_of(request: Request) -> str:
    """The id that the reply carries as x-request-id."""
    return str(request.scope.get("state", {}).get("request_id", "-"))


def add_handlers(app: FastAPI) -> None:
    """Answer every error that a handler or the router raises in the envelope."""

    async def on_error(request: Request, error: Exception) -> Response:
        return error_response(as_request_error(error, request_id=request_id_of(request)))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = RequestError(_http_message(request, error.status_code, error.detail))
        told.type = {404: "not_found_error"}.get(error.status_code, told.type)
        told.code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        response = error_response(told, error.headers)
        response.status_code = error.status_code
        return response

    app.add_exception_handler(RequestError, on_error)
    app.add_exception_handler(EngineDeadError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)


def _http_message(request: Request, status: int, detail: Any) -> str:
    path, method = shown(request.scope["path"]), request.method
    if status == 404:
        return f"there is no {path} here; GET /docs lists what there is"
    if status == 405:
        return f"{path} does not take {method}"
    return str(detail)
