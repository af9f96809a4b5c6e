"""Errors in a checkpoint and its files, and in a training."""

from __future__ import annotations

from bad_input import QUERY, Bad, config, cuts, in_shards, removes, renames, weights, writes
from bad_input_folder import edit_json

T = "train --architecture model --steps 2 --learning-rate 1e-3 --out trained"

EVALUATIONS = (
    Bad("no checkpoint", "evaluate", ("checkpoint",)),
    Bad("a checkpoint that is not there", "evaluate none ...", ("none",)),
    Bad("a text for a checkpoint", "evaluate texts/notes.txt ...", ("texts/notes.txt",)),
    Bad("an original model that is not there", "evaluate model --original none ...", ("none",)),
    Bad(
        "an original model with other words",
        "evaluate grouped --original model ...",
        ("original", "300", "257"),
        config(vocab_size=300),
    ),
    Bad("fewer than no tokens to decode", "evaluate model --speed-tokens -1 ...", ("--speed-tokens", "-1")),
    Bad("a task that nobody knows", "evaluate model ... --tasks none", ("tasks", "'none'", "demo")),
    Bad("task files that are not there", "evaluate model ... --tasks none/tasks", ("none/tasks",)),
    Bad("a folder without task files", "evaluate model ... --tasks texts", ("texts", "task file")),
    Bad("prompts that are not there", "evaluate model ... --prompts none.txt", ("none.txt",)),
    Bad("a context longer than the model's", "evaluate model ... --context-lengths 4096", ("context", "4096")),
    Bad("a word for a context length", "evaluate model ... --context-lengths long", ("context", "'long'", "max")),
    Bad("an engine that nobody knows", "evaluate model --engine llama", ("engine", "llama.cpp", "'llama'")),
    Bad("tasks in an engine", "evaluate model --engine llama.cpp --tasks demo", ("--tasks", "without --engine")),
    Bad("a Python without the engine's", "evaluate model ... --engine-python python3", ("engine_python", "--engine")),
    Bad("memory of no engine", "evaluate model ... --cache-memory 40", ("cache_memory", "--engine")),
    Bad(
        "code of an export without an engine",
        "evaluate model ... --trust-remote-code",
        ("trust_remote_code", "--engine"),
    ),
    Bad(
        "texts to hide lines in, and no length",
        "evaluate model ... --context-texts 3",
        ("context_texts", "--context-lengths"),
    ),
    Bad("one token to time", "evaluate model --engine llama.cpp --speed-tokens 1", ("speed_tokens", "got 1")),
    Bad("a baseline that is not there", "evaluate model ... --baseline none", ("none",)),
    Bad("held-out text that is not there", "evaluate model ... --eval-data none.txt", ("none.txt",)),
    Bad("no tokenizer", "evaluate model ...", ("tokenizer", "model"), removes("model/tokenizer.json")),
    Bad(
        "a broken tokenizer",
        "evaluate model ...",
        ("tokenizer", "model"),
        writes("model/tokenizer.json", "{"),
    ),
    Bad(
        "a tokenizer without an end token",
        "evaluate model ...",
        ("tokenizer", "end token"),
        lambda folder: edit_json(folder / "model" / "tokenizer_config.json", eos_token=None),
    ),
    Bad("no config", "evaluate model ...", ("model", "config.json"), removes("model/config.json")),
    Bad("a broken config", "evaluate model ...", ("model/config.json", "JSON"), writes("model/config.json", "{")),
    Bad("a list for a config", "evaluate model ...", ("model/config.json",), writes("model/config.json", "[]")),
    Bad(
        "7 heads in a width of 32",
        "evaluate model ...",
        ("model/config.json", "hidden size (32)", "heads (7)"),
        config(num_attention_heads=7),
    ),
    Bad(
        "KV heads that do not divide the heads",
        "evaluate model ...",
        ("num_key_value_heads", "3 and 4"),
        config(num_key_value_heads=3),
    ),
    Bad("a word for a count", "evaluate model ...", ("heads", "four"), config(num_attention_heads="four")),
    Bad("a negative width", "evaluate model ...", ("hidden_size", "-32"), config(hidden_size=-32)),
    Bad("an odd head dim", "evaluate model ...", ("even", "`head_dim`=7"), config(head_dim=7)),
    Bad("no layers", "evaluate model ...", ("num_layers", "got 0"), config(num_hidden_layers=0)),
    Bad("a family that is not supported", "evaluate model ...", ("bert", "llama"), config(model_type="bert")),
    Bad("a family misspelt", "evaluate model ...", ("lama",), config(model_type="lama")),
    Bad(
        "a kind of RoPE misspelt",
        "evaluate model ...",
        ("rope_type", "did you mean yarn?"),
        config(rope_parameters={"rope_type": "yarrn"}),
    ),
    Bad(
        "a quantised checkpoint",
        "evaluate model ...",
        ("quantised", "gptq"),
        config(quantization_config={"quant_method": "gptq", "bits": 4}),
    ),
    Bad("no weights", "evaluate model ...", ("model", "safetensors"), removes("model/model.safetensors")),
    Bad(
        "weights that are pickled",
        "evaluate model ...",
        ("safetensors",),
        renames("model/model.safetensors", "model/pytorch_model.bin"),
    ),
    Bad(
        "weights that are not safetensors",
        "evaluate model ...",
        ("model/model.safetensors",),
        writes("model/model.safetensors", "not weights at all, but long enough to be looked at"),
    ),
    Bad(
        "weights cut short",
        "evaluate model ...",
        ("model/model.safetensors", "truncated"),
        cuts("model/model.safetensors", 20_000),
    ),
    Bad("a shard cut short", "evaluate model ...", ("model-00002-of-00002.safetensors", "truncated"), in_shards),
    Bad("a projection missing", "evaluate model ...", (QUERY,), weights(lambda found: found.pop(QUERY))),
    Bad(
        "a projection of another shape",
        "evaluate model ...",
        (QUERY, "[16, 32]"),
        weights(lambda found: found.update({QUERY: found[QUERY][:16].clone()})),
    ),
    Bad(
        "more layers in the config than in the weights",
        "evaluate model ...",
        ("num_hidden_layers", "3"),
        config(num_hidden_layers=3),
    ),
    Bad(
        "weights of other names",
        "evaluate model ...",
        ("lacks", "of other names"),
        weights(lambda found: [found.update({f"my.{key}": found.pop(key)}) for key in list(found)]),
    ),
    Bad("a vocabulary that the weights do not have", "evaluate model ...", ("[257, 32]",), config(vocab_size=100)),
    Bad(
        "a converted model that has lost its plan",
        "evaluate uneven ...",
        ("attention_plan",),
        lambda folder: edit_json(folder / "uneven" / "config.json", attention_plan=None),
    ),
    Bad(
        "a plan of another format",
        "evaluate uneven ...",
        ("plan", "format", "9"),
        lambda folder: edit_json(folder / "uneven" / "config.json", attention_plan={"format": 9}),
    ),
    Bad("a broken record", "evaluate uneven ...", ("headfold.json", "JSON"), writes("uneven/headfold.json", "{")),
    Bad(
        "a list for a record",
        "evaluate uneven ...",
        ("uneven/headfold.json", "object"),
        writes("uneven/headfold.json", "[]"),
    ),
)

TRAININGS = (
    Bad(
        "an architecture that is not there",
        "train --architecture none --steps 2 --learning-rate 1e-3 --out trained ...",
        ("architecture", "none"),
    ),
    Bad(
        "no steps",
        "train --architecture model --steps 0 --learning-rate 1e-3 --out trained ...",
        ("--steps", "got '0'"),
    ),
    Bad(
        "no learning rate",
        "train --architecture model --steps 2 --learning-rate 0 --out trained ...",
        ("learning_rate",),
    ),
    Bad(
        "a word for a learning rate",
        "train --architecture model --steps 2 --learning-rate fast --out trained ...",
        ("--learning-rate", "fast"),
    ),
    Bad("a recipe of training misspelt", f"{T} --recipe dcfromer ...", ("did you mean dcformer?",)),
    Bad("a setting of training misspelt", f"{T} --set train.batchsize=2 ...", ("did you mean batch_size?",)),
    Bad("a word for a batch", f"{T} --set train.batch_size=many ...", ("train.batch_size", "many")),
    Bad("a value for the training section", f"{T} --set train=3 ...", ("train", "got 3", "section")),
    Bad(
        "a composition's setting misspelt",
        f"{T} --recipe dcformer --set composition.rnk=2 ...",
        ("composition.rnk", "did you mean rank?"),
    ),
    Bad("a composition of no rank", f"{T} --recipe dcformer --set composition.rank=0 ...", ("rank", "got 0")),
    Bad(
        "a composition in groups that heads do not make",
        f"{T} --recipe dcformer --set composition.groups=3 ...",
        ("groups", "4 heads", "3"),
    ),
    Bad("composition without composed heads", f"{T} --set composition.rank=2 ...", ("--recipe dcformer",)),
    Bad("a setting that has an option", f"{T} --set train.seed=2 ...", ("train.seed", "--seed")),
    Bad("training sequences that are too long", f"{T} ... --sequence-length 128", ("sequence_length", "128", "64")),
    Bad("training texts that are not there", f"{T} ... --train-data none.txt", ("none.txt",)),
    Bad("too few training tokens", f"{T} ... --train-tokens 4", ("train", "4 tokens", "32")),
    Bad(
        "more training workers than processors",
        f"{T} --set train.num_workers=200 --set train.batch_size=200 ...",
        ("train.num_workers", "200"),
    ),
    Bad(
        "training over other work",
        "train --architecture model --steps 2 --learning-rate 1e-3 --out work ...",
        ("work",),
    ),
    Bad(
        "training over its model",
        "train --architecture model --steps 2 --learning-rate 1e-3 --out model ...",
        ("model",),
    ),
    Bad(
        "training below a file",
        "train --architecture model --steps 2 --learning-rate 1e-3 --out texts/notes.txt/out ...",
        ("texts/notes.txt",),
    ),
    Bad(
        "training into an address",
        "train --architecture model --steps 2 --learning-rate 1e-3 --out s3://b/x ...",
        ("out",),
    ),
    Bad("training without a tokenizer", f"{T} ...", ("tokenizer", "model"), removes("model/tokenizer.json")),
)

F = "finetune --model model --steps 2 --learning-rate 1e-3 --out trained"
FINETUNINGS = (
    Bad(
        "fine-tuning of nothing",
        "finetune --model none --steps 2 --learning-rate 1e-3 --out trained ...",
        ("model", "none"),
    ),
    Bad("a part of the weights that is none", f"{F} --tuning some ...", ("train.tuning", "some", "kv")),
    Bad("a tuning that has an option", f"{F} --set train.tuning=kv ...", ("train.tuning", "--tuning")),
    Bad("distillation from nothing", f"{F} --set train.distillation=kl ...", ("train.distillation", "--original")),
    Bad("a model to learn from that is not there", f"{F} --original none ...", ("original", "none")),
    Bad("composition in a fine-tuning", f"{F} --set composition.rank=2 ...", ("composition",)),
    Bad("fine-tuning on texts that are not there", f"{F} ... --train-data none.txt", ("none.txt",)),
    Bad(
        "fine-tuning over its model",
        "finetune --model model --steps 2 --learning-rate 1e-3 --out model ...",
        ("model",),
    ),
    Bad(
        "fine-tuning over other work",
        "finetune --model model --steps 2 --learning-rate 1e-3 --out work ...",
        ("work",),
    ),
)
