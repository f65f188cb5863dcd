"""A GDN layer small enough for Triton's interpreter: vLLM's own layer, metadata builder and kernels, plain configs.

On the CPU the convolution of prefill rows is vLLM's PyTorch one; the chunked recurrence, which is another kernel on
every platform, is `reference`'s loop. All else that a verified row passes through is what runs on a GPU.
"""

import importlib.util
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

KEY_HEADS, VALUE_HEADS, HEAD_DIM, WIDTH = 1, 2, 16, 4
CONV_DIM = (2 * KEY_HEADS + VALUE_HEADS) * HEAD_DIM
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class Row:
    """A request in a batch: its tokens in this step, tokens computed before, state blocks, drafts (-1: not verified),
    and how many tokens of the step before were accepted."""

    tokens: int
    computed: int
    blocks: list[int]
    drafts: int = -1
    accepted: int = 1


def make_builder(drafts: int, full_graphs: bool = False):
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
    from vllm.v1.kv_cache_interface import MambaSpec

    mode = CUDAGraphMode.FULL_AND_PIECEWISE if full_graphs else CUDAGraphMode.NONE
    config = SimpleNamespace(
        additional_config={"gdn_prefill_backend": "triton"},
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(linear_key_head_dim=HEAD_DIM)),
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False),
        compilation_config=SimpleNamespace(cudagraph_mode=mode, max_cudagraph_capture_size=None),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    spec = MambaSpec(
        block_size=1024,
        shapes=((CONV_DIM, WIDTH - 1 + drafts), (VALUE_HEADS, HEAD_DIM, HEAD_DIM)),
        dtypes=(torch.float32, torch.float32),
        num_speculative_blocks=drafts,
        mamba_cache_mode="none",
    )
    return GDNAttentionMetadataBuilder(spec, ["layer"], config, DEVICE)


def common(rows: list[Row]):
    """The metadata that a runner shares with all builders, for these rows."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    tokens = [row.tokens for row in rows]
    starts = torch.tensor([0, *tokens]).cumsum(0).int()
    lengths = torch.tensor([row.computed + row.tokens for row in rows], dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts.to(DEVICE),
        query_start_loc_cpu=starts,
        seq_lens=lengths.to(DEVICE),
        num_reqs=len(rows),
        num_actual_tokens=sum(tokens),
        max_query_len=max(tokens),
        max_seq_len=int(lengths.max()),
        block_table_tensor=torch.tensor([row.blocks for row in rows], dtype=torch.int32, device=DEVICE),
        slot_mapping=torch.zeros(sum(tokens), dtype=torch.int64, device=DEVICE),
    )


def accepted(rows: list[Row]) -> torch.Tensor:
    return torch.tensor([row.accepted for row in rows], dtype=torch.int32, device=DEVICE)


def build(builder, rows: list[Row], num_accepted: torch.Tensor | None = None):
    """The GDN metadata as the runners ask for it."""
    num_accepted = accepted(rows) if num_accepted is None else num_accepted
    return builder.build(0, common(rows), num_accepted, torch.tensor([row.drafts for row in rows], dtype=torch.int32))


def make_layer(drafts: int, blocks: int, dtype: torch.dtype = torch.float32, seed: int = 0):
    """A Qwen GDN layer with random weights and random states in every block."""
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    rng = torch.Generator().manual_seed(seed)

    def randn(*shape, dtype=dtype):
        return torch.randn(*shape, generator=rng).to(DEVICE, dtype)

    layer = QwenGatedDeltaNetAttention.__new__(QwenGatedDeltaNetAttention)
    nn.Module.__init__(layer)
    layer.prefix, layer.tp_size, layer.activation, layer.enable_packed_recurrent_decode = "layer", 1, "silu", False
    layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim = (
        KEY_HEADS,
        VALUE_HEADS,
        HEAD_DIM,
        HEAD_DIM,
    )
    layer.key_dim, layer.value_dim = KEY_HEADS * HEAD_DIM, VALUE_HEADS * HEAD_DIM
    layer.conv1d = nn.Module()
    layer.conv1d.weight, layer.conv1d.bias = nn.Parameter(randn(CONV_DIM, 1, WIDTH) / 2, requires_grad=False), None
    layer.A_log = nn.Parameter(randn(VALUE_HEADS, dtype=torch.float32).sigmoid(), requires_grad=False)
    layer.dt_bias = nn.Parameter(randn(VALUE_HEADS, dtype=torch.float32), requires_grad=False)
    layer.chunk_gated_delta_rule = _chunks
    layer.kv_cache = [
        randn(blocks, WIDTH - 1 + drafts, CONV_DIM),
        randn(blocks, VALUE_HEADS, HEAD_DIM, HEAD_DIM, dtype=torch.float32),
    ]
    return layer


def tokens(count: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> tuple[torch.Tensor, ...]:
    """Random layer inputs qkv [count, CONV_DIM], b and a [count, VALUE_HEADS]."""
    rng = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(count, width, generator=rng).to(DEVICE, dtype) for width in (CONV_DIM, VALUE_HEADS, VALUE_HEADS)
    )


def forward(layer, metadata, qkv, b, a) -> torch.Tensor:
    """The layer's core, [tokens, VALUE_HEADS, HEAD_DIM], as its custom op calls it; updates layer.kv_cache."""
    from vllm.forward_context import ForwardContext, override_forward_context

    out = torch.zeros(len(qkv), VALUE_HEADS, HEAD_DIM, dtype=qkv.dtype, device=DEVICE)
    context = ForwardContext(no_compile_layers={"layer": layer}, attn_metadata={"layer": metadata}, slot_mapping={})
    with override_forward_context(context):
        # The convolution may write its output over its input.
        layer._forward_core(mixed_qkv=qkv.clone(), b=b, a=a, core_attn_out=out)
    return out


def history(layer, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """What a verified row continues from: the convolution's last WIDTH-1 inputs, and the recurrent state."""
    last = row.accepted - 1
    return layer.kv_cache[0][row.blocks[0], last : last + WIDTH - 1].clone(), layer.kv_cache[1][
        row.blocks[last]
    ].clone()


def reference(layer, qkv, b, a, conv, state) -> torch.Tensor:
    """The core of one request in float32 from its history (conv [WIDTH-1, CONV_DIM], state [heads, value, key])."""
    x = torch.cat([conv, qkv]).float().T[None]
    y = functional.silu(functional.conv1d(x, layer.conv1d.weight.float(), groups=CONV_DIM))[0].T
    q, k, v = (
        part.unflatten(1, (-1, HEAD_DIM)) for part in y.split([layer.key_dim, layer.key_dim, layer.value_dim], 1)
    )
    q, k = (part * (part.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for part in (q, k))
    decay = -layer.A_log.exp() * functional.softplus(a.float() + layer.dt_bias)
    return _recurrence(q, k, v, decay, b.float().sigmoid(), state.float())[0]


def _recurrence(q, k, v, decay, beta, state):
    q, k = (part.float().repeat_interleave(VALUE_HEADS // KEY_HEADS, 1) for part in (q, k))
    out = torch.empty_like(v, dtype=torch.float32)
    for t in range(len(v)):
        state = state * decay[t].exp()[:, None, None]
        error = v[t].float() - torch.einsum("hvk,hk->hv", state, k[t])
        state = state + torch.einsum("hv,hk->hvk", error * beta[t][:, None], k[t])
        out[t] = torch.einsum("hvk,hk->hv", state, q[t]) * HEAD_DIM**-0.5
    return out, state


def _chunks(q, k, v, g, beta, initial_state, cu_seqlens, **_):
    out, states = torch.empty_like(v), []
    bounds = cu_seqlens.tolist()
    for state, start, end in zip(initial_state, bounds[:-1], bounds[1:], strict=True):
        parts = (part[0, start:end] for part in (q, k, v, g, beta))
        out[0, start:end], final = _recurrence(*parts, state.float())
        states.append(final)
    return out, torch.stack(states)


def use_triton_convolution(monkeypatch) -> None:
    """Let the layer update its convolution state by the Triton kernel, for which vLLM has a stand-in on the CPU."""
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
    from vllm.platforms import current_platform

    if DEVICE.type == "cuda":
        return
    spec = importlib.util.find_spec("vllm.model_executor.layers.mamba.ops.causal_conv1d")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(type(current_platform), "is_cpu", lambda self: False):
        spec.loader.exec_module(module)
    monkeypatch.setattr(qwen_gdn_linear_attn, "causal_conv1d_update", module.causal_conv1d_update)
