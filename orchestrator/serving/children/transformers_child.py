"""Complete prompts with transformers alone: `python -S -P transformers_child.py REQUEST.json`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def cache_bytes(cache):
    """Every tensor that a layer of the cache holds, once; those that a layer keeps beside keys and values too."""
    held = {}
    for layer in cache.layers:
        for tensor in vars(layer).values():
            if hasattr(tensor, "element_size") and tensor.dim() >= 3:
                held[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(held.values())


def main():
    import torch
    import transformers

    if any(Path(folder, "attention", "plan.py").is_file() for folder in sys.path):
        raise RuntimeError("this process can import Headfold, so that it would prove nothing")
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(request["threads"])
    asked = {"trust_remote_code": request["trust_remote_code"], "dtype": getattr(torch, request["dtype"])}
    model = transformers.AutoModelForCausalLM.from_pretrained(request["folder"], **asked).eval()
    stops = model.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [] if stops is None else [stops]
    completions, bytes_per_token = [], 0
    for prompt in request["prompts"]:
        taken, scores, held = [], [], torch.tensor([prompt])
        cache: Any = None
        with torch.no_grad():
            for _ in range(request["tokens"]):
                made = model(held, past_key_values=cache, use_cache=True)
                cache, scored = made.past_key_values, made.logits[0, -1].float().log_softmax(-1)
                best = int(scored.argmax())
                if best in stops:
                    break
                taken.append(best)
                scores.append(float(scored[best]))
                held = torch.tensor([[best]])
        length = cache.get_seq_length()
        bytes_per_token = max(bytes_per_token, cache_bytes(cache) / length)
        completions.append({"tokens": taken, "log_probabilities": scores, "prompt_tokens": len(prompt)})
    answer = {"version": f"transformers {transformers.__version__}", "completions": completions}
    print(json.dumps(answer | {"kv_bytes_per_token": bytes_per_token}), flush=True)


if __name__ == "__main__":
    main()
