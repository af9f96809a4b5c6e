"""A model in long contexts, where the KV cache matters: loss by position, recall by depth.

Legend: N sequences, L tokens of a context, V vocabulary.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypedDict

import torch
from torch import Tensor

from attention.base.products import exact_products
from attention.modeling.predictions import final
from attention.modeling.running import evaluating
from orchestrator.config.schema import ConfigError
from trainers.evaluation import evaluate
from trainers.text.tokenising import beginning

BINS = 8
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the line: the beginning of the context, ..., right before the question."""
NUM_TEXTS = 8  # that a line is hidden in, at each depth, by default
CANDIDATES = 4  # values that the line of a text has, one after the other; chance is one in so many
SHORTEST = 64  # context that holds a line, the question, and text between them
_TOKENS_AT_ONCE = 2048
_WORD = re.compile(r"[a-z]{3,12}")

PositionLoss = TypedDict("PositionLoss", {"from": int, "to": int, "loss": float})
"""Mean loss in nats of the tokens at positions `from` to `to` (exclusive)."""


class Recall(TypedDict):
    """How the line at a depth is recalled.

    Each of CANDIDATES values is hidden in turn, and all are scored each time.
    """

    depth: float
    recall: float
    """Share in which the hidden value is the likeliest of them (chance: 1 / CANDIDATES)."""
    greedy: float
    """Share in which it is the likeliest of all tokens."""
    margin: float
    """Mean log-probability of the values where they are hidden, less that where another one is, in
    nats: what a model prefers by itself cancels out, and 0 means that it does not look."""
    margin_stderr: float
    """Standard error of the margin over the texts."""
    contexts: int


def context_lengths(text: str, max_positions: int) -> list[int]:
    """Return ascending lengths: `max`, or numbers such as `256,512`.

    Raises:
        ConfigError: For one that the model does not take.
    """
    if text.strip() == "max":
        return [max_positions]
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(
            f"context_lengths: expected `max` or numbers such as 256,512, got {text!r}"
        ) from None
    if not lengths[0] >= SHORTEST or lengths[-1] > max_positions:
        wrong = lengths[0] if lengths[0] < SHORTEST else lengths[-1]
        raise ConfigError(
            f"context_lengths: must lie in [{SHORTEST}, {max_positions}] (all that the model "
            f"takes), got {wrong}"
        )
    return lengths


def loss_by_position(model: Any, sequences: Tensor) -> list[PositionLoss]:
    """Return the mean loss of the predictions in each of BINS parts of `sequences [N, L]`."""
    losses = evaluate(model, sequences).token_losses
    assert losses is not None  # no other worker shares the sequences
    means = losses.mean(0)
    length = sequences.shape[1]
    edges = [1 + i * (length - 1) // BINS for i in range(BINS + 1)]
    return [
        {"from": start, "to": end, "loss": means[start - 1 : end - 1].mean().item()}
        for start, end in pairwise(edges)
    ]


@dataclass(frozen=True)
class Needles:
    """Contexts with a hidden line, each ending in the question for its value.

    Attributes:
        ids: `[DEPTHS, N, CANDIDATES, L]`: with each value hidden.
        candidates: `[N, CANDIDATES]`: token ids of the values.
    """

    ids: Tensor
    candidates: Tensor

    @classmethod
    def hide(cls, sequences: Tensor, tokenizer: Any, seed: int) -> Needles:
        """Hide lines in held-out text, behind what the tokenizer begins a text with.

        The line is `KEY_code = 'VALUE'`, the question `KEY_code = '`; keys and values are words of
        the vocabulary, values of one token.

        Args:
            sequences: Texts `[N, L]`.
            tokenizer: Of the model.
            seed: Of keys and values.

        Raises:
            ConfigError: Where the vocabulary has too few words.
        """
        words = check_words(tokenizer)

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special_tokens=False)

        generator = torch.Generator().manual_seed(seed)
        first = len(beginning(tokenizer))
        contexts = []
        candidates = []
        for row in sequences.tolist():
            indices = torch.randperm(len(words), generator=generator)[: CANDIDATES + 1].tolist()
            key, *values = [words[index] for index in indices]
            question = encode(f"\n{tokenizer.decode([key]).strip()}_code = '")
            end = encode("'\n")
            lines = [[*question, value, *end] for value in values]
            contexts.append(
                [[_insert(row, line, question, depth, first) for line in lines] for depth in DEPTHS]
            )
            candidates.append(values)
        return cls(torch.tensor(contexts).transpose(0, 1), torch.tensor(candidates))

    def recall(
        self, model: Any, count: Callable[[int], None] = lambda tokens: None
    ) -> list[Recall]:
        """Return how a model recalls the lines of each depth.

        Args:
            model: Takes contexts of this length.
            count: Called with the number of tokens that were read since the last call.
        """
        return [self._recall_at(model, index, count) for index in range(len(DEPTHS))]

    def _recall_at(self, model: Any, depth: int, count: Callable[[int], None]) -> Recall:
        device = next(model.parameters()).device
        contexts = self.ids[depth].flatten(0, 1)
        candidates = self.candidates.repeat_interleave(CANDIDATES, 0)
        size = max(1, _TOKENS_AT_ONCE // contexts.shape[1])
        scores = []
        likeliest = []
        with evaluating(model), exact_products():
            batches = zip(contexts.split(size), candidates.split(size), strict=True)
            for ids, values in batches:
                states, head, _ = final(model, ids.to(device))
                logs = head(states[:, -1]).float().log_softmax(-1).cpu()
                scores.append(logs.gather(1, values))
                likeliest.append(logs.argmax(1))
                count(ids.numel())
        # [text, hidden value, scored value]
        table = torch.cat(scores).view(len(self.candidates), CANDIDATES, CANDIDATES)
        hidden = table.diagonal(dim1=1, dim2=2)
        others = (table.sum((1, 2)) - hidden.sum(1)) / (CANDIDATES * (CANDIDATES - 1))
        margins = hidden.mean(1) - others
        recalled = table.argmax(2) == torch.arange(CANDIDATES)
        greedy = torch.cat(likeliest) == self.candidates.flatten()
        return {
            "depth": DEPTHS[depth],
            "recall": recalled.float().mean().item(),
            "greedy": greedy.float().mean().item(),
            "margin": margins.mean().item(),
            "margin_stderr": margins.std().item() / math.sqrt(len(margins)),
            "contexts": len(contexts),
        }


def check_words(tokenizer: Any) -> list[int]:
    """Return the words of one token to hide lines with.

    Raises:
        ConfigError: For too few.
    """
    words = _words(tokenizer)
    if len(words) < 2 * CANDIDATES:
        raise ConfigError(
            f"context_lengths: the vocabulary has {len(words)} words of one token, needed are "
            f"{2 * CANDIDATES} to hide lines with; measure this model without context lengths"
        )
    return words


def _words(tokenizer: Any) -> list[int]:
    """Return tokens that are one word each, none of them twice."""
    special = set(tokenizer.all_special_ids)
    words: dict[str, int] = {}
    for token in range(len(tokenizer)):
        if token not in special and _WORD.fullmatch(text := tokenizer.decode([token])):
            words.setdefault(text, token)
    return list(words.values())


def _insert(
    text: Sequence[int], line: list[int], question: list[int], depth: float, first: int
) -> list[int]:
    """Return as many tokens as `text` has: its beginning with the line in it, and the question.

    Nothing is put before the `first` tokens, which begin every text.
    """
    rest = text[: len(text) - len(line) - len(question)]
    index = max(first, round(depth * len(rest)))
    return [*rest[:index], *line, *rest[index:], *question]
