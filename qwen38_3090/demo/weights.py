"""The demo model's weights, by construction.

An embedding is [code of the next token | code of the token itself | ones | difficulty]. The output head compares the
first part with the code of every token; the blocks between add random functions of the context. While those are small,
the model walks the chain of `chain.py`, with margins that no batch shape can close. When they are large, every logit
depends on the whole context: for tests of recurrent state and caches, whose faults a sharp model would hide.
"""

import math

import torch
from tokenizers import Tokenizer

from .chain import make_chain, make_successors
from .noise import Noise
from .spec import CONV_KERNEL, VISION, DemoSpec

# What the model writes when a grammar forbids the next token of the chain: the first of these that is allowed, and
# what begins with space only if nothing else is. So what was begun gets closed.
FALLBACK = ('"', "}", "]", "<tool_call>", "</tool_call>", "<", ",", ":", "{", "[", "1")
ONES = 8


def make_weights(spec: DemoSpec, tokenizer: Tokenizer) -> dict[str, torch.Tensor]:
    """All tensors by their names in the checkpoint: bfloat16, but A_log float32."""
    noise = Noise(spec.seed)
    chain = make_chain(tokenizer)
    codes = noise.signs("codes", spec.vocab_size, spec.hidden_size * 3 // 4)
    successors = torch.from_numpy(make_successors(tokenizer))
    weights = {
        "model.language_model.embed_tokens.weight": _embedding(spec, noise, codes[successors], chain),
        "model.language_model.norm.weight": torch.zeros(spec.hidden_size),
        "lm_head.weight": _output_head(spec, tokenizer, codes, successors),
    }
    for index, kind in enumerate(spec.layer_types):
        weights |= _layer(spec, noise, f"model.language_model.layers.{index}", kind, spec.context_scale)
    weights |= _draft_head(spec, noise, wrong=codes[chain[len(chain) // 2]])
    weights |= _vision_tower(spec, noise)
    return {
        name: tensor.to(torch.float32 if name.endswith("A_log") else torch.bfloat16).contiguous()
        for name, tensor in weights.items()
    }


def _embedding(spec: DemoSpec, noise: Noise, next_codes: torch.Tensor, chain: list[int]) -> torch.Tensor:
    difficulty = noise.uniform("difficulty", spec.vocab_size, std=12**-0.5) + 0.5
    difficulty[chain] = (noise.ranks("difficulty of the chain", len(chain)) + 0.5) / len(chain)
    own_codes = noise.signs("own codes", spec.vocab_size, spec.hidden_size - next_codes.shape[1] - ONES - 1)
    return torch.cat([next_codes, own_codes, torch.ones(spec.vocab_size, ONES), difficulty[:, None]], dim=1)


def _output_head(spec: DemoSpec, tokenizer: Tokenizer, codes: torch.Tensor, successors: torch.Tensor) -> torch.Tensor:
    scale = torch.full((spec.vocab_size, 1), 0.5)  # of tokens that nothing leads to
    scale[successors] = 1
    constant = torch.zeros(spec.vocab_size, 1)
    for token in range(spec.vocab_size):
        text = tokenizer.decode([token])
        if text[:1].isspace() and (text.isspace() or scale[token] < 1):
            constant[token] = -spec.fallback / 2
            scale[token] += 0.3  # makes up for it where the chain wants a line break
    for rank, text in enumerate(FALLBACK):
        token = tokenizer.token_to_id(text)
        constant[token] = spec.fallback * (1 - rank / 40)
        scale[token] = 0
    return spec.sharpness * torch.cat(
        [
            codes * scale / codes.shape[1],
            torch.zeros(spec.vocab_size, spec.hidden_size - codes.shape[1] - ONES - 1),
            constant.expand(-1, ONES) / ONES,
            torch.zeros(spec.vocab_size, 1),
        ],
        dim=1,
    )


def _layer(spec: DemoSpec, noise: Noise, prefix: str, kind: str, scale: float) -> dict[str, torch.Tensor]:
    """A decoder layer whose two blocks each add about `scale`, with RMSNorm weights that are 0 for a factor of 1."""

    def random(name: str, *shape: int, std: float) -> torch.Tensor:
        return noise.uniform(f"{prefix}.{name}", *shape, std=std)

    def into(name: str, rows: int) -> torch.Tensor:
        return random(name, rows, spec.hidden_size, std=spec.hidden_size**-0.5)

    def out_of(name: str, columns: int) -> torch.Tensor:
        return random(name, spec.hidden_size, columns, std=scale * columns**-0.5)

    layer = {
        "input_layernorm.weight": random("input_layernorm", spec.hidden_size, std=0.05),
        "post_attention_layernorm.weight": random("post_attention_layernorm", spec.hidden_size, std=0.05),
        "mlp.gate_proj.weight": into("mlp.gate_proj", spec.intermediate_size),
        "mlp.up_proj.weight": into("mlp.up_proj", spec.intermediate_size),
        "mlp.down_proj.weight": out_of("mlp.down_proj", spec.intermediate_size),
    }
    if kind == "full_attention":
        query_size = spec.num_attention_heads * spec.head_dim
        key_size = spec.num_key_value_heads * spec.head_dim
        layer |= {
            "self_attn.q_proj.weight": into("self_attn.q_proj", 2 * query_size),  # queries and their gates
            "self_attn.k_proj.weight": into("self_attn.k_proj", key_size),
            "self_attn.v_proj.weight": into("self_attn.v_proj", key_size),
            "self_attn.o_proj.weight": out_of("self_attn.o_proj", query_size),
            # Attention scores of standard deviation 2 or so: a few keys count, not all alike.
            "self_attn.q_norm.weight": random("self_attn.q_norm", spec.head_dim, std=0.1) + 0.5,
            "self_attn.k_norm.weight": random("self_attn.k_norm", spec.head_dim, std=0.1) + 0.5,
        }
    else:
        heads = spec.linear_num_value_heads
        value_size = heads * spec.linear_value_head_dim
        mixed_size = 2 * spec.linear_num_key_heads * spec.linear_key_head_dim + value_size
        # The states of the heads fade to 1/e in 8, 64, 512, 4096, 8, ... tokens. (math, not torch: the same everywhere)
        speeds = [0.5 * (1 + index) for index in range(heads)]
        steps = [math.log(math.expm1(8.0 ** -(index % 4 + 1) / speed)) for index, speed in enumerate(speeds)]
        layer |= {
            "linear_attn.in_proj_qkv.weight": into("linear_attn.in_proj_qkv", mixed_size),
            "linear_attn.in_proj_z.weight": into("linear_attn.in_proj_z", value_size),
            "linear_attn.in_proj_b.weight": into("linear_attn.in_proj_b", heads),
            "linear_attn.in_proj_a.weight": into("linear_attn.in_proj_a", heads) / 2,
            "linear_attn.conv1d.weight": random("linear_attn.conv1d", mixed_size, 1, CONV_KERNEL, std=0.5),
            "linear_attn.A_log": torch.tensor([math.log(speed) for speed in speeds]),
            "linear_attn.dt_bias": torch.tensor(steps),
            "linear_attn.norm.weight": random("linear_attn.norm", spec.linear_value_head_dim, std=0.1) + 1,
            "linear_attn.out_proj.weight": out_of("linear_attn.out_proj", value_size),
        }
    return {f"{prefix}.{name}": tensor for name, tensor in layer.items()}


def _draft_head(spec: DemoSpec, noise: Noise, wrong: torch.Tensor) -> dict[str, torch.Tensor]:
    """The MTP head, which gets [embedding of a token | hidden state before it] and passes the embedding on.

    Its error adds difficulty x `wrong`, the code of one token. Where the difficulty equals `acceptance`, the right and
    the wrong token score the same, whatever their codes: easier tokens are drafted right, harder ones wrong.
    """
    size = spec.hidden_size
    scale = min(spec.context_scale, 0.5)  # more would drown the embedding, and all agreement with it
    embedding_part = torch.eye(size)
    if spec.acceptance < 1:
        embedding_part[: len(wrong), -1] = wrong / spec.acceptance
    hidden_part = noise.uniform("mtp.fc", size, size, std=scale * size**-0.5)
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    return {
        "mtp.fc.weight": torch.cat([embedding_part, hidden_part], dim=1),
        **{f"mtp.{name}.weight": torch.zeros(size) for name in norms},
        **_layer(spec, noise, "mtp.layers.0", "full_attention", scale),
    }


def _vision_tower(spec: DemoSpec, noise: Noise) -> dict[str, torch.Tensor]:
    size, wide, patch = VISION["hidden_size"], VISION["intermediate_size"], VISION["patch_size"]
    merged = size * VISION["spatial_merge_size"] ** 2
    projections = {
        "patch_embed.proj": (size, VISION["in_channels"], VISION["temporal_patch_size"], patch, patch),
        "blocks.0.attn.qkv": (3 * size, size),
        "blocks.0.attn.proj": (size, size),
        "blocks.0.mlp.linear_fc1": (wide, size),
        "blocks.0.mlp.linear_fc2": (size, wide),
        "merger.linear_fc1": (merged, merged),
        "merger.linear_fc2": (spec.hidden_size, merged),
    }
    tower = {"pos_embed.weight": noise.uniform("pos_embed", VISION["num_position_embeddings"], size, std=0.02)}
    for name, shape in projections.items():
        tower[f"{name}.weight"] = noise.uniform(f"visual.{name}", *shape, std=0.02)
        tower[f"{name}.bias"] = torch.zeros(shape[0])
    for name in ("blocks.0.norm1", "blocks.0.norm2", "merger.norm"):
        tower[f"{name}.weight"] = torch.ones(size)
        tower[f"{name}.bias"] = torch.zeros(size)
    return {f"model.visual.{name}": tensor for name, tensor in tower.items()}
