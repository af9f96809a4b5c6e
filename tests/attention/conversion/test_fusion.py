"""Fusion: what each closed form promises, against slow references and against what the model itself does."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from head_references import Seen, activations, as_mha, lifted, logits, watch, with_heads
from parameters import extended
from torch import Tensor
from transformers import PreTrainedModel

from attention.axes import ALIGNMENT, FUSION
from attention.calibration.calibrate import calibrate
from attention.calibration.moments import LayerStatistics, packed
from attention.calibration.store import Calibration
from attention.conversion.convert import convert, lift
from attention.conversion.fusion.costs import KeyCost, ValueCost
from attention.conversion.fusion.least_squares import least_squares_fuse
from attention.conversion.fusion.pooled import mean_fuse, norm_restored_fuse
from attention.conversion.fusion.signs import signs, with_signs
from attention.families import families, family_of, geometry_of
from attention.geometry import HeadGeometry, RotaryLayout
from attention.heads import LayerHeads, distinct_heads
from attention.modeling.model_classes import plan_of
from attention.plan import AttentionPlan, LayerPlan
from trainers.evaluation import evaluate

Tiny = Callable[..., PreTrainedModel]
MODELS = {
    "llama": {"attention_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen2, GQA": {"num_key_value_heads": 2},
    "qwen3": {},
    "gpt_neox": {},
    "opt": {},
    "gpt_oss": {},
    "phi3": {},
    "stablelm": {},
}
FAMILIES = sorted(families())
PLAN = LayerPlan((0, 1, 0, 0), (0, 0, 1, 0))


def ready(
    tiny_model: Tiny, case: str, tokens: Tensor, **overrides: object
) -> tuple[PreTrainedModel, HeadGeometry, Calibration]:
    model = tiny_model(case.split(",")[0], **(MODELS[case] | overrides))
    return model, geometry_of(model.config), calibrate(model, tokens)


def tensors(heads: LayerHeads) -> dict[str, Tensor]:
    return {f.name: t for f in fields(heads) if (t := getattr(heads, f.name)) is not None}


# ---- what every fusion owes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("name", FUSION.names())
def test_an_identity_plan_changes_no_bit(name: str, case: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model, geometry, calibration = ready(tiny_model, case, tiny_tokens)
    part = FUSION.get(name)
    for heads, statistics in zip(lifted(model), calibration.layers, strict=True):
        fused = part(heads, LayerPlan.identity(4), statistics, geometry, **part.settings())
        assert tensors(fused).keys() == tensors(heads).keys()
        assert all(torch.equal(value, getattr(heads, field)) for field, value in tensors(fused).items())


@pytest.mark.parametrize("family", FAMILIES)
def test_as_many_heads_as_before_give_the_same_logits(family: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    """A model of the plan's own kind with G = H, by every fusion with every alignment, also of a grouped checkpoint."""
    model = tiny_model(family)
    calibration = calibrate(model, tiny_tokens)
    whole = AttentionPlan.identity(2, 4, geometry_of(model.config).head_dim)
    expected = logits(model, tiny_tokens)
    for fusion, alignment in itertools.product(FUSION.names(), ALIGNMENT.names()):
        same = convert(model, whole, fusion=fusion, alignment=alignment, calibration=calibration)
        torch.testing.assert_close(logits(same, tiny_tokens), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("name", FUSION.names())
def test_shapes_order_and_untouched_heads(name: str, case: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model, geometry, calibration = ready(tiny_model, case, tiny_tokens)
    part, heads = FUSION.get(name), lifted(model)[1]
    before = {field: value.clone() for field, value in tensors(heads).items()}
    fused = part(heads, PLAN, calibration.layers[1], geometry, **part.settings())
    assert all(torch.equal(value, before[field]) for field, value in tensors(heads).items())
    assert fused.k.shape == (2, 8, heads.hidden_size) and fused.v.shape == (2, 8, heads.hidden_size)
    assert (fused.k_bias is None, fused.v_bias is None) == (heads.k_bias is None, heads.v_bias is None)
    assert {t.dtype for t in tensors(fused).values()} == {torch.float32}
    assert torch.equal(fused.k[1], heads.k[1]) and torch.equal(fused.q[1], heads.q[1])
    assert torch.equal(fused.v[1], heads.v[2]) and torch.equal(fused.o[2], heads.o[2])


@pytest.mark.parametrize("name", FUSION.names())
def test_equal_heads_merge_without_loss(name: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    """A lifted GQA checkpoint folded back into its own groups is itself."""
    for case in ("qwen2, GQA", "qwen3"):
        model, geometry, calibration = ready(tiny_model, case, tiny_tokens, num_key_value_heads=2)
        plan = AttentionPlan((LayerPlan(geometry.kv_map, geometry.kv_map),) * 2, 8)
        merged = convert(model, plan, fusion=name, calibration=calibration)
        torch.testing.assert_close(logits(merged, tiny_tokens), logits(model, tiny_tokens), rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", FUSION.names())
def test_heads_that_are_not_lifted_are_refused(name: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model, geometry, calibration = ready(tiny_model, "llama", tiny_tokens)
    heads, part = lifted(model)[0], FUSION.get(name)
    with pytest.raises(ValueError, match=r"lifted heads.* got \(4, 2, 4\)"):
        part(replace(heads, k=heads.k[:2]), PLAN, calibration.layers[0], geometry, **part.settings())
    if "statistics" in part.needs:
        with pytest.raises(ValueError, match="needs a calibration"):
            part(heads, PLAN, None, geometry, **part.settings())


# ---- mean, norm restored ------------------------------------------------------------------------------------------


def test_means_by_hand() -> None:
    def rows(*values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).view(len(values), 1, 1)

    heads = LayerHeads(rows(1, 2, 3), rows(3, 5, -1), rows(2, 4, 6), rows(1, 1, 1))
    plan = LayerPlan((0, 1, 0), (0, 0, 0))
    fused = mean_fuse(heads, plan)
    assert fused.k.flatten().tolist() == [1, 5] and fused.v.flatten().tolist() == [4]
    assert torch.equal(fused.q, heads.q) and torch.equal(fused.o, heads.o)
    moment = torch.tensor([[4.0, 0], [0, 1]], dtype=torch.float64)  # x of mean square 4, mean 0
    statistics = LayerStatistics(
        10, moment, packed(moment.float().repeat(3, 1, 1)), torch.zeros(3, 1, 1), torch.zeros(0, 0, 1)
    )
    restored = norm_restored_fuse(heads, plan, statistics)
    # Keys 3 and -1: mean square 5; values 2, 4, 6: 56 / 3. The scale of x drops out.
    torch.testing.assert_close(restored.k.flatten(), torch.tensor([5**0.5, 5.0]))
    torch.testing.assert_close(restored.v.flatten(), torch.tensor([(56 / 3) ** 0.5]))


def test_a_mean_that_vanishes_is_not_blown_up() -> None:
    ones = torch.ones(2, 1, 1)
    heads = LayerHeads(ones, torch.tensor([1.0, -1.0]).view(2, 1, 1), ones, ones)
    moment = torch.eye(2, dtype=torch.float64)
    statistics = LayerStatistics(
        10, moment, packed(moment.float().repeat(2, 1, 1)), torch.zeros(2, 1, 1), torch.zeros(0, 0, 1)
    )
    assert norm_restored_fuse(heads, LayerPlan((0, 0), (0, 0)), statistics).k.flatten().tolist() == [0]


@pytest.mark.parametrize("name", ["norm_restored", "least_squares"])
@pytest.mark.parametrize("case", ["llama", "qwen2", "gpt_neox", "opt"])
def test_shared_heads_keep_the_norm_of_their_members(
    name: str, case: str, tiny_model: Tiny, tiny_tokens: Tensor
) -> None:
    model, geometry, calibration = ready(tiny_model, case, tiny_tokens)
    heads, seen, part = lifted(model)[1], watch(model, tiny_tokens)[1], FUSION.get(name)
    fused = part(heads, PLAN, calibration.layers[1], geometry, **part.settings())
    key_mean, value_mean = 0.0, 0.0
    old, new = activations(heads.k, heads.k_bias, seen.x)[[0, 2, 3]], activations(fused.k, fused.k_bias, seen.x)[0]
    if name == "least_squares" and case in ("gpt_neox", "opt"):
        free = list(geometry.rotary.free)  # free dims are fitted, and sized, without the mean that softmax drops
        key_mean = torch.zeros_like(old[:, :1])
        key_mean[..., free] = old.mean(1, keepdim=True)[..., free]
        shared_mean = torch.zeros_like(new[:1])
        shared_mean[..., free] = new.mean(0, keepdim=True)[..., free]
        new = new - shared_mean
    torch.testing.assert_close(new.square().sum(-1).mean(), (old - key_mean).square().sum(-1).mean(), rtol=1e-3, atol=0)
    if name == "norm_restored":
        old, new = activations(heads.v, heads.v_bias, seen.x)[[0, 1, 3]], activations(fused.v, fused.v_bias, seen.x)[0]
    else:  # values are sized as attention mixes them
        mixed = torch.cat([seen.mixed(h) for h in (0, 1, 3)])
        old, new = activations(heads.v, heads.v_bias, mixed)[[0, 1, 3]], activations(fused.v, fused.v_bias, mixed)[0]
        if heads.o_bias is not None:
            per_head = new.view(3, -1, 8)
            value_mean = old.view(3, 3, -1, 8).mean(2, keepdim=True).expand(3, 3, old.shape[1] // 3, 8).flatten(1, 2)
            new = (per_head - per_head.mean(1, keepdim=True)).flatten(0, 1)
    torch.testing.assert_close(
        new.square().sum(-1).mean(), (old - value_mean).square().sum(-1).mean(), rtol=1e-3, atol=0
    )


# ---- least squares: lossless where it can be ----------------------------------------------------------------------


def scaled_turns(layout: RotaryLayout, seed: int) -> Tensor:
    """`[4, d, d]`: a random complex number in each rotary pair, any map of the free dims."""
    generator = torch.Generator().manual_seed(seed)
    maps = torch.zeros(4, layout.head_dim, layout.head_dim)
    for a, b in zip(layout.first, layout.second, strict=True):
        real, imaginary = torch.randn(2, 4, generator=generator)
        maps[:, a, a], maps[:, b, b], maps[:, b, a], maps[:, a, b] = real, real, imaginary, -imaginary
    free = torch.tensor(layout.free, dtype=torch.long)
    maps[:, free[:, None], free] = torch.randn(4, len(free), len(free), generator=generator)
    return maps


@pytest.mark.parametrize("case", ["llama", "qwen2", "gpt_neox", "opt"])
def test_heads_of_one_subspace_merge_without_loss(case: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model(case, **MODELS[case])
    geometry = geometry_of(model.config)
    related = []
    for heads in lifted(model):
        keys, values = scaled_turns(geometry.rotary, 1), scaled_turns(RotaryLayout.none(8), 2)
        bias = {
            n: None if getattr(heads, n) is None else maps @ getattr(heads, n)[0]
            for n, maps in (("k_bias", keys), ("v_bias", values))
        }
        related.append(replace(heads, k=keys @ heads.k[0], v=values @ heads.v[0], **bias))
    model = with_heads(model, related)
    calibration = calibrate(model, tiny_tokens)
    plan = AttentionPlan((LayerPlan((0,) * 4, (0,) * 4),) * 2, 8)
    expected = logits(model, tiny_tokens)
    assert (logits(convert(model, plan), tiny_tokens) - expected).abs().max() > 0.5
    merged = convert(model, plan, fusion="least_squares", calibration=calibration)
    torch.testing.assert_close(logits(merged, tiny_tokens), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("case", ["qwen2", "opt"])
def test_constants_of_value_biases_survive(case: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    """With values that are their bias alone, attention hands on a constant, which one shared head can carry."""
    model = tiny_model(case)
    model = with_heads(model, [replace(heads, v=torch.zeros_like(heads.v)) for heads in lifted(model)])
    calibration = calibrate(model, tiny_tokens)
    plan = AttentionPlan((LayerPlan((0, 1, 2, 3), (0,) * 4),) * 2, 8)
    expected = logits(model, tiny_tokens)
    assert (logits(convert(model, plan), tiny_tokens) - expected).abs().max() > 0.1
    merged = convert(model, plan, fusion="least_squares", calibration=calibration)
    torch.testing.assert_close(logits(merged, tiny_tokens), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("case", ["llama", "qwen2", "gpt_neox", "opt"])
def test_least_squares_does_not_care_for_coordinates(case: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model, _, calibration = ready(tiny_model, case, tiny_tokens)
    plan = AttentionPlan((PLAN,) * 2, 8)
    settings = {"fusion": "least_squares", "calibration": calibration}
    plain, turned = (convert(model, plan, alignment=name, **settings) for name in ("none", "procrustes"))
    torch.testing.assert_close(logits(turned, tiny_tokens), logits(plain, tiny_tokens), rtol=0, atol=5e-3)


# ---- least squares: the predicted error is the measured one -------------------------------------------------------


def measured_value_error(heads: LayerHeads, fused: LayerHeads, value_map: tuple[int, ...], seen: Seen, h: int) -> float:
    """Mean squared change of what head h adds to the output; an output bias may take up the mean, where the weights sum
    to 1."""
    mixed, sums = seen.mixed(h), seen.weights[:, h].sum(-1).flatten()

    def seen_values(layer: LayerHeads, index: int) -> Tensor:
        result = activations(layer.v[index : index + 1], None, mixed)[0]
        return result if layer.v_bias is None else result + sums[:, None] * layer.v_bias[index].double()

    slot = value_map[h]
    change = seen_values(heads, h) @ heads.o[h].double().T - seen_values(fused, slot) @ fused.o[h].double().T
    if heads.o_bias is not None and heads.sinks is None:
        change = change - change.mean(0)
    return change.square().sum(-1).mean().item()


@pytest.mark.parametrize("sweeps", [0, 2])
@pytest.mark.parametrize("case", MODELS)
def test_value_errors_are_those_measured_on_tokens(
    case: str, sweeps: int, tiny_model: Tiny, tiny_tokens: Tensor
) -> None:
    model, geometry, calibration = ready(tiny_model, case, tiny_tokens)
    heads, statistics, seen = lifted(model)[1], calibration.layers[1], watch(model, tiny_tokens)[1]
    fused = least_squares_fuse(heads, PLAN, statistics, geometry, sweeps=sweeps)
    cost = ValueCost(heads, statistics, geometry)
    result = [cost.fit(torch.tensor(g), sweeps).errors.sum() if len(g) > 1 else 0 for g in PLAN.value_groups]
    for group, error in zip(PLAN.value_groups, result, strict=True):
        expected = sum(measured_value_error(heads, fused, PLAN.value_map, seen, h) for h in group)
        assert float(error) == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert (error == 0) == (len(group) == 1)


@pytest.mark.parametrize("family", ["olmo2", "olmoe"])
@pytest.mark.parametrize("key_map", [(0, 0, 1, 1), (0, 1, 0, 0), (0, 0, 0, 0)])
def test_keys_under_a_norm_of_all_heads(
    family: str, key_map: tuple[int, ...], tiny_model: Tiny, tiny_tokens: Tensor
) -> None:
    """Nearer to the original than mean keys; and lifted, the same model."""
    model = tiny_model(family)
    calibration = calibrate(model, tiny_tokens)
    plan = AttentionPlan((LayerPlan(key_map, (0, 1, 2, 3)),) * 2, 8)
    expected, apart = logits(model, tiny_tokens), {}
    for name in ("mean", "least_squares"):
        converted = convert(model, plan, fusion=name, calibration=calibration)
        apart[name] = float((logits(converted, tiny_tokens) - expected).square().mean())
    assert 0 < apart["least_squares"] < 0.95 * apart["mean"], apart  # random keys: little to gain
    converted = convert(model, plan, fusion="least_squares", calibration=calibration)
    expanded = with_heads(model, lift(converted))
    torch.testing.assert_close(logits(expanded, tiny_tokens), logits(converted, tiny_tokens), rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma4_text", "minimax_m2", "olmo2", "olmoe"])
def test_a_layer_that_keeps_all_its_kv_heads_keeps_all_its_weights(
    family: str, tiny_model: Tiny, tiny_tokens: Tensor
) -> None:
    """Of a grouped checkpoint, whose heads come lifted: a copy for each query head."""
    model = tiny_model(family, num_key_value_heads=2)
    own = plan_of(model)
    fused = LayerPlan((0, 0, 0, 0), (0, 0, 0, 0))
    plan = replace(own, layers=(own.layers[0], *(fused for _ in own.layers[1:])))
    converted = convert(model, plan, fusion="least_squares", calibration=calibrate(model, tiny_tokens))
    before, after = (family_of(m.config).attention_modules(m)[0].state_dict() for m in (model, converted))
    assert before
    for name, weights in before.items():
        assert torch.equal(after[name], weights), name


@pytest.mark.parametrize("case", ["llama", "qwen2", "gpt_neox", "opt"])
def test_an_output_bias_takes_up_the_mean_change(case: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model, geometry, calibration = ready(tiny_model, case, tiny_tokens)
    heads, seen = lifted(model)[1], watch(model, tiny_tokens)[1]
    fused = least_squares_fuse(heads, PLAN, calibration.layers[1], geometry)
    change = torch.zeros(heads.hidden_size, dtype=torch.float64)
    for old, head_map, sign in ((heads, range(4), 1), (fused, PLAN.value_map, -1)):
        for h, slot in enumerate(head_map):
            bias = None if old.v_bias is None else old.v_bias[slot : slot + 1]
            values = activations(old.v[slot : slot + 1], bias, seen.mixed(h))[0]
            change += sign * (values @ old.o[h].double().T).mean(0)
        change += 0 if old.o_bias is None else sign * old.o_bias.double()
    if heads.o_bias is None:
        assert change.abs().max() > 1e-2
    else:
        torch.testing.assert_close(change, torch.zeros_like(change), rtol=0, atol=1e-4)


def slow_key_error(heads: LayerHeads, fused: LayerHeads, slot: int, h: int, seen: Seen, layout: RotaryLayout) -> float:
    """Mean squared logit change, queries and keys independent: a loop over the angles that RoPE may put there."""
    q, q_new = (activations(x.q, x.q_bias, seen.x)[h] for x in (heads, fused))
    k, k_new = activations(heads.k, heads.k_bias, seen.x)[h], activations(fused.k, fused.k_bias, seen.x)[slot]
    total = 0.0
    for a, b in zip(layout.first, layout.second, strict=True):
        complex_of = [torch.complex(x[:, a], x[:, b]) for x in (q, k, q_new, k_new)]
        # Energies of the products separate because the one scale is folded into the query: q_new = conj(s) q.
        scale = (complex_of[2] * complex_of[0].conj()).sum() / complex_of[0].abs().square().sum()
        change = complex_of[1] - scale.conj() * complex_of[3]
        for angle in torch.arange(4) * torch.pi / 2:  # four angles average the square of a cosine exactly
            turned = change * torch.polar(torch.tensor(1.0).double(), angle.double())
            logit = (complex_of[0].conj()[:, None] * turned[None, :]).real
            total += logit.square().mean().item() / 4
    free = list(layout.free)
    if free:
        logit = q[:, free] @ k[:, free].T - q_new[:, free] @ k_new[:, free].T
        logit = logit - logit.mean(1, keepdim=True)  # one number per query, which softmax does not see
        total += logit.square().mean().item()
    return total


@pytest.mark.parametrize("case", ["llama", "mistral", "qwen2", "qwen2, GQA", "gpt_neox", "opt"])
def test_key_errors_are_those_measured_on_tokens(case: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model, geometry, calibration = ready(tiny_model, case, tiny_tokens)
    heads, statistics, seen = lifted(model)[1], calibration.layers[1], watch(model, tiny_tokens)[1]
    fused = least_squares_fuse(heads, PLAN, statistics, geometry)
    cost = KeyCost(heads, statistics, geometry)
    result = [cost.cost(group) for group in PLAN.key_groups]
    for slot, (group, error) in enumerate(zip(PLAN.key_groups, result, strict=True)):
        expected = sum(slow_key_error(heads, fused, slot, h, seen, geometry.rotary) for h in group)
        assert error == pytest.approx(expected, rel=1e-3, abs=1e-4)
        assert (error == 0) == (len(group) == 1)


@pytest.mark.parametrize(("case", "signed"), [("qwen3", True), ("gemma3_text", True), ("phi", False)])
def test_keys_under_a_norm_are_averaged(case: str, signed: bool, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model(case, **({} if signed else {"qk_layernorm": True}))
    geometry, statistics, heads = geometry_of(model.config), calibrate(model, tiny_tokens).layers[1], lifted(model)[1]
    turned = with_signs(heads, PLAN.key_groups, statistics, geometry)
    assert torch.equal(turned.k.abs(), heads.k.abs()) and not torch.equal(turned.k, heads.k)
    same = [logits(with_heads(model, [lifted(model)[0], each]), tiny_tokens) for each in (heads, turned)]
    assert (float((same[0] - same[1]).abs().max()) < 1e-4) == signed, "a layer norm takes off a mean, which has a sign"
    fused = least_squares_fuse(heads, PLAN, statistics, geometry)
    start = turned if signed else heads
    assert torch.equal(fused.q, start.q) and torch.equal(fused.k, mean_fuse(start, PLAN).k)
    # Parallel heads cost nothing at any length, since the norm removes it; opposed ones the most, but for signs.
    parallel = replace(heads, k=heads.k[:1] * torch.tensor([1.0, 2, 3, -1]).view(4, 1, 1))
    if heads.k_bias is not None:
        parallel = replace(parallel, k_bias=torch.zeros_like(heads.k_bias))
    cost = KeyCost(parallel, statistics, geometry)
    assert cost.cost((0, 1, 2)) == pytest.approx(0, abs=1e-4)
    against = statistics.query_moment[3].trace().item()  # 2 k and -k: the mean k / 2 points against the second
    assert cost.cost((1, 3)) == pytest.approx(0 if signed else 4 * against, rel=1e-3, abs=1e-4)


def test_signs_of_a_unit_are_the_best_of_all() -> None:
    """Of few heads: against every choice. The first keeps its dims."""
    rows = torch.randn(50, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    gram = rows @ rows.mT
    chosen = signs(gram)
    every = torch.cartesian_prod(*[torch.tensor([1.0, -1.0], dtype=torch.float64)] * 4)
    every = torch.cat([torch.ones(len(every), 1), every.double()], 1)
    best = torch.einsum("si,nij,sj->ns", every, gram, every).amax(1)
    result = torch.einsum("ni,nij,nj->n", chosen, gram, chosen)
    assert (chosen[:, 0] == 1).all() and set(chosen.unique().tolist()) == {-1.0, 1.0}
    assert (result > 0.85 * best).all() and (result > 0.999 * best).double().mean() > 0.9


def test_signs_bring_keys_under_a_norm_nearer(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model = tiny_model("qwen3")
    calibration, plan = calibrate(model, tiny_tokens), AttentionPlan((LayerPlan((0, 0, 1, 1), (0, 1, 2, 3)),) * 2, 8)
    expected = logits(model, tiny_tokens)
    created = (convert(model, plan, fusion=name, calibration=calibration) for name in ("least_squares", "mean"))
    apart = [float((logits(one, tiny_tokens) - expected).square().mean()) for one in created]
    assert 0 < apart[0] < apart[1]


# ---- least squares: slow references of the optimum ----------------------------------------------------------------


def test_values_are_the_svd_of_the_weighted_maps(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    """docs/methods.md, section 6, in the model's own D dims: SVD of C^(1/2) [M_h], then each B_h refitted under C_h."""
    model, geometry, calibration = ready(tiny_model, "mistral", tiny_tokens)
    heads, statistics, seen = lifted(model)[1], calibration.layers[1], watch(model, tiny_tokens)[1]
    fused, group = least_squares_fuse(heads, PLAN, statistics, geometry, sweeps=0), PLAN.value_groups[0]
    covariances = [seen.mixed(h).T @ seen.mixed(h) / len(seen.mixed(h)) for h in group]
    maps = [heads.v[h].double().T @ heads.o[h].double().T for h in group]
    values, vectors = torch.linalg.eigh(sum(covariances) / len(group))
    root = vectors * values.sqrt() @ vectors.T
    left = torch.linalg.svd(root @ torch.cat(maps, dim=1)).U[:, :8]
    shared = torch.linalg.solve(root, left)
    for h, covariance, expected in zip(group, covariances, maps, strict=True):
        refitted = shared @ torch.linalg.solve(shared.T @ covariance @ shared, shared.T @ covariance @ expected)
        result = fused.v[0].double().T @ fused.o[h].double().T
        torch.testing.assert_close(result, refitted, rtol=1e-2, atol=1e-3)


def test_keys_are_the_leading_direction_of_each_pair(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    """The SVD of the members' weighted complex keys, token by token, for each rotary pair."""
    model, geometry, calibration = ready(tiny_model, "qwen2", tiny_tokens)
    heads, seen, layout = lifted(model)[1], watch(model, tiny_tokens)[1], geometry.rotary
    fused, group = least_squares_fuse(heads, PLAN, calibration.layers[1], geometry), PLAN.key_groups[0]
    q, k = activations(heads.q, heads.q_bias, seen.x), activations(heads.k, heads.k_bias, seen.x)
    q_new, k_new = activations(fused.q, fused.q_bias, seen.x), activations(fused.k, fused.k_bias, seen.x)[0]
    for a, b in zip(layout.first, layout.second, strict=True):
        weight = torch.stack([q[h][:, [a, b]].square().sum(1).mean().sqrt() for h in group])
        keys = torch.stack([torch.complex(k[h][:, a], k[h][:, b]) for h in group])
        left, values, right = torch.linalg.svd(weight[:, None] * keys, full_matrices=False)
        best = left[:, :1] * values[0] @ right[:1] / weight[:, None]
        for index, h in enumerate(group):
            result = (
                torch.complex(q_new[h][:, a], -q_new[h][:, b])[:, None] * torch.complex(k_new[:, a], k_new[:, b])
            ).real
            expected = (torch.complex(q[h][:, a], -q[h][:, b])[:, None] * best[index]).real
            torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-3)


def test_two_keys_by_hand() -> None:
    # One rotary pair, x the identity input of two dims with mean square 1: k_0 = x, k_1 = 2 i x. Rank one, so exact.
    turn, eye = torch.tensor([[0.0, -1], [1, 0]]), torch.eye(2)
    both = torch.stack([eye, eye])
    heads = LayerHeads(both, torch.stack([eye, 2 * turn]), both, both)
    moment = torch.eye(3, dtype=torch.float64)
    statistics = LayerStatistics(9, moment, packed(moment.float().repeat(2, 1, 1)), both.double(), torch.zeros(0, 0, 2))
    geometry = HeadGeometry("llama", 1, 2, 2, 2, 2, RotaryLayout(2, 2), False, False, False, False, False, 8, 8)
    plan = LayerPlan((0, 0), (0, 1))
    fused = least_squares_fuse(heads, plan, statistics, geometry)
    assert KeyCost(heads, statistics, geometry).cost(plan.key_groups[0]) == pytest.approx(0, abs=1e-12)
    # Mean energy of the members: (1 + 4) / 2 of the unit; the heavier member keeps its phase.
    torch.testing.assert_close(fused.k[0], 2.5**0.5 * turn)
    for h in range(2):
        torch.testing.assert_close(fused.q[h].T @ fused.k[0], heads.q[h].T @ heads.k[h])
    # Orthogonal keys of equal weight: half of the energy of both is lost. 1 pair, energies |q|^2 = 2, |k|^2 = 2.
    mirror = replace(heads, k=torch.stack([eye, torch.diag(torch.tensor([1.0, -1.0]))]))
    assert KeyCost(mirror, statistics, geometry).cost(plan.key_groups[0]) == pytest.approx(2.0)


def test_a_group_of_one_stored_head_is_left_as_it_is(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    """A layer that keeps all KV heads of a grouped checkpoint."""
    model, geometry, calibration = ready(tiny_model, "qwen2, GQA", tiny_tokens)
    heads = lifted(model)[0]
    first, which = distinct_heads(heads.k, heads.k_bias)
    assert 1 < len(first) < geometry.num_heads
    groups = tuple(which.tolist())
    fused = least_squares_fuse(heads, LayerPlan(groups, groups), calibration.layers[0], geometry)
    assert torch.equal(fused.q, heads.q) and torch.equal(fused.o, heads.o)
    assert torch.equal(fused.k, heads.k[first]) and torch.equal(fused.v, heads.v[first])


# ---- costs of groups ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", MODELS)
def test_costs_together_are_the_costs_one_by_one(case: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model, geometry, calibration = ready(tiny_model, case, tiny_tokens)
    heads, statistics = lifted(model)[0], calibration.layers[0]
    for cost in (KeyCost(heads, statistics, geometry), ValueCost(heads, statistics, geometry)):
        for size in range(1, 5):
            groups = list(itertools.combinations(range(4), size))
            for group, together in zip(groups, cost.costs(groups, chunk=3), strict=True):
                assert together.item() == pytest.approx(cost.cost(group[::-1]), rel=1e-9)


@pytest.mark.parametrize("case", MODELS)
def test_a_value_cost_is_the_error_of_the_fit(case: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    """The price of a group, in its short form, is what fitting the group leaves."""
    model, geometry, _ = ready(tiny_model, case, tiny_tokens)
    statistics = calibrate(model, tiny_tokens).layers[1]
    cost = ValueCost(lifted(model)[1], statistics, geometry)
    groups = list(itertools.combinations(range(4), 2))
    for group, price in zip(groups, cost.costs(groups), strict=True):
        fitted = cost.fit(torch.tensor(group)).errors.sum().item()
        assert price.item() == pytest.approx(fitted, rel=1e-4, abs=1e-6 * cost.cost(range(4)))
    with pytest.raises(ValueError, match="of one size"):
        cost.costs([(0, 1), (0, 1, 2)])


def test_more_heads_in_a_group_never_cost_less(demo_model: PreTrainedModel, demo_calibration: Calibration) -> None:
    geometry = geometry_of(demo_model.config)
    heads, statistics = lifted(demo_model)[3], demo_calibration.layers[3]
    keys, values = KeyCost(heads, statistics, geometry), ValueCost(heads, statistics, geometry)
    table: dict[tuple[int, ...], float] = {}
    for size in (1, 2, 3, 8):
        groups = list(itertools.combinations(range(8), size))
        table |= dict(zip(groups, keys.costs(groups).tolist(), strict=True))
    for group, head in itertools.product(table, range(8)):
        if (more := tuple(sorted({*group, head}))) in table:
            assert table[more] >= table[group] - 1e-9
    assert 0 < values.cost((0, 1)) < values.cost((0, 1, 2)) < values.cost(range(8))
    assert table[tuple(range(8))] > 100 * min(price for price in table.values() if price > 0) / 28  # far from flat


def test_sweeps_lower_the_value_error(demo_model: PreTrainedModel, demo_calibration: Calibration) -> None:
    groups = ((0, 1, 2, 3), (4, 5, 6, 7))
    for heads, statistics in zip(lifted(demo_model), demo_calibration.layers, strict=True):
        cost = ValueCost(heads, statistics)
        errors = [sum(cost.fit(torch.tensor(g), n).errors.sum() for g in groups) for n in (0, 1, 2, 5)]
        assert all(later <= earlier for earlier, later in itertools.pairwise(errors))
        assert errors[2] < 0.95 * errors[0]


def test_moments_of_fewer_tokens_than_dims_are_fitted_as_far_as_they_go(tiny_model: Tiny) -> None:
    """Singular but for rounding, which is below zero here and there: sweeps stay finite and do no harm."""
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 8}
    model = tiny_model("llama", **sizes)
    tokens = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
    heads, statistics = lifted(model)[0], calibrate(model, tokens).layers[0]
    for group in itertools.combinations(range(6), 4):
        fits = [ValueCost(heads, statistics).fit(torch.tensor(group), sweeps) for sweeps in (0, 10)]
        assert all(torch.isfinite(t).all() for fit in fits for t in (fit.basis, fit.back, fit.errors))
        assert fits[1].errors.sum() <= fits[0].errors.sum()


def test_groups_that_are_none_are_refused(tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    model, geometry, calibration = ready(tiny_model, "llama", tiny_tokens)
    cost = KeyCost(lifted(model)[0], calibration.layers[0], geometry)
    for members in ((), (0, 0), (3, 4), (-1,)):
        with pytest.raises(ValueError, match=r"distinct heads of 0\.\.3"):
            cost.cost(members)


# ---- the demo checkpoint ------------------------------------------------------------------------------------------


@pytest.mark.extended
@pytest.mark.parametrize(("width", "aligned_gain"), [extended(2, 0.8), (4, 0.8)])
def test_the_order_on_the_demo_checkpoint(
    width: int,
    aligned_gain: float,
    demo_model: PreTrainedModel,
    demo_calibration: Calibration,
    demo_held_out: Tensor,
) -> None:
    """Neighbour groups without training: mean, aligned mean, least squares, in this order and by these margins."""
    neighbours = tuple(h // width for h in range(8))
    plan = AttentionPlan((LayerPlan(neighbours, neighbours),) * 4, 32)
    loss = {"untouched": evaluate(demo_model, demo_held_out).loss}
    for name, alignment, fusion in (
        ("mean", "none", "mean"),
        ("aligned mean", "procrustes", "mean"),
        ("aligned, norm restored", "procrustes", "norm_restored"),
        ("least squares", "none", "least_squares"),
    ):
        model = convert(demo_model, plan, alignment=alignment, fusion=fusion, calibration=demo_calibration)
        loss[name] = evaluate(model, demo_held_out).loss
    print({name: round(value, 3) for name, value in loss.items()})
    assert loss["aligned mean"] < loss["mean"] - aligned_gain
    assert loss["aligned, norm restored"] < loss["aligned mean"]
    assert loss["least squares"] < loss["mean"] - 1.5
    assert loss["untouched"] < loss["least squares"] < loss["aligned, norm restored"] - 0.3


@pytest.mark.parametrize("name", FUSION.names())
def test_conversion_and_plain_expansion_agree(name: str, tiny_model: Tiny, tiny_tokens: Tensor) -> None:
    """The converted model against a stock model that repeats each fused head for its readers."""
    for case in ("qwen2, GQA", "gpt_neox"):
        model, geometry, calibration = ready(tiny_model, case, tiny_tokens)
        part = FUSION.get(name)
        fused = [
            part(heads, PLAN, statistics, geometry, **part.settings())
            for heads, statistics in zip(lifted(model), calibration.layers, strict=True)
        ]
        converted = convert(model, AttentionPlan((PLAN,) * 2, 8), fusion=name, calibration=calibration)
        expanded = with_heads(as_mha(model), fused, [PLAN] * 2)
        torch.testing.assert_close(logits(converted, tiny_tokens), logits(expanded, tiny_tokens), rtol=0, atol=1e-4)
