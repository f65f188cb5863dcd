"""The key check in front of vLLM's server: every path but the health checks, HTTP and WebSocket."""

import asyncio

import pytest

from qwen38_3090.api import KEYS_VARIABLE, RequireKey


def ask(path, authorization=None, kind="http", method="POST"):
    """What an application behind the check gets to see: "passed", or the status or close code sent instead."""
    seen = []

    async def app(scope, receive, send):
        seen.append("passed")

    async def send(message):
        seen.append(message.get("status") or message.get("code"))

    headers = [(b"authorization", authorization)] if authorization else []
    scope = {"type": kind, "path": path, "headers": headers, "method": method}
    asyncio.run(RequireKey(app)(scope, None, send))
    return seen[0]


@pytest.fixture(autouse=True)
def keys(monkeypatch):
    monkeypatch.setenv(KEYS_VARIABLE, "first\nsecond")


@pytest.mark.parametrize(
    "path", ["/v1/models", "/invocations", "/metrics", "/scale_elastic_ep", "/healthy", "/health/x"]
)
def test_no_way_in_without_a_key(path):
    assert ask(path) == 401
    for wrong in (b"Bearer", b"Bearer ", b"Bearer third", b"Basic first", b"first", b"Bearer first\nsecond"):
        assert ask(path, wrong) == 401
    for right in (b"Bearer first", b"bearer second"):
        assert ask(path, right) == "passed"


def test_websockets_are_closed():
    assert ask("/v1/realtime", kind="websocket") == 1008
    assert ask("/v1/realtime", b"Bearer first", kind="websocket") == "passed"


@pytest.mark.parametrize("path", ["/health", "/ping", "/version"])
def test_health_checks_are_open(path):
    assert ask(path) == "passed"


def test_preflight_and_lifespan_pass():
    assert ask("/v1/models", method="OPTIONS") == "passed"
    assert ask("", kind="lifespan") == "passed"


def test_without_keys_everything_passes(monkeypatch):
    monkeypatch.delenv(KEYS_VARIABLE)
    assert ask("/invocations") == "passed"
