"""An architecture and a tokenizer for the synthetic tasks: one token a word, so that tiny models can learn them.

    python examples/make_words.py --out runs/words
    headfold train --architecture runs/words --recipe dcformer --train-data synthetic:all --eval-data synthetic:all \\
        --sequence-length 128 --steps 400 --learning-rate 3e-3 --out runs/words-dcformer

A Llama of 2 layers, 4 heads of 16 and about 100,000 parameters; there are no weights, they come from `headfold train`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from trainers.text.synthetic import vocabulary

END = "<pad>"  # id 0: ends documents and pads


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words, signs and line ends; spaces are dropped, and what no task has becomes padding."""
    words = vocabulary()
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=END))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|\n|[^\w\s]"), behavior="removed", invert=True)
    tokenizer.decoder = decoders.WordPiece(prefix="")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    out = parser.parse_args().out
    if out.exists():
        parser.error(f"--out {out} exists; give a new folder")
    tokenizer = make_tokenizer()
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
