"""The web application: OpenAI's endpoints before one engine."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from deltatree import __version__
from deltatree.decode.options import GenerateOptions
from deltatree.decode.stream import check_prompt
from deltatree.errors import DeltatreeError
from deltatree.pair_api import Pair
from deltatree.serve.engine import Engine, Job, Piece
from deltatree.serve.gate import Gate
from deltatree.serve.metrics import Metrics
from deltatree.serve.options import ServeOptions
from deltatree.serve.refusals import Refusal
from deltatree.serve.replies import Reply, event
from deltatree.serve.requests import check_supported, messages_of, options_of, prompts_of, tools_of
from deltatree.serve.schemas import ChatRequest, CompletionRequest

log = logging.getLogger("deltatree.serve")

REFUSED = {status: {"description": what} for status, what in (
    (400, "The request cannot be answered."), (401, "The API key is missing or wrong."), (404, "Another model is served."),
    (408, "The body did not arrive in time."), (413, "The body is too large."), (429, "The queue is full."),
    (503, "The server is shutting down."), (504, "The request took too long."),
)}  # fmt: skip


class _Gone(Exception):
    """The client has hung up."""


def create_app(pair: Pair, config: ServeOptions | None = None) -> FastAPI:
    """The application for one pair. Its engine is `app.state.engine`; the lifespan's end closes it.

    Raises OptionError if the method in the defaults needs a drafter and the pair has none.
    """
    from deltatree.decode.methods import plan

    config = config or ServeOptions()
    plan(config.defaults, pair.drafter, pair.target.vocab_size, pair.transitions(config.defaults))
    metrics = Metrics()
    engine = Engine(
        pair, max_queue=config.max_queue, keep_conversations=config.keep_conversations, observe=metrics.observe
    )
    metrics.watch(engine)
    service = _Service(pair, config, engine)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(engine.close, config.grace_seconds)

    app = FastAPI(title="deltatree", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.engine = engine
    app.add_middleware(Gate, config=config, metrics=metrics)
    _handle_errors(app)

    @app.post("/v1/chat/completions", responses=REFUSED)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await service.chat(body, request)

    @app.post("/v1/completions", responses=REFUSED)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.complete(body, request)

    @app.get("/v1/models", responses={401: REFUSED[401]})
    async def models() -> dict:
        entry = {"id": config.model_name, "object": "model", "created": service.started, "owned_by": "deltatree"}
        return {"object": "list", "data": [entry | {"max_model_len": pair.target.context_length}]}

    @app.get("/health", responses={503: REFUSED[503]})
    async def health() -> JSONResponse:
        state = {"status": "ok" if engine.is_alive else "stopping", "waiting": engine.num_waiting}
        return JSONResponse(state, 200 if engine.is_alive else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def read_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    described = app.openapi

    def openapi() -> dict:
        document = described()
        for name in ("ChatRequest", "CompletionRequest"):
            document["components"]["schemas"][name]["properties"]["model"]["enum"] = [config.model_name]
        return document

    app.openapi = openapi
    return app


class _Service:
    """From a request to its response."""

    def __init__(self, pair: Pair, config: ServeOptions, engine: Engine) -> None:
        self.pair, self.config, self.engine = pair, config, engine
        self.started = int(time.time())
        self._tokenizer_lock = threading.Lock()  # encoding may set the tokenizer's truncation

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        check_supported(body, self.config)
        self._check_choices(body.n or 1)
        messages, tools = messages_of(body), tools_of(body)
        thinking = body.chat_template_kwargs.enable_thinking if body.chat_template_kwargs else None
        prompt_ids = await self._encode(messages, thinking=thinking, tools=tools)
        parameters = {t["function"]["name"]: t["function"].get("parameters") or {} for t in tools} if tools else None
        reply = Reply("chat", self.config.model_name, body.n or 1, parameters=parameters)
        return await self._answer(body, request, [prompt_ids], reply)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        check_supported(body, self.config)
        prompts = prompts_of(body)
        self._check_choices(len(prompts) * (body.n or 1))
        prompt_ids = [await self._encode(prompt, raw=True) for prompt in prompts]
        reply = Reply("text", self.config.model_name, len(prompts) * (body.n or 1), num_prompts=len(prompts))
        return await self._answer(body, request, prompt_ids, reply)

    def _check_choices(self, count: int) -> None:
        if not 1 <= count <= self.config.max_choices:
            raise Refusal(
                400, f"{count} answers were asked for; from 1 to {self.config.max_choices} are possible", param="n"
            )

    async def _encode(self, prompt, **how) -> list[int]:
        def encode() -> list[int]:
            with self._tokenizer_lock:
                return self.pair.encode(prompt, **how)

        prompt_ids = await asyncio.to_thread(encode)
        check_prompt(prompt_ids, self.pair.target)
        return prompt_ids

    async def _answer(
        self, body: ChatRequest | CompletionRequest, request: Request, prompts: list[list[int]], reply: Reply
    ) -> Response:
        answers = []
        for prompt_ids in prompts:
            options = options_of(body, self.config, room=self.pair.target.context_length - len(prompt_ids))
            answers += [(prompt_ids, _nth(options, i)) for i in range(reply.num_choices // len(prompts))]
        job = Job(answers, time.monotonic() + self.config.timeout_seconds)
        if self.config.log_prompts:
            for prompt_ids in prompts:
                log.info("%s prompt: %s", reply.id, self.pair.tokenizer.decode(prompt_ids))
        self.engine.submit(job)
        try:
            async with _watch(request):
                first = await job.next()  # what is refused now still gets its status
                if body.stream:
                    usage = body.stream_options is not None and body.stream_options.include_usage
                    stream = self._stream(job, first, reply, usage)
                    return StreamingResponse(
                        stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"}
                    )
                await self._collect(job, first, reply)
            return JSONResponse(reply.whole())
        except _Gone:
            self.engine.cancel(job)
            return Response(status_code=499)
        except BaseException:
            self.engine.cancel(job)
            raise

    async def _collect(self, job: Job, first, reply: Reply) -> None:
        done = first
        while True:
            if isinstance(done, Piece):
                reply.add(done.choice, done.text)
            else:
                reply.finish(done.choice, done.generation)
                if len(reply.generations) == reply.num_choices:
                    return
            done = await job.next()

    async def _stream(self, job: Job, first, reply: Reply, usage: bool) -> AsyncIterator[str]:
        try:
            done, opened = first, set()
            while True:
                if done.choice not in opened:
                    opened.add(done.choice)
                    if opening := reply.opening(done.choice):
                        yield event(opening)
                if isinstance(done, Piece):
                    for delta in reply.add(done.choice, done.text):
                        yield event(reply.chunk(done.choice, delta))
                else:
                    for delta in reply.finish(done.choice, done.generation):
                        yield event(reply.chunk(done.choice, delta))
                    yield event(reply.chunk(done.choice, {}, reply.finish_reason(done.choice)))
                    if len(reply.generations) == reply.num_choices:
                        break
                done = await job.next()
            if usage:
                yield event(reply.usage_chunk())
            yield event("[DONE]")
        except DeltatreeError as error:  # too late for a status
            yield event(_refusal(error).body())
        finally:
            self.engine.cancel(job)  # does nothing to a finished one


@asynccontextmanager
async def _watch(request: Request) -> AsyncIterator[None]:
    """Raise _Gone in the body of the block if the client hangs up meanwhile."""
    task, gone = asyncio.current_task(), False

    async def listen() -> None:
        nonlocal gone
        while (await request.receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    listener = asyncio.create_task(listen())
    try:
        yield
    except asyncio.CancelledError:
        if gone and task.uncancel() == 0:
            raise _Gone from None
        raise
    finally:
        listener.cancel()


def _nth(options: GenerateOptions, choice: int) -> GenerateOptions:
    """Each answer of one request has its own seed."""
    if options.seed is None or choice == 0:
        return options
    return replace(options, seed=(options.seed + choice) % (1 << 63))


def _refusal(error: DeltatreeError) -> Refusal:
    return error if isinstance(error, Refusal) else Refusal(400, str(error))


def _handle_errors(app: FastAPI) -> None:
    """Every error is one sentence in OpenAI's shape; the server's insides stay in its log."""

    def response(refusal: Refusal) -> JSONResponse:
        return JSONResponse(refusal.body(), refusal.status, refusal.headers())

    @app.exception_handler(DeltatreeError)
    async def refused(request: Request, error: DeltatreeError) -> JSONResponse:
        return response(_refusal(error))

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"] if part != "body"]
        if first["type"] == "json_invalid":
            return response(Refusal(400, "the request body is not valid JSON"))
        if first["type"] == "extra_forbidden":
            return response(
                Refusal(400, f"{'.'.join(where)[:200]!r} is not known here; leave it out", param=where[0][:200])
            )
        name = ".".join(where)[:200] or "the request body"
        message = f"{name}: {first['msg'][0].lower()}{first['msg'][1:]}"
        return response(Refusal(400, _printable(message), param=_printable(where[0][:200]) if where else None))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message = {404: "there is nothing at this path", 405: "this path takes another method"}.get(
            error.status_code, str(error.detail)
        )
        refusal = Refusal(error.status_code, message)
        return JSONResponse(refusal.body(), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(request: Request, error: Exception) -> JSONResponse:
        return response(Refusal(500, "the server failed on this request; its log says more"))


def _printable(text: str) -> str:
    """Half surrogate pairs cannot be sent back."""
    return text.encode("utf-8", errors="replace").decode("utf-8")
