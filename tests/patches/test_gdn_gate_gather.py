"""Requests of a mixed batch against a plain per-request reference, through vLLM's builder, layer and kernels."""

import pytest
import torch

from tests.patches import gdn

K = 4
BLOCKS = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10], [11, 12, 13, 14, 15]]
VERIFIED = gdn.Row(tokens=K + 1, computed=40, blocks=BLOCKS[0], drafts=K, accepted=3)
SHORTER = gdn.Row(tokens=3, computed=70, blocks=BLOCKS[1], drafts=2, accepted=5)
PROMPT = gdn.Row(tokens=4, computed=0, blocks=BLOCKS[2])
DRAFTLESS = gdn.Row(tokens=1, computed=60, blocks=BLOCKS[2])


@pytest.fixture(autouse=True)
def _triton_convolution(monkeypatch):
    gdn.use_triton_convolution(monkeypatch)


def errors(rows, dtype=torch.float32):
    """Largest error of each request's outputs against the reference."""
    layer = gdn.make_layer(K, blocks=16, dtype=dtype)
    qkv, b, a = gdn.tokens(sum(row.tokens for row in rows), dtype)
    starts = []
    for row in rows:
        conv, state = gdn.history(layer, row)
        starts.append((conv, state) if row.computed else (torch.zeros_like(conv), torch.zeros_like(state)))
    out = gdn.forward(layer, gdn.build(gdn.make_builder(K), rows), qkv, b, a)
    found, position = [], 0
    for row, start in zip(rows, starts, strict=True):
        part = slice(position, position + row.tokens)
        expected = gdn.reference(layer, qkv[part], b[part], a[part], *start)
        found.append((out[part] - expected).abs().max().item())
        position += row.tokens
    return found


@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-5), (torch.float16, 4e-3)])
@pytest.mark.parametrize(
    "rows",
    [
        [PROMPT, VERIFIED],
        [VERIFIED, PROMPT, SHORTER],
        [DRAFTLESS, SHORTER, VERIFIED],
    ],
    ids=["prompt first", "prompt between", "a request without drafts first"],
)
def test_verified_rows_behind_others(patched, rows, dtype, close):
    stock = errors(rows, dtype)
    wrong = [error for row, error in zip(rows, stock, strict=True) if row.drafts > 0]
    assert max(wrong) > 10 * close, "stock 0.27.1 no longer mixes the gates up"
    with patched("gdn_gate_gather"):
        assert max(errors(rows, dtype)) < close


@pytest.mark.parametrize(
    "rows",
    [[VERIFIED, SHORTER], [VERIFIED, PROMPT], [PROMPT], [DRAFTLESS]],
    ids=["verified only", "verified first", "prompt only", "decode only"],
)
def test_batches_that_were_right_stay_right(patched, rows):
    stock = errors(rows)
    assert max(stock) < 1e-5
    with patched("gdn_gate_gather"):
        assert errors(rows) == stock


def test_revert_restores_the_name(patched):
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn
    from vllm.third_party.flash_linear_attention.ops import fused_sigmoid_gating_delta_rule_update

    for _ in range(2):
        with patched("gdn_gate_gather"):
            bound = qwen_gdn_linear_attn.fused_sigmoid_gating_delta_rule_update
            assert bound is not fused_sigmoid_gating_delta_rule_update
        assert qwen_gdn_linear_attn.fused_sigmoid_gating_delta_rule_update is fused_sigmoid_gating_delta_rule_update
