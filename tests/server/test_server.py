"""A real vLLM server, patched, against a real `openai` client, on the CPU."""

import json
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from qwen38_3090 import patches
from tests.server.conftest import start, stop
from tests.server.w4a16 import write_checkpoint

pytestmark = pytest.mark.server

KEY = "s3cret"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def long_text(words=900):
    return " ".join(f"word{i % 97} and {i}" for i in range(words // 3))


def complete(server, prompt, key="none", **options):
    options = {"max_tokens": 48, "temperature": 0, **options}
    model = options.pop("model", server.model)
    return server.client(key).completions.create(model=model, prompt=prompt, **options)


def test_chat(server):
    answer = server.client().chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": "Who are you?"}], temperature=0
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "stop"
    assert len(choice.message.content.split()) > 10
    assert "<think>" not in choice.message.content and "<|im_end|>" not in choice.message.content


def test_streaming_with_usage(server):
    stream = server.client().chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "Who are you?"}],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    whole = server.client().chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": "Who are you?"}], temperature=0
    )
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert len(chunks) > 5


def test_second_turn_reports_cached_tokens(server):
    messages = [{"role": "user", "content": "A long turn: " + long_text()}]
    first = server.client().chat.completions.create(model=server.model, messages=messages, temperature=0)
    assert first.usage.prompt_tokens > 600
    turn = [
        *messages,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And then?"},
    ]
    second = server.client().chat.completions.create(model=server.model, messages=turn, temperature=0)
    third = server.client().chat.completions.create(model=server.model, messages=turn, temperature=0)
    assert third.usage.prompt_tokens_details.cached_tokens >= second.usage.prompt_tokens_details.cached_tokens > 0
    assert third.choices[0].message.content == second.choices[0].message.content


def test_drafts_are_accepted(server):
    names = [f"vllm:spec_decode_num_{what}_tokens_total" for what in ("draft", "accepted")]
    before = [server.counter(name) for name in names]
    complete(server, "Once upon a time", max_tokens=64, extra_body={"ignore_eos": True})
    drafted, accepted = (server.counter(name) - was for name, was in zip(names, before, strict=True))
    assert drafted > 30 and 0.2 * drafted < accepted < drafted


def test_same_text_with_and_without_drafts_and_cache(server, plain_server):
    """Greedy texts are equal, alone and four at once; lengths around the accepted blocks' edges."""
    prompts = [f"{long_text(30 + 7 * i)} number {i}" for i in range(4)] + ["a", "one two three"]

    def texts(target, key):
        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda p: complete(target, p, key, extra_body={"ignore_eos": True}), prompts)
            return [answer.choices[0].text for answer in answers]

    plain = texts(plain_server, KEY)
    assert texts(server, "none") == plain
    assert texts(server, "none") == plain
    assert [complete(server, p, extra_body={"ignore_eos": True}).choices[0].text for p in prompts] == plain


def test_json_schema(server):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    answer = server.client().chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "Give me a person."}],
        temperature=0,
        max_tokens=400,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    )
    person = json.loads(answer.choices[0].message.content)
    assert set(person) == {"name", "age"} and isinstance(person["age"], int)


def test_a_forced_tool_call(server):
    answer = server.client().chat.completions.create(
        model=server.model,
        messages=[{"role": "user", "content": "Weather in Paris?"}],
        temperature=0,
        max_tokens=400,
        tools=[WEATHER],
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )
    call = answer.choices[0].message.tool_calls[0].function
    assert call.name == "get_weather" and set(json.loads(call.arguments)) == {"city"}


def test_tools_offered_and_not_called(server):
    answer = server.client().chat.completions.create(
        model=server.model, messages=[{"role": "user", "content": "Hello"}], temperature=0, tools=[WEATHER]
    )
    assert answer.choices[0].message.content and not answer.choices[0].message.tool_calls


def test_every_process_is_patched(server):
    """The log of API server, engine core and worker each has the line of the patches, with all of this platform's."""
    lines = [line for line in server.log.read_text().splitlines() if "qwen38_3090 patches in" in line]
    processes = {line.split("patches in ")[1].split(" (pid")[0] for line in lines}
    assert len(processes) == len(lines) == 3, lines
    for process in ("MainProcess", "EngineCore", "VllmWorker"):
        assert any(name.startswith(process) for name in processes), lines
    for patch in patches.selected({}, "cpu"):
        assert all(patch.name in line.split("applied: ")[1].split(";")[0] for line in lines)


def test_the_start_says_what_is_served(server):
    log = server.log.read_text()
    for part in ("mode  demo", "mtp, 3 drafts", "prefix caching on", f"{server.base_url}/v1 (127.0.0.1 only",
                 "qwen3.8-demo, qwen38", "patches  ", "Ready at", "curl "):  # fmt: skip
        assert part in log


def test_both_names_are_served(server):
    assert [model.id for model in server.client().models.list()] == ["qwen3.8-demo", "qwen38"]


def test_unknown_name(server):
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        complete(server, "x", model="gpt-5")


def test_prompt_longer_than_the_context(plain_server):
    with pytest.raises(openai.BadRequestError, match="1024"):
        complete(plain_server, long_text(3000), KEY)
    assert complete(plain_server, "still alive", KEY).choices[0].text


def test_key_refused_and_accepted(plain_server):
    with pytest.raises(openai.AuthenticationError):
        complete(plain_server, "x", "wrong")
    for path in ("/v1/models", "/invocations", "/tokenize", "/metrics", "/openapi.json", "/scale_elastic_ep"):
        assert httpx.get(plain_server.base_url + path).status_code == 401, path
    assert complete(plain_server, "x", KEY).choices[0].text
    assert KEY not in plain_server.log.read_text()


def test_a_new_request_beside_running_ones(server, plain_server):
    """Requests that join and leave while others decode don't change anyone's text."""
    prompts = [long_text(20 + 31 * i) + f" end {i}" for i in range(8)]
    alone = [complete(plain_server, p, KEY, max_tokens=20 + 5 * i).choices[0].text for i, p in enumerate(prompts)]
    with ThreadPoolExecutor(8) as pool:
        together = list(
            pool.map(lambda i: complete(server, prompts[i], max_tokens=20 + 5 * i).choices[0].text, range(8))
        )
    assert together == alone


def test_a_quantized_checkpoint_that_forgets_its_mtp_module(tmp_path):
    """W4A16 with a bf16 MTP module that it does not exempt, as published: stock can't load it; here it drafts."""
    write_checkpoint(tmp_path / "model")
    running = start(tmp_path, MODEL=str(tmp_path / "model"))
    try:
        assert "8 names added" in running.log.read_text()
        complete(running, "Once upon a time", extra_body={"ignore_eos": True})
        assert running.counter("vllm:spec_decode_num_accepted_tokens_total") > 5
    finally:
        stop(running)
