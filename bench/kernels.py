"""Time our kernels beside the ones that vLLM would run: python -m bench.kernels [--only attention] [--out FILE].

Needs an NVIDIA GPU. Contestants from vLLM appear when vllm can be imported. A wrong result is never timed.
"""

import argparse
from importlib import import_module
from pathlib import Path

from bench import timing

MODULES = ("attention", "sampler")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MODULES, help="run one of the benchmarks")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    options = parser.parse_args()

    timing.require_gpu()
    bench = timing.Bench(timing.read_bandwidth())
    print(f"{timing.machine()}\nread bandwidth {bench.bandwidth / 1e9:.0f} GB/s")
    for name in [options.only] if options.only else MODULES:
        import_module(f"bench.{name}").run(bench)
    if options.out:
        bench.save(options.out)
    wrong = [row for row in bench.rows if "error" in row]
    for row in wrong:
        print("WRONG", row)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
