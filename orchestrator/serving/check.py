"""Whether an engine computes of an export what the source computes, in the cache that was promised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from attention.io.targets import EngineSupport
from orchestrator.serving.engine import Answer, Completion, Engine, Question, Run

TEXTS = (
    "def read_lines(path):",
    "The memory of a token is kept until",
    "import os\nimport sys\n\n",
    "In the year 1905, a clerk in Bern",
    "    for index, item in enumerate(",
    "Q: What is the capital of France?\nA:",
    'class Error(Exception):\n    """',
    "Once upon a time there was",
)
"""Prompts of a check: code and prose, as most models have seen."""
TOKENS = 32
USUAL = 16.0  # a logit of this size; rounding grows with the size of what is rounded
MEMORY = 2**30


class CheckError(ValueError):
    """An engine that computes something else than the source, or holds another cache than was promised."""


@dataclass(frozen=True)
class RunResult:
    """One run of an engine against the source. `same`: prompts whose tokens are all the source's greedy ones.
    `difference`: largest of log-probabilities, over the engine's tokens; `shortfall`: the most by which one of its
    tokens is less likely than the source's best, in nats."""

    how: str
    prompts: int
    tokens: int
    same: int
    difference: float
    shortfall: float
    tolerance: float


@dataclass(frozen=True)
class CheckResult:
    """What a check has found; `reasons` is empty if it passed. Bytes are those of a cache in `cache_dtype`."""

    engine: str
    version: str
    runs: list[RunResult]
    cache_dtype: str
    kv_bytes_per_token: float
    kv_bytes_per_token_promised: int
    memory: int
    capacity: int
    reasons: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"passed": not self.reasons}


def check_export(
    engine: Engine,
    python: str,
    folder: Path,
    source: PreTrainedModel,
    tokenizer: Any,
    held: EngineSupport,
    dtype: str,
    *,
    memory: int = MEMORY,
    own_code: bool = False,
) -> CheckResult:
    """Ask `engine` about the export in `folder` and compare with `source`, a float32 model whose weights are rounded to
    `dtype`. `tokenizer`: of the source, or None. Raises EngineError if the engine does not answer."""
    prompts, texts = prompts_for(source, tokenizer)
    question = Question(folder, prompts, TOKENS, dtype, held, memory, texts, own_code, _activation(source))
    answer = engine.ask(python, question)
    ends = end_tokens(source, tokenizer)
    results = [compare(source, prompts, run, ends) for run in answer.runs]
    promised = held.bytes_per_token(answer.cache_dtype)
    return CheckResult(
        engine.name,
        answer.version,
        results,
        answer.cache_dtype,
        answer.kv_bytes_per_token,
        promised,
        memory,
        answer.capacity,
        _reasons(answer, results, prompts, promised),
    )


def _activation(source: PreTrainedModel) -> str:
    names = ("hidden_act", "hidden_activation", "activation_function")
    return next((str(act) for name in names if (act := getattr(source.config, name, None))), "silu")


def prompts_for(source: PreTrainedModel, tokenizer: Any) -> tuple[list[list[int]], list[str] | None]:
    """Prompts as token ids, and their texts: random ids and no texts for a model without a tokenizer."""
    if tokenizer is not None:
        return [tokenizer(text)["input_ids"] for text in TEXTS], list(TEXTS)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(source.config.vocab_size, (len(TEXTS), 8), generator=generator).tolist(), None


def end_tokens(source: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Tokens at which an engine ends a completion."""
    told = getattr(source.generation_config, "eos_token_id", None)
    ends = [*(told if isinstance(told, list) else [told]), getattr(tokenizer, "eos_token_id", None)]
    return frozenset(end for end in ends if end is not None)


@torch.no_grad()
def compare(source: PreTrainedModel, prompts: Sequence[Sequence[int]], run: Run, ends: frozenset[int]) -> RunResult:
    """One forward pass of the source over each prompt with the engine's own tokens behind it."""
    same, tokens, difference, shortfall, largest = 0, 0, 0.0, 0.0, 0.0
    for prompt, made in zip(prompts, run.completions, strict=True):
        kept = next((i for i, token in enumerate(made.tokens) if token in ends), len(made.tokens))
        taken = made.tokens[:kept]  # some engines tell the end token, some do not
        ids = torch.tensor([[*prompt, *taken]], device=source.device)
        logits = source(ids).logits[0, len(prompt) - 1 :].float().cpu()
        largest, scores = max(largest, logits.abs().max().item()), logits.log_softmax(-1)
        best = scores.argmax(-1).tolist()
        whole = len(taken) == TOKENS or best[len(taken)] in ends
        same, tokens = same + (whole and best[: len(taken)] == taken), tokens + len(taken)
        for index, (token, told) in enumerate(zip(taken, made.log_probabilities[:kept], strict=True)):
            if told is not None:
                difference = max(difference, abs(scores[index, token].item() - told))
            shortfall = max(shortfall, (scores[index].max() - scores[index, token]).item())
    tolerance = run.tolerance * max(1.0, largest / USUAL)
    return RunResult(run.how, len(prompts), tokens, same, difference, shortfall, tolerance)


def _reasons(
    answer: Answer, results: Sequence[RunResult], prompts: Sequence[Sequence[int]], promised: int
) -> list[str]:
    reasons = []
    for run, result in zip(answer.runs, results, strict=True):
        if (other := _other_tokenizer(prompts, run.completions)) is not None:
            reasons.append(other)
            break
        for what, value in (("log-probabilities differ", result.difference), ("tokens fall short", result.shortfall)):
            if not value <= result.tolerance:
                reasons.append(f"{run.how}: {what} by up to {value:.2g} nats, allowed are {result.tolerance:g}")
        if not result.tokens:
            reasons.append(f"{run.how}: not one token was generated")
    if answer.kv_bytes_per_token != promised:
        reasons.append(
            f"its cache takes {answer.kv_bytes_per_token:g} bytes per token in {answer.cache_dtype}, promised were "
            f"{promised}"
        )
    return reasons


def _other_tokenizer(prompts: Sequence[Sequence[int]], made: Sequence[Completion]) -> str | None:
    """A sentence if the engine's tokenizer makes other numbers of tokens of the prompts than ours."""
    for prompt, completion in zip(prompts, made, strict=True):
        if len(prompt) != completion.prompt_tokens:
            return (
                f"the engine's tokenizer makes {completion.prompt_tokens} tokens of a prompt of {len(prompt)}: the "
                "tokenizer in the export is not the source's"
            )
    return None
