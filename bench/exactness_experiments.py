"""The exactness experiments: what is asked of an engine, and whether each reply is the text that the rule predicts.

    python bench/exactness_experiments.py SETUP.json RESULTS.jsonl

runs one engine's experiments and writes a line as each one ends, so that a crash loses nothing before it.
`hybrid_exactness.py` starts these processes: an engine's patches and its crash stay in its own.
"""

import json
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

# Run as a file, this folder would come first, and its names before those of installed packages; the sources beside it
# come last, so that an installed qwen38_3090 is the one that is used.
HERE = Path(__file__).resolve().parent
sys.path = [path for path in sys.path if path != str(HERE)] + [str(HERE.parent)]
from bench import recall_model  # noqa: E402
from bench.exactness_engine import BLOCK, Arrival, Engine, Reply, Setup  # noqa: E402


@dataclass(frozen=True)
class Outcome:
    """One reply beside its prediction. wrong_at: index of the first wrong token, None when all are right."""

    case: str
    prompt_tokens: int
    cached_tokens: int
    wrong_at: int | None
    got: list[int]
    expected: list[int]
    gap: float | None = None


def judge(case: str, prompt: list[int], reply: Reply, length: int) -> Outcome:
    """Compare a reply with the rule's text; keeps eight tokens from the first difference."""
    expected = recall_model.continuation(prompt, length)
    pairs = zip(reply.tokens, expected, strict=False)
    wrong = next((i for i, (got, right) in enumerate(pairs) if got != right), None)
    if wrong is None and len(reply.tokens) != length:
        wrong = min(len(reply.tokens), length)
    window = slice(wrong, wrong + 8) if wrong is not None else slice(0, 0)
    return Outcome(case, len(prompt), reply.cached, wrong, reply.tokens[window], expected[window], reply.gap)


def sensitive(make: Callable[[random.Random], list[int]], seed: str, length: int, kept=(), cuts=()) -> list[int]:
    """A prompt of `make` whose text of `length` tokens tells when its state is spoiled.

    kept, cuts: the kinds of damage, as `recall_model.shows` takes them.
    """
    rng = random.Random(seed)
    for _ in range(500):
        prompt = make(rng)
        told = [recall_model.shows(prompt, length, kept=k) for k in kept if 0 <= k < len(prompt)]
        told += [recall_model.shows(prompt, length, cut=c) for c in cuts if 0 < c < len(prompt)]
        if all(told):
            return prompt
    raise ValueError(f"no prompt tells that its state is spoiled: {seed}, {length} tokens, kept {kept}, cut {cuts}")


@lru_cache(maxsize=1024)
def ring(length: int, text: int, seed: str, straight: float = 0.5) -> list[int]:
    """A prompt whose text depends on all of its state; of one or two tokens there is nothing to depend on."""
    kept = (0, length - 4) if length > 2 else ()
    return sensitive(lambda rng: recall_model.ring_prompt(rng, length, straight), seed, text, kept)


@lru_cache(maxsize=1024)
def tailed(shared: tuple[int, ...] | None, tail: int, text: int, seed: str, straight: float = 0.8) -> list[int]:
    """`shared`, or three blocks of its own, and a tail of that many tokens.

    The text depends on the prefix, on the tail, and on how they and the third block are joined to what comes before.
    """
    total = 3 * BLOCK + tail
    last = total - min(tail, 4)

    def make(rng: random.Random) -> list[int]:
        prefix = shared if shared is not None else recall_model.prefix(rng, 3 * BLOCK, straight)
        return recall_model.with_tail(rng, prefix, tail, straight)

    kept, cuts = (0, 2 * BLOCK, 3 * BLOCK, last), (2 * BLOCK, 3 * BLOCK, last)
    return sensitive(make, seed, text, kept, cuts)


def shared_prefix(seed: str, straight: float = 0.8) -> tuple[int, ...]:
    """Three blocks, of which two are hit, and with which prompts can be made that depend on both."""
    return tuple(tailed(None, 5, 88, seed, straight)[: 3 * BLOCK])


def prompt_lengths(engine: Engine) -> Iterator[Outcome]:
    """Prompts of 1 to 40 tokens, one at a time."""
    for tokens in range(1, 41):
        text = tokens + 16
        prompt = ring(tokens, text, f"length {tokens}")
        yield judge(str(tokens), prompt, engine.alone(prompt, text), text)


def shared_prefix_tails(engine: Engine) -> Iterator[Outcome]:
    """Prompts that share three blocks (two are hit) with tails of 1 token to two blocks, one at a time."""
    shared = shared_prefix("tails")
    # Speculation gives up the last matching unit, and state is kept only where a chunk ended: after two blocks here.
    engine.alone(tailed(shared, 5, 88, "tails warm"), 4)
    for tail in range(1, 2 * BLOCK + 1, engine.setup.tail_step):
        text = 64 + tail + 16
        prompt = tailed(shared, tail, text, f"tail {tail}")
        yield judge(str(tail), prompt, engine.alone(prompt, text), text)


def poison(engine: Engine) -> Iterator[Outcome]:
    """Serve B, then A (a hit whose last chunk is k+1 tokens), then B's prompt and B's next turn from the cache."""
    a_tail = engine.setup.draft_tokens + 1
    shared = shared_prefix("poison A")
    engine.alone(tailed(shared, 5, 88, "poison warm"), 4)
    for extra in range(8):
        asked = tailed(None, 17, 104, f"poison B {extra}")
        # B ends around a block boundary, where the block that holds its newest state is one that is kept.
        answer = BLOCK + 12 + extra
        yield judge(f"B{extra}", asked, engine.alone(asked, answer), answer)
        prompt = tailed(shared, a_tail, 88, f"poison A {extra}")
        yield judge(f"A{extra}", prompt, engine.alone(prompt, 88), 88)
        yield judge(f"B{extra} again", asked, engine.alone(asked, 104), 104)
        turn = [*asked, *recall_model.continuation(asked, answer), *random.Random(extra).sample(range(128), 3)]
        yield judge(f"B{extra} next turn", turn, engine.alone(turn, 104), 104)


def joins(engine: Engine) -> Iterator[Outcome]:
    """A prompt that arrives while two requests decode: all three texts."""
    for tokens in (2, 3, 4, 5, 8, 16, 20, 33, 64, 100):
        arrivals = []
        for row, (size, text, after) in enumerate(((24, 120, 0), (31, 120, 0), (tokens, tokens + 24, 20))):
            arrivals.append(Arrival(ring(size, text, f"join {tokens} {row}"), text, after))
        for row, (arrival, reply) in enumerate(zip(arrivals, engine.run(arrivals), strict=True)):
            yield judge(
                f"{tokens}{' joining' if row == 2 else f' decoding {row}'}", arrival.prompt, reply, arrival.length
            )


def pairs(engine: Engine) -> Iterator[Outcome]:
    """Two prompts of the same length at once, so that they are one batch of equal rows."""
    for tokens in sorted({2, 3, 4, 5, 7, 8, 15, 16, 17, engine.setup.draft_tokens + 1}):
        text = tokens + 16
        arrivals = [Arrival(ring(tokens, text, f"pair {tokens} {row}"), text) for row in range(2)]
        for row, (arrival, reply) in enumerate(zip(arrivals, engine.run(arrivals), strict=True)):
            yield judge(f"{tokens} row {row}", arrival.prompt, reply, text)


def one_token(engine: Engine) -> Iterator[Outcome]:
    """A prompt of one token that arrives while another request decodes."""
    for number in range(6):
        text = 100
        arrivals = [Arrival(ring(24, text, f"one {number}"), text), Arrival([(37 * number + 5) % 128], 80, 12)]
        for row, arrival, reply in zip(("decoding", "joining"), arrivals, engine.run(arrivals), strict=True):
            yield judge(f"{number} {row}", arrival.prompt, reply, arrival.length)


class Cycle:
    """Stands in for the scheduler's table of draft counts by batch size: the next count of a cycle, every step."""

    def __init__(self, counts: tuple[int, ...]) -> None:
        self._counts, self._step = counts, 0

    def __getitem__(self, batch_size: int) -> int:
        self._step += 1
        return self._counts[self._step % len(self._counts)]


def verify_lengths(engine: Engine) -> Iterator[Outcome]:
    """Drafts in the cycle 15, 15, 7, 15, 7 (verify lengths 16, 16, 8, 16, 8), then always 15.

    Requests are alone, four at once, and on a prefix hit; drafts are nearly all accepted ("accepted") or not ("mixed").
    """
    text = 120
    for name, cycle in (("cycle", Cycle((15, 15, 7, 15, 7))), ("constant", None)):
        engine.scheduler.dynamic_sd_lookup = cycle
        try:
            for kind, straight in (("accepted", 0.97), ("mixed", 0.8)):
                prompts = [ring(60 + number, text, f"{kind} {number}", straight) for number in range(7)]
                for number, prompt in enumerate(prompts[:3]):
                    yield judge(f"{name} {kind} {number}", prompt, engine.alone(prompt, text), text)
                replies = engine.run([Arrival(prompt, text) for prompt in prompts[3:]])
                for number, (prompt, reply) in enumerate(zip(prompts[3:], replies, strict=True)):
                    yield judge(f"{name} {kind} together {number}", prompt, reply, text)
                shared = shared_prefix(f"{kind} hit", straight)
                for number in range(4):
                    prompt = tailed(shared, 5 + 9 * number, text, f"{kind} hit {number}", straight)
                    yield judge(f"{name} {kind} hit {number}", prompt, engine.alone(prompt, text), text)
        finally:
            engine.scheduler.dynamic_sd_lookup = None


EXPERIMENTS: dict[str, Callable[[Engine], Iterator[Outcome]]] = {
    "prompt_lengths": prompt_lengths,
    "shared_prefix_tails": shared_prefix_tails,
    "poison": poison,
    "joins": joins,
    "pairs": pairs,
    "one_token": one_token,
    "verify_lengths": verify_lengths,
}


def ask(engine: Engine, name: str, tell: Callable[..., None]) -> None:
    """Run one experiment, telling every reply and, also when the engine dies in it, the sum."""
    engine.steps.clear()
    outcomes: list[Outcome] = []
    try:
        for outcome in EXPERIMENTS[name](engine):
            outcomes.append(outcome)
            line = f"{name} {outcome.case}: wrong" if outcome.wrong_at is not None else ""
            tell("reply", line, name=name, **asdict(outcome))
    finally:
        wrong = [outcome for outcome in outcomes if outcome.wrong_at is not None]
        cases = [outcome.case for outcome in wrong]
        tell(
            "experiment",
            f"{name}: {len(wrong)} wrong of {len(outcomes)} {cases or ''}",
            name=name,
            of=len(outcomes),
            wrong=cases,
            hits=sum(outcome.cached_tokens > 0 for outcome in outcomes),
            least_gap=min((outcome.gap for outcome in outcomes if outcome.gap is not None), default=None),
            steps=dict(engine.steps.most_common()),
            wrong_outcomes=[asdict(outcome) for outcome in wrong],
        )


def main(setup_file: str, results_file: str) -> int:
    """Run the experiments of the setup; 0 when they ran to the end, whatever they found."""
    values = json.loads(Path(setup_file).read_text())
    setup = Setup(**values | {"experiments": tuple(values["experiments"])})
    os.environ.update(setup.environment())
    began = time.monotonic()
    with open(results_file, "w", encoding="utf-8") as file:

        def tell(event: str, line: str = "", **details) -> None:
            record = {"event": event, "seconds": round(time.monotonic() - began, 1), **details}
            print(json.dumps(record), file=file, flush=True)
            if line:
                print(f"{record['seconds']:6.1f} s  {event} {line}", flush=True)

        try:
            engine = Engine(setup)
            facts = engine.facts()
            tell("started", json.dumps(facts), **facts)
            for name in setup.experiments:
                ask(engine, name, tell)
        except Exception as error:  # whatever kills an engine is a result of this process
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"[:500]
            tell("crashed", reason, error=reason)
            return 1
        tell("done", "all experiments")
    return 0


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # all is written; tearing an engine down can hang after a CUDA error
