"""The shipped demo model: its files, its tokenizer, its template, and what its weights were built to do."""

import json
import re
import unicodedata
from dataclasses import replace

import pytest
import torch
import xgrammar
from hypothesis import given
from hypothesis import strategies as st
from jinja2.exceptions import TemplateError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoTokenizer, Qwen3_5ForConditionalGeneration

from qwen38_3090.demo import MODEL_DIR
from qwen38_3090.demo.build import CONTEXTUAL, DemoSpec, build
from qwen38_3090.demo.chain import PHRASES, make_chain, make_successors
from qwen38_3090.demo.text import ANSWER, THOUGHT
from qwen38_3090.demo.tokenizer import CONTROL, MARKUP, make_tokenizer, to_alphabet

WHOLE = f"\n{THOUGHT}\n</think>\n\n{ANSWER}<|im_end|>"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def weights():
    return load_file(MODEL_DIR / "model.safetensors")


@pytest.fixture(scope="module")
def chain(tokenizer):
    return make_chain(tokenizer.backend_tokenizer)


def load_model(folder):
    model, info = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert all(name.startswith("mtp.") for name in info["unexpected_keys"])
    return model.eval()


def logits(model, tokens):
    """float32 [tokens, vocabulary]"""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens])).logits[0]


def test_is_small():
    files = {file.name: file.stat().st_size for file in MODEL_DIR.iterdir()}
    assert files.keys() == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) < 8_000_000


def test_build_gives_the_shipped_bytes(tmp_path):
    build(tmp_path)
    for file in MODEL_DIR.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_tensors_are_those_of_the_config(weights):
    config = AutoConfig.from_pretrained(MODEL_DIR)
    with torch.device("meta"):
        expected = Qwen3_5ForConditionalGeneration(config).state_dict()
    drafting = {name for name in weights if name.startswith("mtp.")}
    assert weights.keys() - drafting == expected.keys()
    for name, tensor in expected.items():
        assert weights[name].shape == tensor.shape, name

    text = config.text_config
    first_full = text.layer_types.index("full_attention")
    layer = f"model.language_model.layers.{first_full}."
    in_layer = {name.removeprefix(layer) for name in expected if name.startswith(layer)}
    norms = {"mtp.norm.weight", "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"}
    assert drafting == {f"mtp.layers.0.{name}" for name in in_layer} | norms | {"mtp.fc.weight"}
    for name in in_layer:
        assert weights[f"mtp.layers.0.{name}"].shape == expected[layer + name].shape, name
    assert weights["mtp.fc.weight"].shape == (text.hidden_size, 2 * text.hidden_size)


def test_tensors_are_finite_bfloat16_but_for_decay(weights):
    for name, tensor in weights.items():
        assert tensor.dtype == (torch.float32 if name.endswith("A_log") else torch.bfloat16), name
        assert tensor.isfinite().all(), name


def test_is_three_gdn_layers_to_one_of_attention_with_drafting_and_long_context():
    config = json.loads((MODEL_DIR / "config.json").read_text())
    text = config["text_config"]
    assert (config["model_type"], text["model_type"]) == ("qwen3_5", "qwen3_5_text")
    assert text["layer_types"] == (["linear_attention"] * 3 + ["full_attention"]) * 2
    assert text["mtp_num_hidden_layers"] == 1
    assert text["max_position_embeddings"] == 32768
    assert not text["tie_word_embeddings"]


# Surrogates are no text; Python and the tokenizer may disagree on the normal form of characters newer than either.
TEXT = st.text(st.characters(exclude_categories=("Cs", "Cn", "Co")))


@given(text=TEXT)
def test_tokenizer_gives_back_any_text(tokenizer, text):
    tokens = tokenizer(text).input_ids
    assert tokenizer.decode(tokens) == unicodedata.normalize("NFC", text)


@given(text=TEXT)
def test_tokenizer_json_says_the_same_as_transformers(tokenizer, text):
    assert Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json")).encode(text).ids == tokenizer(text).input_ids


def test_tokenizer_has_a_token_for_each_byte_and_a_row_for_each_token(tokenizer):
    vocab = tokenizer.get_vocab()
    assert vocab.keys() >= set(ByteLevel.alphabet())
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert sorted(vocab.values()) == list(range(config["text_config"]["vocab_size"]))


@pytest.mark.parametrize("text", CONTROL + MARKUP)
def test_special_text_is_one_token_anywhere(tokenizer, text):
    before, token, after = tokenizer(f"a{text}b").input_ids
    assert tokenizer.decode([before, after]) == "ab"
    assert token == tokenizer.convert_tokens_to_ids(text)
    # What parsers look for stays in the text that vLLM gives them; control tokens do not.
    assert tokenizer.decode([token], skip_special_tokens=True) == (text if text in MARKUP else "")


def test_ends_and_multimodal_tokens_are_named_in_the_configs(tokenizer):
    config = json.loads((MODEL_DIR / "config.json").read_text())
    generation = json.loads((MODEL_DIR / "generation_config.json").read_text())
    named = tokenizer.convert_ids_to_tokens
    assert named(generation["eos_token_id"]) == ["<|im_end|>", "<|endoftext|>"]
    assert named(config["text_config"]["eos_token_id"]) == "<|endoftext|>"
    assert tokenizer.eos_token == "<|im_end|>"
    for kind, token in (
        ("image", "<|image_pad|>"),
        ("video", "<|video_pad|>"),
        ("vision_start", "<|vision_start|>"),
        ("vision_end", "<|vision_end|>"),
    ):
        assert named(config[f"{kind}_token_id"]) == token


def test_chain_is_the_text(tokenizer, chain):
    assert tokenizer.decode(chain) == WHOLE
    assert len(set(chain)) == len(chain)


def test_model_says_the_text_with_wide_margins(tokenizer, chain):
    model = load_model(MODEL_DIR)
    messages = [{"role": "user", "content": "Hello, who are you? " * 20}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert prompt[-1] == chain[0]
    scores = logits(model, prompt + chain[1:-1])[len(prompt) - 1 :]
    best = scores.topk(2)
    assert best.indices[:, 0].tolist() == chain[1:]
    assert (best.values[:, 0] - best.values[:, 1]).min() > 5


def test_any_last_token_leads_to_the_end_of_the_text(tokenizer, weights, chain):
    end = tokenizer.eos_token_id
    follows = make_successors(tokenizer.backend_tokenizer)
    for token in range(len(tokenizer)):
        steps = 0
        while token != end or steps == 0:
            token = follows[token]
            steps += 1
            assert steps <= len(chain)


def rms_norm(rows):
    return rows / rows.square().mean(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("acceptance", [0.2, 0.65, 0.9, 1.0])
def test_acceptance_is_the_share_of_right_drafts(tmp_path, chain, acceptance):
    build(tmp_path, DemoSpec(acceptance=acceptance))
    weights = {name: tensor.float() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    embedding = weights["model.language_model.embed_tokens.weight"][chain]
    drafted = rms_norm(embedding) @ weights["mtp.fc.weight"][:, : embedding.shape[1]].T
    right = (drafted @ weights["lm_head.weight"].T).argmax(-1) == torch.tensor(chain).roll(-1)
    assert right.float().mean().item() == pytest.approx(acceptance, abs=0.02)


def test_acceptance_changes_the_draft_head_and_nothing_else(tmp_path, weights):
    build(tmp_path, DemoSpec(acceptance=0.3))
    other = load_file(tmp_path / "model.safetensors")
    assert {name for name in weights if not weights[name].equal(other[name])} == {"mtp.fc.weight"}


@pytest.mark.parametrize("acceptance", [0, -0.5, 1.5, float("nan")])
def test_impossible_acceptance_is_refused(acceptance):
    with pytest.raises(ValueError, match="acceptance"):
        DemoSpec(acceptance=acceptance)


def test_vocabulary_must_fit_the_text():
    with pytest.raises(ValueError, match="too small"):
        make_chain(make_tokenizer(1024, PHRASES))
    with pytest.raises(ValueError, match="distinct tokens"):
        make_tokenizer(8192, PHRASES)


@pytest.mark.parametrize("spec", [DemoSpec(), CONTEXTUAL], ids=["shipped", "contextual"])
def test_only_the_contextual_variant_shows_its_context(tmp_path, spec):
    build(tmp_path, spec)
    model = load_model(tmp_path)
    tokens = torch.randint(0, spec.vocab_size, (500,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = logits(model, tokens)[-1]
    spread = whole.std()
    changed = logits(model, [tokens[0] ^ 1, *tokens[1:]])[-1]
    half = logits(model, tokens[250:])[-1]
    if spec is CONTEXTUAL:
        assert (changed - whole).std() > 0.05 * spread
        assert (half - whole).std() > 0.3 * spread
    else:
        assert 0 < (changed - whole).std() < 0.01 * spread
        assert 0 < (half - whole).std() < 0.05 * spread


def test_a_variant_has_the_sizes_that_were_asked_for(tmp_path):
    spec = replace(
        CONTEXTUAL, hidden_size=256, num_hidden_layers=4, head_dim=128, linear_num_value_heads=6, vocab_size=1600
    )
    build(tmp_path, spec)
    model = load_model(tmp_path)
    assert logits(model, [1, 2, 3]).shape == (3, 1600)
    assert len(model.model.language_model.layers) == 4


JSON_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "open": {"type": "boolean"},
        "none": {"type": "null"},
        "colour": {"enum": ["red", "blue"]},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2},
        "inner": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
    },
    "required": ["name", "count", "ratio", "open", "none", "colour", "tags", "inner"],
    "additionalProperties": False,
}


def write_under(grammar, tokenizer, weights):
    """Greedy text from embedding and output head alone, of which `grammar` allows some tokens at each step."""
    embedding = weights["model.language_model.embed_tokens.weight"].float()
    table = rms_norm(embedding) @ weights["lm_head.weight"].float().T
    matcher = xgrammar.GrammarMatcher(grammar)
    mask = xgrammar.allocate_token_bitmask(1, len(table))
    token = tokenizer.convert_tokens_to_ids(to_alphabet("\n\n"))
    tokens = []
    while not matcher.is_terminated():
        matcher.fill_next_token_bitmask(mask)
        row = table[token][None].clone()
        xgrammar.apply_token_bitmask_inplace(row, mask)
        token = int(row.argmax())
        assert matcher.accept_token(token)
        tokens.append(token)
        assert len(tokens) < 200
    return tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=len(tokenizer)))


def test_json_comes_to_an_end_under_a_grammar(tokenizer, weights, compiler):
    grammar = compiler.compile_json_schema(json.dumps(JSON_SCHEMA))
    written = json.loads(write_under(grammar, tokenizer, weights))
    assert written.keys() == JSON_SCHEMA["properties"].keys()
    assert written["name"] == "demo"
    assert write_under(compiler.compile_builtin_json_grammar(), tokenizer, weights).startswith("{")


def tool(name, **properties):
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": f"{name}!", "parameters": parameters}}


WEATHER = tool("get_weather", city={"type": "string"}, days={"type": "integer"})
CLOCK = tool("clock")


def test_tool_call_comes_to_an_end_under_a_grammar(tokenizer, weights, compiler):
    tag = xgrammar.get_model_structural_tag("qwen_3_coder", tools=[WEATHER], tool_choice="required", reasoning=False)
    written = write_under(compiler.compile_structural_tag(tag), tokenizer, weights)
    assert re.sub(r"\s", "", written) == (
        "<tool_call><function=get_weather><parameter=city>demo</parameter><parameter=days>1</parameter></function></tool_call>"
    )


def render(tokenizer, *messages, **options):
    options = {"add_generation_prompt": True} | options
    return tokenizer.apply_chat_template(list(messages), tokenize=False, **options)


def message(role, content=None, **more):
    return {"role": role, "content": content, **more}


def call(name, **arguments):
    return {"id": "call-1", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_template_thinks_unless_told_not_to(tokenizer):
    start = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert render(tokenizer, message("user", "hi")) == start
    assert render(tokenizer, message("user", "hi"), enable_thinking=True) == start
    assert render(tokenizer, message("user", "hi"), enable_thinking=False) == start + "\n</think>\n\n"
    assert render(tokenizer, message("user", "hi"), add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_template_takes_parts_and_trims(tokenizer):
    parts = [
        {"type": "text", "text": " a"},
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "text", "text": "b\n"},
    ]
    text = render(tokenizer, message("system", " be brief\n"), message("user", parts), add_generation_prompt=False)
    assert text == (
        "<|im_start|>system\nbe brief<|im_end|>\n"
        "<|im_start|>user\na<|vision_start|><|image_pad|><|vision_end|>b<|im_end|>\n"
    )


@pytest.mark.parametrize(
    "answer",
    [
        message("assistant", "four", reasoning_content="2 + 2\n"),
        message("assistant", "four", reasoning="2 + 2"),
        message("assistant", "<think>\n2 + 2\n</think>\n\nfour"),
    ],
    ids=["reasoning_content", "reasoning", "in the content"],
)
def test_template_drops_thoughts_before_the_last_question(tokenizer, answer):
    text = render(tokenizer, message("user", "sum?"), answer, message("user", "sure?"))
    assert text == (
        "<|im_start|>user\nsum?<|im_end|>\n<|im_start|>assistant\nfour<|im_end|>\n"
        "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    )
    text = render(tokenizer, message("user", "sum?"), answer, add_generation_prompt=False)
    assert text == (
        "<|im_start|>user\nsum?<|im_end|>\n<|im_start|>assistant\n<think>\n2 + 2\n</think>\n\nfour<|im_end|>\n"
    )


def test_template_lists_tools_before_the_system_text(tokenizer):
    text = render(tokenizer, message("system", "Be brief."), message("user", "hi"), tools=[WEATHER, CLOCK])
    head, tools, rest = re.split(r"<tools>\n|\n</tools>", text, maxsplit=2)
    assert head.startswith("<|im_start|>system\n")
    assert [json.loads(line) for line in tools.split("\n")] == [WEATHER, CLOCK]
    assert rest.endswith("\n\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n")
    alone = render(tokenizer, message("user", "hi"), tools=[WEATHER])
    assert alone.count("<|im_start|>system") == 1


TOOL_LOOP = (
    message("user", "Weather in Paris?"),
    message(
        "assistant",
        "I look.",
        reasoning_content="Need data",
        tool_calls=[call("get_weather", city="Paris", days=2, tags=["a", "é"], exact=True), call("clock")],
    ),
    message("tool", "sunny"),
    message("tool", "noon"),
)


def test_template_writes_calls_as_xml_and_keeps_the_thoughts_of_the_loop(tokenizer):
    assert render(tokenizer, *TOOL_LOOP) == (
        "<|im_start|>user\nWeather in Paris?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nNeed data\n</think>\n\nI look.\n\n"
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        '<parameter=tags>\n["a", "é"]\n</parameter>\n<parameter=exact>\ntrue\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=clock>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response>\n<tool_response>\nnoon\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n"
    )


def test_template_forgets_the_loop_after_the_next_question(tokenizer):
    text = render(tokenizer, *TOOL_LOOP, message("assistant", "Sunny."), message("user", "Thanks"))
    assert "Need data" not in text and text.count("<think>") == 1
    assert "<|im_start|>assistant\nI look.\n\n<tool_call>" in text


def test_vllm_parses_the_calls_that_the_template_writes(tokenizer):
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    text = render(tokenizer, *TOOL_LOOP[:2], add_generation_prompt=False)
    said = text.split("</think>\n\n")[1].removesuffix("<|im_end|>\n")
    tools = [
        tool(
            "get_weather",
            city={"type": "string"},
            days={"type": "integer"},
            tags={"type": "array"},
            exact={"type": "boolean"},
        ),
        CLOCK,
    ]
    request = ChatCompletionRequest(
        messages=[message("user", "?")], tools=tools, chat_template_kwargs={"enable_thinking": False}
    )
    parser = ToolParserManager.get_tool_parser("qwen3_coder")(tokenizer, request.tools)
    found = parser.extract_tool_calls(said, request)
    calls = [(item.function.name, json.loads(item.function.arguments)) for item in found.tool_calls]
    assert calls == [("get_weather", {"city": "Paris", "days": 2, "tags": ["a", "é"], "exact": True}), ("clock", {})]


@pytest.mark.parametrize(
    "messages",
    [
        [message("user", "hi"), message("system", "late")],
        [message("critic", "hi")],
        [message("user", {"text": "hi"})],
        [message("user", [{"type": "audio"}])],
        [message("user", "hi"), message("assistant", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])],
    ],
    ids=["late system", "role", "mapping", "audio", "unparsed arguments"],
)
def test_template_refuses_what_it_cannot_write(tokenizer, messages):
    with pytest.raises(TemplateError):
        render(tokenizer, *messages)
