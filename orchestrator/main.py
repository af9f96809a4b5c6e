"""The command line: `python orchestrator/main.py VERB`, `python -m orchestrator.main VERB`, or `headfold VERB`.

Each verb is a thin shell over a function that a notebook can call. A mistake of the user ends with one message and exit
code 2, a failure of the work with 1, an interruption with 130. Heavy imports wait until a verb needs them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

REPOSITORY = Path(__file__).resolve().parent.parent
if sys.path and Path(sys.path[0] or ".").resolve() == REPOSITORY / "orchestrator":
    # Run as a script: Python puts the script's folder first, where `import evaluate` would find our evaluate.py.
    sys.path[0] = str(REPOSITORY)

import typer  # noqa: E402

USER_ERROR, FAILURE, INTERRUPTED = 2, 1, 130
PACKAGES = ("attention", "search_spaces", "trainers", "orchestrator")

app = typer.Typer(
    name="headfold",
    help="Search, train and ship attention-head sharing: a smaller KV cache for a pretrained transformer.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the result to this file as one JSON object.")]
CalibrationData = Annotated[
    str, typer.Option(help="Text to calibrate on: stdlib, a hub name, or local text / jsonl / parquet files.")
]
EvalData = Annotated[str, typer.Option(help="Text to measure the held-out loss on; the same kinds of source.")]
CalibrationTokens = Annotated[int, typer.Option(min=2)]
EvalTokens = Annotated[int, typer.Option(min=2)]
SequenceLength = Annotated[int, typer.Option(min=2, help="Tokens a sequence.")]
Seed = Annotated[int, typer.Option(min=0)]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]


@app.command()
def search(
    config: Annotated[Path, typer.Argument(help="YAML file, e.g. configs/demo.yaml.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="e.g. search.samples=4")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the newest search of this name.")] = False,
    json: JsonFile = None,
) -> None:
    """Run a search: baselines, trials, Pareto front, promotion, report."""
    from orchestrator.config import load_config
    from orchestrator.search import search as run_search

    outcome = run_search(load_config(config, overrides or []), resume=resume)
    _finish(outcome.to_dict(), json)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


@app.command()
def convert(
    model: Annotated[str, typer.Option(help="Folder with safetensors, or hub name.")],
    recipe: Annotated[str, typer.Option(help="Named recipe, e.g. gqa, asymgqa, align, headfold.")],
    kv_ratio: Annotated[float, typer.Option(help="Share of the KV cache of multi-head attention to keep, in (0, 1].")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the converted checkpoint; without it only measure.")
    ] = None,
    calibration_data: CalibrationData = "stdlib",
    eval_data: EvalData = "stdlib",
    calibration_tokens: CalibrationTokens = 16_384,
    eval_tokens: EvalTokens = 16_384,
    sequence_length: SequenceLength = 256,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    device: Device = "auto",
    json: JsonFile = None,
) -> None:
    """Convert one checkpoint, without a cluster and without training; prints the loss before and after."""
    from orchestrator.convert import convert_checkpoint

    record = convert_checkpoint(
        model,
        recipe,
        kv_ratio,
        out,
        calibration_data=calibration_data,
        eval_data=eval_data,
        calibration_tokens=calibration_tokens,
        eval_tokens=eval_tokens,
        sequence_length=sequence_length,
        seed=seed,
        dtype=dtype,
        device=device,
    )
    print(
        f"{recipe} at {record['kv_ratio']:.3f} KV: held-out loss {record['loss_base']:.3f} before, "
        f"{record['loss']:.3f} after ({record['rise']:+.3f} nats a token), KL {record['kl']:.3f}; "
        f"{record['kv_bytes_per_token']} KV bytes a token"
    )
    if out is not None:
        print(f"checkpoint: {out}")
    _finish(record, json)


@app.command()
def evaluate(
    checkpoint: Annotated[str, typer.Argument(help="Folder of a checkpoint, or hub name.")],
    base: Annotated[str | None, typer.Option(help="The untouched checkpoint to compare with.")] = None,
    eval_data: EvalData = "stdlib",
    eval_tokens: EvalTokens = 16_384,
    sequence_length: SequenceLength = 256,
    seed: Seed = 0,
    dtype: Dtype = "float32",
    device: Device = "auto",
    speed_tokens: Annotated[int, typer.Option(min=0, help="Tokens to decode for the speed; 0 skips it.")] = 32,
    json: JsonFile = None,
) -> None:
    """Held-out loss, KL to the base, KV bytes planned and allocated, prefill and decode speed."""
    from orchestrator.evaluate import evaluate_checkpoint

    record = evaluate_checkpoint(
        checkpoint,
        base,
        eval_data=eval_data,
        eval_tokens=eval_tokens,
        sequence_length=sequence_length,
        seed=seed,
        dtype=dtype,
        device=device,
        speed_tokens=speed_tokens,
    )
    print(f"held-out loss {record['loss']:.3f} nats a token over {record['eval_tokens']} tokens")
    if base is not None:
        print(f"untouched model {record['loss_base']:.3f}, rise {record['rise']:+.3f}, KL {record['kl']:.3f}")
    print(
        f"KV ratio {record['kv_ratio']:.3f}: {record['kv_bytes_per_token']} bytes a token planned, "
        f"{record['cache_bytes_measured']} held after {record['cache_tokens']} tokens"
    )
    if speed_tokens:
        print(
            f"prefill {record['prefill_tokens_per_second']:.0f} tokens/s, "
            f"decode {record['decode_tokens_per_second']:.0f} tokens/s"
        )
    _finish(record, json)


@app.command()
def promote(
    search: Annotated[Path, typer.Argument(help="Folder of a search, e.g. runs/demo/demo.")],
    trial: Annotated[list[str] | None, typer.Option(help="Trial id to promote; may be given several times.")] = None,
    top: Annotated[int | None, typer.Option(min=1, help="Promote the K best at each budget.")] = None,
    json: JsonFile = None,
) -> None:
    """Continue the chosen trials to the full training, pass the gate, register. Finished steps are not repeated."""
    from orchestrator.promotion import promote_search

    outcome = promote_search(search, trials=trial or [], top=top)
    _finish(outcome.to_dict(), json)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="Folder of a converted checkpoint.")],
    target: Annotated[str, typer.Option(help="Stock format to lower to, e.g. gqa.")],
    out: Annotated[Path, typer.Option(help="Folder for the exported checkpoint.")],
    json: JsonFile = None,
) -> None:
    """Lower a checkpoint to a stock format: exact or not, KV bytes before and after."""
    from orchestrator.convert import export_checkpoint

    record = export_checkpoint(checkpoint, target, out)
    print(
        f"{record['model_type']} in {out}: {'exact' if record['exact'] else 'not exact'}, largest logit difference "
        f"{record['max_logit_difference']:.2g}; KV bytes a token {record['kv_bytes_per_token_before']} before, "
        f"{record['kv_bytes_per_token_after']} after ({record['kv_bytes_per_token_mha']} with multi-head attention)"
    )
    for note in record["notes"]:
        print(f"note: {note}")
    _finish(record, json)


@app.command()
def report(
    search: Annotated[Path, typer.Argument(help="Folder of a search.")],
    out: Annotated[Path | None, typer.Option(help="HTML file; report.html in the folder by default.")] = None,
    json: JsonFile = None,
) -> None:
    """Write one self-contained page: front, trials, rungs, head budgets."""
    from orchestrator.report import write_report

    written = write_report(search, out)
    print(f"report: {written['report']}")
    _finish(written, json)


def _finish(record: dict[str, Any], file: Path | None) -> None:
    if file is not None:
        from orchestrator.results import write_json

        write_json(file, record)


def _fail(message: str, code: int) -> NoReturn:
    print(f"headfold: {message}", file=sys.stderr)
    sys.exit(code)


def _quiet() -> None:
    """Libraries below talk on import and while loading; what matters to the user is printed by the verbs."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A training is half a dozen small processes; on two cores Ray finds that worth a warning each time.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "PYTHON worker processes have been started")
    if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, imported by transformers, warns on import


def run() -> None:
    """The installed command. User errors are ValueErrors, here and in all packages below."""
    _quiet()
    try:
        app(standalone_mode=True)
    except KeyboardInterrupt:
        _fail("interrupted", INTERRUPTED)
    except Exception as error:
        if os.environ.get("HEADFOLD_TRACEBACK"):
            raise
        if _mistake(error):
            _fail(str(error), USER_ERROR)
        _fail(f"{type(error).__name__}: {error} (set HEADFOLD_TRACEBACK=1 for the traceback)", FAILURE)


def _mistake(error: Exception) -> bool:
    """Whether our own code raised a ValueError: that is how all four packages report what a user can mend. One that
    comes from a library below is a failure of ours."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return isinstance(error, ValueError) and trace is not None and _ours(trace.tb_frame.f_code.co_filename)


def _ours(file: str) -> bool:
    path = Path(file).resolve()
    return any((REPOSITORY / name) in path.parents for name in PACKAGES)


if __name__ == "__main__":
    run()
