"""What every kernel benchmark shares: check first, then time CUDA graph replays over inputs that the L2 does not hold.

A benchmark module offers `run(bench: Bench) -> None` and calls, for each shape and contestant,

    bench.time("section", shape, "ours", launches, check)

`launches` are callables over separate inputs (`rotation` says how many fill three L2 caches); `check` returns the
error of the result that the launches leave, as a number at most 1 when it is within tolerance (`excess` computes it).
"""

import datetime
import json
import math
import statistics
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import triton
import triton.language as tl

L2_MULTIPLE = 3  # inputs rotate through this many times the L2
LAUNCHES_PER_GRAPH = 32  # at least; hides the cost of starting the graph
REPLAYS = 15


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("bench: needs an NVIDIA GPU")


def machine() -> dict:
    """The machine and the software that a result belongs to."""
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader", "--id=0"]
    driver, power = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    return {
        "gpu": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "driver": driver,
        "power_limit": power,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }


def rotation(bytes_per_launch: int) -> int:
    """How many separate inputs of that size to rotate, so that none is left in the L2 when its turn comes again."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, math.ceil(L2_MULTIPLE * l2 / bytes_per_launch))


def excess(got: torch.Tensor, want: torch.Tensor, atol: float, rtol: float) -> float:
    """Largest |got - want| / (atol + rtol |want|): at most 1 is right; NaN and infinite results count as infinite."""
    got, want = got.float(), want.float()
    ratio = ((got - want).abs() / (atol + rtol * want.abs())).nan_to_num(nan=math.inf)
    return ratio.max().item()


@dataclass(frozen=True)
class Timing:
    """Microseconds a launch: the median of the replays, and their tenth and ninetieth percentile."""

    median: float
    low: float
    high: float


def replay(launches: Sequence[Callable[[], object]], replays: int = REPLAYS) -> Timing:
    """Capture `launches`, repeated in order, in one CUDA graph and time its replays.

    The launches must be capturable and warm (each is called once before the capture). Returns times for one launch.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    rounds = math.ceil(LAUNCHES_PER_GRAPH / len(launches))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    for _ in range(2):
        graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = [start.elapsed_time(end) * 1e3 / (rounds * len(launches)) for start, end in events]
    cuts = statistics.quantiles(times, n=10) if len(times) > 1 else times * 9
    return Timing(statistics.median(times), cuts[0], cuts[-1])


@triton.jit
def _read(source, sums, BLOCK: tl.constexpr, TILES: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK * TILES
    total = tl.zeros((BLOCK,), tl.int32)
    for tile in range(TILES):
        total += tl.load(source + start + tile * BLOCK + tl.arange(0, BLOCK))
    tl.store(sums + tl.program_id(0), tl.sum(total))


def read_bandwidth(nbytes: int = 1 << 31) -> float:
    """Bytes per second of a kernel that only reads `nbytes` of device memory: the ceiling of a memory-bound kernel."""
    block, tiles = 2048, 8
    source = torch.randint(-100, 100, (nbytes // 4,), dtype=torch.int32, device="cuda")
    programs = source.numel() // (block * tiles)
    sums = torch.empty(programs, dtype=torch.int32, device="cuda")
    timing = replay([lambda: _read[(programs,)](source, sums, block, tiles, num_warps=8)] * 1, replays=5)
    if sums.sum().item() != source[: programs * block * tiles].sum().item():
        raise RuntimeError("the read kernel did not read everything")
    return nbytes / (timing.median * 1e-6)


@dataclass
class Bench:
    """Collects the rows of one run; a contestant whose result is wrong gets an error in place of a time."""

    bandwidth: float  # bytes/s, measured
    rows: list[dict] = field(default_factory=list)

    def time(
        self,
        section: str,
        shape: dict,
        contestant: str,
        launches: Sequence[Callable[[], object]],
        check: Callable[[], float],
        nbytes: int | None = None,
    ) -> float | None:
        """Microseconds a launch, or None when `check()` is above 1. `nbytes`: what one launch must read and write."""
        row = {"section": section, **shape, "contestant": contestant}
        self.rows.append(row)
        for launch in launches:
            launch()
        torch.cuda.synchronize()
        row["excess"] = round(check(), 3)
        if not row["excess"] <= 1:
            row["error"] = "wrong result: not timed"
            return None
        timing = replay(launches)
        row |= {"us": round(timing.median, 2), "us_p10": round(timing.low, 2), "us_p90": round(timing.high, 2)}
        if nbytes:
            rate = nbytes / (timing.median * 1e-6)
            row |= {"bytes": nbytes, "GB_s": round(rate / 1e9), "of_read_bandwidth": round(rate / self.bandwidth, 3)}
        return timing.median

    def save(self, path: Path) -> None:
        """Write the rows with machine, date and measured bandwidth."""
        document = {"machine": machine(), "read_GB_s": round(self.bandwidth / 1e9), "rows": self.rows}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
