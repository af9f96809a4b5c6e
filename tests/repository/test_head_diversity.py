"""Directions that the heads of a layer use, of `benchmarks.head_diversity`, against concatenated projections."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from attention.families import family_of, geometry_of
from benchmarks.head_diversity import FRACTIONS, captured_share, captured_shares, main

Tiny = Callable[..., PreTrainedModel]


def test_a_worked_example() -> None:
    """Singular values 2, 1, 1, 0: squares 4, 1, 1, 0."""
    matrix = torch.diag(torch.tensor([1.0, 2.0, 0.0, 1.0]))[[2, 0, 3, 1]]
    assert [captured_share(matrix, part) for part in (1 / 4, 1 / 2, 3 / 4)] == pytest.approx([4 / 6, 5 / 6, 1.0])
    assert captured_share(matrix, 1 / 16) == pytest.approx(4 / 6), "at least one direction counts"


@torch.no_grad()
def test_the_matrices_are_products_of_concatenated_projections(tiny_model: Tiny) -> None:
    """The definition of Cordonnier et al. 2020, on the projections of a stock model with grouped heads."""
    model = tiny_model("llama")
    geometry = geometry_of(model.config)
    expected: dict[str, list[float]] = {"QK": [0.0] * len(FRACTIONS), "OV": [0.0] * len(FRACTIONS)}
    for module in family_of(model.config).attention_modules(model):
        repeats = geometry.num_heads // geometry.num_kv_heads
        shape = (geometry.num_kv_heads, geometry.head_dim, -1)
        query, output = module.q_proj.weight.double(), module.o_proj.weight.double()
        keys, values = (
            projection.weight.double().view(shape).repeat_interleave(repeats, 0).flatten(0, 1)
            for projection in (module.k_proj, module.v_proj)
        )
        for name, matrix in (("QK", query.T @ keys), ("OV", output @ values)):
            variance = torch.linalg.eigvalsh(matrix.T @ matrix).flip(0)
            for i, part in enumerate(FRACTIONS):
                first = max(1, round(part * len(variance)))
                expected[name][i] += float(variance[:first].sum() / variance.sum()) / geometry.num_layers
    shares = captured_shares(model)
    for name in expected:
        assert shares[name] == pytest.approx(expected[name], abs=1e-6)
        assert shares[name] == sorted(shares[name]) and shares[name][-1] < 1


def test_the_table_has_two_rows_per_model(demo_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(demo_dir)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[2].startswith(f"| {demo_dir} | QK |")
