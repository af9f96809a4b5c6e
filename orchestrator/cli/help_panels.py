"""The layout of `--help`: verbs in groups with two examples each, options in panels."""

from __future__ import annotations

_DATA = "Data"
_ADVANCED = "Advanced"
_OPTIONS = {
    _DATA: (
        "calibration_data train_data data eval_data text_field calibration_tokens eval_tokens "
        "train_tokens sequence_length"
    ),
    _ADVANCED: (
        "seed dtype device dequantize strict overrides layerwise polish polish_weights cache_dir "
        "engine_python trust_remote_code check_memory cache_memory speed_tokens sync_from "
        "checkpoint_minutes eval_every agreement counts allow_larger_cache json probe_mib seconds"
    ),
}
PANELS = {name: panel for panel, names in _OPTIONS.items() for name in names.split()}
"""The panel of an option by its name in Python; others are in the main one."""

GROUPS = {
    "Start": ("demo", "convert", "inspect", "estimate", "recipes"),
    "Search": ("init", "search", "watch", "promote", "report", "ui", "doctor"),
    "Train": ("finetune", "train"),
    "Use": ("evaluate", "export"),
}
"""The verbs of each group, in the order of the help."""

EXAMPLES = {
    "demo": ("headfold demo", "headfold demo --storage runs/demo --resume"),
    "convert": (
        "headfold convert --model Qwen/Qwen3-0.6B --kv-ratio 0.5 --data chats.jsonl --out half",
        "headfold convert --model MODEL --kv-bytes 0.25 --for llama.cpp --out quarter",
    ),
    "inspect": (
        "headfold inspect MODEL --data texts.jsonl",
        "headfold inspect MODEL --kv-ratio 0.5,0.25 --out heads.html",
    ),
    "estimate": (
        "headfold estimate --model MODEL --kv-ratio 0.5",
        "headfold estimate search.yaml",
    ),
    "recipes": ("headfold recipes", "headfold recipes MODEL --for vllm"),
    "init": (
        "headfold init MODEL",
        "headfold init MODEL --gpus 1 --gpu-memory 80 --out search.yaml",
    ),
    "search": (
        "headfold search search.yaml --dry-run",
        "headfold search search.yaml search.num_samples=4",
    ),
    "watch": ("headfold watch runs/demo/demo", "headfold watch runs/demo/demo --once"),
    "promote": (
        "headfold promote runs/demo/demo --trial t0003",
        "headfold promote runs/demo/demo --top 1",
    ),
    "report": (
        "headfold report runs/demo/demo",
        "headfold report runs/demo/demo --out report.html",
    ),
    "ui": ("headfold ui runs/demo/demo", "headfold ui runs/demo/demo --port 5056"),
    "doctor": ("headfold doctor", "headfold doctor --config search.yaml"),
    "finetune": (
        "headfold finetune --model half --original MODEL --steps 500 --out half-tuned",
        "headfold finetune --model MODEL --data texts.jsonl --steps 500 --learning-rate 1e-5 "
        "--out tuned",
    ),
    "train": (
        "headfold train --architecture MODEL --steps 1000 --learning-rate 3e-4 --out trained",
        "headfold train --architecture MODEL --recipe dcformer --steps 1000 --learning-rate 3e-4 "
        "--out composed",
    ),
    "evaluate": (
        "headfold evaluate half --original MODEL --data texts.jsonl",
        "headfold evaluate half --original MODEL --tasks demo",
    ),
    "export": (
        "headfold export half --target auto --out half-export",
        "headfold export half --target gguf --out half-gguf --check",
    ),
}


def group_of(verb: str) -> str:
    """Return the group of a verb."""
    return next(group for group, verbs in GROUPS.items() if verb in verbs)


def epilog(verb: str) -> str:
    """Return the examples of a verb, a paragraph each."""
    return "\n\n".join(["Examples:", *EXAMPLES[verb]])
