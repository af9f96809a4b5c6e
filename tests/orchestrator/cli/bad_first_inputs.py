"""Errors of new users: with the demo, and with a first configuration."""

from __future__ import annotations

from bad_input import Bad, config

DEMOS = (
    Bad("a key of the demo misspelt", "demo search.num_samplez=1", ("did you mean num_samples?",)),
    Bad("a demo into a file", "demo --storage texts/notes.txt", ("storage", "texts/notes.txt")),
    Bad("a demo to go on with that never was", "demo --resume", ("--resume", "demo")),
    Bad("a demo by name", "demo runs/demo", ("key=value", "runs/demo")),
)

CLUSTERS = (
    Bad("a check that there is not", "doctor --only heartbeat", ("heartbeat",)),
    Bad("no file for a cluster's search", "doctor --config none.yaml", ("none.yaml",)),
)

FIRST_CONFIGS = (
    Bad("no model to begin with", "init", ("model",)),
    Bad("a model to begin with that is not there", "init nothing", ("model", "nothing")),
    Bad("other work for a model to begin with", "init work", ("model", "work")),
    Bad("a model to begin with that was converted", "init uneven", ("model", "converted already")),
    Bad("a model that has nothing left to group", "init model", ("1 KV head",), config(num_key_value_heads=1)),
    Bad("a configuration in the place of another file", "init model --out mine.yaml", ("mine.yaml", "exists")),
    Bad("a configuration in no folder", "init model --out no/first.yaml", ("no/first.yaml", "cannot write")),
    Bad("a comparison with a recipe misspelt", "init model --compare asymgqa,dah", ("--compare", "did you mean dha?")),
    Bad("a comparison of the baseline alone", "init model --compare gqa", ("--compare", "gqa is the baseline")),
    Bad("a comparison of a recipe with itself", "init model --compare dha,dha", ("--compare", "dha is named twice")),
    Bad("fewer GPUs than none", "init model --gpus -1", ("--gpus", "got '-1'")),
)
