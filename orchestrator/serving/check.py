"""Check that an engine computes the same of an export as the source, in the promised cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from attention.io.targets import EngineSupport
from orchestrator.serving.engine import Answer, Completion, Engine, EngineRun, Question

_PROMPTS = (
    "def read_lines(path):",
    "The memory of a token is kept until",
    "import os\nimport sys\n\n",
    "Year  Place\n\n1905  Bern, where a clerk",  # tokenizers differ in white space before digits
    "    for index, item in enumerate(",
    "Q: What is the capital of France?\nA:",
    'class Error(Exception):\n    """',
    "Once upon a time there was",
)
"""Prompts of a check: code and prose, as most models have seen."""
_TOKENS = 32
_USUAL_LOGIT = 16.0  # rounding grows with the size of what is rounded
MEMORY = 2**30


class CheckError(RuntimeError):
    """An engine that computes something else than the source, or holds another cache."""


@dataclass(frozen=True)
class RunResult:
    """A run of an engine, compared with the source.

    Attributes:
        same: Prompts whose tokens are all the source's greedy ones.
        difference: Largest of log-probabilities, over the engine's tokens, in nats.
        shortfall: The most by which one of its tokens is less likely than the source's best, in
            nats.
    """

    how: str
    prompts: int
    tokens: int
    same: int
    difference: float
    shortfall: float
    tolerance: float


@dataclass(frozen=True)
class CheckResult:
    """The result of a check; `reasons` is empty if it passed.

    Bytes are those of a cache in `cache_dtype`.
    """

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
    support: EngineSupport,
    dtype: str,
    *,
    memory: int = MEMORY,
    own_code: bool = False,
) -> CheckResult:
    """Ask an engine about an export, and compare it with its source.

    Args:
        engine: The engine.
        python: The interpreter that has it.
        folder: The export.
        source: A float32 model whose weights are rounded to `dtype`.
        tokenizer: Of the source, or None.
        support: The cache that the format promises.
        memory: Bytes of cache whose capacity in tokens is reported.
        own_code: Whether the folder has Python files that the engine must run.

    Raises:
        EngineFailure: If the engine does not answer.
    """
    prompts, texts = prompts_for(source, tokenizer)
    answer = engine.ask(
        python,
        Question(
            folder, prompts, _TOKENS, dtype, support, memory, texts, own_code, _activation(source)
        ),
    )
    ends = end_tokens(source, tokenizer)
    results = [_compare(source, prompts, run, ends) for run in answer.runs]
    promised = support.bytes_per_token(answer.cache_dtype)
    return CheckResult(
        engine=engine.name,
        version=answer.version,
        runs=results,
        cache_dtype=answer.cache_dtype,
        kv_bytes_per_token=answer.kv_bytes_per_token,
        kv_bytes_per_token_promised=promised,
        memory=memory,
        capacity=answer.capacity,
        reasons=_reasons(answer, results, prompts, promised),
    )


def _activation(source: PreTrainedModel) -> str:
    names = ("hidden_act", "hidden_activation", "activation_function")
    return next((str(act) for name in names if (act := getattr(source.config, name, None))), "silu")


def prompts_for(
    source: PreTrainedModel, tokenizer: Any
) -> tuple[list[list[int]], list[str] | None]:
    """Return prompts as token ids, and their texts.

    For a model without a tokenizer the ids are random, and there are no texts.
    """
    if tokenizer is not None:
        return [tokenizer(text)["input_ids"] for text in _PROMPTS], list(_PROMPTS)
    generator = torch.Generator().manual_seed(0)
    vocabulary = source.config.vocab_size
    return torch.randint(vocabulary, (len(_PROMPTS), 8), generator=generator).tolist(), None


def end_tokens(source: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Return the tokens at which an engine ends a completion."""
    configured = getattr(source.generation_config, "eos_token_id", None)
    ends = [
        *(configured if isinstance(configured, list) else [configured]),
        getattr(tokenizer, "eos_token_id", None),
    ]
    return frozenset(end for end in ends if end is not None)


@torch.no_grad()
def _compare(
    source: PreTrainedModel, prompts: Sequence[Sequence[int]], run: EngineRun, ends: frozenset[int]
) -> RunResult:
    """Run the source over each prompt followed by the engine's own tokens, and compare."""
    same = tokens = 0
    difference = shortfall = largest = 0.0
    for prompt, completion in zip(prompts, run.completions, strict=True):
        generated = completion.tokens
        # Some engines report the end token, some do not
        end = next((i for i, token in enumerate(generated) if token in ends), len(generated))
        answer = generated[:end]
        ids = torch.tensor([[*prompt, *answer]], device=source.device)
        logits = source(ids).logits[0, len(prompt) - 1 :].float().cpu()
        largest = max(largest, logits.abs().max().item())
        scores = logits.log_softmax(-1)
        best = scores.argmax(-1).tolist()
        whole = len(answer) == _TOKENS or best[len(answer)] in ends
        same += whole and best[: len(answer)] == answer
        tokens += len(answer)
        reported = completion.log_probabilities[:end]
        for index, (token, score) in enumerate(zip(answer, reported, strict=True)):
            if score is not None:
                difference = max(difference, abs(scores[index, token].item() - score))
            shortfall = max(shortfall, (scores[index].max() - scores[index, token]).item())
    return RunResult(
        how=run.how,
        prompts=len(prompts),
        tokens=tokens,
        same=same,
        difference=difference,
        shortfall=shortfall,
        tolerance=run.tolerance * max(1.0, largest / _USUAL_LOGIT),
    )


def _reasons(
    answer: Answer, results: Sequence[RunResult], prompts: Sequence[Sequence[int]], promised: int
) -> list[str]:
    reasons = []
    for run, result in zip(answer.runs, results, strict=True):
        if (other := _other_tokenizer(prompts, run.completions)) is not None:
            reasons.append(other)
            break
        measured = {
            "log-probabilities differ": result.difference,
            "tokens fall short": result.shortfall,
        }
        for what, value in measured.items():
            if not value <= result.tolerance:
                reasons.append(
                    f"{run.how}: {what} by up to {value:.2g} nats, allowed are {result.tolerance:g}"
                )
        if not result.tokens:
            reasons.append(f"{run.how}: not one token was generated")
    if answer.kv_bytes_per_token != promised:
        reasons.append(
            f"its cache takes {answer.kv_bytes_per_token:g} bytes per token in "
            f"{answer.cache_dtype}, promised were {promised}"
        )
    return reasons


def _other_tokenizer(
    prompts: Sequence[Sequence[int]], completions: Sequence[Completion]
) -> str | None:
    """Return a sentence if the engine's tokenizer makes other numbers of tokens of the prompts."""
    for prompt, completion in zip(prompts, completions, strict=True):
        if len(prompt) != completion.prompt_tokens:
            return (
                f"the engine's tokenizer makes {completion.prompt_tokens} tokens of a prompt of "
                f"{len(prompt)}: the tokenizer in the export is not the source's"
            )
    return None
