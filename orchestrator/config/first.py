"""First configurations for a checkpoint, from its config.json and the hardware.

There are two: a smoke file, which goes through every part of a search in minutes, and the search
itself.
"""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass
from pathlib import Path

from attention.geometry import HeadGeometry
from attention.io.targets.vllm import LLAMA_LIKE
from orchestrator.config.parsing import ConfigError, read_yaml
from trainers.deepspeed_config import ADAM_BYTES

COMES_ALONG = ("builtin", "stdlib")
BILLION = 1_000_000_000
EXACT = 16  # KV heads up to which the best grouping is found by trying all
# Share of the GPUs' memory that these may take; the rest is for activations and logits
_MEMORY_SHARE = 0.7
HALF = 2  # bytes of a frozen parameter in bfloat16
TRAINED = 2 * HALF + ADAM_BYTES  # of a trained one, with its gradient
SMOKE_STEPS = 4


@dataclass(frozen=True)
class Hardware:
    """The machine that a first configuration is for.

    Attributes:
        gpus: Number of GPUs; with 0 a search runs on CPUs.
        gpu_bytes: Bytes of memory of each GPU.
        cpus: Number of CPUs.
        cpu_bfloat16: Whether the CPUs multiply bfloat16 faster than float32.
    """

    gpus: int
    gpu_bytes: int
    cpus: int
    cpu_bfloat16: bool = False

    @property
    def gpu_memory(self) -> int:
        return self.gpus * self.gpu_bytes


@dataclass(frozen=True)
class FirstConfig:
    """The choices of a first configuration, made from a checkpoint and the hardware.

    Attributes:
        model: The checkpoint as the user names it.
        geometry: Its layers, heads and dims.
        dtype: Name of the dtype of its weights.
        parameters: Number of its parameters.
        source: Text to train and measure on.
        hardware: Where it runs.
        schema: The JSON schema that editors check the file by.
        smoke: Whether this is the short file.
        small: Whether it takes less disk: one KV ratio, one learning rate, nothing that the
            searcher draws, fewer measurements, at each of which weights are saved.
        little_memory: Whether one trial trains at a time, one sequence at once.
    """

    model: str
    geometry: HeadGeometry
    dtype: str
    parameters: int
    source: str
    hardware: Hardware
    schema: str
    dequantize: bool = False
    storage: str = "runs"
    smoke: bool = False
    small: bool = False
    little_memory: bool = False

    def text(self) -> str:
        """Return the YAML, with a comment on the reason for each choice.

        Raises:
            ConfigError: For a checkpoint that has nothing to convert.
        """
        g = self.geometry
        count = self.parameters
        size = f"{count / 1e9:.3g}B" if count >= BILLION else f"{count / 1e6:.3g}M"
        length = self.length
        lasts, promoted = self.steps
        tokens = (lasts[-1] + promoted) * self.batch * length
        measured = 4 * length if self.smoke else max(16_384, 8 * length)
        what = f"A smoke test, minutes long, of {self.about}" if self.smoke else self.about
        what = f"{what[0].upper()}{what[1:]} for {self.model}"
        return f"""\
# yaml-language-server: $schema={self.schema}
# {what}: {g.family}, {size} parameters in {self.dtype}, {g.num_layers} layers,
# {g.num_heads} query heads and {g.num_kv_heads} KV heads of {g.head_dim} in each.
#   headfold search FILE --dry-run    checks everything, and says what it will take
# Every key is explained in docs/reference/config.md. Where a key is left out its default holds.
name: {self.quoted(self.name)}

model:
  path: {self.quoted(self.model)}
{self.dequantization}
data:
  source: {self.quoted(self.source)}    # {self.about_source}
  sequence_length: {length}    # the model takes up to {g.max_positions}
  train: {{tokens: {tokens}}}    # all steps of the longest training, each text once
  eval: {{tokens: {measured}}}    # held out: never trained or calibrated on
  calibration: {{tokens: {measured}}}

search:
{self.candidates()}
  baseline: gqa    # {self.about_baseline}

rungs:
  steps: {lasts}    # 0: the converted model before any training
  {self.stopping}

train:
  batch_size: {self.batch}
{self.training()}
promotion:
{self.promotion()}
storage: {self.quoted(self.storage)}    # a folder, for a cluster one that every node sees, or s3://bucket/path
{self.resources()}"""

    about = "a first search"
    """Subject of the file, for its first line."""
    stopping = "reduction_factor: 2    # about a half continues at each"
    """Settings of early stopping."""
    about_baseline = "never stopped early; what a promotion must beat"

    @property
    def dequantization(self) -> str:
        return (
            "  dequantize: true    # its weights are quantised: read as plain numbers\n"
            if self.dequantize
            else ""
        )

    @property
    def name(self) -> str:
        """The last part of the model's name, as a name of a search."""
        last = Path(self.model).name.lower().removesuffix(".gguf")
        name = re.sub(r"[^a-z0-9._-]+", "-", last).strip("._-")[: 64 - len(self.ending)]
        return (name or "search") + self.ending

    @property
    def ending(self) -> str:
        """The ending of the search's name."""
        return "-smoke" if self.smoke else ""

    def candidates(self) -> str:
        """Return the section `search` but for its baseline."""
        g, large = self.geometry, self.parameters >= BILLION
        # Those that vLLM holds in their own bytes
        layers = ["headfold_layers"] if g.family in LLAMA_LIKE else []
        relaxing = ["align"] if self.trains_all_weights else []  # a relaxation trains all weights
        if self.smoke:
            return (
                "  searcher: grid\n"
                "  recipes: [gqa, {recipe: headfold_gqa, params: {refinement.fit_steps: 20}}]    "
                "# the baseline first\n"
                f"  {self.kv_ratios}\n"
                f"  learning_rates: [{self.rates[0]}]"
            )
        lines = [
            f"searcher: {'grid' if self.small or large else 'optuna'}",
            f"recipes: [{', '.join(['gqa', 'headfold_gqa', *layers, *relaxing])}]    # the "
            "baseline first",
            self.kv_ratios,
            f"learning_rates: [{', '.join(self.rates[:1] if self.small else self.rates)}]    # "
            f"{self.about_rates}",
        ]
        if not self.small and not large:
            exact = ["exact"] if g.num_kv_heads <= EXACT else []
            lines += [
                "num_samples: 4    # candidates that the searcher draws after the named ones, "
                "from this space:",
                "search_space:",
                f"  grouping: [{', '.join([*exact, 'merge', 'anneal'])}]",
                "  objective: [least_squares]",
                "  together: [true]    # one map for keys and values: exports as plain GQA",
                "params: {grouping.equal_sizes: true}",
            ]
        return "\n".join(f"  {line}" for line in lines)

    def promotion(self) -> str:
        """Return the section `promotion`."""
        steps = (
            f"steps: {self.steps[1]}    # after the last rung; the baseline is trained for as many"
        )
        return f"  {steps}\n{self.saved_weights()}  registered_name: {self.quoted(self.name)}\n"

    def saved_weights(self) -> str:
        """Return the keys of the section `promotion` that say whose weights are saved."""
        if self.smoke and self.parameters >= BILLION:
            return "  enabled: false    # each promoted model is three more copies of the weights\n"
        if self.parameters < BILLION and not self.small:
            return ""
        saved = (
            "keep_weights: finalists    # of finished trials: those alone that are promoted, "
            "and gqa"
        )
        once = (
            "evaluations: 1    # the default of 4 keeps the best of them, one more copy of the "
            "weights\n"
        )
        return f"  {saved}\n" + (f"  {once}" if self.small else "")

    @property
    def length(self) -> int:
        long = 512 if self.smoke or self.parameters < BILLION else 2048
        return min(self.geometry.max_positions, long)

    @property
    def steps(self) -> tuple[list[int], int]:
        """Rungs, and steps of the promotion: few on the little text that is bundled."""
        if self.smoke:
            return [0, SMOKE_STEPS], SMOKE_STEPS
        rungs, promoted = ([0, 20, 60], 60) if self.source in COMES_ALONG else ([0, 100, 400], 1000)
        return [rungs[0], rungs[-1]] if self.small else rungs, promoted

    @property
    def batch(self) -> int:
        large = self.parameters >= BILLION and self.source not in COMES_ALONG and not self.smoke
        rows = 32 if large else 8
        return math.ceil(rows / self.workers) * self.workers

    @property
    def workers(self) -> int:
        return max(1, self.hardware.gpus)

    @property
    def kv_ratios(self) -> str:
        """A half and a quarter, or the next ratios above that all recipes reach.

        The baseline has as many heads in every layer: at a half of three it would keep one of them,
        and recipes with a number for each layer one and a half.
        """
        count = self.geometry.num_kv_heads
        if count == 1:
            raise ConfigError(
                f"model: {self.model!r} has 1 KV head per layer already, so no heads are left to "
                "group; choose a checkpoint with 2 or more"
            )
        shares = [share for share in (2, 4) if count >= share]
        if self.smoke or self.small:
            shares = shares[:1]
        counts = [-(-count // share) for share in shares]
        ratios = [round(heads / count, 3) for heads in counts]
        heads = " and ".join(map(str, counts))
        return f"kv_ratios: {ratios}    # {heads} of its {count} KV heads per layer"

    @property
    def rates(self) -> tuple[str, str]:
        """Two learning rates, the one to try first before the other."""
        if not self.teaches:
            return "1.0e-5", "3.0e-5"
        if not self.trains_all_weights:
            return "3.0e-4", "1.0e-4"
        return ("1.0e-4", "3.0e-5") if self.parameters < BILLION else ("3.0e-5", "1.0e-5")

    @property
    def about_rates(self) -> str:
        if not self.teaches:
            return "higher rates harm what converts well, where it learns from text alone"
        if self.parameters >= BILLION or not self.trains_all_weights:
            return "not measured at this size; of several, each recipe is judged at its best"
        return "as measured with distillation; of several, each recipe is judged at its best"

    @property
    def about_source(self) -> str:
        if self.source in COMES_ALONG:
            return (
                "bundled, to try things out; put your own here: files, a folder, or a dataset "
                "on the hub"
            )
        return "files, a folder, or a dataset on the hub"

    @property
    def trains_all_weights(self) -> bool:
        """Whether all weights can be trained on the device."""
        return (
            not self.hardware.gpus
            or self._trained_bytes * self.parameters <= _MEMORY_SHARE * self.hardware.gpu_memory
        )

    @property
    def zero_stage(self) -> int:
        """The tensors that DeepSpeed splits over workers."""
        return 3 if self.hardware.gpus > 1 and self.parameters >= BILLION else 1

    @property
    def _trained_bytes(self) -> int:
        """Bytes of a trained parameter; gradients that are split are summed in float32."""
        return TRAINED + HALF * (self.zero_stage == 3)

    def training(self) -> str:
        """Return the rest of the section `train`."""
        hardware, large = self.hardware, self.parameters >= BILLION
        half = hardware.gpus > 0 or hardware.cpu_bfloat16
        lines = [f"dtype: {'bfloat16' if half else 'float32'}"]
        lines += ["micro_batch_size: 1"] * (large or self.little_memory)
        lines += ["activation_checkpointing: true"] * large
        if not self.trains_all_weights:
            room = f"{hardware.gpus} x {hardware.gpu_bytes / 2**30:.0f} GiB"
            lines.append(f"tuning: lora    # all weights and Adam's moments do not fit {room}")
        lines.append(self.distillation)
        lines.append(f"zero_stage: {self.zero_stage}")
        if hardware.gpus:
            lines += [f"num_workers: {hardware.gpus}", "gpus_per_worker: 1"]
        share = max(1.0, hardware.cpus // hardware.gpus - 1) if hardware.gpus else 0.95
        return "".join(f"  {line}\n" for line in [*lines, f"cpus_per_worker: {share:g}"])

    @property
    def teaches(self) -> bool:
        """Whether the original model is the teacher: if its weights fit next to the trained."""
        room = _MEMORY_SHARE * self.hardware.gpu_memory
        bytes_per_parameter = (self._trained_bytes if self.trains_all_weights else HALF) + HALF
        return not self.hardware.gpus or bytes_per_parameter * self.parameters <= room

    @property
    def distillation(self) -> str:
        """The key of what is learned from."""
        if not self.teaches:
            return (
                "distillation: none    # the original model does not fit together with the trained "
                "one"
            )
        return "distillation: kl    # towards the original model's predictions"

    def resources(self) -> str:
        if not self.hardware.gpus:
            alone = "\nresources:\n  max_concurrent: 1    # two trials do not fit the memory here\n"
            return alone if self.little_memory else ""
        return (
            "\nresources:\n  trial_gpus: 1    # planning and measuring; free again while the "
            "workers train\n"
        )

    @staticmethod
    def quoted(text: str) -> str:
        """Return any text as a YAML string."""
        if re.fullmatch(r"[\w./-]+", text):
            with contextlib.suppress(ValueError):
                if read_yaml(text) == text:
                    return text
        return "'" + text.replace("'", "''") + "'"
