"""What a model makes of a long context, where the KV cache matters: loss by position, and recall of a line by depth.

Legend: N sequences, L tokens of a context, V vocabulary.
"""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.modeling.predictions import final, positions_at_once
from attention.modeling.running import evaluating
from orchestrator.config.schema import ConfigError
from trainers.text.tokenising import beginning

BINS = 8
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the line: the beginning of the context, ..., right before the question
NUM_TEXTS = 8  # that a line is hidden in, at each depth
CANDIDATES = 4  # values that the line of a text has, one after the other; chance is one in so many
SHORTEST = 64  # context that holds a line, the question, and text between them
TOKENS_AT_ONCE = 2048
WORD = re.compile(r"[a-z]{3,12}")


@dataclass(frozen=True)
class Recall:
    """How the line at a depth is recalled. Each of CANDIDATES values is hidden in turn, and all are scored each time.

    `recall`: share in which the hidden value is the likeliest of them (chance: 1 / CANDIDATES); `greedy`: share in
    which it is the likeliest of all tokens; `margin`: mean log-probability of the values where they are hidden, less
    that where another one is, in nats: what a model prefers by itself cancels out, and 0 means that it does not look;
    `margin_stderr`: its standard error over the texts.
    """

    depth: float
    recall: float
    greedy: float
    margin: float
    margin_stderr: float
    contexts: int


def context_lengths(given: str, most: int) -> list[int]:
    """`max`, or lengths such as `256,512`, ascending. Raises ConfigError for one that the model does not take."""
    if given.strip() == "max":
        return [most]
    try:
        lengths = sorted({int(part) for part in given.split(",")})
    except ValueError:
        raise ConfigError(f"context lengths: expected `max` or numbers such as 256,512, got {given!r}") from None
    if not lengths[0] >= SHORTEST or lengths[-1] > most:
        wrong = lengths[0] if lengths[0] < SHORTEST else lengths[-1]
        raise ConfigError(f"context lengths: must lie in [{SHORTEST}, {most}] (all that the model takes), got {wrong}")
    return lengths


def loss_by_position(model: Any, sequences: Tensor) -> list[dict[str, float]]:
    """Mean loss in nats of the predictions in each of BINS parts of `sequences [N, L]`. `from`, `to` (exclusive):
    positions of the tokens that are predicted."""
    device, length = next(model.parameters()).device, sequences.shape[1]
    total = torch.zeros(length - 1, dtype=torch.float64)
    with evaluating(model):
        for ids in sequences.to(device).split(max(1, TOKENS_AT_ONCE // length)):
            states, head, vocabulary = final(model, ids)
            parts = states[:, :-1].split(max(1, positions_at_once(vocabulary) // len(ids)), dim=1)
            losses, start = [], 1
            for part in parts:
                labels = ids[:, start : start + part.shape[1]]
                losses.append(F.cross_entropy(head(part).float().transpose(1, 2), labels, reduction="none"))
                start += part.shape[1]
            total += torch.cat(losses, dim=1).double().sum(0).cpu()
    edges = [1 + i * (length - 1) // BINS for i in range(BINS + 1)]
    means = total / len(sequences)
    return [{"from": a, "to": b, "loss": means[a - 1 : b - 1].mean().item()} for a, b in pairwise(edges)]


@dataclass(frozen=True)
class Needles:
    """Contexts with a hidden line, and the question for its value last. `ids [DEPTHS, NUM_TEXTS, CANDIDATES, L]`:
    with each value hidden; `candidates [NUM_TEXTS, CANDIDATES]`: the token ids of the values."""

    ids: Tensor
    candidates: Tensor

    @classmethod
    def hide(cls, sequences: Tensor, tokenizer: Any, seed: int) -> Needles:
        """In `sequences [NUM_TEXTS, L]` of held-out text, behind what the tokenizer begins a text with. The line is
        `KEY_code = 'VALUE'`, the question `KEY_code = '`; keys and values are words of the vocabulary, values of one
        token. Raises ConfigError where it has too few."""
        words = _words(tokenizer)
        if len(words) < 2 * CANDIDATES:
            raise ConfigError(
                f"context lengths: the vocabulary has {len(words)} words of one token, needed are {2 * CANDIDATES} to "
                "hide lines with; measure this model without --context-lengths"
            )
        generator, first = torch.Generator().manual_seed(seed), len(beginning(tokenizer))
        contexts, candidates = [], []
        for row in sequences:
            drawn = torch.randperm(len(words), generator=generator)[: CANDIDATES + 1].tolist()
            key, *values = [words[i] for i in drawn]
            question = _encode(tokenizer, f"\n{tokenizer.decode([key]).strip()}_code = '")
            lines = [[*question, value, *_encode(tokenizer, "'\n")] for value in values]
            contexts.append(
                [[_hidden(row.tolist(), line, question, depth, first) for line in lines] for depth in DEPTHS]
            )
            candidates.append(values)
        return cls(torch.tensor(contexts).transpose(0, 1), torch.tensor(candidates))

    def recall(self, model: Any) -> list[dict[str, float]]:
        """A `Recall` of each depth, as a dict."""
        return [asdict(self._at(model, i)) for i in range(len(DEPTHS))]

    def _at(self, model: Any, depth: int) -> Recall:
        device, contexts = next(model.parameters()).device, self.ids[depth].flatten(0, 1)
        scores, likeliest = [], []
        wanted = self.candidates.repeat_interleave(CANDIDATES, 0)  # [NUM_TEXTS * CANDIDATES, CANDIDATES]
        size = max(1, TOKENS_AT_ONCE // contexts.shape[1])
        with evaluating(model):
            for ids, values in zip(contexts.split(size), wanted.split(size), strict=True):
                states, head, _ = final(model, ids.to(device))
                logs = head(states[:, -1]).float().log_softmax(-1).cpu()
                scores.append(logs.gather(1, values))
                likeliest.append(logs.argmax(1))
        table = torch.cat(scores).view(len(self.candidates), CANDIDATES, CANDIDATES)  # text, hidden value, scored value
        own = table.diagonal(dim1=1, dim2=2)
        margins = own.mean(1) - (table.sum((1, 2)) - own.sum(1)) / (CANDIDATES * (CANDIDATES - 1))
        return Recall(
            depth=DEPTHS[depth],
            recall=(table.argmax(2) == torch.arange(CANDIDATES)).float().mean().item(),
            greedy=(torch.cat(likeliest) == self.candidates.flatten()).float().mean().item(),
            margin=margins.mean().item(),
            margin_stderr=margins.std().item() / math.sqrt(len(margins)),
            contexts=len(contexts),
        )


def _encode(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def _words(tokenizer: Any) -> list[int]:
    """Tokens that are one word each, none of them twice."""
    special, found = set(tokenizer.all_special_ids), dict[str, int]()
    for token in range(len(tokenizer)):
        if token not in special and WORD.fullmatch(text := tokenizer.decode([token])):
            found.setdefault(text, token)
    return list(found.values())


def _hidden(text: list[int], line: list[int], question: list[int], depth: float, first: int) -> list[int]:
    """As many tokens as `text` has: its beginning with the line in it, and the question. `first`: tokens that begin
    every text, before which nothing is put."""
    kept = text[: len(text) - len(line) - len(question)]
    place = max(first, round(depth * len(kept)))
    return [*kept[:place], *line, *kept[place:], *question]
