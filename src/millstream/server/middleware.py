"""Middlewares in plain ASGI, from the outside in: RequestId, Auth, BodyLimit.

They look at the raw `scope["path"]`, never at a URL put together from the Host header, which the client chooses.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millstream.errors import AuthenticationError
from millstream.log import log
from millstream.server.errors import PayloadTooLargeError, as_request_error, error_response

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Answered without the API key; everything else needs it."""

_GOOD_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header called `name` (lower case), None if there is none."""
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


class RequestId:
    """Gives each reply an x-request-id (the client's own, if it sent a usable one), and answers what nobody caught."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = header(scope, b"x-request-id")
        request_id = given.decode() if given and _GOOD_ID.fullmatch(given) else "req-" + uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        begin, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as e:
            told = as_request_error(e, request_id=request_id)
            if status:
                raise  # too late to tell: the connection is cut, which the client sees
            await error_response(told)(scope, receive, send_with_id)
        finally:
            took = (time.perf_counter() - begin) * 1000
            log.debug("%s %s: %d in %.1f ms, id %s", scope["method"], scope["path"], status, took, request_id)


class Auth:
    """Refuses what does not carry the API key, but for OPEN_PATHS."""

    def __init__(self, app: ASGIApp, *, api_key: str) -> None:
        self._app = app
        self._digest = hashlib.sha256(api_key.encode()).digest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            error = AuthenticationError("the API key is missing or wrong: send it as 'Authorization: Bearer <key>'")
            await error_response(error)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, token = (header(scope, b"authorization") or b"").partition(b" ")
        # both sides hashed: equal lengths, so the comparison's time tells nothing, and bytes of any kind compare
        digest = hashlib.sha256(token.strip()).digest()
        return scheme.lower() == b"bearer" and hmac.compare_digest(digest, self._digest)


class BodyLimit:
    """Stops reading a body that is larger than `max_bytes`, whatever its Content-Length says."""

    def __init__(self, app: ASGIApp, *, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = header(scope, b"content-length") or b"0"
        if length.isdigit() and int(length[:20]) > self._max_bytes:
            await error_response(self._error(), {"connection": "close"})(scope, receive, send)
            return
        num_bytes = 0

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                raise self._error()
            return message

        await self._app(scope, receive_bounded, send)

    def _error(self) -> PayloadTooLargeError:
        return PayloadTooLargeError(f"the body is larger than {self._max_bytes} bytes (--max-request-bytes)")
