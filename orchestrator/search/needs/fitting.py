"""Whether the processes of a search fit the GPUs that they ask for, and what helps where one does not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from attention.checkpoint import Checkpoint
from orchestrator.cluster.accelerators import GIGABYTES, in_words, memory_of
from orchestrator.config.schema import ConfigError, SearchConfig
from orchestrator.conversion.estimates.sizes import Size
from orchestrator.search.needs.disk import giga
from orchestrator.search.needs.memory import Need, Needs
from orchestrator.search.searchers import SearchProblem
from trainers.settings import TrainSettings

OFFLOAD = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
Change = tuple[str, dict[str, Any]]
"""What a change of the training's settings is called, and the settings."""


def check_accelerators(config: SearchConfig, problem: SearchProblem) -> None:
    """Raises ConfigError for a process that cannot fit the GPU that it asks for by type; nothing is looked at where
    there is no type, or one whose memory is not known."""
    section = config.resources
    if not any(kind and memory_of(kind) for kind in (section.accelerator_type, section.trial_accelerator_type)):
        return
    model = Checkpoint.open(config.model.path).config
    # The smallest statistics: what is kept of them is chosen later, by the room that there is
    if refusals := refused(Needs(config, model, Size.of(model), problem, "pooled")):
        raise ConfigError("\n".join(refusals))


def refused(needs: Needs) -> list[str]:
    """A line for each process that does not fit: what it takes, of which what most, and what helps."""
    return [_refusal(need, needs) for need in needs.all() if not need.fits]


def _refusal(need: Need, needs: Needs) -> str:
    assert need.accelerator_type is not None and need.limit is not None
    of_training = need.train is not None
    typed = "accelerator_type" if of_training or not needs.config.resources.trial_accelerator_type else ""
    key = f"resources.{typed or 'trial_accelerator_type'}"
    share = f" and {need.share:g} of it is asked for" if need.share < 1 else ""
    most = f"{giga(need.parts[need.largest])} of it {need.largest}"
    would = list(_trainings(need, needs) if of_training else _plannings(need, needs))
    if larger := [kind for kind in GIGABYTES if (memory_of(kind) or 0) >= need.total]:
        would.append(f"{key}={min(larger, key=lambda kind: GIGABYTES[kind])}")
    return (
        f"{key}: {in_words(need.accelerator_type)}{share}, but the {need.process} takes "
        f"{giga(need.total)}, {most}; what helps: {'; or '.join(would) or 'a smaller model'}"
    )


def _trainings(need: Need, needs: Needs) -> Iterator[str]:
    """Changes of the training that make it fit: each that does so alone, else as many together as are enough."""
    assert need.train is not None and need.limit is not None
    prefix = "promotion.train" if need.process.startswith("promotion") else "train"

    def smaller(train: TrainSettings) -> int:
        return needs.training(need.process, train).total

    alone, together, changed = False, [], need.train
    for words, change in _changes(need.train):
        made = _changed(need.train, change)
        if made is not None and (total := smaller(made)) <= need.limit:
            alone = True
            yield f"{prefix}.{words} ({giga(total)})"
        if smaller(changed) > need.limit and (added := _changed(changed, change)) is not None:
            changed = added
            together.append(f"{prefix}.{words}")
    if not alone and (total := smaller(changed)) <= need.limit:
        yield f"{' and '.join(together)} ({giga(total)})"


def _changes(train: TrainSettings) -> Iterator[Change]:
    """What makes a training smaller, one step each."""
    if train.zero_stage < 3 and train.num_workers > 1:
        yield "zero_stage=3", {"zero_stage": 3}
    if not train.activation_checkpointing:
        yield "activation_checkpointing=true", {"activation_checkpointing": True}
    if train.device_batch_size > 1:
        yield "micro_batch_size=1", {"micro_batch_size": 1}
    for times in (2, 4):
        workers = train.num_workers * times
        if train.batch_size % (workers * train.device_batch_size) == 0:
            yield f"num_workers={workers} with zero_stage=3", {"num_workers": workers, "zero_stage": 3}
    if "zero_optimization" not in train.deepspeed:
        words = "deepspeed={zero_optimization: {offload_optimizer: {device: cpu}}}"
        yield words, {"deepspeed": dict(train.deepspeed) | OFFLOAD} | ({} if train.zero_stage else {"zero_stage": 1})


def _changed(train: TrainSettings, change: dict[str, Any]) -> TrainSettings | None:
    try:
        return TrainSettings.model_validate(train.model_dump() | change)
    except ValidationError:
        return None


def _plannings(need: Need, needs: Needs) -> Iterator[str]:
    if needs.config.resources.trial_gpus < 1:
        yield "resources.trial_gpus=1"
    if need.largest in ("activations", "logits"):
        yield "a smaller train.micro_batch_size"
    yield f"resources.trial_gpus=0, which plans on CPUs in {giga(_on_cpus(need, needs))} of memory"


def _on_cpus(need: Need, needs: Needs) -> int:
    config = needs.config
    none = {"trial_gpus": 0.0, "trial_accelerator_type": None}
    changed = config.model_copy(update={"resources": config.resources.model_copy(update=none)})
    there = Needs(changed, needs.model, needs.size, needs.problem, needs.mixed)
    return {"planning": there.planning, "original model": there.original}[need.process]().total
