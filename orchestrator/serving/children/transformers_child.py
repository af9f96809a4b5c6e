"""Complete prompts with transformers alone, or time it.

`python -S -P transformers_child.py REQUEST.json`; it is timed where the request has `repetitions`.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from pathlib import Path
from typing import Any

HEADFOLD = ("headfold", "attention", "search_spaces", "trainers", "orchestrator", "benchmarks")


def cache_bytes(cache):
    """Return the bytes of every tensor that a layer of the cache holds, each once.

    Tensors that a layer caches in addition to keys and values count too.
    """
    sizes = {}
    for layer in cache.layers:
        for tensor in vars(layer).values():
            if hasattr(tensor, "element_size") and tensor.dim() >= 3:
                sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


def seconds(model, prompt, tokens):
    """Return the seconds to the first new token and from there to the last, and bytes per token.

    The bytes are those of the cache.
    """
    import torch

    stamps = []

    def stamp(ids, scores, **_):  # called after each new token
        stamps.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)

    ids = torch.tensor([prompt])
    started = time.perf_counter()
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        stopping_criteria=[stamp],
        return_dict_in_generate=True,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        use_cache=True,
    )
    if len(stamps) != tokens:
        raise RuntimeError(f"{len(stamps)} tokens were generated, asked were {tokens}")
    cache = output.past_key_values
    bytes_per_token = cache_bytes(cache) / cache.get_seq_length()
    return (stamps[0] - started, stamps[-1] - stamps[0]), bytes_per_token


def timed(model, request):
    """Return the seconds of each repetition of each prompt, and the bytes per token."""
    prompts, tokens = request["prompts"], request["tokens"]
    seconds(model, prompts[-1], tokens)  # the first one touches memory that is not there yet
    rounds = range(request["repetitions"])
    measured = [[seconds(model, prompt, tokens) for _ in rounds] for prompt in prompts]
    return {
        "seconds": [[times for times, _ in of_prompt] for of_prompt in measured],
        "kv_bytes_per_token": max(
            cache_bytes for of_prompt in measured for _, cache_bytes in of_prompt
        ),
    }


def main():
    """Answer the request."""
    # Headfold may be installed where transformers is: what loads with it would prove nothing
    for name in HEADFOLD:
        sys.modules[name] = None  # type: ignore[assignment]
    import torch
    import transformers

    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(request["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        request["folder"],
        trust_remote_code=request["trust_remote_code"],
        dtype=getattr(torch, request["dtype"]),
    ).eval()
    version = {"version": f"transformers {transformers.__version__}"}
    if request["repetitions"]:
        print(json.dumps(version | timed(model, request)), flush=True)
        return
    stops = model.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    completions, bytes_per_token = [], 0
    names = inspect.signature(model.forward).parameters
    cache_name = "cache" if "cache" in names else "past_key_values"  # until transformers 5.24
    for prompt in request["prompts"]:
        chosen, scores = [], []
        ids = torch.tensor([prompt])
        cache: Any = None
        with torch.no_grad():
            for _ in range(request["tokens"]):
                output = model(ids, **{cache_name: cache}, use_cache=True)
                cache = output.past_key_values
                scored = output.logits[0, -1].float().log_softmax(-1)
                best = int(scored.argmax())
                if best in stops:
                    break
                chosen.append(best)
                scores.append(float(scored[best]))
                ids = torch.tensor([[best]])
        length = cache.get_seq_length()
        bytes_per_token = max(bytes_per_token, cache_bytes(cache) / length)
        completions.append(
            {"tokens": chosen, "log_probabilities": scores, "prompt_tokens": len(prompt)}
        )
    answer = {"completions": completions, "kv_bytes_per_token": bytes_per_token}
    print(json.dumps(version | answer), flush=True)


if __name__ == "__main__":
    main()
