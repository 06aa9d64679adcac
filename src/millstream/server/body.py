"""From the bytes of a request to a checked body; everything wrong with it is an InvalidRequestError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect, Request

from millstream.errors import InvalidRequestError, NotFoundError
from millstream.server.errors import shown
from millstream.server.fields import Field, UnknownFields, check_fields
from millstream.server.schema import Body

B = TypeVar("B", bound=Body)

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "a string",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


class ClientGoneError(Exception):
    """The client has closed the connection; nobody reads an answer."""


class BodyReader:
    """Reads bodies for one served model."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._unknown = UnknownFields()

    async def read(self, request: Request, kind: type[B], table: Mapping[str, Field]) -> B:
        """The body of `request` as a `kind`, its other fields checked against `table`.

        Raises InvalidRequestError, NotFoundError (another model), PayloadTooLargeError, ClientGoneError.
        """
        # a page in a browser may post text/plain to any address without asking, but not JSON
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        try:
            data = await request.body()
        except ClientDisconnect:
            raise ClientGoneError from None
        if content_type != "application/json":
            raise InvalidRequestError(
                f"the content-type header is {shown(content_type)}: it must be application/json", code="invalid_json"
            )
        body = parse(data, kind)
        if body.model is not None and body.model != self._model_name:
            raise NotFoundError(
                f"model is {shown(body.model)}: this server has {shown(self._model_name)}",
                param="model",
                code="model_not_found",
            )
        check_fields(body.model_extra or {}, table, self._unknown)
        return body


def parse(data: bytes, kind: type[B]) -> B:
    """`data` as a `kind`. Raises InvalidRequestError with the field's name, its value and what it must be."""
    try:
        raw = from_json(data, allow_inf_nan=False)
    except ValueError as e:
        raise InvalidRequestError(f"the body is not valid JSON: {e}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"the body is {shown(raw)}: it must be a JSON object", code="invalid_json")
    try:
        return kind.model_validate(raw)
    except ValidationError as e:
        raise _told(e.errors(include_url=False, include_context=False)[0], raw) from None


def _told(error: ErrorDetails, raw: Any) -> InvalidRequestError:
    """One of pydantic's errors in our words. Its `loc` also names union branches: only what is in `raw` counts."""
    path, value = "", raw
    for step in error["loc"]:
        if isinstance(value, dict) and step in value:
            path, value = f"{path}.{step}" if path else str(step), value[step]
        elif isinstance(value, list) and isinstance(step, int):
            path, value = f"{path}[{step}]", value[step]
    if error["type"] == "missing":
        name = str(error["loc"][-1])
        path = f"{path}.{name}" if path else name
        return InvalidRequestError(f"{path} is missing: it must be given", param=path, code="missing_field")
    wanted = _EXPECTED.get(error["type"])
    rule = f"it must be {wanted}" if wanted else error["msg"]
    return InvalidRequestError(f"{path} is {shown(value)}: {rule}", param=path, code="invalid_type")
