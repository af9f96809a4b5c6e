"""Complete prompts with llama.cpp, time or score it: `python llama_cpp_child.py REQUEST.json`.

It is timed where the request has `repetitions`, and scores the tokens of `sequences`. The log,
which names the size of the KV cache, goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

LOG_SECONDS = 1.0
"""Least time until the end: llama.cpp's log, which has the size of the cache and the reason of a
failure, is written by another thread.
"""
CACHE_TYPES = {
    "float32": "GGML_TYPE_F32",
    "float16": "GGML_TYPE_F16",
    "bfloat16": "GGML_TYPE_F16",
}
FORCED = 1e4  # added to the logit of a token that is to come, after its probability was taken


def parameters(request, engine):
    """Return the server's parameters."""
    settings = engine.CommonParams()
    settings.model.path = request["file"]
    settings.n_ctx = request["cells"]
    settings.n_parallel = 1
    settings.cpuparams.n_threads = request["threads"]
    settings.warmup = False
    settings.fit_params = False
    # The size of the cache is logged from 4 on; all tokens from 10 on, which takes time
    settings.verbosity = 4 if request["repetitions"] or "sequences" in request else 10
    settings.cache_type_k, settings.cache_type_v = (
        getattr(engine.ggml_type, CACHE_TYPES.get(name) or f"GGML_TYPE_{name.upper()}")
        for name in request.get("cache_formats") or 2 * [request["cache_dtype"]]
    )
    flash = "ENABLED" if request["flash_attention"] else "DISABLED"
    settings.flash_attn_type = getattr(
        engine.llama_flash_attn_type, f"LLAMA_FLASH_ATTN_TYPE_{flash}"
    )
    return settings


def complete(server, prompt, tokens):
    """Return the greedy completion of a prompt."""
    request = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "cache_prompt": False,
        "logprobs": 1,
        "return_tokens": True,
    }
    answer = server.handle_completions(request)
    if "choices" not in answer:
        raise RuntimeError(f"no completion: {json.dumps(answer)[:500]}")
    content = (answer["choices"][0].get("logprobs") or {}).get("content", [])
    tokens = answer["__verbose"]["tokens"]
    return {
        "tokens": tokens,
        "log_probabilities": aligned(tokens, content),
        "prompt_tokens": answer["usage"]["prompt_tokens"],
    }


def aligned(tokens, content):
    """Return the log-probability of each token.

    None stands for those that end within a character, which the server leaves out.
    """
    rest = list(content)
    return [rest.pop(0)["logprob"] if rest and rest[0]["id"] == token else None for token in tokens]


def seconds(server, prompt, tokens):
    """Return the seconds to the first new token, and from there to the last, by the server."""
    request = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "cache_prompt": False,
        "ignore_eos": True,
    }
    answer = server.handle_completions(request)
    timings = answer.get("timings") or {}
    if timings.get("prompt_n") != len(prompt) or timings.get("predicted_n") != tokens:
        raise RuntimeError(
            f"no timings of {len(prompt)} and {tokens} tokens: {json.dumps(answer)[:500]}"
        )
    return timings["prompt_ms"] / 1000, timings["predicted_ms"] / 1000


def scores(server, sequence):
    """Return the log-probability of each token of a sequence but the first, given those before.

    None stands for those that end within a character, which the server leaves out. Each request
    computes one token and finds the others in the cache.
    """
    result = []
    for length in range(1, len(sequence)):
        request = {
            "prompt": sequence[:length],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": 1,
            "logit_bias": [[sequence[length], FORCED]],
        }
        answer = server.handle_completions(request)
        if "choices" not in answer:
            raise RuntimeError(f"no score: {json.dumps(answer)[:500]}")
        content = (answer["choices"][0].get("logprobs") or {}).get("content", [])
        if content and content[0]["id"] != sequence[length]:
            raise RuntimeError(f"expected token {sequence[length]}, got {content[0]['id']}")
        result.append(content[0]["logprob"] if content else None)
    return result


def main():
    """Answer the request."""
    started = time.monotonic()
    try:
        respond()
    finally:
        time.sleep(max(0.0, started + LOG_SECONDS - time.monotonic()))


def respond():
    """Print the answer to the request."""
    engine: Any = importlib.import_module("xllamacpp")
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    server = engine.Server(parameters(request, engine))
    version = f"xllamacpp {engine.__version__}"
    if "sequences" in request:
        scored = [scores(server, sequence) for sequence in request["sequences"]]
        print(json.dumps({"version": version, "scores": scored}), flush=True)
        return
    if request["repetitions"]:
        # The first one touches memory that is not there yet
        seconds(server, request["prompts"][-1], request["tokens"])
        rounds = range(request["repetitions"])
        timed = [
            [seconds(server, prompt, request["tokens"]) for _ in rounds]
            for prompt in request["prompts"]
        ]
        print(json.dumps({"version": version, "seconds": timed}), flush=True)
        return
    completions = [complete(server, prompt, request["tokens"]) for prompt in request["prompts"]]
    print(json.dumps({"version": version, "completions": completions}), flush=True)


if __name__ == "__main__":
    main()
