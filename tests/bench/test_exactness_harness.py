"""The exactness experiments see a wrong state, and no wrong state where there is none."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from bench import hybrid_exactness
from bench.exactness_engine import Reply
from bench.exactness_experiments import EXPERIMENTS
from bench.hybrid_exactness import ENGINES, Run, plan, run_engine, save, table
from bench.recall_model import Recall, continuation, write_checkpoint


class Oracle:
    """Answers as the rule says. spoiled(prompt): how many tokens of a prompt its memory keeps; all by default."""

    def __init__(self, setup, spoiled=len):
        self.setup, self.spoiled = setup, spoiled
        self.scheduler = SimpleNamespace(dynamic_sd_lookup=None)

    def run(self, arrivals):
        return [self.alone(arrival.prompt, arrival.length) for arrival in arrivals]

    def alone(self, prompt, length):
        recall = Recall(prompt)
        recall.memories = Recall(prompt[: self.spoiled(prompt)]).memories
        return Reply(recall.generate(length))


ASKED = [(engine, name) for engine, setup in ENGINES.items() for name in setup.experiments]


@pytest.mark.parametrize(("engine", "name"), ASKED)
def test_right_answers_pass(engine, name):
    outcomes = list(EXPERIMENTS[name](Oracle(ENGINES[engine])))
    assert len(outcomes) >= 12
    assert [outcome.case for outcome in outcomes if outcome.wrong_at is not None] == []


@pytest.mark.parametrize("kept", [lambda prompt: 0, lambda prompt: len(prompt) - 4], ids=["no state", "last 4 lost"])
@pytest.mark.parametrize(("engine", "name"), ASKED)
def test_lost_state_is_seen_in_every_prompt(engine, name, kept):
    if name == "poison":
        pytest.skip("prompts of a next turn need not depend on their last four tokens")
    outcomes = list(EXPERIMENTS[name](Oracle(ENGINES[engine], lambda prompt: max(0, kept(prompt)))))
    unseen = [outcome.case for outcome in outcomes if outcome.wrong_at is None and outcome.prompt_tokens > 3]
    assert unseen == []


def test_short_text_counts_as_wrong():
    class Cut(Oracle):
        def alone(self, prompt, length):
            return Reply(continuation(prompt, length)[:-1])

    assert all(o.wrong_at is not None for o in EXPERIMENTS["pairs"](Cut(ENGINES["drafts_3"])))


@pytest.mark.server
@pytest.mark.parametrize("spoil", ["", "state", "conv"])
def test_engine_whose_state_is_zeroed_is_wrong(tmp_path, spoil):
    """A real engine, with speculation and prefix caching: V1, eager, on the CPU where there is no GPU."""
    write_checkpoint(tmp_path / "model")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    (name, setup), *_ = plan(tmp_path / "model", device, ["drafts_3"], ["v1"], ["all"], graphs="none")
    setup = replace(setup, spoil=spoil, experiments=("pairs",))
    run = run_engine(name, setup, tmp_path, limit_s=240, cache=tmp_path)
    assert (run.status, run.error) == ("done", "")
    (pairs,) = run.experiments
    if not spoil:
        assert pairs["wrong"] == []
        assert any(step.startswith("verify") for step in pairs["steps"])
    else:
        # After two or three tokens there is next to nothing to lose.
        expected = [f"{size} row {row}" for size in (4, 5, 7, 8, 15, 16, 17) for row in range(2)]
        assert set(expected) <= set(pairs["wrong"]) if spoil == "state" else len(pairs["wrong"]) >= 5


def test_table_and_files_tell_crashes_from_wrong_text(tmp_path):
    setup = ENGINES["drafts_3"]
    found = [dict(name="prompt_lengths", of=40, wrong=["4"]), dict(name="shared_prefix_tails", of=3, wrong=[])]
    stock = Run("drafts_3", replace(setup, patches="none"), "crashed", "CUDA error", 9.0, {"device": "X"}, found)
    fixed = Run("drafts_3", setup, "done", "", 9.0, {"device": "X"}, [found[0] | {"wrong": []}])
    assert fixed.sound
    assert not stock.sound
    save([fixed, stock], tmp_path / "results")
    lines = (tmp_path / "results.txt").read_text().splitlines()
    assert lines[2].split() == ["experiment", "v1", "stock", "v1", "patched"]
    assert lines[3].split() == ["drafts_3:", "prompt_lengths", "1/40", "(4)", "0/40"]
    assert "0/3, then crashed" in lines[4]
    assert table([fixed, stock]) in (tmp_path / "results.txt").read_text()


def test_engine_that_was_killed_keeps_its_replies(tmp_path, monkeypatch):
    """The child here answers one prompt and hangs."""
    script = tmp_path / "bench" / "exactness_experiments.py"
    script.parent.mkdir()
    script.write_text(
        "import json, sys, time\n"
        "reply = dict(event='reply', seconds=1.0, name='pairs', case='4 row 0', wrong_at=3)\n"
        "open(sys.argv[2], 'w').write(json.dumps(reply) + chr(10))\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(hybrid_exactness, "ROOT", tmp_path)
    run = run_engine("drafts_3", ENGINES["drafts_3"], tmp_path, limit_s=3, cache=tmp_path)
    assert (run.status, run.sound) == ("timed out", False)
    assert "1/1 (4 row 0), then timed out" in table([run])
