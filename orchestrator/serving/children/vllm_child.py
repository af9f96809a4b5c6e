"""Complete prompts with vLLM, time or score it: `python vllm_child.py REQUEST.json`.

It runs in the environment where vLLM lives. It is timed where the request has `repetitions`, and
scores the tokens of `sequences`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def main():
    """Answer the request."""
    request = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # Read when vLLM is imported
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(request["memory"] // 2**30)
    os.environ.update(
        {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
    )
    # The cache's configuration is read off the engine
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    vllm: Any = importlib.import_module("vllm")
    platform: Any = importlib.import_module("vllm.platforms").current_platform
    # On a CPU the variable above says how much
    cache_memory = {} if platform.is_cpu() else {"kv_cache_memory_bytes": request["memory"]}
    engine = vllm.LLM(
        request["folder"],
        dtype=request["dtype"],
        enforce_eager=True,
        max_model_len=request["cells"],
        max_num_seqs=8,
        trust_remote_code=request["trust_remote_code"],
        model_impl=request["model_impl"],
        skip_tokenizer_init=not request.get("has_tokenizer"),
        kv_cache_dtype=request.get("cache_dtype", "auto"),
        enable_prefix_caching=False,
        disable_log_stats=True,
        **cache_memory,
    )
    version = {"version": f"vLLM {vllm.__version__}"}
    if "sequences" in request:
        device = engine.llm_engine.vllm_config.device_config.device_type
        answer = {"scores": scored(vllm, engine, request["sequences"]), "device": device}
        print(json.dumps(version | answer | cache(engine)), flush=True)
        return
    if request["repetitions"]:
        times = {"seconds": timed(vllm, engine, request)}
        print(json.dumps(version | times | cache(engine)), flush=True)
        return
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=request["tokens"], logprobs=1, detokenize=False
    )
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in request["prompts"]], sampling, use_tqdm=False
    )
    completions = []
    for output in outputs:
        chosen = output.outputs[0]
        scores = [
            step[token].logprob
            for token, step in zip(chosen.token_ids, chosen.logprobs, strict=True)
        ]
        stopped = chosen.finish_reason == "stop"
        completions.append(
            {
                "tokens": list(chosen.token_ids)[: -1 if stopped else None],
                "log_probabilities": scores[: -1 if stopped else None],
                "prompt_tokens": len(output.prompt_token_ids),
            }
        )
    print(json.dumps(version | {"completions": completions} | cache(engine)), flush=True)


def timed(vllm, engine, request):
    """Return, for each prompt of each repetition, seconds to the first new token and to the last.

    The second number counts from the first new token.
    """
    tokens, prompts = request["tokens"], request["prompts"]
    sampling = vllm.SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
    )

    def seconds(prompt):
        started, stamps = time.perf_counter(), []
        engine.llm_engine.add_request(str(started), {"prompt_token_ids": prompt}, sampling)
        while engine.llm_engine.has_unfinished_requests():
            if engine.llm_engine.step():  # a long prompt takes several steps to its first token
                stamps.append(time.perf_counter())
        if len(stamps) != tokens:
            raise RuntimeError(f"{len(stamps)} tokens were generated, asked were {tokens}")
        return stamps[0] - started, stamps[-1] - stamps[0]

    seconds(prompts[-1])  # the first one touches memory that is not there yet
    return [[seconds(prompt) for _ in range(request["repetitions"])] for prompt in prompts]


def scored(vllm, engine, sequences):
    """Return the log-probability of each token of each sequence but the first.

    The last token is the one that may be generated, so that a sequence may be as long as the
    context; its log-probability is the one before others were forbidden.
    """
    settings = [
        vllm.SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            logprobs=0,
            allowed_token_ids=[sequence[-1]],
            ignore_eos=True,
            detokenize=False,
        )
        for sequence in sequences
    ]
    prompts = [{"prompt_token_ids": sequence[:-1]} for sequence in sequences]
    result = []
    for sequence, output in zip(
        sequences, engine.generate(prompts, settings, use_tqdm=False), strict=True
    ):
        steps = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        result.append(
            [step[token].logprob for token, step in zip(sequence[1:], steps, strict=True)]
        )
    return result


def cache(engine):
    """Return what vLLM has allotted.

    That is the bytes of the tensors of its cache, and the tokens that fit there by its
    configuration.
    """
    config = engine.llm_engine.vllm_config.cache_config
    blocks, size = config.num_gpu_blocks, config.block_size
    core = engine.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    sizes = {}
    for tensor in runner.kv_caches:
        for part in tensor if isinstance(tensor, (list, tuple)) else [tensor]:
            sizes[part.untyped_storage().data_ptr()] = part.untyped_storage().nbytes()
    return {"capacity": blocks * size, "cache_bytes": sum(sizes.values())}


if __name__ == "__main__":
    main()
