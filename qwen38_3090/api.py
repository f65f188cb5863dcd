"""ASGI middleware in front of vLLM's server."""

import json
import os
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

KEYS_VARIABLE = "QWEN38_3090_API_KEYS"
OPEN_PATHS = ("/health", "/ping", "/version")


class RequireKey:
    """Refuse every HTTP and WebSocket request without one of the API keys, but for health checks and the version.

    vLLM asks for the key below /v1, /v2, /inference and /cohere only; /invocations answers chats, and
    /scale_elastic_ep changes the engine. The keys, one a line, are in KEYS_VARIABLE, which `serve` sets.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self.app = app
        self.keys = [key.encode() for key in os.environ.get(KEYS_VARIABLE, "").splitlines() if key]

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass the request on, or answer 401."""
        guarded = scope["type"] in ("http", "websocket") and scope.get("method") != "OPTIONS"
        if guarded and self.keys and scope["path"] not in OPEN_PATHS and not self._authorized(scope):
            await _refuse(scope["type"], send)
        else:
            await self.app(scope, receive, send)

    def _authorized(self, scope: dict[str, Any]) -> bool:
        for name, value in scope["headers"]:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                return any(secrets.compare_digest(value[7:].strip(), key) for key in self.keys)
        return False


async def _refuse(kind: str, send: Any) -> None:
    if kind == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    body = json.dumps({"error": "Unauthorized"}).encode()
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})
