"""`headfold train`: a model of a known architecture from random weights, a plain Transformer or a DCFormer.

Everything of a training lies beside its result: DIR is the trained checkpoint, DIR.training the untrained one, the
token sequences, and the training checkpoints with what was measured. The same command run again goes on where it was
stopped.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field

from attention.conversion import conversion
from attention.io import checkpoint
from attention.io.replacing import check_folder
from attention.messages import near
from attention.modeling.composition import reset
from attention.modeling.modeling import headfold_config, plan_of_config
from attention.plan import AttentionPlan, Composition
from orchestrator.cluster.placement import Demand
from orchestrator.cluster.room import concurrency
from orchestrator.cluster.session import connected
from orchestrator.cluster.tokenising import tokeniser
from orchestrator.config.schema import ConfigError, Section, apply_override, parse_section
from orchestrator.conversion import loading
from orchestrator.conversion.estimate import Size
from orchestrator.search.estimate import in_hours, training_rate
from orchestrator.search.trial import prepare_process
from orchestrator.search.validation import check_training, local_nodes, starts_ray
from orchestrator.storage.mirror import is_remote
from orchestrator.storage.paths import storage_path
from orchestrator.storage.records import clock, compact, read_json, write_json
from search_spaces.composition.dcmha import composition_of
from trainers.jobs.checkpoints import CheckpointStore
from trainers.jobs.worker import TrainJob, run_training
from trainers.settings import TrainSettings
from trainers.text import synthetic_corpus
from trainers.text.data import TextCut, token_set

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Recipe = Literal["transformer", "dcformer"]
TRAIN_TOKENS = 4_000_000  # of text at most, unless asked for; what is shorter than the training is seen again
OWN_OPTIONS = ("learning_rate", "seed")
POLL_SECONDS = 0.5
RUN = "scratch"
MEASURED = ("step", "loss", "train_loss", "tokens", "tokens_per_second", "seconds")


class TrainSection(Section):
    """What `--set` reaches: `composition.KEY`, settings of `Composition`, and `train.KEY`, those of `TrainSettings`."""

    recipe: Recipe
    composition: dict[str, Any] = Field(default_factory=dict)
    train: TrainSettings = TrainSettings()


@dataclass(frozen=True)
class Scratch:
    """A training from scratch, checked. `out`: absolute folder of the trained checkpoint."""

    architecture: str
    recipe: Recipe
    plan: AttentionPlan
    settings: TrainSettings
    steps: int
    eval_every: int
    train_data: str
    eval_data: str
    train_tokens: int
    eval_tokens: int
    sequence_length: int
    out: Path

    @property
    def folder(self) -> Path:
        return self.out.with_name(f"{self.out.name}.training")

    @property
    def milestones(self) -> tuple[int, ...]:
        return (*range(self.eval_every, self.steps, self.eval_every), self.steps)

    @property
    def tokens(self) -> int:
        """Trained on in all steps."""
        return self.steps * self.settings.batch_size * self.sequence_length

    @property
    def epochs(self) -> str:
        return f"{self.tokens / self.train_tokens:.3g} epochs"

    @property
    def demand(self) -> Demand:
        return Demand(0, 0, *self.settings.shape[:3])

    @property
    def cuts(self) -> tuple[TextCut, TextCut]:
        """The text to train on and the held-out text."""
        length, seed = self.sequence_length, self.settings.seed
        train = TextCut(self.train_data, "train", self.train_tokens, length, seed)
        return train, TextCut(self.eval_data, "eval", self.eval_tokens, length, seed)

    @property
    def mark(self) -> Path:
        """What the training depends on; later also `parameters`, and whether it has `finished`."""
        return self.folder / "scratch.json"

    def reports(self) -> list[dict[str, Any]]:
        """What was measured so far."""
        return CheckpointStore(str(self.folder / "train"), RUN).read()[1]

    def to_dict(self) -> dict[str, Any]:
        """Plain values: everything that the result depends on."""
        record = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "out"}
        return {**record, "plan": self.plan.to_dict(), "settings": self.settings.model_dump()}


def check(
    architecture: str | Path,
    out: str | Path,
    *,
    recipe: str = "transformer",
    steps: int,
    learning_rate: float,
    overrides: Sequence[str] = (),
    train_data: str = "stdlib",
    eval_data: str = "stdlib",
    train_tokens: int | None = None,
    eval_tokens: int = 16_384,
    sequence_length: int = 256,
    eval_every: int | None = None,
    seed: int = 0,
    device: str = "auto",
) -> Scratch:
    """Everything that can be wrong, before anything is read or started but configs.

    Raises ConfigError or PlanError, and DataError for a source of text that there is not.
    """
    section = _section(recipe, overrides, learning_rate, seed, device)
    check_training(section.train)
    loading.geometry_of(str(architecture), sequence_length, key="architecture", weights=False)
    loading.load_tokenizer(architecture)
    eval_every = max(1, steps // 10) if eval_every is None else eval_every
    for name, value in (("steps", steps), ("eval_every", eval_every)):
        if value < 1:
            raise ConfigError(f"{name}: got {value}; it must be at least 1")
    config = checkpoint.load_config(architecture)
    composed = composition_of(section.composition) if section.recipe == "dcformer" else None
    plan = replace(plan_of_config(config), composition=composed)
    headfold_config(config, plan)  # whether the plan fits
    if is_remote(str(out)):
        raise ConfigError(f"out: got {str(out)!r}; it must be a folder of this machine or one that it mounts")
    wanted = min(steps * section.train.batch_size * sequence_length, TRAIN_TOKENS)
    train_tokens = wanted if train_tokens is None else train_tokens
    plan = Scratch(
        architecture=str(Path(architecture).absolute()) if Path(architecture).is_dir() else str(architecture),
        recipe=section.recipe,
        plan=plan,
        settings=section.train,
        steps=steps,
        eval_every=eval_every,
        train_data=train_data,
        eval_data=eval_data,
        train_tokens=train_tokens,
        eval_tokens=eval_tokens,
        sequence_length=sequence_length,
        out=storage_path(str(out)),
    )
    for cut in plan.cuts:
        cut.check()
    return plan


def _section(recipe: str, overrides: Sequence[str], learning_rate: float, seed: int, device: str) -> TrainSection:
    record: dict[str, Any] = {"recipe": recipe}
    for override in overrides:
        apply_override(record, override)
    train = record.setdefault("train", {})
    if isinstance(train, dict):
        for name in OWN_OPTIONS:
            if name in train:
                raise ConfigError(f"train.{name}: it has an option of its own; give it as --{name.replace('_', '-')}")
        gpus = float(loading.device_of(device).type == "cuda")
        record["train"] = {"gpus_per_worker": gpus} | train | {"learning_rate": learning_rate, "seed": seed}
    section = parse_section(TrainSection, record, "this training")
    known = {"windowed": False} | {f.name: f.default for f in fields(Composition)}
    for name, value in section.composition.items():
        if name not in known:
            raise ConfigError(f"composition.{name}: unknown setting{near(name, known)}; there are {', '.join(known)}")
        if type(value) is not type(known[name]):
            kind = "true or false" if isinstance(known[name], bool) else "a whole number"
            raise ConfigError(f"composition.{name}: got {value!r}; it must be {kind}")
    if section.composition and section.recipe != "dcformer":
        raise ConfigError(f"composition: recipe {section.recipe} composes no heads; use --recipe dcformer")
    if section.train.distillation != "none":
        raise ConfigError("train.distillation: a training from scratch has no original model to learn from; use none")
    if section.train.tuning != "full":
        raise ConfigError("train.tuning: random weights have nothing that adapters could be beside; use full")
    return section


def train_from_scratch(
    architecture: str | Path,
    out: str | Path,
    *,
    progress: Callable[[str], None] = print,
    overwrite: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Train a model with the architecture and the tokenizer of `architecture` from random weights and save it in `out`.

    `settings` are those of `check`; `recipe` "dcformer" composes heads dynamically (paper 002) from the paper's
    initialisation, "transformer" does not. With one seed both start from the same weights, composition apart, and see
    the same text. `out` must be free, hold this very training, or with `overwrite` a checkpoint that we wrote; its
    `out.training` is never replaced by another. `progress` is told each milestone in words. Returns one record: losses
    in nats a token at each milestone, tokens, tokens a second of training, parameters, seconds; measured on
    `synthetic:NAME` also `answers`: accuracy and perplexity of the answers alone, over `count` examples and by task
    (paper 002, Table 5).
    """
    plan = check(architecture, out, **settings)
    _check_folder(plan, overwrite)
    of_text = f"{plan.tokens} tokens ({plan.epochs} of the text)"
    progress(f"training: {plan.recipe}, {plan.steps} steps, {of_text}; in {plan.folder}")
    if (metrics := _ended(plan)) is None:
        if starts_ray():
            concurrency(local_nodes(), plan.demand)
        prepare_process()
        with connected() as nodes:
            concurrency(nodes, plan.demand)
            job = _prepare(plan)
            with _told(plan, progress):
                metrics = run_training(job)
    known = read_json(plan.mark) | {"finished": True}
    write_json(plan.mark, known)
    return {
        **plan.to_dict(),
        **_answers(plan),
        "out": str(plan.out),
        "plan_digest": plan.plan.digest,
        "seed": plan.settings.seed,
        "learning_rate": plan.settings.learning_rate,
        "parameters": known["parameters"],
        "weights_digest": metrics["weights_digest"],
        **{name: metrics[name] for name in MEASURED},
        "milestones": [{name: point[name] for name in MEASURED} for point in plan.reports()],
    }


def rehearse(architecture: str | Path, out: str | Path, *, overwrite: bool = False, **settings: Any) -> dict[str, str]:
    """What `train_from_scratch` would do, in words by what they are about, after all that it checks without a cluster.
    Nothing is written. Raises as it does."""
    plan = check(architecture, out, **settings)
    _check_folder(plan, overwrite)
    train, config = plan.settings, checkpoint.load_config(architecture)
    if starts_ray():
        concurrency(local_nodes(), plan.demand)
    size = Size.of(config)
    rate, source = training_rate(config, train, plan.sequence_length, size)
    hours = f"; about {in_hours(plan.tokens / rate / train.num_workers / 3600)}" if rate else ""
    return {
        "training": f"{plan.recipe}, {plan.steps} steps, {compact(plan.tokens)} tokens ({plan.epochs} of the text)",
        "model": f"{compact(size.total)} parameters, composition left out, as {Path(architecture).name} has them",
        "rate": f"{rate:.0f} tokens/s a worker, {source}{hours}, starts and measurements left out" if rate else source,
        "results": f"{plan.out}, and beside it {plan.folder.name}",
    }


def _answers(plan: Scratch) -> dict[str, Any]:
    """How the trained model answers the held-out synthetic tasks, if that is what it was measured on."""
    if not plan.eval_data.startswith(synthetic_corpus.PREFIX):
        return {}
    model = checkpoint.load(plan.out)
    name = plan.eval_data.removeprefix(synthetic_corpus.PREFIX)
    return {"answers": asdict(synthetic_corpus.score(model, loading.load_tokenizer(plan.architecture), name))}


def _ended(plan: Scratch) -> dict[str, Any] | None:
    """The last report of a training that was finished by an earlier start, its weights as they were written."""
    if not plan.mark.is_file() or not read_json(plan.mark).get("finished"):
        return None
    reports = plan.reports()
    written = reports and reports[-1].get("weights_digest") == checkpoint.weights_digest(plan.out)
    return reports[-1] if written else None


def _check_folder(plan: Scratch, overwrite: bool) -> None:
    """Raises ConfigError or OutputError unless `out` may be written, or holds this very training."""
    record = plan.to_dict()
    if plan.mark.is_file():
        known = read_json(plan.mark)
        if changed := [name for name in record if known.get(name) != json.loads(json.dumps(record[name]))]:
            raise ConfigError(
                f"out: {plan.folder} holds a training with another {', '.join(changed)}; give another --out, or remove "
                "that folder to start over"
            )
        if known.get("finished") and not plan.out.is_dir():
            raise ConfigError(f"out: {plan.out} was trained and is gone; remove {plan.folder} to train it again")
        if _ended(plan) is None:
            check_folder(plan.out, overwrite=True, reads=[plan.architecture])
    else:
        check_folder(plan.out, overwrite=overwrite, reads=[plan.architecture])
        check_folder(plan.folder, reads=[plan.architecture])


def _prepare(plan: Scratch) -> TrainJob:
    """The job, with its untrained model and its texts on disk; those of an earlier start are taken as they are."""
    if not plan.mark.is_file():
        write_json(plan.mark, plan.to_dict())  # first, so that what a kill leaves is known as ours
    tokenizer = loading.load_tokenizer(plan.architecture)
    train_file, eval_file = (
        token_set(cut, tokenizer, plan.folder / "data", tokenise=tokeniser(plan.architecture, cut.tokens))
        for cut in plan.cuts
    )
    if "parameters" not in read_json(plan.mark):
        model = untrained(plan.architecture, plan.plan, plan.settings.seed)
        checkpoint.save(model, plan.folder / "untrained", plan.architecture)
        write_json(plan.mark, {**plan.to_dict(), "parameters": loading.parameters(model)})
    return TrainJob(
        model_dir=str(plan.folder / "untrained"),
        train_file=str(train_file),
        eval_file=str(eval_file),
        out_dir=str(plan.out),
        storage_path=str(plan.folder / "train"),
        run_name=RUN,
        milestones=plan.milestones,
        settings=plan.settings,
        seed=plan.settings.seed,
    )


def untrained(architecture: str | Path, plan: AttentionPlan, seed: int) -> PreTrainedModel:
    """A model of the plan with the architecture's own initialisation, composition with that of paper 002, sec. 4.

    The weights follow from `seed` alone; torch's own generator, which transformers initialises with, is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = conversion.build(checkpoint.load_config(architecture), plan)
    reset(model, identity=False, generator=torch.Generator().manual_seed(seed))
    return model


@contextmanager
def _told(plan: Scratch, progress: Callable[[str], None]) -> Iterator[None]:
    """While the body runs, tell each milestone as it comes, those of an earlier start as well."""
    ended = threading.Event()

    def watch() -> None:
        shown, last_look = 0, False
        while not last_look:
            last_look = ended.wait(POLL_SECONDS)
            points = plan.reports()
            for point in points[shown:]:
                progress(_line(point, plan.steps))
            shown = len(points)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _line(point: dict[str, Any], steps: int) -> str:
    step = point["step"]
    left = point["seconds"] * (steps - step) / step
    end = f"{clock(left)} left" if step < steps else f"done in {clock(point['seconds'])}"
    return (
        f"step {step}/{steps}: held-out loss {point['loss']:.3f}, training loss {point['train_loss']:.3f}, "
        f"{point['tokens_per_second']:.0f} tokens/s, {end}"
    )
