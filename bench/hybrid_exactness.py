"""Is greedy text under speculation, prefix caching and CUDA graphs what the model says? Patched against stock vLLM.

    python bench/hybrid_exactness.py                       # everything, one engine after the other
    python bench/hybrid_exactness.py --parallel 4          # engines share the GPU; each needs about 3 GiB
    python bench/hybrid_exactness.py --engines drafts_3 --runners v2 --patches all

Each engine is a process of its own: runner V1 or V2, stock or patched, with the small model of `recall_model.py`, whose
text is known in advance. Lines appear as experiments end; the table and the JSON file are written after every engine.
Exit status 1 when a patched engine was wrong, crashed or ran out of time. Without a GPU: V1, eager.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))
from bench.exactness_engine import Setup  # noqa: E402
from bench.recall_model import write_checkpoint  # noqa: E402

PLACEHOLDER = Setup(model="")
# What to ask of which engine. Experiments are described where they are defined, in exactness_experiments.py.
ENGINES: dict[str, Setup] = {
    "drafts_3": replace(
        PLACEHOLDER,
        prefix_unit=16,
        experiments=("prompt_lengths", "shared_prefix_tails", "poison", "joins", "pairs", "one_token"),
    ),
    "drafts_15": replace(
        PLACEHOLDER,
        draft_tokens=15,
        blocks=320,
        experiments=("prompt_lengths", "verify_lengths", "shared_prefix_tails"),
        tail_step=3,
    ),
    "own_draft_block": replace(
        PLACEHOLDER,
        draft_block=16,
        experiments=("prompt_lengths", "shared_prefix_tails", "poison", "joins"),
        tail_step=3,
    ),
    "no_drafts": replace(
        PLACEHOLDER,
        draft_tokens=0,
        experiments=("prompt_lengths", "shared_prefix_tails", "pairs", "one_token"),
        tail_step=3,
    ),
    "reference": replace(
        PLACEHOLDER,
        draft_tokens=0,
        prefix_caching=False,
        graphs="none",
        patches="none",
        blocks=2000,  # each is used once: stock vLLM lets a prompt of one token start from what a used one holds
        experiments=("prompt_lengths", "shared_prefix_tails", "joins", "pairs", "one_token"),
        tail_step=5,
    ),
}


@dataclass
class Run:
    """What came of one engine. status: "done", "crashed", "timed out"."""

    engine: str
    setup: Setup
    status: str
    error: str
    seconds: float
    facts: dict
    experiments: list[dict]

    @property
    def column(self) -> str:
        return "reference" if self.engine == "reference" else self.setup.name

    @property
    def sound(self) -> bool:
        return self.status == "done" and not any(experiment["wrong"] for experiment in self.experiments)


def plan(
    model: Path,
    device: str,
    engines: Sequence[str] = tuple(ENGINES),
    runners: Sequence[str] = ("v1", "v2"),
    patches: Sequence[str] = ("none", "all"),
    graphs: str = "full_and_piecewise",
    state: str = "float16",
) -> list[tuple[str, Setup]]:
    """The engines to start, in order.

    On the CPU there is one runner, no graph, the state is float32, and no attention block smaller than 32 tokens.
    """
    on_gpu = device == "cuda"
    common = dict(model=str(model), device=device)
    planned = []
    for name in engines:
        setup = replace(ENGINES[name], **common, state=state if on_gpu else "float32")
        if name == "reference":
            planned.append((name, setup))
            continue
        if not on_gpu and setup.draft_block:
            continue
        setup = replace(setup, graphs=graphs if on_gpu else "none")
        for patch, runner in product(patches, runners if on_gpu else ("v1",)):
            planned.append((name, replace(setup, runner=runner, patches=patch)))
    return planned


def run_engine(name: str, setup: Setup, folder: Path, limit_s: float, cache: Path) -> Run:
    """Run one engine's process to its end or to the limit, in seconds; passes its lines on to stdout."""
    label = name if name == "reference" else f"{name} {setup.name}"
    stem = re.sub(r"\W+", "-", label)
    request, results = folder / f"{stem}.json", folder / f"{stem}.jsonl"
    results.unlink(missing_ok=True)
    request.write_text(json.dumps(asdict(setup)))
    environment = {key: value for key, value in os.environ.items() if key not in ("VLLM_PLUGINS", "TRITON_INTERPRET")}
    # A compile cache of its own: two engines that start at once would write the same files.
    environment |= {"PYTHONUNBUFFERED": "1", "VLLM_CACHE_ROOT": str(cache / stem)} | setup.environment()
    timed_out = threading.Event()
    with open(folder / f"{stem}.log", "w", encoding="utf-8") as log:
        child = subprocess.Popen(
            [sys.executable, str(ROOT / "bench" / "exactness_experiments.py"), str(request), str(results)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        )

        def stop() -> None:
            timed_out.set()
            os.killpg(child.pid, signal.SIGKILL)

        timer = threading.Timer(limit_s, stop)
        timer.start()
        for line in child.stdout:
            print(f"{label:28} {line.rstrip()[:600]}", flush=True)
        code = child.wait()
        timer.cancel()
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return _run_of(name, setup, lines, code, timed_out.is_set(), limit_s, folder / f"{stem}.log")


def _run_of(name: str, setup: Setup, lines: list[dict], code: int, timed_out: bool, limit_s: float, log: Path) -> Run:
    events = {line["event"]: line for line in lines}
    if "done" in events:
        status, error = "done", ""
    elif "crashed" in events:
        status, error = "crashed", events["crashed"]["error"]
    elif timed_out:
        status, error = "timed out", f"after {limit_s:.0f} s"
    else:
        tail = " | ".join(log.read_text(errors="replace").splitlines()[-3:])
        status, error = "crashed", f"exit status {code}: {tail}"
    print(f"{name} {setup.name}: {status} {error}"[:600], flush=True)
    facts = {key: value for key, value in events.get("started", {}).items() if key not in ("event", "seconds")}
    seconds = lines[-1]["seconds"] if lines else 0.0
    return Run(name, setup, status, error, seconds, facts, _experiments_of(lines))


def _experiments_of(lines: list[dict]) -> list[dict]:
    """The finished experiments, and as much as is known of one that was cut off."""
    found = [line for line in lines if line["event"] == "experiment"]
    finished = {experiment["name"] for experiment in found}
    replies = [line for line in lines if line["event"] == "reply" and line["name"] not in finished]
    if replies:
        wrong = [reply for reply in replies if reply["wrong_at"] is not None]
        cases = [reply["case"] for reply in wrong]
        found.append({"name": replies[0]["name"], "of": len(replies), "wrong": cases, "wrong_outcomes": wrong})
    return found


def run_all(
    planned: Iterable[tuple[str, Setup]],
    folder: Path,
    limit_s: float = 240,
    parallel: int = 1,
    report: Callable[[list[Run]], None] | None = None,
) -> list[Run]:
    """Run the planned engines, `parallel` at a time. report: called with the runs so far after each."""
    runs: list[Run] = []
    lock = threading.Lock()

    def one(task: tuple[str, Setup]) -> None:
        run = run_engine(*task, folder, limit_s, folder / "cache")
        with lock:
            runs.append(run)
            if report:
                report(runs)

    with ThreadPoolExecutor(parallel) as pool:
        list(pool.map(one, planned))
    return runs


def table(runs: Sequence[Run]) -> str:
    """Wrong replies of all, by experiment and engine, with the first wrong cases."""
    columns = sorted({run.column for run in runs}, key=lambda name: (name != "reference", "stock" not in name, name))
    rows = [["experiment", *columns]]
    for engine in dict.fromkeys(name for name in ENGINES if any(run.engine == name for run in runs)):
        mine = [run for run in runs if run.engine == engine]
        for experiment in ENGINES[engine].experiments:
            cells = [_cell(next((run for run in mine if run.column == column), None), experiment) for column in columns]
            rows.append([f"{engine}: {experiment}", *cells])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _cell(run: Run | None, experiment: str) -> str:
    if run is None:
        return ""
    found = next((entry for entry in run.experiments if entry["name"] == experiment), None)
    if found is None:
        return run.status if run.status != "done" else "not run"
    wrong = found["wrong"]
    cases = f" ({', '.join(wrong[:4])}{', …' if len(wrong) > 4 else ''})" if wrong else ""
    ended = run.experiments[-1] is not found or run.status == "done"
    return f"{len(wrong)}/{found['of']}{cases}{'' if ended else ', then ' + run.status}"


def save(runs: Sequence[Run], stem: Path) -> None:
    """Write STEM.json and STEM.txt."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    devices = sorted({run.facts.get("device", "") for run in runs} - {""})
    head = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": ", ".join(devices),
        "python": platform.python_version(),
    }
    stored = [asdict(run) | {"setup": asdict(replace(run.setup, model=Path(run.setup.model).name))} for run in runs]
    stem.with_suffix(".json").write_text(json.dumps(head | {"runs": stored}, indent=1) + "\n")
    note = f"Wrong replies of all, greedy, {head['device']}, {head['date']}"
    stem.with_suffix(".txt").write_text(f"{note}\n\n{table(runs)}\n")


def _only(experiments: tuple[str, ...], wanted: list[str] | None) -> tuple[str, ...]:
    return experiments if wanted is None else tuple(name for name in experiments if name in wanted)


def main() -> int:
    """Parse the command line, run, save."""
    import torch

    def names(text: str) -> list[str]:
        return [name for name in text.split(",") if name]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--engines", type=names, default=list(ENGINES), help=f"of {','.join(ENGINES)}")
    parser.add_argument("--runners", type=names, default=["v1", "v2"])
    parser.add_argument("--patches", type=names, default=["none", "all"], help="none, all, or one set as name+name")
    graphs = ("full_and_piecewise", "full_decode_only", "none")
    parser.add_argument("--graphs", choices=graphs, default=graphs[0])
    parser.add_argument("--state", choices=("float16", "bfloat16", "float32"), default="float16")
    parser.add_argument("--experiments", type=names, help="only these")
    parser.add_argument("--spoil", choices=("state", "conv"), default="", help="zero the state: replies must be wrong")
    parser.add_argument("--parallel", type=int, default=1, help="engines at a time")
    parser.add_argument("--limit", type=float, default=240, help="seconds for one engine")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "hybrid_exactness")
    parser.add_argument("--work", type=Path, help="folder for model, logs and caches; a temporary one otherwise")
    options = parser.parse_args()
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    patches = [patch.replace("+", ",") for patch in options.patches]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.work or Path(temporary)
        write_checkpoint(folder / "model")
        chosen = (options.engines, options.runners, patches, options.graphs, options.state)
        planned = [
            (name, replace(setup, spoil=options.spoil, experiments=_only(setup.experiments, options.experiments)))
            for name, setup in plan(folder / "model", device, *chosen)
        ]
        runs = run_all(planned, folder, options.limit, options.parallel, lambda done: save(done, options.out))
    print(f"\n{table(runs)}")
    return 0 if all(run.sound for run in runs if run.setup.patches != "none" or run.engine == "reference") else 1


if __name__ == "__main__":
    sys.exit(main())
