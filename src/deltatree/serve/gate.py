"""What every request passes before it is read: the key, the size limit, the count."""

from __future__ import annotations

import asyncio
import hmac

from starlette.responses import JSONResponse

from deltatree.serve.metrics import Metrics
from deltatree.serve.options import ServeOptions
from deltatree.serve.refusals import Refusal

BODY_SECONDS = 60
"""A body must have arrived by then."""

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/metrics")


class Gate:
    """ASGI middleware. Bodies are read whole, up to the limit, before anything looks at them."""

    def __init__(self, app, config: ServeOptions, metrics: Metrics) -> None:
        self.app, self.config, self.metrics = app, config, metrics

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in PATHS else "other"

        async def counted(message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.requests.labels(path, message["status"]).inc()
            await send(message)

        try:
            self._check_key(scope)
            body = await self._read(scope, receive)
        except Refusal as refusal:
            headers = refusal.headers() | {"Connection": "close"}
            await JSONResponse(refusal.body(), refusal.status, headers)(scope, receive, counted)
            return
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def replayed():
            return pending.pop() if pending else await receive()

        await self.app(scope, replayed, counted)

    def _check_key(self, scope) -> None:
        if self.config.api_key is None or not scope["path"].startswith("/v1/"):
            return
        given = dict(scope["headers"]).get(b"authorization", b"")
        if not hmac.compare_digest(given, f"Bearer {self.config.api_key}".encode()):
            raise Refusal(401, "this server asks for its API key as a bearer token", code="invalid_api_key")

    async def _read(self, scope, receive) -> bytes:
        limit = self.config.max_body_bytes
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        patience = int(declared[:20]) <= 8 * limit if declared.isdigit() else True
        body, size = bytearray(), 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while patience and size <= 8 * limit:
                    message = await receive()
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= limit:
                        body += part
                    if not message.get("more_body", False):
                        break
        except TimeoutError:
            raise Refusal(408, "the request body did not arrive in time; send it again") from None
        if not patience or size > limit:  # most clients read an answer only once they have sent everything
            raise Refusal(413, f"the request body is above the limit of {limit} bytes; send less")
        return bytes(body)
