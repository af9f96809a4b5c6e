"""Options of all verbs: each defined once, with its type, default, bounds and help text.

A verb has a frozen class of options, whose docstring is the verb's help. The command line is made
from it (`orchestrator.cli.runner`), and so is the reference of the commands. Options that several
verbs have are inherited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

import typer
from typer.models import OptionInfo

from orchestrator.config.defaults import CHECKPOINT_MINUTES, DISTILLED_RATE

if TYPE_CHECKING:
    from attention.checkpoint import Checkpoint
    from search_spaces.recipes.recipe import Recipe
else:  # the command line is made without them
    Checkpoint = Recipe = Any


@dataclass(frozen=True)
class Typed:
    """The type of an option on the command line, where Python takes other types too.

    It stands in the annotation of the option.
    """

    annotation: Any


def option_types(options: type) -> dict[str, Any]:
    """Return the annotations of a class of options by name.

    Its own are first, then those of its bases in turn. An option without one of Typer's
    descriptions is for Python alone.
    """
    names = [name for each in options.__mro__ for name in vars(each).get("__annotations__", {})]
    types = get_type_hints(options, include_extras=True)
    return {name: types[name] for name in dict.fromkeys(names)}


# ---- single options ------------------------------------------------------------------------------

JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write the result to this file as one JSON object.")
]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Print the parts of the memory estimate too.")
]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite",
        help="Replace the folder of --out if Headfold wrote all of it, and nothing else.",
    ),
]
ConfigFile = Annotated[Path, typer.Argument(help="YAML file, e.g. configs/demo.yaml.")]
ConfigOverrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. search.num_samples=4")
]
KVRatios = Annotated[
    str | float | Sequence[float] | None,
    Typed(str | None),
    typer.Option(
        help="Maximum share of the KV cache to keep, e.g. 0.5 or 50%; or several, e.g. 0.5,0.25."
    ),
]
KVHeads = Annotated[
    str | int | Sequence[int] | None,
    Typed(str | None),
    typer.Option(help="Instead of --kv-ratio: maximum KV heads per layer, on average; e.g. 4,2."),
]
KVBytes = Annotated[
    str | float | Sequence[float] | None,
    Typed(str | None),
    typer.Option(
        help="Instead of --kv-ratio: maximum KV bytes per token, e.g. 24KiB or 24576; or a share, "
        "e.g. 0.5."
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Refuse an inexact size, instead of using the largest plan at or below it.",
    ),
]
Overrides = Annotated[
    Sequence[str] | Mapping[str, Any] | None,
    Typed(list[str] | None),
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Other choices of the recipe, e.g. refinement=heal; repeatable.",
    ),
]

RecipeName = Annotated[
    str | Recipe,
    Typed(str),
    typer.Option(
        help="Named recipe, see `headfold recipes`; auto: the best one for the model and --for, "
        "compared with wide heads by a short fit."
    ),
]
Engine = Annotated[
    str | None,
    typer.Option(
        "--for", help="Engine that will load the result: vllm, llama.cpp or transformers."
    ),
]

CalibrationData = Annotated[
    str | None,
    typer.Option(
        "--data",
        "--calibration-data",
        help="Text to calibrate on, and to measure on a part of it that is held out: local text, "
        "jsonl or parquet "
        "files, a hub name, stdlib, or builtin (the default: prose and code of this Python).",
    ),
]
EvalData = Annotated[
    str | None,
    typer.Option(
        help="Another text to measure on, whole, less documents of --data; the same kinds of "
        "source."
    ),
]
TextField = Annotated[
    str,
    typer.Option(
        help="Field of a record that contains its text; not needed for conversations in messages."
    ),
]
CalibrationTokens = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens to calibrate on (default: 16384, or what the text has)."),
]
EvalTokens = Annotated[
    int | None,
    typer.Option(
        min=2, help="Tokens to measure the loss on (default: 16384, or what the text has)."
    ),
]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        min=2,
        help="Tokens per sequence (default: 2048, or what the model takes; less for little text).",
    ),
]
Seed = Annotated[
    int, typer.Option(min=0, max=2**32 - 1, help="Random seed of plans and of the choice of text.")
]
Dtype = Annotated[
    str,
    typer.Option(
        help="Dtype of the output: auto (as the checkpoint), float32, bfloat16 (bf16) or float16."
    ),
]
Dequantize = Annotated[
    bool,
    typer.Option(
        "--dequantize",
        help=(
            "Read quantised weights (FP8, compressed-tensors, MXFP4) as plain numbers; a GGUF "
            "file needs no option."
        ),
    ),
]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check everything and print an estimate; nothing is written or started. What a hub "
        "has is fetched into its cache.",
    ),
]


TensorParallel = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="GPUs that the engine divides the heads among: report KV bytes per token on each of "
        "them, and refuse KV heads that cannot be divided.",
    ),
]

AUTO_FORMAT = "auto"
"""The cache format with the lowest loss together with the possible heads."""

# ---- options of a verb ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class BudgetOptions:
    """How much of the KV cache is kept: one of three, each a number, several, or text."""

    kv_ratio: KVRatios = None
    kv_heads: KVHeads = None
    kv_bytes: KVBytes = None
    strict: Strict = False

    @property
    def unit(self) -> str:
        """The unit of the budget, and of the answer (`attention.ratios.UNITS`)."""
        return (
            "heads"
            if self.kv_heads is not None
            else "bytes"
            if self.kv_bytes is not None
            else "share"
        )


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Changes of a recipe: `["axis=part", "axis.knob=value"]`, or the same as a mapping."""

    overrides: Overrides = None

    @property
    def recipe_settings(self) -> dict[str, Any]:
        """The changes as `search_spaces.recipes.catalogue.recipe` takes them."""
        if isinstance(self.overrides, Mapping):
            return dict(self.overrides)
        from orchestrator.config.parsing import read_override

        return dict(read_override(override, "refinement=heal") for override in self.overrides or ())


@dataclass(frozen=True, kw_only=True)
class EvalSizeOptions:
    """How much text is measured on."""

    eval_tokens: EvalTokens = None
    sequence_length: SequenceLength = None


@dataclass(frozen=True, kw_only=True)
class EvalTextOptions(EvalSizeOptions):
    """What text is measured on."""

    eval_data: EvalData = None
    text_field: TextField = "text"
    seed: Seed = 0


@dataclass(frozen=True, kw_only=True)
class SizeOptions(EvalSizeOptions):
    """How much text is calibrated and measured on."""

    calibration_tokens: CalibrationTokens = None


@dataclass(frozen=True, kw_only=True)
class TextOptions(SizeOptions, EvalTextOptions):
    """What text is calibrated and measured on."""

    calibration_data: CalibrationData = None


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """How a checkpoint is opened, computed and written."""

    dtype: Dtype = "auto"
    device: Device = "auto"
    dequantize: Dequantize = False


@dataclass(frozen=True, kw_only=True)
class ConversionOptions(BudgetOptions, RecipeOptions, TextOptions, DeviceOptions):
    """What all verbs that convert a checkpoint have in common.

    `cache_dir` keeps what was measured.
    """

    cache_dir: str | Path | None = None


@dataclass(frozen=True, kw_only=True)
class PolishOptions:
    """Whether a converted model is trained for some steps, in the process that has converted it."""

    polish: Annotated[
        int,
        typer.Option(
            min=0,
            help="Steps of training at the end, a few tens: KL(original ‖ converted) on the text "
            "that is calibrated on.",
        ),
    ] = 0
    polish_weights: Annotated[
        Literal["all", "kv"],
        typer.Option(help="Weights that --polish trains: projections of keys and values, or all."),
    ] = "kv"


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(PolishOptions, ConversionOptions):
    """Convert one checkpoint, without training but for --polish.

    Needs no cluster, and prints the loss before and after.
    """

    model: Annotated[
        str | Path | Checkpoint,
        Typed(str),
        typer.Option(help="Folder with safetensors, a GGUF file, or hub name."),
    ]
    recipe: RecipeName = "auto"
    engine: Engine = None
    cache_format: Annotated[
        str | None,
        typer.Option(
            help="Format of the KV cache that --kv-bytes counts in: that of --for llama.cpp (q8_0, "
            "q8_0,q4_0, ...) or vllm (fp8), f16, or auto: the one with the lowest loss together "
            "with the possible heads (the default with both)."
        ),
    ] = None
    out: Annotated[
        str | Path | None,
        Typed(Path | None),
        typer.Option(
            help="Folder for the checkpoint (for several ratios: kv-RATIO in it, curve.json, "
            "curve.png)."
        ),
    ] = None
    layerwise: Annotated[
        bool | None,
        typer.Option(
            help="Load one decoder layer at a time, from disk to disk, and continue where it was "
            "stopped (by default "
            "where the model would not fit in memory: see the verb estimate)."
        ),
    ] = None
    overwrite: Overwrite = False

    def __post_init__(self) -> None:
        if self.cache_format != AUTO_FORMAT:
            _check_cache_format(self.cache_format)


@dataclass(frozen=True, kw_only=True)
class EstimateOptions(PolishOptions, BudgetOptions, RecipeOptions, SizeOptions, DeviceOptions):
    """Say what a search or a conversion will take.

    Before it runs: tokens, hours, peak memory, disk.
    """

    search: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG] [KEY=VALUE]...", help="For a search: its YAML file and changes to it."
        ),
    ] = None
    config: Annotated[Path | None, typer.Option(help="The same YAML file.")] = None
    model: Annotated[
        str | None,
        typer.Option(
            help="For a conversion: folder with config.json, a GGUF file, or hub name; no weights "
            "are read."
        ),
    ] = None
    recipe: RecipeName = "auto"
    engine: Engine = None
    gpus: Annotated[
        int | None,
        typer.Option(min=0, help="GPUs of the machine that it will run on, if not this one."),
    ] = None
    gpu_memory: Annotated[
        int | None, typer.Option(min=1, help="GiB of memory of each of them.")
    ] = None
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Type of these GPUs, e.g. H100, L40S or A100-80G: their memory, and the time on "
            "one of them."
        ),
    ] = None
    tensor_parallel: TensorParallel = None


@dataclass(frozen=True, kw_only=True)
class InspectOptions(ConversionOptions):
    """Show which heads matter, and what recipes cost: one page.

    Also which are alike, and what each layer keeps.
    """

    checkpoint: Annotated[
        str | Path | Checkpoint,
        Typed(str),
        typer.Argument(help="Folder with safetensors, a GGUF file, or hub name."),
    ]
    recipe: Annotated[
        str,
        typer.Option(help="Recipe whose grouping and fusion the sensitivity is measured with."),
    ] = "headfold"
    compare: Annotated[
        str | Sequence[str] | None,
        Typed(str | None),
        typer.Option(help="Recipes to convert by (default: gqa,headfold), or 'none'."),
    ] = None
    counts: Annotated[
        str | None,
        typer.Option(
            help="Head counts to measure: any (those of equal groups, others where there are few), "
            "powers_of_two, divisors or all (default: the recipe's)."
        ),
    ] = None
    agreement: Annotated[
        bool,
        typer.Option(
            "--agreement",
            help="Also compare the layer-output score's ranks with the whole model's.",
        ),
    ] = False
    out: Annotated[Path, typer.Option(help="The page.")] = Path("inspection.html")
    cache_dir: Annotated[
        str | Path | None,
        Typed(Path | None),
        typer.Option(
            "--cache",
            help=(
                "Folder where measurements are kept (default: HEADFOLD_CACHE, or "
                "~/.cache/headfold)."
            ),
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions(EvalTextOptions, DeviceOptions):
    """Measure a checkpoint and compare it with its original.

    Held-out loss, KL, KV bytes planned and allocated, speed; optionally tasks, generated
    text and long contexts.
    """

    checkpoint: Annotated[
        str | Path | Checkpoint,
        Typed(str),
        typer.Argument(help="Folder of a checkpoint, a GGUF file, or hub name."),
    ]
    original: Annotated[
        str | Path | Checkpoint | None,
        Typed(str | None),
        typer.Option(help="The original checkpoint to compare with."),
    ] = None
    baseline: Annotated[
        str | Path | Checkpoint | None,
        Typed(str | None),
        typer.Option(help="One more checkpoint to compare with, e.g. of recipe gqa."),
    ] = None
    tasks: Annotated[
        str | Sequence[str] | None,
        Typed(str | None),
        typer.Option(
            help="Tasks of lm-evaluation-harness: demo (bundled), folders of task files, or "
            "ruler_vt and other long-context tasks (at --context-lengths), or its own names; "
            "with commas between them."
        ),
    ] = None
    prompts: Annotated[
        str | Sequence[str] | None,
        Typed(str | None),
        typer.Option(
            help="Text to continue greedily, side by side: a file (one prompt per line, or "
            ".jsonl), or a prompt."
        ),
    ] = None
    context_lengths: Annotated[
        str | None,
        typer.Option(
            help="Loss by position and recall of a hidden line at these context lengths: max, or "
            "256,512. With "
            "--engine: those of the speed (by default max; with --cache-types one, by default "
            "the sequence length)."
        ),
    ] = None
    context_texts: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Texts at each of --context-lengths that a line is hidden in, 20 times each "
            "(default: 8). Fewer take less time and are less exact.",
        ),
    ] = None
    engine: Annotated[
        str | None,
        typer.Option(
            help="Measure speed and the sequences that fit in llama.cpp, vLLM or transformers, and "
            "nothing else (but for --cache-types); "
            "checkpoints are exported for it, or are exports."
        ),
    ] = None
    cache_format: Annotated[
        str | None,
        typer.Option(
            help="Measure checkpoint and baseline with a KV cache in a format of an engine: f16, "
            "bf16, q8_0, q5_1, q4_0 (llama.cpp), fp8 (vLLM); or keys and values apart: q8_0,q4_0. "
            "The original keeps its own."
        ),
    ] = None
    engine_python: Annotated[
        str | None,
        typer.Option(help="With --engine: the Python of the environment that has the engine."),
    ] = None
    cache_types: Annotated[
        str | Sequence[str] | None,
        Typed(str | None),
        typer.Option(
            help="Measure the loss of the checkpoint with its cache in each of these formats, "
            "commas between them, keys and values apart with a slash: f16,q8_0,q8_0/q4_0,q4_0. "
            "With --engine llama.cpp or vLLM (auto,fp8): in the engine itself, with bytes, speed "
            "and the sequences that fit."
        ),
    ] = None
    cache_memory: Annotated[
        int,
        typer.Option(min=1, help="With --engine: GiB of cache in which sequences are to fit."),
    ] = 1
    trust_remote_code: Annotated[
        bool,
        typer.Option(
            "--trust-remote-code", help="With --engine: run the Python files in an export given."
        ),
    ] = False
    speed_tokens: Annotated[
        int, typer.Option(min=0, help="Tokens to decode for the speed; 0 skips it.")
    ] = 32
    data: Annotated[
        str | None,
        typer.Option(
            help="Text whose held-out part is measured on, as convert does; the same kinds of "
            "source."
        ),
    ] = None

    def __post_init__(self) -> None:
        _check_cache_format(self.cache_format)


SearchPath = Annotated[Path, typer.Argument(help="Folder of a search, e.g. runs/demo/demo.")]


SyncFrom = Annotated[
    Literal["address", "folder"] | None,
    typer.Option(
        help="address or folder: which to continue with if the storage is an address, and it and "
        "its working folder have both changed since they last agreed."
    ),
]


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Run a search: trials, front, promotion, report."""

    config: ConfigFile
    overrides: ConfigOverrides = None
    resume: Annotated[
        bool | str,
        Typed(bool),
        typer.Option(
            "--resume",
            help=(
                "Continue the newest search of this name; with a NAME after it the one in that "
                "folder, e.g. demo-2."
            ),
        ),
    ] = False
    sync_from: SyncFrom = None


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Check a cluster: GPUs, network, storage, hub, MLflow, one step of training.

    It says what is wrong and what to do; exit code 2 if anything would keep a search from running.
    """

    overrides: ConfigOverrides = None
    config: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of a search, whose workers, storage and stores are tested (default: "
            "what the cluster has)."
        ),
    ] = None
    storage: Annotated[
        str | None,
        typer.Option(help="Folder or address to try without a config (default: runs)."),
    ] = None
    only: Annotated[
        list[str] | None,
        typer.Option(help="A check to make, e.g. all-reduce; repeatable (default: all)."),
    ] = None
    seconds: Annotated[
        float, typer.Option(min=1, help="Time limit of one check, with the start of nodes.")
    ] = 300.0
    probe_mib: Annotated[
        int, typer.Option(min=1, help="MiB that each node writes to measure the storage.")
    ] = 256


@dataclass(frozen=True, kw_only=True)
class PromoteOptions:
    """Train chosen trials fully, pass the gate, register. Finished steps are not repeated.

    What the gate has refused is checked again by other settings of it, e.g. promotion.margin=0.01.
    """

    search: SearchPath
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[promotion.KEY=VALUE]...", help="e.g. promotion.margin_standard_errors=2"
        ),
    ] = None
    trial: Annotated[
        list[str] | None, typer.Option(help="Trial id to promote; may be given several times.")
    ] = None
    top: Annotated[int | None, typer.Option(min=1, help="Promote the K best at each KV ratio.")] = (
        None
    )
    sync_from: SyncFrom = None


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write one page of a search: promoted models, front, trials.

    It needs no other file, and no network.
    """

    search: Annotated[Path, typer.Argument(help="Folder of a search.")]
    out: Annotated[
        Path | None, typer.Option(help="HTML file; report.html in the folder by default.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class WatchOptions:
    """Watch a search: trials, current front, time spent and left. Reads files only."""

    search: SearchPath
    every: Annotated[float, typer.Option(min=0.2, help="Refresh interval in seconds.")] = 2.0
    once: Annotated[bool, typer.Option("--once", help="Print the state once and exit.")] = False
    json: Annotated[
        Path | None,
        typer.Option(
            "--json", help="Write the state to this file as one JSON object; - prints it."
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class UIOptions:
    """Serve MLflow's page of a search, and print its address.

    The address is http://127.0.0.1:PORT; it ends with Ctrl-C.
    """

    search: SearchPath
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1.")] = 5000


@dataclass(frozen=True, kw_only=True)
class DemoOptions:
    """Search, promote and export on a small checkpoint that is included.

    The export is loaded in transformers and llama.cpp.
    """

    overrides: ConfigOverrides = None
    storage: Annotated[Path, typer.Option(help="Folder for all output of the demo.")] = Path(
        "runs/demo"
    )
    resume: Annotated[bool, typer.Option("--resume", help="Continue a demo that was stopped.")] = (
        False
    )
    path: Annotated[
        bool, typer.Option("--path", help="Print the folder of the demo checkpoint, and exit.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """Write a first configuration for a checkpoint, and a smoke test of it.

    Both are commented; `headfold search FILE --dry-run` checks one. What does not fit the free
    disk is made smaller, or said.
    """

    model: Annotated[
        str,
        typer.Argument(
            help="Folder with config.json, a GGUF file, or hub name; no weights are read."
        ),
    ]
    out: Annotated[
        Path | None,
        typer.Option(help="The YAML file (default: the model's name in this folder); - prints it."),
    ] = None
    data: Annotated[
        str,
        typer.Option(
            help="Text to train and measure on: files, a folder, a hub name, stdlib or builtin."
        ),
    ] = "builtin"
    compare: Annotated[
        str | None,
        typer.Option(
            help="Recipes to compare with gqa, e.g. asymgqa,dha,align, each also with the local "
            "fit: a grid with seeds, different rates per arm and no early stop."
        ),
    ] = None
    gpus: Annotated[
        int | None,
        typer.Option(
            min=0, help="GPUs of the machine or node that it will run on (default: those here)."
        ),
    ] = None
    gpu_memory: Annotated[
        int | None,
        typer.Option(
            min=1, help="GiB of memory of each (default: of those here; 80 where there is none)."
        ),
    ] = None
    dequantize: Dequantize = False
    storage: Annotated[
        str,
        typer.Option(
            help="Folder that searches write to; the search fits its free space if possible."
        ),
    ] = "runs"


@dataclass(frozen=True, kw_only=True)
class RecipesOptions:
    """List the recipes: what each does, its paper, what it costs, and which engines load it."""

    model: Annotated[
        str | None,
        typer.Argument(
            help="Folder with config.json, a GGUF file, or hub name (default: a Llama)."
        ),
    ] = None
    engine: Engine = None
    dequantize: Dequantize = False


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write a checkpoint in a format that engines load.

    Reports whether it is exact, and KV bytes before and after.
    """

    checkpoint: Annotated[
        str | Path | Checkpoint,
        Typed(Path),
        typer.Argument(help="Folder of a checkpoint, converted or not; or a GGUF file."),
    ]
    target: Annotated[
        str,
        typer.Option(
            help="What to export to: auto, gqa, per_layer (a count per layer), vllm, gguf "
            "(llama.cpp), transformers (any plan, with code), phi (for GPT-NeoX)."
        ),
    ]
    out: Annotated[
        str | Path, Typed(Path), typer.Option(help="Folder for the exported checkpoint.")
    ]
    allow_larger_cache: Annotated[
        bool,
        typer.Option(
            "--allow-larger-cache", help="Export even if the stock form takes more KV cache."
        ),
    ] = False
    dtype: Annotated[
        str,
        typer.Option(
            help="auto (the checkpoint's own), float32, bfloat16 or float16; for gguf also q8_0."
        ),
    ] = "auto"
    cache_format: Annotated[
        str | None,
        typer.Option(
            help="Format of the engine's KV cache, e.g. q8_0 or q8_0,q4_0 "
            "(llama.cpp), fp8 (vLLM): bytes and commands to serve it are those of this format."
        ),
    ] = None
    tensor_parallel: TensorParallel = None
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Load the export in the engine itself; write it only if all is as promised.",
        ),
    ] = False
    engine: Annotated[
        str | None,
        typer.Option(
            help="With --check: llama.cpp, vLLM or transformers (by default the target's own)."
        ),
    ] = None
    engine_python: Annotated[
        str | None,
        typer.Option(help="With --check: the Python of the environment that has the engine."),
    ] = None
    check_memory: Annotated[
        int,
        typer.Option(
            min=1, help="With --check: GiB of cache for which the capacity in tokens is reported."
        ),
    ] = 1
    push: Annotated[
        str | None,
        typer.Option(
            metavar="OWNER/NAME",
            help="Show what would be uploaded to this repository of the Hugging Face hub.",
        ),
    ] = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run/--no-dry-run", help="With --push: only show, or upload.")
    ] = True
    overwrite: Overwrite = False
    dequantize: Dequantize = False

    def __post_init__(self) -> None:
        _check_cache_format(self.cache_format)


def _check_cache_format(text: str | None) -> None:
    if text is not None:
        from orchestrator.config.parsing import read_cache_format

        read_cache_format(text)


def _train_tokens(limit: str) -> OptionInfo:
    return typer.Option(
        min=2, help=f"Tokens of training text (default: what the steps take, {limit} at most)."
    )


def _settings(examples: str) -> OptionInfo:
    return typer.Option("--set", metavar="KEY=VALUE", help=f"e.g. {examples}; repeatable.")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(EvalTextOptions):
    """What trainings outside of a search have in common."""

    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")]
    out: Annotated[
        str | Path,
        Typed(Path),
        typer.Option(help="Folder for the trained checkpoint; training files: OUT.training."),
    ]
    train_data: Annotated[
        str | None,
        typer.Option(
            "--train-data",
            "--data",
            help="Text to train on, and to measure on a part of it that is held out: local text, "
            "jsonl or parquet "
            "files, a hub name, stdlib, or builtin (the default: prose and code of this Python).",
        ),
    ] = None
    train_tokens: Annotated[int | None, _train_tokens("4M")] = None
    eval_every: Annotated[
        int | None,
        typer.Option(min=1, help="Steps between measurements and checkpoints (default: a tenth)."),
    ] = None
    overrides: Annotated[
        Sequence[str] | None,
        Typed(list[str] | None),
        _settings("composition.rank=4, train.batch_size=32"),
    ] = None
    overwrite: Overwrite = False
    device: Device = "auto"
    checkpoint_minutes: Annotated[
        float,
        typer.Option(min=0.001, help="Longest time in minutes without a checkpoint."),
    ] = CHECKPOINT_MINUTES


@dataclass(frozen=True, kw_only=True)
class TrainOptions(TrainingOptions):
    """Train a model from random weights.

    With Ray Train and DeepSpeed; the same command continues a training that was stopped.
    """

    architecture: Annotated[
        str | Path | Checkpoint,
        Typed(str),
        typer.Option(help="Folder or hub name whose architecture and tokenizer to take."),
    ]
    learning_rate: Annotated[
        float, typer.Option(help="Peak of the schedule: warm-up, then a cosine.")
    ]
    recipe: Annotated[
        str, typer.Option(help="transformer, or dcformer: dynamically composed heads.")
    ] = "transformer"
    sequence_length: Annotated[int, typer.Option(min=2, help="Tokens per sequence.")] = 256

    def __post_init__(self) -> None:
        from orchestrator.config.schema import TrainSection, check_train_options

        record = {"recipe": self.recipe}
        check_train_options(
            TrainSection, record, self.overrides or (), self.learning_rate, self.seed
        )


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(TrainingOptions, DeviceOptions):
    """Continue training a checkpoint on your text.

    With Ray Train and DeepSpeed; the same command continues a training that was stopped.
    """

    model: Annotated[
        str | Path | Checkpoint,
        Typed(str),
        typer.Option(help="Folder, GGUF file or hub name of the checkpoint, converted or not."),
    ]
    out: Annotated[
        str | Path,
        Typed(Path),
        typer.Option(help="Folder for the best measured step; training files: OUT.training."),
    ]
    tuning: Annotated[
        str,
        typer.Option(
            help="full: all weights; lora: adapters, merged at the end; kv: projections of keys "
            "and values."
        ),
    ] = "full"
    original: Annotated[
        str | Path | Checkpoint | None,
        Typed(str | None),
        typer.Option(
            help="Model to learn from, e.g. that before conversion: KL(original ‖ model) is the "
            "loss."
        ),
    ] = None
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Peak of the schedule: warm-up, then a cosine (default: 1e-4 with --original)."
        ),
    ] = None
    train_tokens: Annotated[int | None, _train_tokens("100M")] = None
    overrides: Annotated[
        Sequence[str] | None,
        Typed(list[str] | None),
        _settings("train.batch_size=32, train.num_workers=8"),
    ] = None

    def __post_init__(self) -> None:
        from orchestrator.config.schema import FineTuneSection, check_train_options

        check_train_options(FineTuneSection, {}, self.overrides or (), self.peak_rate, self.seed)

    @property
    def peak_rate(self) -> float:
        """The learning rate, or its default. Raises ConfigError without either."""
        if self.learning_rate is not None:
            return self.learning_rate
        if self.original is None:
            from orchestrator.config.parsing import ConfigError

            raise ConfigError(
                "learning_rate: expected --learning-rate, or --original with its default of "
                f"{DISTILLED_RATE:g}; got neither"
            )
        return DISTILLED_RATE
