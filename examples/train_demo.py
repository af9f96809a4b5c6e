"""Make a checkpoint like `stdlib-llama` from scratch, with the project's own trainers.

    python examples/train_demo.py --out runs/my-llama              # about two hours on two cores
    python examples/train_demo.py --out /tmp/tiny --steps 2        # only to see it run

A byte-level BPE tokenizer and a small Llama are trained on the source of Python's standard library: 4 layers, hidden
size 256, 8 heads of 32. Ray Train runs the loop and DeepSpeed the optimiser, as in every trial of a search. Another
interpreter version has other sources, so the loss will differ a little from that of the checkpoint here.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

import ray
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers import trainers as bpe
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from attention.io import checkpoint
from trainers.jobs.worker import TrainJob, run_training
from trainers.settings import TrainSettings
from trainers.text.corpora import resolve
from trainers.text.data import TextCut, token_set

END = "<|eos|>"
VOCABULARY, CONTEXT, LENGTH = 2048, 512, 256


def make_tokenizer(source: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 2,048 tokens, learned from the training side of a source; token 0 ends a document."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    learn = bpe.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(resolve(source).documents("train", "text", None), learn)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END)


def make_model(seed: int) -> LlamaForCausalLM:
    """The untrained model, multi-head attention, random by `seed`."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    randomise(model, seed)
    return model


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> None:
    """Every matrix anew, normal with the configuration's spread, the same for a seed in any process."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.normal_(0.0, model.config.initializer_range, generator=generator)


def options(description: str | None, *, steps: int, tokens: int, learning_rate: float) -> argparse.ArgumentParser:
    """The command line that training scripts share, with their own defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the trained checkpoint and of its making")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--tokens", type=int, default=tokens, help="training text; what is shorter is seen again")
    parser.add_argument("--eval-tokens", type=int, default=65_536)
    parser.add_argument("--learning-rate", type=float, default=learning_rate)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    source: str,
    arguments: argparse.Namespace,
    *,
    name: str,
    batch_size: int,
) -> None:
    """Train from scratch on a source of text; the checkpoint goes to `trained` in the folder that was named."""
    out = arguments.out.resolve()
    checkpoint.save(model, out / "untrained", tokenizer)
    cuts = (
        TextCut(source, "train", arguments.tokens, LENGTH, arguments.seed),
        TextCut(source, "eval", arguments.eval_tokens, LENGTH, arguments.seed),
    )
    train_set, eval_set = (str(token_set(cut, tokenizer, out / "data")) for cut in cuts)
    job = TrainJob(
        model_dir=str(out / "untrained"),
        train_file=train_set,
        eval_file=eval_set,
        out_dir=str(out / "trained"),
        storage_path=str(out / "train"),
        run_name=name,
        milestones=tuple(sorted({max(1, arguments.steps // 2), arguments.steps})),
        settings=TrainSettings(
            learning_rate=arguments.learning_rate,
            weight_decay=0.1,
            batch_size=batch_size,
            num_workers=arguments.workers,
            seed=arguments.seed,
        ),
        seed=arguments.seed,
    )
    print(f"training: {arguments.steps} steps of {batch_size} sequences of {LENGTH} tokens")
    ray.init(address=os.environ.get("RAY_ADDRESS", "local"), log_to_driver=False, logging_level=logging.ERROR)
    try:
        metrics = run_training(job)
    finally:
        ray.shutdown()
    speed = f"{metrics['tokens_per_second']:.0f} tokens a second"
    print(f"held-out loss {metrics['loss']:.3f} nats per token after {metrics['tokens']} tokens, {speed}")
    print(f"checkpoint: {out / 'trained'}")


def refuse_to_overwrite(out: Path) -> None:
    if (out / "trained").exists():
        sys.exit(f"{out / 'trained'} exists; name another folder with --out")


def main() -> None:
    parser = options(__doc__, steps=2000, tokens=8_000_000, learning_rate=2e-3)
    parser.add_argument("--source", default="stdlib", help="text to learn from, as in a search")
    arguments = parser.parse_args()
    refuse_to_overwrite(arguments.out)
    print(f"tokenizer: learning {VOCABULARY} tokens from {arguments.source}")
    tokenizer = make_tokenizer(arguments.source)
    train(make_model(arguments.seed), tokenizer, arguments.source, arguments, name="train-demo", batch_size=32)


if __name__ == "__main__":
    main()
