"""Load an exported checkpoint with plain transformers, where Headfold cannot be imported, and write a little text.

    python examples/load_exported.py runs/demo/.../exported

This is all that software which serves the model has to do.
"""

from __future__ import annotations

import argparse
import inspect
import sys

for name in ("attention", "search_spaces", "trainers", "orchestrator"):
    sys.modules[name] = None  # type: ignore[assignment]  # from here on importing any part of Headfold fails

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate text from a checkpoint with plain transformers.")
    parser.add_argument("checkpoint", help="folder of the exported checkpoint")
    parser.add_argument("--prompt", default="def read_lines(path):\n")
    parser.add_argument("--tokens", type=int, default=48)
    arguments = parser.parse_args()

    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint, dtype="auto").eval()
    prompt = tokenizer(arguments.prompt, return_tensors="pt")
    cache = DynamicCache(config=model.config)
    torch.manual_seed(0)  # generate() takes no generator
    with torch.no_grad():
        # Since transformers 5.24 the cache is called so
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        sampling = {"max_new_tokens": arguments.tokens, "do_sample": True, "temperature": 0.6, "top_k": 20}
        written = model.generate(**prompt, **sampling, **{name: cache})
    cache_bytes = sum(layer.keys.numel() + layer.values.numel() for layer in cache.layers) * model.dtype.itemsize
    positions = cache.get_seq_length()
    config = model.config
    print(f"{type(model).__module__}.{type(model).__name__}, Headfold not importable")
    print(f"{config.num_attention_heads} query heads, {config.num_key_value_heads} KV heads per layer")
    print(f"KV cache: {cache_bytes} bytes for {positions} tokens, {cache_bytes // positions} per token")
    print(tokenizer.decode(written[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
