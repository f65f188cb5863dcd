"""Accepted counts in the GDN metadata, and what the real convolution and recurrent kernels make of them."""

import pytest
import torch

from tests.patches import gdn

K = 4
STALE = [0, -7, K + 2, 10**6]


@pytest.fixture(autouse=True)
def _triton_convolution(monkeypatch):
    gdn.use_triton_convolution(monkeypatch)


def rows(accepted, drafts=K):
    width = drafts + 1
    return [
        gdn.Row(drafts + 1, 40, list(range(1 + i * width, 1 + (i + 1) * width)), drafts, count)
        for i, count in enumerate(accepted)
    ]


def mixed(batch):
    """The batch with a prompt behind it, whose metadata takes the builder's other branch."""
    return [*batch, gdn.Row(7, 0, list(range(40, 40 + K + 1)))]


@pytest.mark.parametrize("with_prompt", [False, True], ids=["verified only", "with a prompt"])
@pytest.mark.parametrize("full_graphs", [False, True], ids=["no full graphs", "full graphs"])
def test_builder_clamps(patched, full_graphs, with_prompt):
    batch = rows([*STALE, 1, 3, K + 1])
    batch = mixed(batch) if with_prompt else batch
    runners = gdn.accepted(batch)

    def counts():
        return gdn.build(gdn.make_builder(K, full_graphs), batch, runners).num_accepted_tokens.tolist()

    assert counts() == [*STALE, 1, 3, K + 1]
    with patched("gdn_accept_bounds"):
        assert counts() == [1, 1, K + 1, K + 1, 1, 3, K + 1]
        assert runners.tolist() == [row.accepted for row in batch], "the runner's own counts are not the builder's"


def test_full_graph_reads_the_clamped_buffer(patched):
    with patched("gdn_accept_bounds"):
        builder = gdn.make_builder(K, full_graphs=True)
        captured = builder.build_for_cudagraph_capture(gdn.common(rows([1, 1])))
        gdn.build(builder, rows([10**6, 2]))
        assert captured.num_accepted_tokens.tolist() == [K + 1, 2]
        assert captured.num_accepted_tokens.data_ptr() == builder.num_accepted_tokens.data_ptr()


def outputs_between_neighbours(count, seed):
    """Outputs of a request with this count whose neighbours, in the batch and in memory, have states from the seed."""
    batch = rows([1, count, 1])
    layer, neighbours = gdn.make_layer(K, blocks=16), gdn.make_layer(K, blocks=16, seed=seed)
    own = batch[1].blocks
    for cache, others in zip(layer.kv_cache, neighbours.kv_cache, strict=True):
        others[own] = cache[own]
        cache.copy_(others)
    out = gdn.forward(layer, gdn.build(gdn.make_builder(K), batch), *gdn.tokens(3 * (K + 1)))
    return out[K + 1 : 2 * (K + 1)]


@pytest.mark.parametrize("count", [0, K + 2])
def test_no_foreign_state_is_read(patched, count):
    one, other = (outputs_between_neighbours(count, seed) for seed in (1, 2))
    assert not torch.equal(one, other), "stock 0.27.1 no longer reads a neighbour's state"
    with patched("gdn_accept_bounds"):
        one, other = (outputs_between_neighbours(count, seed) for seed in (1, 2))
    assert torch.equal(one, other)
    assert torch.equal(one, outputs_between_neighbours(min(max(count, 1), K + 1), seed=1))


@pytest.mark.parametrize("full_graphs", [False, True], ids=["no full graphs", "full graphs"])
@pytest.mark.parametrize("patch", [None, "gdn_accept_bounds"])
def test_counts_above_the_query_length_are_valid(patched, patch, full_graphs):
    """Verify lengths 16, 8, 8, 16, 8: the second step continues from 14 accepted tokens, and is 8 tokens long."""
    drafts, steps = 15, [(16, 14), (8, 8), (8, 3), (16, 16), (8, 5)]
    layer, builder = gdn.make_layer(drafts, blocks=drafts + 2), gdn.make_builder(drafts, full_graphs)
    row = gdn.Row(0, 100, list(range(1, drafts + 2)))
    conv, state = gdn.history(layer, row)
    done = gdn.tokens(0)
    for step, (length, accepted) in enumerate(steps):
        row.tokens, row.drafts = length, length - 1
        new = gdn.tokens(length, seed=step)
        if patch is None:
            metadata = gdn.build(builder, [row])
        else:
            with patched(patch):
                metadata = gdn.build(builder, [row])
        out = gdn.forward(layer, metadata, *new)
        both = [torch.cat(pair) for pair in zip(done, new, strict=True)]
        expected = gdn.reference(layer, *both, conv, state)[len(done[0]) :]
        assert (out - expected).abs().max() < 1e-5, f"step {step} of {length} tokens"
        done = [part[: len(done[0]) + accepted] for part in both]
        row.accepted, row.computed = accepted, row.computed + accepted
