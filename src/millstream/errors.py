"""Every error millstream raises on purpose.

    MillstreamError
    ├── ConfigError              a flag, YAML key or variable has a bad value        exit 2
    ├── ModelError               the model's files are missing, odd or not supported exit 2
    │   └── DownloadError        fetching a model failed                             exit 1
    ├── RequestError             a client's request can't be served; has an HTTP status
    │   ├── InvalidRequestError  400  a field has a bad value, or is not supported
    │   │   └── ContextLengthError    the prompt and its answer do not fit
    │   ├── AuthenticationError  401
    │   ├── NotFoundError        404
    │   └── OverloadedError      429  the queue is full; try later
    └── EngineDeadError          503  the engine process is gone; nothing more will be answered

Messages are sentences for the person who reads them: they name the field, the value and the limit.
"""

from __future__ import annotations


class MillstreamError(Exception):
    """Base of all errors that millstream raises on purpose."""


class ConfigError(MillstreamError):
    """A setting has a value that can't work."""


class ModelError(MillstreamError):
    """The model's files are missing, inconsistent or of an unsupported kind."""


class DownloadError(ModelError):
    """A model could not be fetched."""


class RequestError(MillstreamError):
    """A request that is answered with an error. `param` names the field, `code` is OpenAI's code."""

    status = 400
    type = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else type(self).code


class InvalidRequestError(RequestError):
    """A field of the request has a bad value or is not supported."""


class ContextLengthError(InvalidRequestError):
    """The prompt (and the answer asked for) is longer than the model's context."""

    code = "context_length_exceeded"


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFoundError(RequestError):
    """The model or path does not exist."""

    status = 404
    type = "not_found_error"


class OverloadedError(RequestError):
    """The queue is full; the same request may be accepted later."""

    status = 429
    type = "overloaded_error"
    code = "queue_full"


class EngineDeadError(MillstreamError):
    """The engine process has ended; open and new requests can't be answered."""
