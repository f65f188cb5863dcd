"""On a GPU: greedy text with speculation, prefix caching and FULL graphs is the model's, and on stock vLLM it is not.

`pytest -m gpu tests/gpu` takes some ten minutes and about 6 GiB of GPU memory; bench/hybrid_exactness.py tells more.
"""

import pytest

from bench.hybrid_exactness import ENGINES, plan, run_all
from bench.recall_model import write_checkpoint

pytestmark = pytest.mark.gpu

RUNNERS = ("v1", "v2")
PATCHED = ("no_drafts", "drafts_3", "drafts_15", "own_draft_block")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Every engine run once: {(engine, runner, patches): Run}."""
    folder = tmp_path_factory.mktemp("exactness")
    model = folder / "model"
    write_checkpoint(model)
    planned = plan(model, "cuda", ("reference", *PATCHED), patches=["all"])
    planned += plan(model, "cuda", ["drafts_3"], patches=["none"])
    return {(run.engine, run.setup.runner, run.setup.patches): run for run in run_all(planned, folder, parallel=2)}


def experiments(run):
    return {experiment["name"]: experiment for experiment in run.experiments}


def assert_exact(run):
    assert (run.status, run.error) == ("done", "")
    assert [experiment["name"] for experiment in run.experiments] == list(run.setup.experiments)
    assert {name: found["wrong"] for name, found in experiments(run).items() if found["wrong"]} == {}


def test_model_writes_what_the_rule_says(runs):
    run = runs["reference", "v1", "none"]
    assert_exact(run)
    assert all(found["least_gap"] > 4 for found in run.experiments), "nats: or rounding could change the text"


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("engine", PATCHED)
def test_patched_text_is_exact(runs, engine, runner):
    run = runs[engine, runner, "all"]
    assert_exact(run)


@pytest.mark.parametrize("runner", RUNNERS)
def test_what_is_under_test_occurs(runs, runner):
    found = experiments(runs["drafts_3", runner, "all"])
    for name in ENGINES["drafts_3"].experiments:
        assert found[name]["steps"]["graph full"] > 0
    assert found["prompt_lengths"]["steps"]["chunk 4"] > 0
    assert found["shared_prefix_tails"]["hits"] > 60
    assert found["shared_prefix_tails"]["steps"]["chunk 4"] > 0
    assert found["poison"]["hits"] > 20
    cycle = experiments(runs["drafts_15", runner, "all"])["verify_lengths"]
    assert cycle["steps"]["verify 16"] > 0
    assert cycle["steps"]["verify 8"] > 0
    assert cycle["steps"]["gained 16"] > 0
    assert cycle["hits"] > 10


@pytest.mark.parametrize("runner", RUNNERS)
def test_stock_is_wrong_where_the_last_chunk_is_one_verify_step(runs, runner):
    """When this fails, the patch for it can go."""
    run = runs["drafts_3", runner, "none"]
    assert {"4", "20", "36"} <= set(experiments(run)["prompt_lengths"]["wrong"])
