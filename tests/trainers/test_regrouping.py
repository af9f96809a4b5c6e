"""DHA's stages grouped anew before each fusion, and a fusion stage with a separate batch, rate and schedule."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from attention.io import checkpoint
from attention.plan import AttentionPlan, LayerPlan
from benchmarks.needs.alone import Alone
from trainers import relaxing
from trainers.fusion_search import paired_plan, pairs
from trainers.jobs.train_job import TrainJob
from trainers.relaxations.stage import RelaxationSpec
from trainers.settings import TrainSettings
from trainers.text.data import write_sequences
from trainers.zero import group_of_one

HALVED = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 0, 1, 1)),) * 2, head_dim=8)
SINGLE = AttentionPlan((LayerPlan((0,) * 4, (0, 0, 1, 1)),) * 2, head_dim=8)
KNOBS = {"rate": 0.05, "multiplier_start": 5.0, "tolerance": 0.0}


# ---- which heads come first --------------------------------------------------------------------------------------


def test_pairs_by_hand() -> None:
    """Closest first would pair 0 with 1 (1) and leave 2 with 3 (9), 10 in all; exchanged it is 2 + 3."""
    distance = [[0, 1, 2, 8], [1, 0, 7, 3], [2, 7, 0, 9], [8, 3, 9, 0]]
    assert pairs(distance) == ((0, 2), (1, 3))
    assert pairs([[0, 3, 1], [3, 0, 5], [1, 5, 0]]) == ((0, 2), (1,))
    assert pairs([[0, 4], [4, 0]]) == ((0, 1),)


def brute(distance: list[list[float]]) -> float:
    """Every order of the heads, cut into pairs: the slow reference."""
    count = len(distance)
    orders = permutations(range(count))
    return min(sum(distance[order[i]][order[i + 1]] for i in range(0, count - 1, 2)) for order in orders)


@pytest.mark.parametrize("heads", [2, 3, 4, 5, 6, 7])
def test_pairs_against_all_orders(heads: int) -> None:
    """Exact up to four heads; above never worse than the closest first, and near the least."""
    generator = torch.Generator().manual_seed(heads)
    for _ in range(10):
        matrix = torch.rand(heads, heads, generator=generator)
        distance = (matrix + matrix.T).tolist()
        result = pairs(distance)
        assert sorted(h for pair in result for h in pair) == list(range(heads))
        assert len(result) == -(-heads // 2)
        total, least = sum(distance[p[0]][p[1]] for p in result if len(p) == 2), brute(distance)
        assert total >= least - 1e-9
        assert total <= (least + 1e-9 if heads <= 4 else 1.5 * least)


def test_a_stage_pairs_within_final_groups_only() -> None:
    """Six heads, final groups {0..4} and {5}: 1 goes with 4, 0 with 2, 3 remains; 5 stays alone, though it is near."""
    now = AttentionPlan((LayerPlan.identity(6),), 8)
    goal = AttentionPlan((LayerPlan((0, 0, 0, 0, 0, 1), (0, 1, 2, 3, 4, 5)),), 8)
    distance = torch.full((6, 6), 9.0)
    for i, j, value in ((1, 4, 1.0), (0, 2, 2.0), (0, 5, 0.1), (3, 5, 0.1)):
        distance[i, j] = distance[j, i] = value
    result = paired_plan(now, goal, [distance], [None])
    assert result.layers[0].key_groups == ((0, 2), (1, 4), (3,), (5,))
    assert result.layers[0].value_map == goal.layers[0].value_map


def test_stored_heads_that_were_fused_are_paired_as_one() -> None:
    now = AttentionPlan((LayerPlan((0, 1, 2, 3, 0, 1, 2, 3), tuple(range(8))),), 8)
    goal = AttentionPlan((LayerPlan((0,) * 8, tuple(range(8))),), 8)
    distance = torch.tensor([[0, 5, 5, 1], [5, 0, 1, 5], [5, 1, 0, 5], [1, 5, 5, 0]], dtype=torch.float32)
    result = paired_plan(now, goal, [distance], [None])
    assert result.layers[0].key_groups == ((0, 3, 4, 7), (1, 2, 5, 6))


# ---- as part of a job --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job(tiny_model: Any, tmp_path_factory: pytest.TempPathFactory) -> TrainJob:
    """Two stages of DHA of three steps each on a tiny model, then four steps of recovery."""
    folder = tmp_path_factory.mktemp("regrouped")
    checkpoint.save(tiny_model("llama"), folder / "model")
    generator = torch.Generator().manual_seed(0)
    for name, rows in (("train", 40), ("eval", 4)):
        write_sequences(torch.randint(64, (rows, 16), generator=generator), folder / name)
    group_of_one()
    return TrainJob(
        model_dir=str(folder / "model"),
        train_file=str(folder / "train"),
        eval_file=str(folder / "eval"),
        out_dir=str(folder / "plain" / "out"),
        storage_path=str(folder / "store"),
        run_name="regrouped",
        milestones=(4,),
        settings=TrainSettings(learning_rate=3e-3, batch_size=4),
        relaxation=RelaxationSpec("lagrangian", (HALVED.to_json(), SINGLE.to_json()), 3, KNOBS),
    )


def changed(job: TrainJob, name: str, **changes: Any) -> TrainJob:
    assert job.relaxation is not None
    out = Path(job.out_dir).parent.parent / name / "out"
    return replace(job, out_dir=str(out), relaxation=replace(job.relaxation, **changes))


def test_stages_that_are_grouped_anew_end_at_the_same_plan(job: TrainJob) -> None:
    own = changed(job, "anew", regroup_steps=3)
    relaxed = relaxing.relax(own, Alone())
    root = Path(f"{own.out_dir}.relaxed")
    text = (root / "stage-0" / "plan.json").read_text()
    first = AttentionPlan.from_json(text)
    assert checkpoint.plan_of(checkpoint.load(root / "stage-0" / "collapsed")) == first
    for layer, goal in zip(first.layers, SINGLE.layers, strict=True):
        assert sorted(map(len, layer.key_groups)) == [2, 2]
        assert layer.value_map == goal.value_map  # two heads in a group: nothing to choose
    assert not (root / "stage-1" / "plan.json").exists()  # all remaining heads fuse
    assert checkpoint.plan_of(checkpoint.load(relaxed.model_dir)) == SINGLE
    assert relaxed.tokens == (3 + 3 + 3) * 4 * 16, "those of the grouping too"
    # Killed after the groups were found: read, not found again
    (root / "stage-0" / "outcome.json").unlink()
    (root / "stage-0" / "plan.json").write_text(HALVED.to_json())
    relaxing.relax(own, Alone())
    assert checkpoint.plan_of(checkpoint.load(root / "stage-0" / "collapsed")) == HALVED


def test_a_fusion_stage_with_separate_batch_rate_and_schedule(job: TrainJob, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []

    class Recorded(relaxing.TrainEngine):
        def step(self, *args: Any) -> float:
            rates.append(self.rate)
            return super().step(*args)

    monkeypatch.setattr(relaxing, "TrainEngine", Recorded)
    settings = job.settings.model_copy(update={"batch_size": 2, "learning_rate": 1e-2})
    own = changed(job, "own", settings=settings, own_schedule=True)
    relaxed = relaxing.relax(own, Alone())
    each = [settings.rate(step, 3) for step in range(3)]
    assert rates == each * 2
    assert relaxed.tokens == (3 + 3) * 2 * 16 and relaxed.position["position"] == 6 * 2
    rest = own.after_relaxation(relaxed.model_dir)
    assert (rest.schedule_offset, rest.schedule_steps, rest.settings.batch_size) == (0, 4, 4)
    assert own.schedule_steps == 4
    assert TrainJob.from_json(own.to_json()) == own


def test_what_cannot_be_grouped_anew() -> None:
    with pytest.raises(ValueError, match="relaxation=lagrangian"):
        RelaxationSpec("hard_concrete", (SINGLE.to_json(),), 3, regroup_steps=1)
    with pytest.raises(ValueError, match="at least 0; got -1"):
        RelaxationSpec("lagrangian", (SINGLE.to_json(),), 3, regroup_steps=-1)
