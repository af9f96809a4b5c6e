"""Make a third small checkpoint, one that shares its heads already: Qwen3, 8 query and 4 KV heads, on prose and code.

    python examples/train_third.py --out runs/my-qwen3             # about a quarter of an hour on one core
    python examples/train_third.py --out /tmp/tiny --steps 2       # only to see it run

Most current checkpoints have grouped-query attention with norms on queries and keys; halving such a
cache differs from halving a multi-head one. The text is the prose of `train_second.py` and the
standard library's code, in `mixed.jsonl`:

    headfold convert --model runs/my-qwen3/trained --recipe headfold --kv-ratio 0.5 \\
        --data runs/my-qwen3/mixed.jsonl --sequence-length 256
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from train_demo import VOCABULARY, options, randomise
from train_second import documents, learn
from transformers import Qwen3Config, Qwen3ForCausalLM

from trainers.text.corpora import library_files

PROSE_A_MODULE = 20


def texts() -> Iterator[str]:
    """Documents in turn: some twenty pieces of prose, then a module of the standard library, by name."""
    prose = documents()
    for file in library_files():
        yield from itertools.islice(prose, PROSE_A_MODULE)
        yield file.read_text(encoding="utf-8", errors="replace")
    yield from prose


def make_model(seed: int) -> Qwen3ForCausalLM:
    """The untrained model: 4 layers, hidden size 128, 8 query heads of 16 on 4 KV heads."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = Qwen3ForCausalLM(config)
    randomise(model, seed)
    return model


def main() -> None:
    arguments = options(__doc__, steps=600, tokens=2_400_000, learning_rate=4e-3).parse_args()
    learn(make_model(arguments.seed), texts(), "mixed", arguments, "train-third")


if __name__ == "__main__":
    main()
