"""Errors of users with a search: its configuration, its folder, its promotions or reports."""

from __future__ import annotations

from bad_input import Bad, removes, renames, writes

from orchestrator.storage.journal import JOURNAL_FORMAT

SEARCH = "runs/mine"
ORIGINAL = f"{SEARCH}/original.json"
S = "search mine.yaml"
BEGUN = f'{{"event": "search", "format": {JOURNAL_FORMAT}, "rungs": 2}}\n'
OLD = '{"config": {}, "event": "trial", "trial": "t0000"}\n'
FORMER = ("started by a former version", "start a new search")

GENERAL = (
    Bad("a verb misspelt", "serch mine.yaml", ("serch", "did you mean search?")),
    Bad("another verb misspelt", "convrt --model model", ("convrt", "did you mean convert?")),
    Bad(
        "an option without its value",
        "convert --recipe",
        ("convert: option '--recipe' needs a value after it; see `headfold convert --help`",),
    ),
    Bad(
        "a model without its option",
        "convert model",
        ("convert: missing option '--model'; write --model model; see `headfold convert --help`",),
    ),
    Bad("an option in the place of the verb", "--verbose", ("--verbose", "no such option")),
    Bad("a verb in capitals", "EXPORT uneven", ("EXPORT", "did you mean export?")),
)

SEARCHES = (
    Bad("no configuration", "search", ("config",)),
    Bad("a configuration that is not there", "search none.yaml", ("no configuration file", "none.yaml")),
    Bad("a folder for a configuration", "search work", ("no configuration file", "work")),
    Bad("a text for a configuration", "search work/thesis.md", ("work/thesis.md", "mapping")),
    Bad("broken YAML", S, ("mine.yaml", "not valid YAML"), writes("mine.yaml", "name: [")),
    Bad("an empty configuration", S, ("mine.yaml", "mapping"), writes("mine.yaml", "")),
    Bad("a configuration in another encoding", S, ("mine.yaml", "YAML"), writes("mine.yaml", b"name: \xff")),
    Bad("a key given twice", S, ("name is given twice",), writes("mine.yaml", "name: a\nname: b\n")),
    Bad("a program in YAML", S, ("python/object",), writes("mine.yaml", "name: !!python/object/apply:os.abort []")),
    Bad("a change that is none", f"{S} extra", ("key=value", "extra")),
    Bad("an option of search misspelt", f"{S} --resmue", ("--resmue", "did you mean --resume?")),
    Bad("a key misspelt", f"{S} search.num_samplez=4", ("search.num_samplez", "did you mean num_samples?")),
    Bad("a section misspelt", f"{S} serach.num_samples=4", ("serach", "did you mean search?")),
    Bad("a value for a section", f"{S} model=3", ("model", "got 3", "section")),
    Bad("a name that leaves the storage", f"{S} name=../up", ("name", "../up", "letters")),
    Bad("decode time in no engine", f"{S} search.decode_context_length=64", ("search.decode_context_length", "target")),
    Bad("recall without a context", f"{S} promotion.max_recall_drop=0.1", ("max_recall_drop", "context_lengths")),
    Bad("a model that is not there", f"{S} model.path=none", ("model.path", "none")),
    Bad("a recipe misspelt in a configuration", f"{S} search.recipes=[gqq]", ("search.recipes", "did you mean gqa?")),
    Bad("no recipes", f"{S} search.recipes=[]", ("search.recipes", "at least 1")),
    Bad("a baseline misspelt", f"{S} search.baseline=gqq", ("search.baseline", "did you mean gqa?")),
    Bad("no budgets", f"{S} search.kv_ratios=[]", ("search.kv_ratios", "at least 1")),
    Bad("a number for a list", f"{S} search.kv_ratios=0.5", ("search.kv_ratios", "got 0.5", "list")),
    Bad("a budget above 1", f"{S} search.kv_ratios=[1.5]", ("search.kv_ratios.0", "1.5", "(0, 1)")),
    Bad(
        "a budget that no heads make",
        f"{S} search.kv_ratios=[0.3] search.strict=true",
        ("search.kv_ratios", "0.3", "0.25, 0.5"),
    ),
    Bad("a budget given twice", f"{S} search.kv_ratios=[0.5,0.5]", ("search.kv_ratios", "more than once")),
    Bad("a searcher misspelt", f"{S} search.searcher=optuan", ("search.searcher", "did you mean optuna?")),
    Bad("a scheduler misspelt", f"{S} rungs.scheduler=ahsa", ("rungs.scheduler", "did you mean asha?")),
    Bad("rungs that do not start at 0", f"{S} rungs.steps=[1,2]", ("rungs.steps", "first rung must be 0")),
    Bad("fewer than no samples", f"{S} search.num_samples=-1", ("search.num_samples", "got -1")),
    Bad(
        "an axis misspelt in choices",
        f"{S} search.num_samples=4 'search.search_space={{fusoin: [mean]}}'",
        ("search.search_space", "did you mean fusion?"),
    ),
    Bad(
        "a part misspelt in choices",
        f"{S} search.num_samples=4 'search.search_space={{fusion: [maen]}}'",
        ("search.search_space", "maen", "did you mean mean?"),
    ),
    Bad(
        "a knob misspelt",
        f"{S} search.num_samples=4 'search.params={{grouping.iteratoins: 3}}'",
        ("search.params", "grouping.iterations"),
    ),
    Bad(
        "a part misspelt in an arm",
        f"{S} 'search.recipes=[{{recipe: gqa, changes: {{fusion: maen}}}}]'",
        ("search.recipes", "did you mean mean?"),
    ),
    Bad("a kind of number misspelt in training", f"{S} train.dtype=fp23", ("train.dtype", "fp23")),
    Bad("a batch that workers cannot share", f"{S} train.batch_size=3 train.num_workers=2", ("batch_size", "got 3")),
    Bad(
        "a setting of DeepSpeed's that Headfold has",
        f"{S} train.deepspeed.gradient_clipping=1",
        ("train.deepspeed", "train.max_grad_norm"),
    ),
    Bad("a setting of DeepSpeed's misspelt", f"{S} train.deepspeed.zero_optimisation={{}}", ("did you mean",)),
    Bad("more workers than processors", f"{S} train.num_workers=512 train.batch_size=512", ("train.num_workers",)),
    Bad("a GPU where there is none", f"{S} train.gpus_per_worker=1", ("GPU", "has 0"), without_gpu=True),
    Bad("texts that are not there", f"{S} data.source=none.txt", ("data.train", "none.txt")),
    Bad("more tokens than the texts have", f"{S} data.train.tokens=9999999", ("data.train", "found", "tokens")),
    Bad("longer sequences than the model takes", f"{S} data.sequence_length=128", ("data.sequence_length", "64")),
    Bad("a field that texts do not have", f"{S} data.text_field=body", ("body", "text_field")),
    Bad("a file for a storage", f"{S} storage=texts/notes.txt", ("storage", "texts/notes.txt")),
    Bad("a storage that nobody can write", f"{S} storage=/proc/headfold", ("storage", "/proc/headfold")),
    Bad("an address of no known kind", f"{S} storage=gopher://x/y", ("storage", "gopher")),
    Bad("an address without a bucket", f"{S} storage=s3://", ("storage", "bucket")),
    Bad(
        "a tracking address of no known kind",
        f"{S} tracking.uri=gopher://x",
        ("tracking.uri", "gopher", "sqlite"),
        leaves="runs/cache",
    ),
    Bad("a search to resume that never was", f"{S} name=other --resume", ("--resume", "other")),
    Bad("a search to resume by a name that never was", f"{S} --resume mine-7", ("--resume", "mine-7")),
    Bad(
        "a search to resume with other settings",
        f"{S} search.kv_ratios=[0.25] --resume",
        ("--resume", "search", "same settings"),
    ),
    Bad("a search to resume and to rehearse at once", f"{S} --resume --dry-run", ("dry_run", "--resume")),
    Bad("a search to resume of a former version", f"{S} --resume", FORMER, writes(f"{SEARCH}/journal.jsonl", OLD)),
)

PAGES = (
    Bad("no search to show", "ui", ("search",)),
    Bad("the storage of a search to show", "ui runs", ("runs", "folder of a search")),
    Bad("a port that is none", f"ui {SEARCH} --port 70000", ("--port", "70000")),
    Bad("a search that MLflow was never told of", f"ui {SEARCH}", ("no runs in MLflow",)),
    Bad(
        "a search whose MLflow store has gone",
        f"ui {SEARCH}",
        ("mlflow.db", "found none", "report.html"),
        writes(f"{SEARCH}/state.json", '{"tracking": "sqlite:////nowhere/mlflow.db"}'),
    ),
    Bad(
        "a search whose tracking address has lost its password",
        f"ui {SEARCH}",
        ("password", "MLFLOW_TRACKING_URI"),
        writes(f"{SEARCH}/state.json", '{"tracking": "postgresql://***@db/x"}'),
    ),
)

WATCHES = (
    Bad("no search to watch", "watch", ("search",)),
    Bad("a search that is not there", "watch none", ("none", "folder of a search")),
    Bad("other work for a search", "watch work", ("work", "folder of a search")),
    Bad("the storage for a search", "watch runs", ("runs", "folder of a search")),
    Bad("looks without a pause", f"watch {SEARCH} --every 0", ("--every", "got '0'")),
    Bad("an option of watch misspelt", f"watch {SEARCH} --onse", ("did you mean --once?",)),
    Bad(
        "broken records of trials",
        f"watch {SEARCH} --once",
        ("journal.jsonl", "line 2 of 2 is no event of a search", "restore the file"),
        writes(f"{SEARCH}/journal.jsonl", BEGUN + "{\n"),
    ),
    Bad(
        "records of something else",
        f"watch {SEARCH} --once",
        ("journal.jsonl", "line 2 of 2 is no event of a search"),
        writes(f"{SEARCH}/journal.jsonl", BEGUN + "[{}]\n"),
    ),
    Bad(
        "records of a trial that was never suggested",
        f"watch {SEARCH} --once",
        ("journal.jsonl", "line 2 is no event of a search", "t7"),
        writes(f"{SEARCH}/journal.jsonl", BEGUN + '{"event": "end", "trial": "t7", "error": null}\n'),
    ),
    Bad(
        "a search of a former version, watched",
        f"watch {SEARCH} --once",
        FORMER,
        writes(f"{SEARCH}/journal.jsonl", OLD),
    ),
    Bad(
        "a search of a later version",
        f"watch {SEARCH} --once",
        ("another version (journal format 99", "start a new search"),
        writes(f"{SEARCH}/journal.jsonl", BEGUN.replace(f'"format": {JOURNAL_FORMAT}', '"format": 99')),
    ),
    Bad("a number for a state", f"watch {SEARCH} --once", ("state.json", "got 3"), writes(f"{SEARCH}/state.json", "3")),
    Bad(
        "a list for the original model",
        f"watch {SEARCH} --once",
        ("original.json", "got []"),
        writes(ORIGINAL, "[]"),
    ),
    Bad("--json of watch over other work", f"watch {SEARCH} --json work", ("json", "work")),
)

PROMOTIONS = (
    Bad("no search to promote from", "promote", ("search",)),
    Bad("other work to promote from", "promote work", ("work", "folder of a search")),
    Bad("a trial that never was", f"promote {SEARCH} --trial nope", ("nope", "gqa-0")),
    Bad("a trial misspelt", f"promote {SEARCH} --trial headfold-1", ("did you mean headfold_gqa-1?",)),
    Bad("a trial of the baseline", f"promote {SEARCH} --trial gqa-0", ("gqa-0", "baseline")),
    Bad("the best none", f"promote {SEARCH} --top 0", ("--top", "got '0'")),
    Bad(
        "a broken configuration of a search",
        f"promote {SEARCH}",
        ("search.yaml", "cannot be read"),
        writes(f"{SEARCH}/search.yaml", "name: ["),
    ),
    Bad(
        "a number for a search's configuration",
        f"promote {SEARCH}",
        ("search.yaml", "mapping"),
        writes(f"{SEARCH}/search.yaml", "3"),
    ),
    Bad(
        "a search without trials",
        f"promote {SEARCH}",
        ("nothing can be promoted",),
        writes(f"{SEARCH}/journal.jsonl", BEGUN),
    ),
    Bad("a search of a former version", f"promote {SEARCH}", FORMER, removes(f"{SEARCH}/journal.jsonl")),
    Bad(
        "a search without its original model",
        f"promote {SEARCH}",
        ("original.json", "--resume"),
        removes(ORIGINAL),
    ),
    Bad("a search whose model is gone", f"promote {SEARCH}", ("model",), renames("model", "moved")),
)

REPORTS = (
    Bad("no search to report", "report", ("search",)),
    Bad("a report of a former version", f"report {SEARCH}", FORMER, writes(f"{SEARCH}/journal.jsonl", OLD)),
    Bad("a report of other work", "report work", ("work", "folder of a search")),
    Bad(
        "a report of broken records",
        f"report {SEARCH}",
        ("original.json", "JSON"),
        writes(ORIGINAL, "{"),
    ),
    Bad("a report over other work", f"report {SEARCH} --out work", ("out", "work")),
    Bad("a report over a config", f"report {SEARCH} --out model/config.json", ("out", "model/config.json")),
    Bad("a report below a file", f"report {SEARCH} --out texts/notes.txt/page.html", ("texts/notes.txt",)),
)
