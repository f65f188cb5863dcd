"""The doctor's checks of a running server, against one that misbehaves in one way at a time."""

import json
import socket
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from qwen38_3090.doctor import server as doctor
from qwen38_3090.doctor.finding import FAIL, PASS, SKIP, WARN
from tests.server.doctor import by_check, command_line, statuses

KEY = "s3cret"


class Imitation:
    """What vLLM 0.27.1 would answer; a test changes an attribute or an answer."""

    def __init__(self):
        self.key = None
        self.names = ["demo"]
        self.max_model_len = 8192
        self.text = "Hello, I am a model."
        self.cached = [0, 256]
        self.details = True
        self.labels = {
            "block_size": "128", "mamba_block_size": "16", "cache_dtype": "auto", "num_gpu_blocks": "1365",
            "kv_cache_size_tokens": "151109", "enable_prefix_caching": "True", "mamba_ssm_cache_dtype": "float32",
        }  # fmt: skip
        self.speculates = True
        self.accepts = 20
        self.drafted = self.accepted = 0
        self.answers = {}
        self.asked = []

    def answer(self, method, path, body, authorization):
        """(status, content) of a request; content None drops the connection."""
        if path in self.answers:
            return self.answers[path]
        if path == "/health":
            return 200, ""
        if path == "/version":
            return 200, {"version": "0.27.1"}
        if path == "/metrics":
            return 200, self.metrics()
        if self.key and authorization != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        if path == "/v1/models":
            return 200, {"data": [{"id": name, "max_model_len": self.max_model_len} for name in self.names]}
        if (method, path) == ("POST", "/v1/chat/completions"):
            return 200, self.completion(body)
        return 404, {"detail": "Not Found"}

    def completion(self, body):
        self.asked.append(body)
        self.drafted += 40
        self.accepted += self.accepts
        words = sum(len(message["content"].split()) for message in body["messages"])
        usage = {"prompt_tokens": words, "completion_tokens": len(self.text.split()), "total_tokens": 0}
        if self.details:
            # The first request is the short one, the two turns follow.
            turn = len(self.asked) - 2
            usage["prompt_tokens_details"] = {"cached_tokens": self.cached[turn] if turn >= 0 else 0}
        message = {"role": "assistant", "content": self.text, "reasoning": None}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        return {
            "id": "1", "object": "chat.completion", "created": 1, "model": body["model"], "choices": [choice],
            "usage": usage,
        }  # fmt: skip

    def metrics(self):
        lines = []
        if self.labels:
            labels = ",".join(f'{name}="{value}"' for name, value in self.labels.items())
            lines += ["# TYPE vllm:cache_config_info gauge", f"vllm:cache_config_info{{{labels}}} 1.0"]
        if self.speculates:
            for name, value in (("draft", self.drafted), ("accepted", self.accepted)):
                metric = f"vllm:spec_decode_num_{name}_tokens"
                lines += [f"# TYPE {metric} counter"]
                lines += [f'{metric}_total{{engine="{engine}"}} {value / 2}' for engine in range(2)]
        return "\n".join(lines) + "\n"


@contextmanager
def listening(imitation):
    class Handler(BaseHTTPRequestHandler):
        def respond(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
            status, content = imitation.answer(self.command, self.path, body, self.headers.get("Authorization"))
            if content is None:
                self.close_connection = True
                return
            data = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(content, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = respond

        def log_message(self, *args):
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    try:
        yield web.server_address[1]
    finally:
        web.shutdown()
        web.server_close()


@pytest.fixture
def examine(monkeypatch):
    """`examine(imitation, **command line)`: the findings about it."""
    monkeypatch.setattr(doctor, "COUNTER_SECONDS", 0.1)
    monkeypatch.setattr(doctor, "WEB_SECONDS", 2)

    def call(imitation, environ=None, **changes):
        imitation.asked.clear()
        with listening(imitation) as port:
            return by_check(doctor.check(command_line(port=port, **changes), environ or {}))

    return call


def test_a_good_server(examine):
    imitation = Imitation()
    found = examine(imitation)
    assert list(found) == ["health", "models", "KV pool", "attention", "completion", "second turn", "drafts"]
    assert statuses(found) == {PASS, SKIP} and found["attention"].status == SKIP
    assert "151109 tokens in 1365 blocks of 128, type auto" in found["KV pool"].detail
    assert "'Hello, I am a model.'" in found["completion"].detail
    assert found["second turn"].detail.startswith("256 of ")
    assert found["drafts"].detail == "60 of 120 draft tokens accepted (50%)"
    first, second = (request["messages"] for request in imitation.asked[1:])
    assert len(first[0]["content"].split()) > 3 * 128 and second[0] == first[0] and len(second) == 3


def test_two_runs_ask_two_different_long_prompts(examine):
    prompts = set()
    for _ in range(2):
        imitation = Imitation()
        examine(imitation)
        prompts.add(imitation.asked[1]["messages"][0]["content"][:30])
    assert len(prompts) == 2


def test_no_server():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    found = by_check(doctor.check(command_line(port=port), {}))
    assert list(found) == ["health"] and found["health"].status == SKIP
    assert f"no server at http://127.0.0.1:{port}" in found["health"].detail


def test_a_port_that_never_answers(monkeypatch):
    monkeypatch.setattr(doctor, "WEB_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found = by_check(doctor.check(command_line(port=silent.getsockname()[1]), {}))
    assert found["health"].status == FAIL and "does not answer" in found["health"].detail


@pytest.mark.parametrize(
    ("answers", "detail"),
    [
        ({"/health": (503, "")}, "the engine has died"),
        ({"/health": (404, "")}, "is not vLLM (/health: 404)"),
        ({"/version": (200, "<html>")}, "is not vLLM"),
        ({"/version": (200, ["0.27.1"])}, "is not vLLM"),
        ({"/version": (200, {"version": "0.28.0"})}, "is vLLM 0.28.0, not 0.27.1"),
        ({"/health": (200, None)}, "does not answer as a server should (RemoteProtocolError)"),
    ],
)
def test_another_or_a_dead_server(examine, answers, detail):
    imitation = Imitation()
    imitation.answers = answers
    found = examine(imitation)
    assert list(found) == ["health"] and found["health"].status == FAIL and detail in found["health"].detail


def test_keys(examine):
    imitation = Imitation()
    imitation.key = KEY
    refused = examine(imitation, {"VLLM_API_KEY": "wrong"})["models"]
    assert refused.status == FAIL and refused.remedy == "Set VLLM_API_KEY to the server's."
    assert examine(imitation)["models"].status == FAIL
    assert "drafts" in examine(imitation, {"VLLM_API_KEY": KEY})
    assert "drafts" in examine(imitation, api_key=[KEY, "other"])


def test_proxies_are_not_asked(examine, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    assert FAIL not in statuses(examine(Imitation()))


def test_other_names(examine):
    imitation = Imitation()
    imitation.names = ["llama"]
    found = examine(imitation)
    assert list(found) == ["health", "models"] and found["models"].detail == "it serves llama, not demo"
    assert found["models"].status == FAIL and "settings" in found["models"].remedy


@pytest.mark.parametrize(
    ("path", "answer", "detail"),
    [
        ("/v1/models", (200, "<html>"), "/v1/models answers 200 without a list"),
        ("/v1/models", (500, {"data": []}), "/v1/models answers 500"),
        ("/v1/models", (200, None), "stopped answering"),
        ("/metrics", (200, 'vllm:x{a="b} 1'), "/metrics is not in Prometheus's format"),
        ("/v1/chat/completions", (500, {"error": {"message": "boom"}}), "answered with 500: "),
        ("/v1/chat/completions", (200, None), "APIConnectionError"),
        ("/v1/chat/completions", (200, {}), "without choices or usage"),
        ("/v1/chat/completions", (200, "<html>"), "without choices or usage: <html>"),
    ],
)
def test_answers_that_break_the_api(examine, path, answer, detail):
    imitation = Imitation()
    imitation.answers = {path: answer}
    found = examine(imitation)["API"]
    assert found.status == FAIL and detail in found.detail and "log" in found.remedy


@pytest.mark.parametrize(("text", "detail"), [("", "an empty answer"), ("!" * 64, "garbage: '!!!!")])
def test_useless_answers(examine, text, detail):
    imitation = Imitation()
    imitation.text = text
    found = examine(imitation)["completion"]
    assert found.status == FAIL and found.detail.startswith(detail)


def test_a_pool_of_other_settings(examine):
    imitation = Imitation()
    imitation.labels["cache_dtype"] = "fp8"
    found = examine(imitation)["KV pool"]
    assert found.status == WARN and "not what the settings here say" in found.detail
    assert examine(Imitation(), enable_prefix_caching=False)["KV pool"].status == WARN


def test_a_pool_that_is_not_told(examine):
    imitation = Imitation()
    imitation.labels = {}
    found = examine(imitation)
    assert found["KV pool"].status == WARN and "--disable-log-stats" in found["KV pool"].remedy
    assert found["second turn"].status == PASS


def test_a_backend_that_the_settings_name(examine):
    assert "ask for FLASHINFER" in examine(Imitation(), attention_backend="FLASHINFER")["attention"].detail


def test_nothing_cached(examine):
    imitation = Imitation()
    imitation.cached = [0, 0]
    found = examine(imitation)["second turn"]
    assert found.status == FAIL and found.detail.startswith("0 of ")


def test_cached_tokens_that_are_not_told(examine):
    imitation = Imitation()
    imitation.details = False
    found = examine(imitation)["second turn"]
    assert found.status == WARN and "--enable-prompt-tokens-details" in found.remedy


def test_no_prefix_cache(examine):
    imitation = Imitation()
    imitation.labels["enable_prefix_caching"] = "False"
    assert examine(imitation, enable_prefix_caching=False)["second turn"].status == SKIP


def test_a_context_too_short_for_two_turns(examine):
    imitation = Imitation()
    imitation.max_model_len = 512
    found = examine(imitation)["second turn"]
    assert found.status == SKIP and len(imitation.asked) == 1


def test_drafts_that_are_never_accepted(examine):
    imitation = Imitation()
    imitation.accepts = 0
    found = examine(imitation)["drafts"]
    assert found.status == FAIL and found.detail == "0 of 120 draft tokens accepted"


def test_no_speculation(examine):
    imitation = Imitation()
    imitation.speculates = False
    assert examine(imitation)["drafts"].status == WARN
    assert examine(imitation, speculative_config=None)["drafts"].status == SKIP
