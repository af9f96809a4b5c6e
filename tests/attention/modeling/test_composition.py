"""DCMHA: against the paper's pseudo-code written as loops, its parameter formula, and the cache."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sizes import extra_parameters
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from attention.conversion.convert import assemble, build, convert, read_layers
from attention.families import families
from attention.io import checkpoint
from attention.io.export import export
from attention.modeling.composition import compositions, reset
from attention.modeling.composition.composing import NORM_EPSILON, Compose, DynamicWeights, HeadComposition
from attention.modeling.grouped import cache_bytes
from attention.modeling.growing_cache import cache_argument
from attention.plan import AttentionPlan, Composition, LayerPlan, PlanError

B, H, T, S, D = 2, 4, 3, 5, 6
MAPS = (LayerPlan((0, 1, 0, 2), (0, 0, 0, 1)), LayerPlan((0, 0, 0, 0), (0, 1, 2, 3)))
VARIANTS = {
    "paper": Composition(),
    "rank 1": Composition(rank=1),
    "rank 4": Composition(rank=4),
    "query side": Composition(key_side=False),
    "key side": Composition(query_side=False),
    "before": Composition(after_softmax=False),
    "after": Composition(before_softmax=False),
    "projections": Composition(gate=False),
    "gates": Composition(projection=False),
    "projections in groups, one side": Composition(gate=False, groups=2, key_side=False),
    "static base": Composition(static_base=True),
    "talking heads": Composition(query_side=False, key_side=False, static_base=True),
    "groups": Composition(rank=1, groups=2),
    "grouped base": Composition(groups=2, static_base=True),
    "window": Composition(window=3),
    "window 3:1": Composition(window=3, window_pattern=3),
    "qk norm": Composition(qk_norm=True),
}
every_variant = pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS.keys())


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def stir(model: torch.nn.Module, seed: int = 5) -> torch.nn.Module:
    """Composition parameters of a size that matters (the paper's start is close to the identity)."""
    generator = seeded(seed)
    for module in compositions(model) or [m for m in model.modules() if isinstance(m, Compose)]:
        for parameter in module.parameters():
            std = 0.7 / math.sqrt(parameter.shape[0] if parameter.dim() > 1 else 1)
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * std)
    return model


def sequences(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(64, shape, generator=seeded(seed))


# ---- compose against loops ---------------------------------------------------------------------------------------


def gelu(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def loop_weights(side: DynamicWeights, x: list[float], group: int) -> tuple[list[list[float]], list[list[float]]]:
    """w_1 and w_2 of Xiao 2024, Eq. 5, for one token and one group, as `[R][h]`: nothing but floats."""
    h, rank = side.group_heads, side.rank
    w_1, w_2 = side.w_1.tolist(), side.w_2.tolist()
    inner = [gelu(sum(x[d] * w_1[d][group][i] for d in range(len(x)))) for i in range(2 * h * rank)]
    dw = [sum(inner[i] * w_2[group][i][j] for i in range(len(inner))) for j in range(len(inner))]
    down = [dw[r * h : (r + 1) * h] for r in range(rank)]
    up = [dw[(rank + r) * h : (rank + r + 1) * h] for r in range(rank)]
    norms = [math.sqrt(sum(v * v for v in row) / h + NORM_EPSILON) for row in down]
    return [[v / n for v in row] for row, n in zip(down, norms, strict=True)], up


def loop_compose(compose: Compose, a: Tensor, x_q: Tensor, x_k: Tensor) -> Tensor:
    """Xiao 2024, Eq. 7, one score at a time."""
    out = torch.zeros_like(a)
    size = H // compose.groups
    for b in range(B):
        for t in range(T):
            for s in range(S):
                for head in range(H):
                    group, place = divmod(head, size)
                    old = a[b, group * size : (group + 1) * size, t, s].tolist()
                    if compose.base is None:
                        total = old[place]
                    else:
                        total = sum(old[j] * float(compose.base[group, j, place]) for j in range(size))
                    for side, x in ((compose.query, x_q[b, t]), (compose.key, x_k[b, s])):
                        if side is None:
                            continue
                        if side.w_1 is not None:
                            down, up = loop_weights(side, x.tolist(), group)
                            for r in range(side.rank):
                                total += sum(old[j] * down[r][j] for j in range(size)) * up[r][place]
                        if side.w_gate is not None:
                            gate = sum(float(x[d]) * float(side.w_gate[d, head]) for d in range(D))
                            total += old[place] * math.tanh(gate)
                    out[b, head, t, s] = total
    return out


@every_variant
@torch.no_grad()
def test_equals_loops_in_float64(settings: Composition) -> None:
    compose = Compose(H, D, settings).double()
    stir(compose)
    generator = seeded(2)
    a, x_q, x_k = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((B, H, T, S), (B, T, D), (B, S, D))
    )
    out = compose(a, x_q, compose.key_weights(x_k))
    assert torch.allclose(out, loop_compose(compose, a, x_q, x_k), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(out, a, atol=0.1)


@torch.no_grad()
def test_groups_are_composes_of_their_own() -> None:
    """Section 3.2: no weight and no score crosses a group."""
    whole = Compose(H, D, Composition(groups=2, static_base=True)).double()
    stir(whole)
    a, x = torch.randn(B, H, T, T, generator=seeded(), dtype=torch.float64), torch.randn(B, T, D).double()
    out = whole(a, x, whole.key_weights(x))
    for g in range(2):
        part = Compose(H // 2, D, Composition(static_base=True)).double()
        for ours, all_of_it in ((part.query, whole.query), (part.key, whole.key)):
            ours.w_1.copy_(all_of_it.w_1[:, g : g + 1])
            ours.w_2.copy_(all_of_it.w_2[g : g + 1])
            ours.w_gate.copy_(all_of_it.w_gate[:, 2 * g : 2 * g + 2])
        part.base.copy_(whole.base[g : g + 1])
        heads = a[:, 2 * g : 2 * g + 2]
        assert torch.allclose(out[:, 2 * g : 2 * g + 2], part(heads, x, part.key_weights(x)), atol=1e-12)


@torch.no_grad()
def test_hidden_scores_do_not_leak() -> None:
    """The mask comes after the first compose: what it hides has weight exactly 0, also after the second."""
    module = HeadComposition(H, D, Composition(), window=2)
    stir(module)
    generator = seeded()
    scores, x = torch.randn(1, H, 5, 5, generator=generator), torch.randn(1, 5, D, generator=generator)
    mask = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    mask[..., 1] = False
    weights = module(scores, x, module.key_weights(x), mask)
    for t in range(5):
        for s in range(5):
            seen = s <= t and s != 1 and t - s < 2
            assert bool((weights[0, :, t, s] != 0).all()) is seen or (t == 1 and s != 1) or (t, s) == (2, 1)
    additive = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
    rows = [0, 2, 3, 4]  # row 1 sees only itself, which is hidden: finite, and of no use
    assert torch.allclose(module(scores, x, module.key_weights(x), additive)[:, :, rows], weights[:, :, rows])
    assert weights.isfinite().all()


def test_window_pattern() -> None:
    def locals_of(pattern: int, layers: int) -> list[bool]:
        return [Composition(window=256, window_pattern=pattern).window_of(i) > 0 for i in range(layers)]

    assert locals_of(1, 4) == [True, False, True, False]
    assert locals_of(3, 8) == [True, False, True, True, True, False, True, True]
    assert sum(locals_of(7, 32)) == 28
    assert Composition().window_of(0) == 0


# ---- initialisation ----------------------------------------------------------------------------------------------


def test_initialisation_is_the_papers() -> None:
    heads, hidden, rank = 32, 256, 2
    side = DynamicWeights(heads, hidden, Composition(rank=rank))
    side.reset(generator=seeded())
    expected = {
        "w_1": math.sqrt(2 / (hidden + 2 * heads * rank)),
        "w_2": 0.02 / (math.sqrt(2 * heads * rank) * (heads + rank)),
        "w_gate": 0.05 * math.sqrt(2 / (hidden + heads)),
    }
    for name, std in expected.items():
        assert float(getattr(side, name).detach().std()) == pytest.approx(std, rel=0.05), name


@every_variant
def test_identity_start_is_exact(settings: Composition) -> None:
    compose = Compose(H, D, settings)
    reset(compose, identity=True, generator=seeded())
    scores, x = torch.randn(B, H, T, T, generator=seeded()), torch.randn(B, T, D)
    assert torch.equal(compose(scores, x, compose.key_weights(x)), scores)


def test_identity_start_can_learn() -> None:
    """With all of W_2 zero the low-rank branch would have no gradient, ever. It has one, and so have the gates."""
    compose = Compose(H, D, Composition())
    reset(compose, identity=True, generator=seeded())
    scores, x = torch.randn(B, H, T, T, generator=seeded()), torch.randn(B, T, D, generator=seeded(1))
    compose(scores, x, compose.key_weights(x)).square().sum().backward()
    for side in (compose.query, compose.key):
        assert side.w_2.grad[..., side.w_2.shape[-1] // 2 :].abs().max() > 1e-3
        assert side.w_gate.grad.abs().max() > 1e-3
        with torch.no_grad():
            side.w_2.zero_()
    compose.zero_grad()
    compose(scores, x, compose.key_weights(x)).square().sum().backward()
    assert compose.query.w_2.grad.abs().max() == 0


@every_variant
def test_extra_parameters(settings: Composition, tiny_model) -> None:
    config = tiny_model("llama").config
    plain, composed = (build(config, AttentionPlan(MAPS, 8, (), c)) for c in (None, settings))
    counts = [sum(p.numel() for p in model.parameters()) for model in (plain, composed)]
    assert counts[1] - counts[0] == extra_parameters(settings, 2, 4, 32)


def test_extra_parameters_worked_example() -> None:
    """Xiao 2024, App. E and Table 2: 2.6 % of 12 L D^2 at D = 2048, H = 32, R = 2; in short (2R + 1) / 3d."""
    extra, model = extra_parameters(Composition(), 24, 32, 2048), 24 * 12 * 2048**2
    R, d = 2, 64
    assert extra / model == pytest.approx(2 * R / (3 * d) + 4 * R**2 / (3 * d**2) + 1 / (3 * d), rel=1e-12)
    assert (2 * R + 1) / (3 * d) == pytest.approx(0.026, abs=5e-4)


def test_a_part_of_the_branches_has_its_own_parameters_and_nothing_else() -> None:
    """Table 9: W_1 and W_2 of both sides and places, or W_g alone; at decoding 2R or 1 value per head, side and
    place."""
    R, D_, H_ = 2, 32, 4
    both, projections, gates = (Composition(**s) for s in ({}, {"gate": False}, {"projection": False}))
    assert extra_parameters(projections, 1, H_, D_) == 4 * (D_ * 2 * R * H_ + (2 * R * H_) ** 2)
    assert extra_parameters(gates, 1, H_, D_) == 4 * D_ * H_
    assert [c.cached_values(H_) for c in (both, projections, gates)] == [40, 32, 8]
    with pytest.raises(PlanError, match="at least one of projection and gate"):
        Composition(projection=False, gate=False)
    plan = AttentionPlan(MAPS, 8, (), both)
    assert "gate" not in plan.to_json()  # plans from before there was a choice keep their digests
    for settings in (projections, gates):
        plan = AttentionPlan(MAPS, 8, (), settings)
        assert AttentionPlan.from_json(plan.to_json()) == plan


# ---- in a model --------------------------------------------------------------------------------------------------


def composed(model, settings: Composition, layers=MAPS, *, stirred: bool = True):
    """The model with pooled heads and random composition."""
    base = convert(model, AttentionPlan(layers, 8, (), replace(settings, qk_norm=False)))
    if settings.qk_norm:
        new = build(base.config, AttentionPlan(layers, 8, (), settings)).eval()
        new.load_state_dict(base.state_dict(), strict=False)
        base = new
    return stir(base) if stirred else base


WINDOWED = ("gemma2", "gemma3_text", "gemma4_text", "gpt_oss")
every_family = pytest.mark.parametrize("family", sorted(set(families()) - set(WINDOWED)))


@pytest.mark.parametrize("family", WINDOWED)
def test_layers_that_keep_a_window_are_not_composed(tiny_model, family: str) -> None:
    with pytest.raises(PlanError, match=f"{family} keep a window of 10 tokens.*without composition"):
        convert(tiny_model(family), AttentionPlan(MAPS, 8, (), Composition()))
    if family == "gemma4_text":  # it is converted in these layers alone
        return
    model = tiny_model(family, layer_types=["full_attention"] * 2)
    retrofit = convert(model, AttentionPlan(MAPS, 8, (), Composition(static_base=True)))
    plain = convert(model, AttentionPlan(MAPS, 8))
    with torch.no_grad():  # soft caps and sinks are kept
        assert torch.allclose(retrofit(sequences(2, 20)).logits, plain(sequences(2, 20)).logits, atol=1e-5)


@every_family
@torch.no_grad()
def test_retrofit_starts_at_the_same_logits(tiny_model, family: str) -> None:
    model = tiny_model(family)
    for layers in (MAPS, (LayerPlan.identity(4),) * 2):
        plain = convert(model, AttentionPlan(layers, 8))
        retrofit = convert(model, AttentionPlan(layers, 8, (), Composition(static_base=True)))
        assert torch.allclose(retrofit(sequences(2, 20)).logits, plain(sequences(2, 20)).logits, atol=1e-5)
        again = convert(model, retrofit.plan).state_dict()
        assert all(torch.equal(tensor, again[name]) for name, tensor in retrofit.state_dict().items())


@every_family
@torch.no_grad()
def test_every_family_composes_and_caches(tiny_model, family: str, tmp_path) -> None:
    model = composed(tiny_model(family), Composition())
    x = sequences(2, 16)
    whole = model(x).logits
    assert not torch.allclose(whole, convert(tiny_model(family), AttentionPlan(MAPS, 8))(x).logits, atol=1e-2)
    cache = DynamicCache()
    parts = [model(part, **cache_argument(model, cache)).logits for part in x.split((9, 5, 1, 1), dim=1)]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=3e-4)
    outputs = [model.generate(x, max_new_tokens=6, pad_token_id=0, use_cache=use) for use in (True, False)]
    assert torch.equal(*outputs)
    assert torch.equal(checkpoint.load(checkpoint.save(model, tmp_path / "model"))(x).logits, whole)


@every_variant
@torch.no_grad()
def test_cached_equals_uncached(tiny_model, settings: Composition) -> None:
    model = composed(tiny_model("llama"), settings).double()
    x = sequences(2, 24)
    whole = model(x).logits
    cache = DynamicCache()
    parts = [
        model(x[:, :10], **cache_argument(model, cache)).logits,
        model(x[:, 10:16], **cache_argument(model, cache)).logits,
    ]
    parts += [model(x[:, t : t + 1], **cache_argument(model, cache)).logits for t in range(16, 24)]
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)  # RoPE and softmax leave float32 traces
    assert cache_bytes(cache) == 2 * 24 * model.plan.kv_bytes_per_token("float64")
    cached = {None if layer.key_weights is None else layer.key_weights.shape[-1] for layer in cache.layers}
    assert cached == {settings.cached_values(4) or None}


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 0}], ids=str)
@pytest.mark.parametrize("name", ["paper", "window", "query side", "talking heads"])
@torch.no_grad()
def test_generate_with_padding_equals_generate_without_cache(tiny_model, name: str, how: dict) -> None:
    model = composed(tiny_model("llama"), VARIANTS[name])
    x, mask = sequences(2, 12), torch.ones(2, 12, dtype=torch.long)
    mask[0, :5] = 0
    common = {"attention_mask": mask, "max_new_tokens": 8, "pad_token_id": 0, **how}
    outputs = []
    for use_cache in (True, False):
        torch.manual_seed(3)
        outputs.append(model.generate(x, use_cache=use_cache, **common))
    assert torch.equal(*outputs)
    if not how:
        alone = model.generate(x[:1, 5:], attention_mask=mask[:1, 5:], max_new_tokens=8, pad_token_id=0)
        assert torch.equal(outputs[0][0, 12:], alone[0, 7:])  # padding is not seen


@torch.no_grad()
def test_cache_operations_move_the_weights_too(tiny_model) -> None:
    model = composed(tiny_model("llama"), Composition())
    x = sequences(3, 16)
    whole = model(x).logits

    def filled(rows: Tensor) -> DynamicCache:
        cache = DynamicCache()
        model(rows[:, :12], **cache_argument(model, cache))
        return cache

    def then(cache: DynamicCache, rows: Tensor, start: int) -> Tensor:
        return model(rows[:, start:], **cache_argument(model, cache)).logits

    cache = filled(x)
    cache.crop(-4)
    assert torch.allclose(then(cache, x, 8), whole[:, 8:], atol=3e-5)
    cache, order = filled(x), torch.tensor([2, 0, 0])
    cache.reorder_cache(order)
    assert torch.allclose(then(cache, x[order], 12), whole[order, 12:], atol=3e-5)
    cache = filled(x)
    cache.batch_repeat_interleave(2)
    repeated = x.repeat_interleave(2, 0)
    assert torch.allclose(then(cache, repeated, 12), whole.repeat_interleave(2, 0)[:, 12:], atol=3e-5)
    cache = filled(x)
    cache.batch_select_indices(torch.tensor([1]))
    assert torch.allclose(then(cache, x[1:2], 12), whole[1:2, 12:], atol=3e-5)
    cache.reset()
    assert cache_bytes(cache) == 0
    assert torch.allclose(then(cache, x[1:2], 0), whole[1:2], atol=3e-5)


@torch.no_grad()
def test_other_caches_are_refused(tiny_model) -> None:
    model = composed(tiny_model("llama"), Composition())
    with pytest.raises(ValueError, match="needs a dynamic cache"):
        model.generate(sequences(1, 4), max_new_tokens=3, cache_implementation="static", pad_token_id=0)
    plain = tiny_model("llama")
    filled = plain(sequences(1, 4), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="already holds tokens"):
        model(sequences(1, 1), **cache_argument(model, filled))


@pytest.mark.parametrize("name", ["paper", "window", "qk norm", "groups"])
def test_every_parameter_learns_also_with_recomputation(tiny_model, name: str) -> None:
    model = composed(tiny_model("llama"), VARIANTS[name]).train()
    x = sequences(2, 10)
    model(x, labels=x).loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if "composition" in n}
    assert grads and all(g.abs().max() > 0 for g in grads.values())
    model.zero_grad()
    model.activation_checkpointing_enable()
    model(x, labels=x).loss.backward()
    for n, p in model.named_parameters():
        if n in grads:
            assert torch.allclose(p.grad, grads[n], atol=1e-6), n


@every_variant
@torch.no_grad()
def test_save_and_load(tiny_model, settings: Composition, tmp_path) -> None:
    model = composed(tiny_model("llama"), settings, (LayerPlan.identity(4),) * 2)
    back = checkpoint.load(checkpoint.save(model, tmp_path / "model"))
    assert back.plan == model.plan and back.plan.composition == settings
    assert torch.equal(back(sequences(2, 12)).logits, model(sequences(2, 12)).logits)


@torch.no_grad()
def test_missing_parameters_are_initialised(tiny_model, tmp_path) -> None:
    """A config edited to have composition: we refuse it, and what transformers starts afresh is not garbage."""
    plain = convert(tiny_model("llama"), AttentionPlan(MAPS, 8))
    plain.config.attention_plan["composition"] = {"static_base": True, "qk_norm": True}
    plain.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="lacks .*composition"):
        checkpoint.load(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for module in compositions(model):
        assert float(module.before.query.w_1.std()) == pytest.approx(math.sqrt(2 / (32 + 16)), rel=0.2)
        assert float(module.after.base.std()) == pytest.approx(0.5, rel=0.6)
        assert torch.equal(module.norm.scale, torch.ones(4))


@torch.no_grad()
def test_converting_keeps_or_refuses_composition(tiny_model) -> None:
    model = composed(tiny_model("llama"), Composition(), (LayerPlan.identity(4),) * 2)
    again = convert(model, AttentionPlan(MAPS, 8, (), Composition()))
    for old, new in zip(compositions(model), compositions(again), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(old.parameters(), new.parameters(), strict=True))
    with pytest.raises(PlanError, match="must keep that composition"):
        convert(model, AttentionPlan(MAPS, 8))
    with pytest.raises(PlanError, match="no identity to start from"):
        convert(tiny_model("llama"), AttentionPlan(MAPS, 8, (), Composition(qk_norm=True)))


@torch.no_grad()
def test_qk_norm_worked_example() -> None:
    module = HeadComposition(2, D, Composition(qk_norm=True), window=0)
    module.norm.scale.copy_(torch.tensor([1.0, 3.0]))
    query, key = torch.tensor([3.0, 4.0]).view(1, 1, 1, 2).repeat(1, 2, 1, 1), torch.tensor([[[[0.0, 2.0]]]])
    q, k = module.norm(query, key)
    root = math.sqrt(12.5)
    assert torch.allclose(q[0, :, 0], torch.tensor([[3 / root, 4 / root], [9 / root, 12 / root]]))
    assert torch.allclose(k[0, 0, 0], torch.tensor([0.0, math.sqrt(2)]))


def test_plan_counts_the_cached_weights_and_survives_json() -> None:
    plan = AttentionPlan(MAPS, 8, (), Composition(rank=2))
    # layer 0 keeps 3 + 2 heads, layer 1 1 + 4, of 8 dims; two layers of 2 places x 4 heads x (2 R + 1)
    assert plan.kv_bytes_per_token("float32") == 4 * (10 * 8 + 2 * 2 * 4 * 5)
    query_only = AttentionPlan(MAPS, 8, (), Composition(key_side=False))
    assert query_only.kv_bytes_per_token("float32") == AttentionPlan(MAPS, 8).kv_bytes_per_token("float32")
    assert AttentionPlan.from_json(plan.to_json()) == plan
    older = plan.to_json().replace('"qk_norm":false,', "")
    assert older != plan.to_json() and AttentionPlan.from_json(older) == plan


def test_an_export_without_key_side_refuses_a_static_cache_too(tiny_model, tmp_path: Path) -> None:
    """Its queries would see the empty places for later tokens."""
    model = composed(tiny_model("llama"), Composition(key_side=False), (LayerPlan.identity(4),) * 2)
    checkpoint.save(model, tmp_path / "model")
    export(tmp_path / "model", "transformers", tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    ids = torch.ones(1, 4, dtype=torch.int64)
    assert loaded.generate(ids, max_new_tokens=2, do_sample=False).shape[1] <= 6
    with pytest.raises(ValueError, match="need a DynamicCache"):
        loaded.generate(ids, max_new_tokens=2, do_sample=False, cache_implementation="static")


@pytest.mark.parametrize(("family", "settings"), [("llama", {}), ("mistral", {"sliding_window": 5})])
def test_an_export_generates_with_a_static_cache_of_unequal_counts(
    family: str, settings: dict, tiny_model, tmp_path: Path
) -> None:
    checkpoint.save(convert(tiny_model(family, **settings), AttentionPlan(MAPS, 8)), tmp_path / "model")
    export(tmp_path / "model", "transformers", tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    ids, settings = torch.arange(4)[None], {"max_new_tokens": 6, "do_sample": False}
    expected = loaded.generate(ids, **settings)
    assert torch.equal(loaded.generate(ids, **settings, cache_implementation="static"), expected)


def test_reset_is_reproducible(tiny_model) -> None:
    model = composed(tiny_model("llama"), Composition(), stirred=False)
    reset(model, identity=False, generator=seeded(4))
    first = [p.clone() for p in compositions(model)[0].parameters()]
    reset(model, identity=False, generator=seeded(4))
    assert all(torch.equal(a, b) for a, b in zip(first, compositions(model)[0].parameters(), strict=True))


# ---- static composition is wide heads ------------------------------------------------------------------------------

STATIC = Composition(query_side=False, key_side=False, static_base=True)


@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
@pytest.mark.parametrize("place", ["scores", "weights"])
@torch.no_grad()
def test_static_composition_is_expanded_projections(family: str, place: str, tiny_model, tiny_tokens) -> None:
    """Xiao 2024, Theorems 2.1 and 2.2, in whole models, rotary embedding included.

    Composed scores: head i has the query concat_j C_ij W_j^Q and all heads one key, concat_j W_j^K (Eq. 1). Composed
    weights: all heads one value, concat_j W_j^V, and head i has the output concat_j C_ij W_j^O, which is Eq. 2 with C
    in the output projection, of which each head has a part. So a static composition of H heads is one wide head of H
    slices, whose cache takes the bytes of the H heads.
    """
    scores = place == "scores"
    model = tiny_model(family, dtype=torch.float64, **({"num_key_value_heads": 4} if family == "llama" else {}))
    plan = AttentionPlan.identity(2, 4, 8)
    composed = stir(convert(model, replace(plan, composition=replace(STATIC, **{MISSING[place]: False}))))
    expanded = []
    for heads, module in zip(read_layers(model), compositions(composed), strict=True):
        (compose,) = [m for m in module.modules() if isinstance(m, Compose)]
        base = compose.base[0].double()  # [j, i]: what head i takes of head j
        assert float((base - torch.eye(4)).abs().max()) > 0.1
        if scores:
            q = math.sqrt(4) * torch.einsum("ji,jdm->ijdm", base, heads.q.double()).flatten(1, 2)
            bias = heads.q_bias
            if bias is not None:
                bias = math.sqrt(4) * torch.einsum("ji,jd->ijd", base, bias.double()).flatten(1, 2)
            k_bias = None if heads.k_bias is None else heads.k_bias.flatten()[None]
            expanded.append(replace(heads, q=q, q_bias=bias, k=heads.k.flatten(0, 1)[None], k_bias=k_bias))
        else:
            o = torch.einsum("ij,jmd->imjd", base, heads.o.double()).flatten(2, 3)
            v_bias = None if heads.v_bias is None else heads.v_bias.flatten()[None]
            expanded.append(replace(heads, v=heads.v.flatten(0, 1)[None], v_bias=v_bias, o=o))
    own, one = tuple(range(4)), (0,) * 4
    wide = LayerPlan(one, own, 4, 1) if scores else LayerPlan(own, one, 1, 4)
    result = assemble(model, replace(plan, layers=(wide, wide)), expanded)
    expected = composed(tiny_tokens).logits
    torch.testing.assert_close(result(tiny_tokens).logits, expected, rtol=0, atol=1e-6)  # softmax in float32
    assert float((model(tiny_tokens).logits - expected).abs().max()) > 1e-2, "composition changes the model"
    assert result.plan.kv_bytes_per_token(torch.float32) == plan.kv_bytes_per_token(torch.float32)


MISSING = {"scores": "after_softmax", "weights": "before_softmax"}


@torch.no_grad()
def test_dynamic_composition_has_no_expanded_projections() -> None:
    """Xiao 2024, end of section 2: a map for each pair of tokens, and no one map gives them all."""
    compose = stir(Compose(H, D, Composition()).double())
    x = torch.randn(1, T, D, generator=seeded(), dtype=torch.float64)
    units = torch.eye(H, dtype=torch.float64)[:, :, None, None].expand(H, H, T, T)  # one head's score at a time
    maps = torch.cat([compose(units[i : i + 1], x, compose.key_weights(x)) for i in range(H)])
    assert float((maps[..., 0, 0] - maps[..., 1, 0]).abs().max()) > 1e-2
    assert float((maps[..., 1, 0] - maps[..., 1, 1]).abs().max()) > 1e-2
