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
import sys
from pathlib import Path

import ray
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers import trainers as bpe
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from attention import checkpoint
from trainers.corpora import resolve
from trainers.data import sequence_file
from trainers.settings import TrainSettings
from trainers.worker import TrainJob, run_training

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
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, config.initializer_range, generator=generator)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the trained checkpoint and of its making")
    parser.add_argument("--source", default="stdlib", help="text to learn from, as in a search")
    parser.add_argument("--steps", type=int, default=2000, help="of 32 sequences of 256 tokens")
    parser.add_argument("--tokens", type=int, default=8_000_000, help="training text; what is shorter is seen again")
    parser.add_argument("--eval-tokens", type=int, default=65_536)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    out = given.out.resolve()
    if (out / "trained").exists():
        sys.exit(f"{out / 'trained'} exists; name another folder with --out")

    print(f"tokenizer: learning {VOCABULARY} tokens from {given.source}")
    tokenizer = make_tokenizer(given.source)
    checkpoint.save(make_model(given.seed), out / "untrained", tokenizer)
    text = {"sequence_length": LENGTH, "cache_dir": out / "data", "seed": given.seed}
    job = TrainJob(
        model_dir=str(out / "untrained"),
        train_file=str(sequence_file(given.source, tokenizer, split="train", tokens=given.tokens, **text)),
        eval_file=str(sequence_file(given.source, tokenizer, split="eval", tokens=given.eval_tokens, **text)),
        out_dir=str(out / "trained"),
        storage_path=str(out / "train"),
        run_name="train-demo",
        milestones=tuple(sorted({max(1, given.steps // 2), given.steps})),
        settings=TrainSettings(
            learning_rate=given.learning_rate,
            weight_decay=0.1,
            batch_size=32,
            num_workers=given.workers,
            seed=given.seed,
        ),
        seed=given.seed,
    )
    print(f"training: {given.steps} steps")
    ray.init(log_to_driver=False, logging_level=logging.ERROR)
    try:
        metrics = run_training(job).metrics
    finally:
        ray.shutdown()
    speed = f"{metrics['tokens_per_second']:.0f} tokens a second"
    print(f"held-out loss {metrics['loss']:.3f} nats a token after {metrics['tokens']} tokens, {speed}")
    print(f"checkpoint: {out / 'trained'}")


if __name__ == "__main__":
    main()
