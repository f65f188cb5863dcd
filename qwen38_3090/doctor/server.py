"""A running server: health, names, a completion, the KV pool, cached tokens on a second turn, accepted drafts."""

import time
import uuid
from argparse import Namespace
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import httpx

from qwen38_3090 import serve
from qwen38_3090.doctor.finding import FAIL, PASS, SKIP, WARN, Finding
from qwen38_3090.patches.patch import VLLM_VERSION

_found = partial(Finding, "live server")
_LOG = "Read the server's log."
_OTHER = "Run verify.sh with the settings (environment, .env) that the server was started with."

WEB_SECONDS = 10
# A first request may compile kernels.
ANSWER_SECONDS = 180
COUNTER_SECONDS = 3
ANSWER_TOKENS = 64
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


class NoAnswer(Exception):
    """The server answered, but not as the API promises."""


def check(parsed: Namespace, environ: Mapping[str, str]) -> Iterator[Finding]:
    """All checks of this group on the server that vLLM's parsed command line describes."""
    url = serve.url(parsed)
    key = (parsed.api_key or [environ.get("VLLM_API_KEY")])[0]
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    # Neither a proxy nor a certificate in a name other than 127.0.0.1 is in the way of a server on this machine.
    direct: dict[str, Any] = {"trust_env": False, "verify": not parsed.ssl_certfile}
    with httpx.Client(base_url=url, headers=headers, timeout=WEB_SECONDS, **direct) as web:
        health = _health(web, url)
        yield health
        if health.status != PASS:
            return
        try:
            models = _models(web)
            found, model = _served(models, parsed)
            yield found
            if model:
                yield from _requests(parsed, web, key or "none", direct, model, models[model].get("max_model_len"))
        except NoAnswer as error:
            yield _found("API", FAIL, str(error), _LOG)
        except httpx.TransportError as error:
            yield _found("API", FAIL, f"the server stopped answering ({type(error).__name__})", _LOG)


def _health(web: httpx.Client, url: str) -> Finding:
    try:
        health = web.get("/health")
        version = _json(web.get("/version")).get("version")
    except httpx.ConnectError:
        return _found("health", SKIP, f"no server at {url}, or it still loads; `bash scripts/serve.sh` starts one")
    except httpx.TransportError as error:
        detail = f"{url} takes connections, but does not answer as a server should ({type(error).__name__})"
        return _found("health", FAIL, detail, f"{_LOG} If another program is there, set another PORT.")
    if health.status_code == 503:
        return _found("health", FAIL, f"{url}: the engine has died", f"{_LOG} Then restart it.")
    if health.status_code != 200 or version is None:
        return _found("health", FAIL, f"{url} is not vLLM (/health: {health.status_code})", "Set PORT to the server's.")
    if str(version).partition("+")[0] != VLLM_VERSION:
        remedy = "Start the server with `bash scripts/serve.sh`."
        return _found("health", FAIL, f"{url} is vLLM {version}, not {VLLM_VERSION}", remedy)
    return _found("health", PASS, f"vLLM {version} at {url}")


def _models(web: httpx.Client) -> dict[str, dict[str, Any]]:
    response = web.get("/v1/models")
    if response.status_code == 401:
        return {}
    models = _json(response).get("data")
    if response.status_code != 200 or not isinstance(models, list):
        raise NoAnswer(f"/v1/models answers {response.status_code} without a list of models")
    return {model["id"]: model for model in models}


def _served(models: Mapping[str, Any], parsed: Namespace) -> tuple[Finding, str | None]:
    """The finding, and the name to ask for if the right model is served."""
    wanted = parsed.served_model_name or [parsed.model]
    if not models:
        return _found("models", FAIL, "the server refuses the key", "Set VLLM_API_KEY to the server's."), None
    absent = [name for name in wanted if name not in models]
    if absent:
        return _found("models", FAIL, f"it serves {', '.join(models)}, not {', '.join(absent)}", _OTHER), None
    length = models[wanted[0]].get("max_model_len")
    return _found("models", PASS, f"{', '.join(models)}; up to {length} tokens a request"), wanted[0]


def _requests(
    parsed: Namespace, web: httpx.Client, key: str, direct: dict[str, Any], model: str, max_len: int | None
) -> Iterator[Finding]:
    """The checks that ask the model something, through the client that users have."""
    import openai

    before = _metrics(web)
    cache = next((sample.labels for sample in before.get("vllm:cache_config_info", ())), {})
    yield _pool(parsed, cache)
    yield _backend(parsed)
    with openai.OpenAI(
        base_url=f"{serve.url(parsed)}/v1", api_key=key, timeout=ANSWER_SECONDS, max_retries=0,
        http_client=openai.DefaultHttpxClient(**direct),
    ) as client:  # fmt: skip
        try:
            yield _completion(client, model)
            yield _second_turn(client, model, cache, max_len)
        except openai.APIStatusError as error:
            raise NoAnswer(f"a chat completion is answered with {error.status_code}: {error.message}") from None
        except openai.APIError as error:
            raise NoAnswer(f"a chat completion fails ({type(error).__name__}: {error})") from None
    yield _drafts(parsed, web, before)


def _pool(parsed: Namespace, cache: Mapping[str, str]) -> Finding:
    if not cache:
        detail = "/metrics does not tell the KV cache's size"
        return _found("KV pool", WARN, detail, "Start the server without --disable-log-stats.")
    kind, prefixes = cache["cache_dtype"], cache["enable_prefix_caching"] == "True"
    detail = (
        f"{cache['kv_cache_size_tokens']} tokens in {cache['num_gpu_blocks']} blocks of {_block(cache)}, type {kind}, "
        f"recurrent state {cache['mamba_ssm_cache_dtype']}, prefix caching {'on' if prefixes else 'off'}"
    )
    if (kind, prefixes) != (parsed.kv_cache_dtype, parsed.enable_prefix_caching):
        return _found("KV pool", WARN, f"{detail}: not what the settings here say", _OTHER)
    return _found("KV pool", PASS, detail)


def _backend(parsed: Namespace) -> Finding:
    asked = f"the settings ask for {parsed.attention_backend}" if parsed.attention_backend else "vLLM chooses it"
    return _found("attention", SKIP, f"vLLM {VLLM_VERSION} names its attention backend in its log only; {asked}")


def _completion(client, model: str) -> Finding:
    start = time.monotonic()
    answer = _ask(client, model, [{"role": "user", "content": "Who are you?"}])
    seconds = time.monotonic() - start
    message = answer.choices[0].message
    text = "".join(str(getattr(message, part, None) or "") for part in ("reasoning", "content"))
    if not text.strip() or not answer.usage.completion_tokens:
        return _found("completion", FAIL, f"an empty answer: {answer.choices[0].to_dict()}", _LOG)
    if len(text) > 8 and len(set(text)) == 1:
        remedy = "Weights or kernels are broken: check that every patch passes and that the model is complete."
        return _found("completion", FAIL, f"garbage: {text[:40]!r}", remedy)
    return _found("completion", PASS, f"{answer.usage.completion_tokens} tokens in {seconds:.1f} s: {text[:40]!r}")


def _second_turn(client, model: str, cache: Mapping[str, str], max_len: int | None) -> Finding:
    """A conversation whose first turn fills more than three cache blocks: the second must find some of them."""
    name = "second turn"
    if cache and cache["enable_prefix_caching"] != "True":
        return _found(name, SKIP, "the server runs without prefix caching")
    words = 7 * _block(cache) // 2
    if max_len and words + 4 * ANSWER_TOKENS > max_len:
        return _found(name, SKIP, f"{max_len} tokens of context are too few for {words} in the cache and an answer")
    # A common word is a token; the number makes the prompt new to the cache.
    chat = [{"role": "user", "content": f"{uuid.uuid4().int} " + "the " * words + "end. Who are you?"}]
    first = _ask(client, model, chat)
    chat += [{"role": "assistant", "content": "I see."}, {"role": "user", "content": "And then?"}]
    second = _ask(client, model, chat)
    details = second.usage.prompt_tokens_details
    if details is None:
        remedy = "Start the server with --enable-prompt-tokens-details."
        return _found(name, WARN, "the server does not tell how many tokens were cached", remedy)
    detail = f"{details.cached_tokens} of {second.usage.prompt_tokens} prompt tokens from the cache"
    if not details.cached_tokens:
        detail += f", the first turn had {first.usage.prompt_tokens}"
        remedy = "Check that every patch above passes and that PREFIX_CACHE is on for the server."
        return _found(name, FAIL, detail, remedy)
    return _found(name, PASS, detail)


def _drafts(parsed: Namespace, web: httpx.Client, before: Mapping[str, list]) -> Finding:
    asked = (parsed.speculative_config or {}).get("method")
    if DRAFTED not in before:
        if asked:
            detail = f"the server does not speculate, but the settings here ask for {asked}"
            return _found("drafts", WARN, detail, _OTHER)
        return _found("drafts", SKIP, "the server runs without speculation")
    deadline = time.monotonic() + COUNTER_SECONDS
    while True:
        after = _metrics(web)
        drafted, accepted = (_sum(after, name) - _sum(before, name) for name in (DRAFTED, ACCEPTED))
        if accepted > 0 or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    detail = f"{accepted:.0f} of {drafted:.0f} draft tokens accepted"
    if not accepted:
        remedy = "The drafts are useless: check that every patch passes and that the MTP tensors are this model's."
        return _found("drafts", FAIL, detail, remedy)
    return _found("drafts", PASS, f"{detail} ({accepted / drafted:.0%})")


def _ask(client, model: str, chat: list[dict[str, str]]):
    answer = client.chat.completions.create(model=model, messages=chat, max_tokens=ANSWER_TOKENS, temperature=0)
    if not getattr(answer, "choices", None) or not getattr(answer, "usage", None):
        raise NoAnswer(f"a chat completion is answered without choices or usage: {str(answer)[:200]}")
    return answer


def _block(cache: Mapping[str, str]) -> int:
    """Tokens in a block of the prefix cache; 1024 where the server does not tell."""
    sizes = [int(cache[name]) for name in ("block_size", "mamba_block_size") if cache.get(name, "").isdigit()]
    return max(sizes, default=1024)


def _metrics(web: httpx.Client) -> dict[str, list]:
    """Samples of /metrics by name."""
    from prometheus_client.parser import text_string_to_metric_families

    response = web.get("/metrics")
    found: dict[str, list] = {}
    try:
        for family in text_string_to_metric_families(response.text if response.status_code == 200 else ""):
            for sample in family.samples:
                found.setdefault(sample.name, []).append(sample)
    except ValueError as error:
        raise NoAnswer(f"/metrics is not in Prometheus's format ({error})") from None
    return found


def _sum(metrics: Mapping[str, list], name: str) -> float:
    return sum(sample.value for sample in metrics.get(name, ()))


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        content = response.json()
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {}
