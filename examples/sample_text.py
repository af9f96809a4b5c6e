"""Write text that a model samples itself, to calibrate a conversion where there is no text of its users.

    python examples/sample_text.py MODEL --out sampled.jsonl
    headfold convert --model MODEL --kv-ratio 0.5 --data sampled.jsonl --eval-data builtin --out half

Each document begins with the token that begins a text and is sampled at temperature 1, so the text has the kinds and
proportions that the model learned. benchmarks/LOG.md compares it with other calibration text. Calibration without
data is of Liu et al. 2023, LLM-QAT, arXiv:2305.17888.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from orchestrator import checkpoints

BATCH = 32


def documents(model_path: str, count: int, tokens: int, seed: int) -> Iterator[str]:
    """Sample documents of as many tokens each from a checkpoint."""
    checkpoint = checkpoints.open_model(model_path, "model")
    model: Any = checkpoints.load_working(checkpoint, "float32")
    tokenizer = checkpoint.tokenizer
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    torch.manual_seed(seed)  # generate() takes no generator
    for begin in range(0, count, BATCH):
        prompts = torch.full((min(BATCH, count - begin), 1), first)
        sampled = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=tokens - 1,
            min_new_tokens=tokens - 1,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            pad_token_id=first,
        )
        yield from tokenizer.batch_decode(sampled[:, 1:])
        print(f"{min(begin + BATCH, count)} of {count} documents", file=sys.stderr, flush=True)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Write text that a model samples itself.")
    parser.add_argument("model", help="folder, GGUF file or hub name")
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file to write")
    parser.add_argument("--documents", type=int, default=40, help="one in 20 of them is not calibrated on")
    parser.add_argument("--tokens", type=int, default=512, help="of each document")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(words)
    if arguments.out.exists():
        parser.error(f"{arguments.out} exists; give another --out")
    sampled = documents(arguments.model, arguments.documents, arguments.tokens, arguments.seed)
    first = next(sampled, None)  # a model that is not there leaves no file
    with arguments.out.open("x", encoding="utf-8") as file:
        for document in itertools.chain([] if first is None else [first], sampled):
            file.write(json.dumps({"text": document}) + "\n")
    print(f"sampled text in {arguments.out}")


if __name__ == "__main__":
    main()
