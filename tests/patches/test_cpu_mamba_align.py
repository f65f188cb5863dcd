"""The CPU bodies of the align copies against vLLM's Triton kernels, which run in the interpreter on the same data."""

import copy
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from vllm.model_executor.layers.mamba import mamba_utils as layer_utils
from vllm.utils.cpu_triton_utils import _FuncWrapper
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.utils import CpuGpuBuffer
from vllm.v1.worker import mamba_utils

BLOCK = 8
PAGE = 1024
CPU = torch.device("cpu")
COPY_FUNCS = (layer_utils.get_conv_copy_spec, layer_utils.get_temporal_copy_spec)


class Batch:
    """Random states of `groups` groups of `layers` layers and their block tables, in pages with padding as in vLLM.

    A page holds a convolution window of 3 + drafts tokens and a temporal state. The tables are wider than what is in
    use and have rows to spare, as the model runner's have.
    """

    def __init__(self, generator, requests, drafts, groups=2, layers=2, channels=6, dtype=torch.bfloat16, columns=12):
        self.requests, self.drafts = requests, drafts
        tokens = 3 + drafts
        conv = (channels, tokens) if layer_utils.is_conv_state_dim_first() else (tokens, channels)
        temporal = (2, 4, 5)
        blocks = 1 + requests * columns * groups
        spec = MambaSpec(
            block_size=BLOCK,
            shapes=(conv, temporal),
            dtypes=(dtype, torch.float32),
            page_size_padded=PAGE,
            mamba_cache_mode="align",
            num_speculative_blocks=drafts,
        )
        names = [[f"{group}.{layer}" for layer in range(layers)] for group in range(groups)]
        self.config = KVCacheConfig(blocks, [], [KVCacheGroupSpec(layer_names, spec) for layer_names in names])
        self.layers, self.pages = {}, []
        for name in (name for group in names for name in group):
            page = torch.randint(0, 256, (blocks, PAGE), dtype=torch.uint8, generator=generator)
            self.pages.append(page)
            size = channels * tokens * dtype.itemsize
            self.layers[name] = SimpleNamespace(
                kv_cache=[
                    page[:, :size].view(dtype).view(blocks, *conv),
                    page[:, 512:672].view(torch.float32).view(blocks, *temporal),
                ]
            )
        order = torch.randperm(blocks - 1, generator=generator, dtype=torch.int32) + 1
        self.tables = []
        for group in range(groups):
            table = torch.zeros(requests + 3, columns + 4, dtype=torch.int32)
            start = group * requests * columns
            table[:requests, :columns] = order[start : start + requests * columns].view(requests, columns)
            self.tables.append(table)

    def context(self):
        context = mamba_utils.MambaSpecDecodeGPUContext.create(self.requests + 3, self.config, 2, CPU, buffer)
        context.initialize_from_forward_context(self.config, self.layers, COPY_FUNCS, self.tables)
        return context


def buffer(*size, dtype):
    return CpuGpuBuffer(*size, dtype=dtype, device=CPU, pin_memory=False)


@pytest.fixture(params=["SD", "DS"])
def layout(request, monkeypatch):
    """Convolution states with the tokens first (SD) and with the channels first (DS)."""
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", request.param)
    layer_utils.get_conv_state_layout.cache_clear()
    yield request.param
    layer_utils.get_conv_state_layout.cache_clear()


SHAPES = [
    dict(requests=1, drafts=1, groups=1, layers=1),
    dict(requests=3, drafts=3),
    dict(requests=8, drafts=4, groups=3, layers=1, channels=5),
    dict(requests=8, drafts=7, groups=1, layers=1, channels=2, dtype=torch.float32),
    dict(requests=6, drafts=2, channels=3, dtype=torch.float16),
]


def assert_same(batch, patched, launch):
    """Run `launch(context)` with vLLM's kernel and with ours from equal starts: all bytes and the results are equal."""
    ours = copy.deepcopy(batch)
    before = torch.stack(batch.pages)
    expected = launch(batch.context())
    with patched("cpu_mamba_align"):
        assert isinstance(mamba_utils.precopy_mamba_align_fused_kernel, _FuncWrapper)
        result = launch(ours.context())
    assert torch.equal(torch.stack(ours.pages), torch.stack(batch.pages))
    assert expected is None or torch.equal(result, expected)
    return not torch.equal(before, torch.stack(ours.pages))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_precopy_equals_the_triton_kernel(shape, layout, patched):
    generator = torch.Generator().manual_seed(len(str(shape)))
    copied = 0
    for _ in range(4):
        batch = Batch(generator, **shape)
        rows = batch.requests
        source = torch.randint(-1, 5, (rows,), generator=generator, dtype=torch.int32)
        target = torch.randint(0, 5, (rows,), generator=generator, dtype=torch.int32)
        bias = torch.randint(0, batch.drafts + 1, (rows,), generator=generator, dtype=torch.int32)

        def launch(context, rows=rows, source=source, target=target, bias=bias):
            context.run_fused_precopy(rows, target, source, bias, idx_mapping=None)

        copied += assert_same(batch, patched, launch)
    assert copied


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_postprocess_equals_the_triton_kernel(shape, layout, patched):
    """Verify steps at every place relative to a block's end, with every count of drafts and of accepted tokens."""
    generator = torch.Generator().manual_seed(len(str(shape)))
    drafts, rows = shape["drafts"], shape["requests"]
    cases = [
        (computed, 1 + draft, draft, accepted)
        for computed in range(2 * BLOCK - drafts - 2, 2 * BLOCK + 1, 1 if drafts < 4 else 2)
        for draft in range(drafts + 1)
        for accepted in range(1, draft + 2)
    ]
    cases += [(computed, BLOCK, 0, 1) for computed in range(BLOCK + 1)]  # prefill chunks
    copied = 0
    for start in range(0, len(cases), rows):
        chosen = torch.tensor((cases[start:] + cases)[:rows], dtype=torch.int32)
        computed, scheduled, draft, accepted = chosen.T.contiguous()
        running = (computed + scheduled + BLOCK - 1) // BLOCK - 1

        def launch(context, columns=(accepted, running, scheduled, computed, draft)):
            context.run_fused_postprocess(rows, *columns)
            return context.num_accepted_tokens_out

        copied += assert_same(Batch(generator, **shape, columns=4 + drafts), patched, launch)
    assert copied


def test_every_step_reads_the_state_of_its_own_position(layout, patched):
    """Many steps through preprocess_mamba and postprocess_mamba_align_gpu with a model that writes token positions.

    The model checks that the state it starts from is the one after the tokens computed so far, whatever was accepted,
    and in the end each block's column must hold the state at the block's end.
    """
    generator = torch.Generator().manual_seed(5)
    drafts, names = 3, ["x", "y", "z"]
    batch = Batch(generator, len(names), drafts, columns=20, dtype=torch.float32)
    for page in batch.pages:
        page.zero_()
    computed = dict.fromkeys(names, 0)
    requests = {name: SimpleNamespace(num_computed_tokens=0) for name in names}
    accepted = torch.ones(len(names) + 3, dtype=torch.int32)
    input_batch = SimpleNamespace(
        req_ids=names,
        num_accepted_tokens_cpu=accepted.numpy(),
        num_accepted_tokens_cpu_tensor=accepted,
        block_table=[SimpleNamespace(get_device_tensor=lambda n, t=table: t[:n]) for table in batch.tables],
    )
    with patched("cpu_mamba_align"):
        buffers = mamba_utils.MambaBuffers.create(len(names) + 3, batch.config, COPY_FUNCS, buffer, CPU, True)
        running = {}
        counts = set()
        for step in range(40):
            draft = {
                name: 0 if step < 3 else int(torch.randint(0, drafts + 1, (), generator=generator)) for name in names
            }
            scheduled = {name: BLOCK if step < 2 else 1 + draft[name] for name in names}
            output = SimpleNamespace(
                finished_req_ids=set(),
                preempted_req_ids=None,
                scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
                num_scheduled_tokens=scheduled,
                scheduled_spec_decode_tokens={name: [0] * n for name, n in draft.items() if n},
            )
            common = (batch.layers, COPY_FUNCS, buffers.preprocess, buffers.postprocess_align)
            cache_config = SimpleNamespace(enable_prefix_caching=True)
            mamba_utils.preprocess_mamba(output, batch.config, cache_config, running, input_batch, requests, *common)
            mamba_utils.stage_postprocess_inputs_to_gpu(
                buffers.postprocess_align, output, names, len(names), requests, running
            )
            result = accepted.clone()
            for row, name in enumerate(names):
                position = Positions(batch, row, running[name])
                if computed[name]:
                    position.check(computed[name], int(accepted[row]))
                position.write(computed[name] + scheduled[name] - draft[name], draft[name])
                result[row] = 1 + int(torch.randint(0, draft[name] + 1, (), generator=generator))
                counts.add(int(result[row]))
            mamba_utils.postprocess_mamba_align_gpu(
                bufs=buffers,
                num_reqs=len(names),
                num_accepted_tokens_gpu=result,
                num_accepted_tokens_cpu_tensor=accepted,
                input_batch=input_batch,
                kv_cache_config=batch.config,
                forward_context=batch.layers,
                mamba_state_copy_funcs=COPY_FUNCS,
            )
            for row, name in enumerate(names):
                computed[name] += scheduled[name] - draft[name] + int(result[row]) - 1
                requests[name].num_computed_tokens = computed[name]
    assert counts == {1, 2, 3, 4} and min(computed.values()) > 6 * BLOCK
    for row, name in enumerate(names):
        for column in range(computed[name] // BLOCK):
            Positions(batch, row, column).check((column + 1) * BLOCK, 1)


class Positions:
    """States of request `row` that hold token positions, written and read as the recurrent kernels do."""

    def __init__(self, batch, row, column):
        first = layer_utils.is_conv_state_dim_first()
        self._views = []
        for name, layer in batch.layers.items():
            blocks = batch.tables[int(name.split(".")[0])][row, column:]
            window, temporal = layer.kv_cache
            window = window[blocks[0]]
            self._views.append((window.T if first else window, temporal, blocks))

    def check(self, position, accepted):
        """The state that a step reads, after `accepted` tokens of the last one, is the one at `position`."""
        for window, temporal, blocks in self._views:
            assert torch.all(temporal[blocks[accepted - 1]] == position)
            assert window[accepted - 1 : accepted + 2, 0].tolist() == [position - 2, position - 1, position]

    def write(self, first, drafts):
        """What a step leaves: the states at first, first + 1, ... first + drafts, one a column, and their window."""
        for window, temporal, blocks in self._views:
            for draft in range(drafts + 1):
                temporal[blocks[draft]] = first + draft
            window[: 3 + drafts] = torch.arange(first - 2, first + drafts + 1).unsqueeze(1)


WITHOUT_TRITON = """
import torch
from vllm.triton_utils import HAS_TRITON
from vllm.v1.worker import mamba_utils
from qwen38_3090.patches import cpu_mamba_align
from tests.patches.test_cpu_mamba_align import Batch

assert not HAS_TRITON
column = torch.tensor([1], dtype=torch.int32)
batch = Batch(torch.Generator().manual_seed(0), requests=1, drafts=3)
def launch():
    context = batch.context()
    context.run_fused_precopy(1, column, column - 1, column, idx_mapping=None)
    context.run_fused_postprocess(1, column, column, column, column + 7, column)
try:
    launch()
except TypeError as error:
    print(error)
cpu_mamba_align.apply()
launch()
print("patched runs")
cpu_mamba_align.revert()
assert mamba_utils.precopy_mamba_align_fused_kernel.__module__ == mamba_utils.__name__
"""


def test_without_triton_stock_fails_and_the_patch_runs():
    environ = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    result = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], env=environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-2:] == ["'function' object is not subscriptable", "patched runs"]


def test_revert_restores_vllm(patched):
    names = ("precopy_mamba_align_fused_kernel", "postprocess_mamba_fused_kernel")
    stock = [getattr(mamba_utils, name) for name in names]
    for _ in range(2):
        with patched("cpu_mamba_align"):
            assert all(isinstance(getattr(mamba_utils, name), _FuncWrapper) for name in names)
        assert [getattr(mamba_utils, name) for name in names] == stock


def test_the_v2_runners_arrays_are_refused(patched):
    column = torch.tensor([1], dtype=torch.int32)
    with patched("cpu_mamba_align"):
        context = Batch(torch.Generator().manual_seed(0), requests=1, drafts=3).context()
        with pytest.raises(NotImplementedError, match="V1"):
            context.run_fused_precopy(1, column, column - 1, column, idx_mapping=column - 1)
