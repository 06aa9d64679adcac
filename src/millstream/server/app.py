"""The HTTP application: routes, and what they share."""

from __future__ import annotations

import time
import uuid
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from millstream import __version__
from millstream.config import ServerConfig
from millstream.errors import ConfigError, InvalidRequestError, NotFoundError
from millstream.log import log
from millstream.server import fields
from millstream.server.body import BodyReader, ClientGoneError
from millstream.server.docs import docs_page
from millstream.server.errors import add_handlers, shown
from millstream.server.generation import Generations
from millstream.server.llm import ServedLLM
from millstream.server.logprobs import TokenTexts
from millstream.server.middleware import Auth, BodyLimit, RequestId
from millstream.server.params import OptionsBuilder
from millstream.server.prompts import Prompt, Prompts, check_ids
from millstream.server.respond import Responder
from millstream.server.schema import Body, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from millstream.server.shapes import ChatShape, CompletionShape, ReplyHead
from millstream.server.siblings import Siblings

CLIENT_CLOSED_REQUEST = 499


class Served:
    """The model that the application serves, and all that answering takes."""

    def __init__(self, llm: ServedLLM, config: ServerConfig, model_name: str, siblings: Siblings | None) -> None:
        self.llm = llm
        self.siblings = siblings
        self.model_name = model_name
        self.created = int(time.time())
        self.version = __version__
        self.bodies = BodyReader(model_name)
        self.prompts = Prompts(llm.tokenizer)
        self.options = OptionsBuilder(config)
        self.generations = Generations()
        self.texts = TokenTexts(llm.tokenizer)
        self.responder = Responder(
            llm,
            self.generations,
            self.options.seeds,
            stream_interval=config.stream_interval,
            ping_interval=config.sse_ping_interval,
        )

    def head(self, prefix: str) -> ReplyHead:
        return ReplyHead(id=prefix + uuid.uuid4().hex, model=self.model_name, fingerprint=f"millstream-{self.version}")

    async def chat(self, request: Request) -> Response:
        body = await self.bodies.read(request, ChatRequest, fields.CHAT_FIELDS)
        self.responder.check_ready()
        options = self.options.chat(body, vocab_size=self.llm.info.vocab_size)
        token_ids = await self.prompts.chat(body)
        head = self.head("chatcmpl-")
        shape = ChatShape(head, self.texts, include_usage=options.include_usage)
        return await self.responder.respond(request, head.id, [Prompt(token_ids)], options, shape)

    async def completion(self, request: Request) -> Response:
        body = await self.bodies.read(request, CompletionRequest, fields.COMPLETION_FIELDS)
        self.responder.check_ready()
        vocab_size = self.llm.info.vocab_size
        options = self.options.completion(body, vocab_size=vocab_size)
        prompts = await self.prompts.completion(
            body.prompt, add_special_tokens=body.add_special_tokens is not False, vocab_size=vocab_size
        )
        head = self.head("cmpl-")
        shape = CompletionShape(
            head,
            self.texts,
            include_usage=options.include_usage,
            skip_special_tokens=options.skip_special_tokens,
        )
        return await self.responder.respond(request, head.id, prompts, options, shape)

    async def tokenize(self, request: Request) -> Response:
        body = await self.bodies.read(request, TokenizeRequest, fields.TOKENIZE_FIELDS)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("prompt and messages: exactly one of them must be given", param="prompt")
        if body.prompt is None:
            if body.add_special_tokens:
                raise InvalidRequestError(
                    "add_special_tokens is true: the chat template decides on special tokens",
                    param="add_special_tokens",
                )
            token_ids = await self.prompts.chat(body)
        else:
            special = body.add_special_tokens is not False
            [token_ids] = await self.prompts.encode([body.prompt], add_special_tokens=special)
        max_model_len = self.llm.info.max_model_len if self.llm.is_ready else None
        return _json({"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids})

    async def detokenize(self, request: Request) -> Response:
        body = await self.bodies.read(request, DetokenizeRequest, fields.DETOKENIZE_FIELDS)
        check_ids(body.tokens, self.llm.tokenizer.vocab_size, "tokens")
        text = await self.prompts.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens))
        return _json({"prompt": text})

    def model_card(self) -> dict[str, Any]:
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.created,
            "owned_by": "millstream",
            "max_model_len": self.llm.info.max_model_len if self.llm.is_ready else None,
        }


def create_app(llm: ServedLLM, config: ServerConfig, model_name: str, *, siblings: Siblings | None = None) -> FastAPI:
    """The application that serves `llm` under `model_name`, in this process and perhaps `siblings`. Raises ConfigError.

    `app.state.generations` holds what runs: `stop()` on it cuts all streams off with an error event.
    """
    if config.api_key is not None and not config.api_key.strip():
        raise ConfigError("--api-key is empty: give a key, or leave the setting out to serve without one")
    served = Served(llm, config, model_name, siblings)
    # its own /docs loads scripts from elsewhere, which fails offline
    app = FastAPI(title="millstream", version=served.version, docs_url=None, redoc_url=None)
    app.state.generations = served.generations
    app.router.redirect_slashes = False
    add_handlers(app)

    async def client_gone(request: Request, error: Exception) -> Response:
        log.debug("the client went away")
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    app.add_exception_handler(ClientGoneError, client_gone)
    _add_generating_routes(app, served)
    _add_plain_routes(app, served)
    if config.enable_debug:
        _add_debug_routes(app, served)
    # the last one added is the outermost
    app.add_middleware(BodyLimit, max_bytes=config.max_request_bytes)
    if config.api_key is not None:
        app.add_middleware(Auth, api_key=config.api_key)
    app.add_middleware(RequestId)
    _document_bodies(app)
    return app


def _takes(model: type[Body]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _add_generating_routes(app: FastAPI, served: Served) -> None:
    # bodies are read by hand, for errors in OpenAI's form; the schema is told to FastAPI in openapi_extra
    @app.post("/v1/chat/completions", openapi_extra=_takes(ChatRequest), response_class=Response)
    async def chat_completions(request: Request) -> Response:
        """Answer a chat; `stream` sends server-sent events."""
        return await served.chat(request)

    @app.post("/v1/completions", openapi_extra=_takes(CompletionRequest), response_class=Response)
    async def completions(request: Request) -> Response:
        """Go on with one or more prompts; `stream` sends server-sent events."""
        return await served.completion(request)

    @app.post("/tokenize", openapi_extra=_takes(TokenizeRequest), response_class=Response)
    async def tokenize(request: Request) -> Response:
        """The token ids of a text or of a rendered chat."""
        return await served.tokenize(request)

    @app.post("/detokenize", openapi_extra=_takes(DetokenizeRequest), response_class=Response)
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return await served.detokenize(request)


def _add_plain_routes(app: FastAPI, served: Served) -> None:
    llm = served.llm

    @app.get("/v1/models", response_class=Response)
    async def models() -> Response:
        """The one model that is served."""
        return _json({"object": "list", "data": [served.model_card()]})

    @app.get("/v1/models/{model_id:path}", response_class=Response)
    async def model(model_id: str) -> Response:
        """The model called `model_id`."""
        if model_id != served.model_name:
            raise NotFoundError(
                f"model is {shown(model_id)}: this server has {shown(served.model_name)}",
                param="model",
                code="model_not_found",
            )
        return _json(served.model_card())

    @app.head("/health", include_in_schema=False)
    @app.get("/health", response_class=Response)
    async def health() -> Response:
        """200 while this process lives; never asks the engine."""
        return _json({"status": "ok"})

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", response_class=Response)
    async def ready() -> Response:
        """200 when requests are taken, else 503."""
        status = "dead" if llm.is_dead else "stopping" if served.generations.is_stopping else "loading"
        if status == "loading" and llm.is_ready:
            return _json({"status": "ready"})
        return _json({"status": status}, status_code=503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Figures of the whole server in Prometheus' text format."""
        text = llm.metrics.render() if served.siblings is None else await served.siblings.render()
        return Response(text, headers={"content-type": llm.metrics.content_type})

    @app.get("/version", response_class=Response)
    async def version() -> Response:
        return _json({"version": served.version})

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return Response(docs_page(app.openapi()), media_type="text/html")


def _add_debug_routes(app: FastAPI, served: Served) -> None:
    # the server names the file: a client must not choose where it writes
    @app.post("/debug/trace/start", response_class=Response)
    async def start_trace() -> Response:
        """Begin to write what every stage does to a file on the server."""
        served.responder.check_ready()
        return _json({"file": await served.llm.start_trace()})

    @app.post("/debug/trace/stop", response_class=Response)
    async def stop_trace() -> Response:
        """End the trace."""
        served.responder.check_ready()
        return _json({"file": await served.llm.stop_trace()})


def _json(value: Any, *, status_code: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status_code, media_type="application/json")


def _document_bodies(app: FastAPI) -> None:
    """Put the bodies' schemas where the routes' `$ref`s point to."""
    make = app.openapi

    def openapi() -> dict[str, Any]:
        is_new = app.openapi_schema is None
        schema = make()
        if is_new:
            kinds: list[type[BaseModel]] = [ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest]
            _, made = models_json_schema(
                [(kind, "validation") for kind in kinds], ref_template="#/components/schemas/{model}"
            )
            schema.setdefault("components", {}).setdefault("schemas", {}).update(made["$defs"])
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
