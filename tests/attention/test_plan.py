"""Plans: what can be constructed, what cannot, cost, JSON, digest."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention.plan import AttentionPlan, Composition, HeadShare, LayerPlan, PlanError, resolve_shares
from attention.plan_parts import dense, groups_of, map_of

WIDTHS = st.sampled_from([(1, 1), (1, 3), (2, 2), (4, 1)])


@st.composite
def plans(draw: st.DrawFn) -> AttentionPlan:
    heads, layers = draw(st.integers(1, 64)), draw(st.integers(1, 5))
    ids = st.lists(st.integers(0, heads - 1), min_size=heads, max_size=heads).map(dense)
    return AttentionPlan(
        tuple(LayerPlan(draw(ids), draw(ids), *draw(WIDTHS)) for _ in range(layers)), head_dim=draw(st.integers(1, 256))
    )


@given(plans())
def test_json_gives_the_same_plan_back(plan: AttentionPlan) -> None:
    again = AttentionPlan.from_json(plan.to_json())
    assert again == plan and again.digest == plan.digest and again.to_json() == plan.to_json()
    assert json.loads(plan.to_json()) == plan.to_dict() and AttentionPlan.from_dict(plan.to_dict()) == plan


@given(plans())
def test_ratio_counts_kept_heads(plan: AttentionPlan) -> None:
    stored = sum(
        len(set(layer.key_map)) * layer.key_width + len(set(layer.value_map)) * layer.value_width
        for layer in plan.layers
    )
    assert plan.kv_heads == stored
    assert plan.kv_ratio == stored / (2 * plan.num_layers * plan.num_heads)
    assert plan.kv_bytes_per_token("float32") == stored * plan.head_dim * 4


@given(st.lists(st.integers(-5, 5), min_size=1))
def test_dense_keeps_the_partition(ids: list[int]) -> None:
    mapped = dense(ids)
    assert sorted(set(mapped)) == list(range(len(set(ids))))
    assert all((mapped[i] == mapped[j]) == (ids[i] == ids[j]) for i in range(len(ids)) for j in range(len(ids)))
    assert map_of(groups_of(mapped), len(ids)) == mapped


def test_worked_example() -> None:
    plan = AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 0, 1)), LayerPlan((0, 0, 0, 0), (0, 1, 2, 3))), head_dim=16)
    assert plan.kv_heads == 2 + 2 + 1 + 4
    assert plan.kv_ratio == 9 / 16
    assert plan.kv_bytes_per_token("bfloat16") == 9 * 16 * 2
    assert plan.layers[0].value_groups == ((0, 2), (1, 3))
    assert not plan.is_uniform_gqa
    assert AttentionPlan((LayerPlan((0, 1, 1, 0), (0, 1, 1, 0)),) * 2, 16).is_uniform_gqa
    wide = AttentionPlan((LayerPlan((0, 0, 0, 0), (0, 0, 0, 0), 2, 2),) * 2, 16)
    assert (wide.kv_heads, wide.kv_bytes_per_token("bfloat16"), wide.is_uniform_gqa) == (8, 8 * 16 * 2, True)
    assert wide.to_dict()["layers"][0] == {
        "key_map": [0, 0, 0, 0],
        "value_map": [0, 0, 0, 0],
        "key_width": 2,
        "value_width": 2,
    }
    assert "key_width" not in AttentionPlan.identity(2, 4, 16).to_json(), "digests from before there were widths stay"
    assert AttentionPlan.identity(2, 4, 16).kv_ratio == 1 and AttentionPlan.identity(2, 4, 16).is_uniform_gqa


def test_kv_bytes_refuses_an_unknown_dtype() -> None:
    with pytest.raises(ValueError, match="float3"):
        AttentionPlan.identity(1, 2, 4).kv_bytes_per_token("float3")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LayerPlan((1, 0), (0, 1)), r"key_map must be dense.*\(1, 0\)"),
        (lambda: LayerPlan((0, 1), (0, 2)), r"value_map must be dense.*\(0, 2\)"),
        (lambda: LayerPlan((0, 1), (0,)), "one entry a query head, got 2 and 1"),
        (lambda: LayerPlan((), ()), "at least one query head"),
        (lambda: LayerPlan((0, 0.5), (0, 1)), "tuple of integers"),
        (lambda: AttentionPlan((), 8), "at least one layer"),
        (lambda: AttentionPlan((LayerPlan.identity(2),), 0), "head_dim must be a positive integer, got 0"),
        (lambda: AttentionPlan((LayerPlan.identity(2), LayerPlan.identity(3)), 8), "layer 1: key_map has 3"),
        (lambda: HeadShare(1, 0, 1, 0), "earlier layer, got layer 1"),
        (lambda: AttentionPlan((LayerPlan.identity(2),), 8, (HeadShare(5, 0, 0, 0),)), "is outside"),
        (lambda: LayerPlan((0, 0), (0, 0), 0), "key_width must be a whole number of head dims, at least 1, got 0"),
        (lambda: LayerPlan((0, 0), (0, 0), 1, True), "value_width must be a whole number of head dims"),
        (lambda: AttentionPlan((LayerPlan((0, 0), (0, 0), 2, 2),), 8, composition=Composition()), "got wider"),
        (lambda: Composition(rank=0), "rank must be at least 1, got 0"),
        (lambda: AttentionPlan((LayerPlan.identity(4),), 8, (), Composition(groups=3)), "divide the 4 heads, got 3"),
        (lambda: map_of([[0, 1], [1]], 3), "head 1 is wrong"),
        (lambda: map_of([[0, 1]], 3), "head 2 is in none"),
    ],
)
def test_an_invalid_plan_cannot_be_constructed(make, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        make()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ("[]", "format 1, got 'list'"),
        ('{"format": 9}', "format 1, got 9"),
        ('{"format": 1, "more": 2}', "no field 'more'"),
        ('{"format": 1}', "incomplete"),
        ('{"format": 1, "head_dim": 4, "layers": [{"key_map": [0, 2], "value_map": [0, 1]}]}', "layer 0: key_map"),
        ('{"format": 1, "head_dim": 4, "layers": [{"key_map": [0]}]}', "incomplete"),
    ],
)
def test_json_that_is_no_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        AttentionPlan.from_json(text)


def test_shares_resolve_to_roots() -> None:
    chain = (HeadShare(2, 1, 1, 0), HeadShare(1, 0, 0, 3))
    assert resolve_shares(chain) == (HeadShare(1, 0, 0, 3), HeadShare(2, 1, 0, 3))
    layers = (LayerPlan.identity(4),) * 3
    with pytest.raises(PlanError, match="resolved"):
        AttentionPlan(layers, 8, chain)
    plan = AttentionPlan(layers, 8, resolve_shares(chain), Composition(rank=1))
    assert AttentionPlan.from_json(plan.to_json()) == plan
    with pytest.raises(PlanError, match="two sources"):
        resolve_shares((HeadShare(1, 0, 0, 3), HeadShare(1, 0, 0, 2)))


def test_digest_is_the_same_in_another_process() -> None:
    plan = AttentionPlan((LayerPlan((0, 1, 0), (0, 0, 1)),), 8)
    code = f"from attention.plan import *; print(AttentionPlan.from_json({plan.to_json()!r}).digest)"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "7"}
    )
    assert out.stdout.strip() == plan.digest
    assert json.loads(plan.to_json())["format"] == 1
