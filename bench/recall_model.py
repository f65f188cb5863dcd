"""A checkpoint whose next token is read from its recurrent state, and the rule that predicts it exactly.

The weights are set by hand so that three gated delta-rule layers are in-context memories with one-hot keys and values:
layer l stores "after token x_{t-lag} came, lag tokens later, x_t" and reads it back with the newest tokens. What was
seen in the prompt is continued; what was never seen falls back on a fixed successor, which is all that the MTP head
knows, so its drafts are accepted along that chain and rejected where the prompt has its own continuation. A state that
is lost, stale, someone else's or shifted by a token changes the text, and logits of different tokens are at least
8 nats apart, so neither bf16 nor the order of additions does. `Recall` computes the same text without a model.

Attention layers write their pages and add nothing: only the recurrent and convolution states are under test.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB = 128  # tokens; a key or value is two heads of 64
HEAD, KEY_HEADS, VALUE_HEADS = 64, 2, 4
HIDDEN = 2 * VOCAB  # the newest token, one-hot, and the votes for the next one
LAGS = (1, 2, 3)  # of the three recurrent layers: together they use all three columns of the convolution state
VOTES = (0.2, 0.1, 0.05)  # each layer outweighs those after it and the fallback
FALLBACK = 0.025
LOGIT_SCALE = 20.0
FORGETFUL = 1  # the layer that a forget token empties


def skips_write(token: int) -> bool:
    """Whether beta is 0 at this token: nothing is stored (the gate b differs from token to token)."""
    return token % 16 == 7


def forgets(token: int) -> bool:
    """Whether the decay is total at this token, in the forgetful layer (the gate a differs from token to token)."""
    return token % 32 == 11


def side(token: int) -> int:
    """0 for tokens that shared prefixes are made of, 1 for those of tails; the fallback stays on its side."""
    return token >> 5 & 1


def keyed(layer: int, token: int) -> bool:
    """Whether the layer uses this token as a key: the first two leave odd ones to the layer after them."""
    return layer == 2 or token % 2 == 0


def _successors() -> list[int]:
    rng = random.Random(7)
    after = [0] * VOCAB
    for which in (0, 1):
        ring = [token for token in range(VOCAB) if side(token) == which]
        rng.shuffle(ring)
        for token, following in zip(ring, ring[1:] + ring[:1], strict=True):
            after[token] = following
    return after


SUCCESSOR = _successors()


class Recall:
    """The model as a rule over its own memory, after reading `prompt`."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        self.memories: list[dict[int, int]] = [{} for _ in LAGS]
        self.history: list[int] = []
        for token in prompt:
            self.read(token)

    def read(self, token: int) -> None:
        """Take in one token."""
        self.history.append(token)
        for layer, (lag, memory) in enumerate(zip(LAGS, self.memories, strict=True)):
            if layer == FORGETFUL and forgets(token):
                memory.clear()
            if len(self.history) > lag and keyed(layer, self.history[-1 - lag]) and not skips_write(token):
                memory[self.history[-1 - lag]] = token

    def next(self) -> int:
        """The token with the most votes after what was read."""
        votes = {SUCCESSOR[self.history[-1]]: FALLBACK}
        for layer, (lag, memory) in enumerate(zip(LAGS, self.memories, strict=True)):
            if len(self.history) >= lag and keyed(layer, self.history[-lag]) and self.history[-lag] in memory:
                token = memory[self.history[-lag]]
                votes[token] = votes.get(token, 0.0) + VOTES[layer]
        return max(votes, key=votes.__getitem__)

    def generate(self, length: int) -> list[int]:
        """`length` tokens, each read before the next is chosen."""
        tokens = []
        for _ in range(length):
            tokens.append(self.next())
            self.read(tokens[-1])
        return tokens


def continuation(prompt: list[int], length: int) -> list[int]:
    """The greedy text of `length` tokens after `prompt`."""
    return Recall(prompt).generate(length)


def shows(prompt: list[int], length: int, kept: int = 0, cut: int | None = None) -> bool:
    """Whether the text of `length` tokens tells of a spoiled state.

    kept: the memory holds only the first `kept` tokens of the prompt. cut, instead: after that many tokens the
    convolution state was lost, so that what followed was not joined to what came before.
    """
    spoiled = Recall(prompt)
    if cut is None:
        spoiled.memories = Recall(prompt[:kept]).memories
    else:
        spoiled = Recall(prompt[:cut])
        spoiled.history.clear()
        for token in prompt[cut:]:
            spoiled.read(token)
    return spoiled.generate(length) != continuation(prompt, length)


def walk(rng: random.Random, tokens: list[int], length: int, straight: float) -> list[int]:
    """A ring through `tokens` in random order, followed for `length` tokens.

    straight: the probability that a token is followed by its fallback successor, so that a draft is accepted. Tokens
    that skip the write are only entered that way, so that the memory and the fallback agree on them.
    """
    left = set(tokens)
    ring = [rng.choice([token for token in tokens if token % 2 == 0])]
    while len(ring) < length:
        left.discard(ring[-1])
        following = SUCCESSOR[ring[-1]]
        if following not in left or rng.random() >= straight:
            jumps = [token for token in sorted(left) if not skips_write(token)]
            if not jumps:
                break
            following = rng.choice(jumps)
        ring.append(following)
    return [ring[i % len(ring)] for i in range(length)]


def ring_prompt(rng: random.Random, length: int, straight: float = 0.5) -> list[int]:
    """A prompt of `length` tokens whose last token is its first, so that its continuation goes through all of it."""
    ring = walk(rng, list(range(VOCAB)), max(length - 1, 1), straight)
    return ring if length == 1 else [*ring, ring[0]]


def prefix(rng: random.Random, length: int, straight: float = 0.5) -> list[int]:
    """`length` tokens of side 0, to be shared by prompts; the last 56 differ, and follow no order seen before them."""
    tokens = [token for token in range(VOCAB) if side(token) == 0]
    return [*walk(rng, tokens, length - 56, straight), *walk(rng, tokens, 56, straight)]


def with_tail(rng: random.Random, shared: Sequence[int], length: int, straight: float = 0.5) -> list[int]:
    """`shared` and a tail of `length` tokens that leads back into it: the continuation goes through both."""
    entry = rng.choice([token for token in shared[-56:-36] if token % 2 == 0 and not skips_write(token)])
    tail = walk(rng, [token for token in range(VOCAB) if side(token) == 1], max(length - 1, 1), straight)
    return [*shared, *tail[: length - 1], entry]


def write_checkpoint(folder: Path, max_len: int = 2048) -> None:
    """Write config.json and model.safetensors (8 MB, bf16) of a Qwen3_5ForConditionalGeneration without tokenizer.

    It has three recurrent layers, one full-attention layer and an MTP head.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_config(max_len), indent=1))
    save_file(_weights(), folder / "model.safetensors", metadata={"format": "pt"})


# head size 256 and 4 KV heads make a token's page 4 KiB, so that a cache block is 32 tokens and all tails can be tried
ATTENTION_HEADS, ATTENTION_HEAD, INTERMEDIATE = 4, 256, 128


def _config(max_len: int) -> dict:
    text = dict(
        model_type="qwen3_5_text",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=len(LAGS) + 1,
        num_attention_heads=ATTENTION_HEADS,
        num_key_value_heads=ATTENTION_HEADS,
        head_dim=ATTENTION_HEAD,
        layer_types=["linear_attention"] * len(LAGS) + ["full_attention"],
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=HEAD,
        linear_value_head_dim=HEAD,
        linear_conv_kernel_dim=4,
        max_position_embeddings=max_len,
        tie_word_embeddings=False,
        attn_output_gate=True,
        mtp_num_hidden_layers=1,
        mtp_use_dedicated_embeddings=False,
        rms_norm_eps=1e-6,
        rope_parameters=dict(
            rope_type="default",
            rope_theta=1e7,
            partial_rotary_factor=0.25,
            mrope_section=[11, 11, 10],
            mrope_interleaved=True,
        ),
    )
    vision = dict(
        depth=1,
        hidden_size=32,
        intermediate_size=64,
        num_heads=2,
        out_hidden_size=HIDDEN,
        num_position_embeddings=16,
    )
    ids = dict(image_token_id=124, video_token_id=125, vision_start_token_id=126, vision_end_token_id=127)
    return dict(
        architectures=["Qwen3_5ForConditionalGeneration"],
        model_type="qwen3_5",
        dtype="bfloat16",
        tie_word_embeddings=False,
        text_config=text,
        vision_config=vision,
        **ids,
    )


def _weights() -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(1)
    embedding = torch.eye(VOCAB, HIDDEN)
    head = torch.zeros(VOCAB, HIDDEN)
    head[:, VOCAB:] = LOGIT_SCALE * torch.eye(VOCAB)
    for token, following in enumerate(SUCCESSOR):
        head[following, token] = LOGIT_SCALE * FALLBACK
    tensors = {
        "model.language_model.embed_tokens.weight": embedding,
        "model.language_model.norm.weight": torch.zeros(HIDDEN),
        "lm_head.weight": head,
        "mtp.fc.weight": torch.eye(HIDDEN, 2 * HIDDEN),
        "mtp.norm.weight": torch.zeros(HIDDEN),
        "mtp.pre_fc_norm_embedding.weight": torch.zeros(HIDDEN),
        "mtp.pre_fc_norm_hidden.weight": torch.zeros(HIDDEN),
    }
    for layer in range(len(LAGS)):
        prefix_ = f"model.language_model.layers.{layer}."
        tensors |= _idle_mlp(prefix_)
        tensors |= {f"{prefix_}linear_attn.{name}": tensor for name, tensor in _memory(layer).items()}
    for prefix_ in (f"model.language_model.layers.{len(LAGS)}.", "mtp.layers.0."):
        tensors |= _idle_mlp(prefix_) | _idle_attention(prefix_, noise)
    return {
        name: tensor.to(torch.float32 if name.endswith("A_log") else torch.bfloat16).contiguous()
        for name, tensor in tensors.items()
    }


def _memory(layer: int) -> dict[str, torch.Tensor]:
    """Weights of one recurrent layer. RMSNorm brings the newest token's coordinate to about 16 at its input."""
    keys, values = KEY_HEADS * HEAD, VALUE_HEADS * HEAD
    lag = LAGS[layer]
    tokens = torch.eye(VOCAB, HIDDEN) / 2
    used = torch.tensor([[float(keyed(layer, token))] for token in range(VOCAB)])
    taps = torch.zeros(2 * keys + values, 1, 4)  # tap 3 is the newest token
    taps[:keys, 0, 4 - lag] = 1  # query x_{t-lag+1}
    taps[keys : 2 * keys, 0, 3 - lag] = 1  # key x_{t-lag}
    taps[2 * keys :, 0, 3] = 1  # value x_t
    write = torch.tensor([-1.0 if skips_write(token) else 1.0 for token in range(VOCAB)])
    forget = torch.tensor([3.0 if layer == FORGETFUL and forgets(token) else 0.0 for token in range(VOCAB)])
    gate = torch.zeros(values, HIDDEN)
    gate[:, :VOCAB] = 0.5  # silu(8) for every token
    votes = torch.zeros(HIDDEN, values)
    for column in range(values):
        # The normalised read is 8 at its coordinate; value heads 0 and 2 hold tokens below 64, 1 and 3 the others.
        votes[VOCAB + column % VOCAB, column] = VOTES[layer] / (8 * 8)
    padded = torch.zeros(2, VALUE_HEADS, HIDDEN)
    padded[0, :, :VOCAB], padded[1, :, :VOCAB] = write, forget
    return {
        "in_proj_qkv.weight": torch.cat([tokens * used, tokens * used, tokens, tokens]),
        "in_proj_z.weight": gate,
        "in_proj_b.weight": padded[0],
        "in_proj_a.weight": padded[1],
        "conv1d.weight": taps,
        "A_log": torch.zeros(VALUE_HEADS),
        "dt_bias": torch.full((VALUE_HEADS,), -20.0),
        "norm.weight": torch.ones(HEAD),
        "out_proj.weight": votes,
    }


def _idle_mlp(prefix_: str) -> dict[str, torch.Tensor]:
    return {
        f"{prefix_}input_layernorm.weight": torch.zeros(HIDDEN),
        f"{prefix_}post_attention_layernorm.weight": torch.zeros(HIDDEN),
        f"{prefix_}mlp.gate_proj.weight": torch.zeros(INTERMEDIATE, HIDDEN),
        f"{prefix_}mlp.up_proj.weight": torch.zeros(INTERMEDIATE, HIDDEN),
        f"{prefix_}mlp.down_proj.weight": torch.zeros(HIDDEN, INTERMEDIATE),
    }


def _idle_attention(prefix_: str, noise: torch.Generator) -> dict[str, torch.Tensor]:
    """Attention that fills its pages with numbers like any other, and whose output is multiplied by zero."""
    width = ATTENTION_HEADS * ATTENTION_HEAD

    def random_weight(rows: int) -> torch.Tensor:
        return torch.randn(rows, HIDDEN, generator=noise) * 0.05

    return {
        f"{prefix_}self_attn.q_proj.weight": random_weight(2 * width),
        f"{prefix_}self_attn.k_proj.weight": random_weight(width),
        f"{prefix_}self_attn.v_proj.weight": random_weight(width),
        f"{prefix_}self_attn.o_proj.weight": torch.zeros(HIDDEN, width),
        f"{prefix_}self_attn.q_norm.weight": torch.zeros(ATTENTION_HEAD),
        f"{prefix_}self_attn.k_norm.weight": torch.zeros(ATTENTION_HEAD),
    }
