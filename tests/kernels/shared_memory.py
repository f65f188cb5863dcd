"""Compile the attention kernel, which needs no GPU, and print the shared memory that its blocks use as JSON.

A process of its own (python -m tests.kernels.shared_memory), since the tests run Triton's interpreter. With --all it
compiles every tiling, else the largest of each kind.
"""

import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qwen38_3090.kernels.split_kv_attention import QUOTA, TILINGS, WIDE_TILINGS, Tiling, _segment_kernel


def compile_segment_kernel(tiling: Tiling, head_size: int, quantized: bool, capability: int):
    cache = "*i32" if quantized else "*bf16"
    types = {
        "query": "*bf16",
        "key": cache,
        "value": cache,
        "block_table": "*i32",
        "query_start": "*i32",
        "seq_lens": "*i32",
        "partial": "*fp32",
        "partial_lse": "*fp32",
        "scale": "fp32",
    }
    values = {
        "GROUP": 6,
        "HEAD": head_size,
        "PAGE": 16,
        "LEFT": -1,
        "RIGHT": 0,
        "QUANTIZED": quantized,
        "FLOAT32": False,
        "REQUESTS": 8,
        "QUOTA": QUOTA,
        "ROWS": tiling.rows,
        "TAIL": tiling.tail,
        "KEYS": tiling.keys,
        "RUN": 16,
        "PARTS": 4 if quantized else tiling.parts,
        "STAGES": tiling.stages,
    }
    unaligned = set()
    if quantized:
        types |= {"key_scale": "*fp32", "value_scale": "*fp32"}
        unaligned = {"value", "key_scale", "value_scale", "stride_slot", "stride_head"}
    else:
        values |= {"key_scale": None, "value_scale": None}
    names = _segment_kernel.arg_names
    signature = {name: "constexpr" if name in values else types.get(name, "i32") for name in names}
    aligned = [
        name
        for name in names
        if (signature[name].startswith("*") or name.startswith("stride")) and name not in unaligned
    ]
    source = ASTSource(
        _segment_kernel,
        signature,
        {(names.index(name),): value for name, value in values.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": tiling.warps})


def main() -> None:
    chosen = slice(None) if "--all" in sys.argv else slice(-1, None)
    found = []
    for capability, table in ((86, TILINGS), (90, WIDE_TILINGS)):
        for (head_size, quantized), tilings in table.items():
            for tiling in tilings[chosen]:
                used = compile_segment_kernel(tiling, head_size, quantized, capability).metadata.shared
                found.append(
                    {
                        "capability": capability,
                        "kind": [head_size, quantized],
                        "declared": tiling.shared << 10,
                        "used": used,
                    }
                )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
