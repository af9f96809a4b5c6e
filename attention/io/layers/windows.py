"""One decoder layer of a checkpoint at a time, read from safetensors on disk.

Legend: L layers, N sequences of T tokens, D model dim, V vocabulary.

A *window* is a model of the checkpoint's own class with a single layer. Its vocabulary are
sequences: token id n stands for the hidden states of sequence n at the input of that layer, the
*streams* `[N, T, D]`. So code that works on a model works on a window, and the whole model is never
in memory (as in layer-wise quantisers: Frantar 2022, GPTQ).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from attention.families import family_of, geometry_of
from attention.io.experts import PlacedTensor, parts_of
from attention.io.safetensors_files import Stored, WeightsError, open_safetensors
from attention.io.weights import check_finite, check_weights
from attention.modeling.model_classes import MAP_NAMES, plan_of_config
from attention.modeling.predictions import Final, final
from attention.modeling.running import entered_by, layer_of, run_to
from attention.plan import AttentionPlan

PER_LAYER = ("layer_types", "no_rope_layers")  # fields of a config with an entry for each layer
EMBEDDING_ROWS = 4096  # rows of an embedding that are looked at together


class LazyWeights:
    """The tensors of a checkpoint folder by the present model class' names.

    Nothing is read before it is used, and no file stays open: pages of a mapped file count as
    memory of the process.

    Raises WeightsError unless the files hold all that the config's model has
    (`attention.io.weights.check_weights`), and on reading for numbers that are not finite.
    """

    def __init__(self, folder: str | Path, config: PretrainedConfig) -> None:
        self.folder = Path(folder)
        self._places = check_weights(self.folder, config)
        if not self._places:
            raise WeightsError(
                f"{self.folder}: transformers changes tensors of a {config.model_type} while it "
                f"loads them, so that "
                "they cannot be read one by one; convert it in memory, without --layerwise"
            )
        self._rounding: torch.dtype | None = None

    def rounded(self, dtype: torch.dtype) -> LazyWeights:
        """Return the same weights, rounded to `dtype` wherever they are read."""
        other = copy.copy(self)
        other._rounding = dtype
        return other

    def _round(self, tensor: Tensor) -> Tensor:
        exact = self._rounding is None or not tensor.is_floating_point()
        return tensor if exact else tensor.to(self._rounding)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def _parts(self, name: str) -> list[PlacedTensor]:
        if name not in self._places:
            raise WeightsError(
                f"{self.folder} has no tensor {name!r}; its config describes none either"
            )
        return parts_of(self._places[name])

    def _whole(self, name: str) -> Stored:
        """Return the file of a tensor that does not belong to experts."""
        ((stored, _),) = self._parts(name)
        return stored

    def read_into(self, targets: Mapping[str, Tensor]) -> None:
        """Copy the named tensors into `targets`, in their dtype and on their device.

        Each file is opened once. Maps of heads that the files lack are left as they are.
        """
        by_file: dict[str, list[tuple[str, Tensor]]] = {}
        for name, target in targets.items():
            if name not in self and name.endswith(MAP_NAMES):
                continue
            for stored, where in self._parts(name):
                by_file.setdefault(stored.file, []).append((stored.name, target[where]))
        for file_name in sorted(by_file):
            with open_safetensors(self.folder / file_name) as file:
                for name, target in by_file[file_name]:
                    self._copy(file.get_tensor(name), target, name)

    @torch.no_grad()
    def _copy(self, source: Tensor, target: Tensor, name: str) -> None:
        if source.shape != target.shape:  # copy_ would repeat what is smaller
            raise WeightsError(
                f"{self.folder}: {name} is {list(source.shape)} in the file, expected "
                f"{list(target.shape)}"
            )
        check_finite(self.folder, {name: source})
        target.copy_(self._round(source))

    def rows(self, name: str, ids: Tensor) -> Tensor:
        """Return rows `ids` (ascending) of a matrix, without loading the others."""
        source = self._whole(name)
        parts = []
        with open_safetensors(self.folder / source.file) as file:
            part = file.get_slice(source.name)
            for start in range(0, part.get_shape()[0], EMBEDDING_ROWS):
                inside = ids[(ids >= start) & (ids < start + EMBEDDING_ROWS)]
                if len(inside):
                    parts.append(part[start : start + EMBEDDING_ROWS][inside - start].clone())
        rows = torch.cat(parts)
        check_finite(self.folder, {name: rows})
        return self._round(rows)

    def holds_only(self, names: Iterable[str], dtype: torch.dtype) -> bool:
        """Whether `dtype` can represent the named tensors without rounding."""
        kinds = {stored.dtype for name in names for stored, _ in self._parts(name)}
        narrow = {"F16": torch.float16, "BF16": torch.bfloat16}
        return all(
            narrow.get(kind, torch.float32) == dtype or dtype == torch.float32 for kind in kinds
        )

    def one(self, name: str, dtype: torch.dtype) -> Tensor:
        """Return a whole tensor, floating-point ones in `dtype`, in separate memory."""
        source = self._whole(name)
        with open_safetensors(self.folder / source.file) as file:
            tensor = file.get_tensor(source.name)
            check_finite(self.folder, {name: tensor})
            return tensor.to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)


# ---- windows ----------------------------------------------------------------------------------


def check_windows(config: PretrainedConfig) -> None:
    """Raise ValueError for a checkpoint whose layers cannot stand alone."""
    plan = plan_of_config(config)
    if plan.is_shared or plan.composition is not None:
        raise ValueError(
            "a checkpoint with shared or composed heads cannot be converted layer by layer; "
            "convert it in memory"
        )
    if geometry_of(config).decoder_layers is not None:
        raise ValueError(
            f"a {family_of(config).name}, of whose layers only some are converted, cannot be "
            f"converted layer by layer; convert it in memory"
        )
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        raise ValueError(
            "a checkpoint with scale_attn_by_inverse_layer_idx=true cannot be converted layer by "
            "layer: its attention "
            "depends on the number of the layer; convert it in memory"
        )


def stand_alone(config: PretrainedConfig) -> bool:
    """Whether the layers of a checkpoint can stand alone (see `check_windows`)."""
    try:
        check_windows(config)
    except ValueError:
        return False
    return True


def window_config(config: PretrainedConfig, layer: int, vocabulary: int) -> PretrainedConfig:
    """Return the config of a model of layer `layer` alone, with `vocabulary` token ids."""
    geometry = geometry_of(config)
    one: Any = copy.deepcopy(config)
    index = layer
    if geometry.decoder_layers is not None:
        index = geometry.decoder_layers[layer]
        one.per_layer_config = None
        one.num_key_value_heads = geometry.num_kv_heads
        one.head_dim = geometry.head_dim
    for name in PER_LAYER:
        if entries := getattr(config, name, None):
            setattr(one, name, [entries[index]])
    if (
        dense := getattr(config, "mlp_only_layers", None)
    ) is not None:  # Qwen's mixtures of experts
        routed = layer not in dense and (layer + 1) % config.decoder_sparse_step == 0
        one.mlp_only_layers = [] if routed else [0]
        one.decoder_sparse_step = 1
    if (count := getattr(config, "first_k_dense_replace", None)) is not None:  # GLM's
        one.first_k_dense_replace = int(layer < count)
    one.num_hidden_layers = 1
    one.vocab_size = vocabulary
    one.tie_word_embeddings = False
    one.bos_token_id = one.eos_token_id = one.pad_token_id = None
    if getattr(config, "attention_plan", None) is not None:
        whole = plan_of_config(config)
        one.attention_plan = AttentionPlan((whole.layers[layer],), whole.head_dim).to_dict()
    return one


def empty(config: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """Return a model in evaluation mode whose weights take no memory before they are set."""
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    nn.Module.to(model, device)
    return model.eval().requires_grad_(False)


def the_layer(model: PreTrainedModel) -> nn.Module:
    """Return the decoder layer of a window."""
    return layer_of(model, family_of(model.config).attention_modules(model)[0])


def layer_prefix(model: PreTrainedModel) -> str:
    """Return what the names of layer 0's tensors start with, e.g. `model.layers.0.`.

    Other layers differ in the number.
    """
    layer = the_layer(model)
    return next(name for name, module in model.named_modules() if module is layer) + "."


def of_layer(name: str, prefix: str, layer: int) -> str:
    """Return the name in the whole model of a tensor that a window calls `name`.

    `prefix` is `layer_prefix`.
    """
    return f"{prefix.removesuffix('0.')}{layer}.{name.removeprefix(prefix)}"


def outer_names(model: PreTrainedModel) -> list[str]:
    """Names of the parameters and persistent buffers of a window that are outside of its layer.

    The embedding first.
    """
    stem = layer_prefix(model).removesuffix("0.")
    table = _embedding_name(model)
    rest = [name for name in model.state_dict() if not name.startswith(stem) and name != table]
    return [table, *rest]


def stored_outer_names(config: PretrainedConfig) -> list[str]:
    """Names outside of the layers that a checkpoint of `config` stores; the embedding first."""
    model = empty(window_config(config, 0, 1), torch.float32, torch.device("cpu"))
    tied = [_output_name(model)] if config.tie_word_embeddings else []
    return [name for name in outer_names(model) if name not in tied]


def _embedding_name(model: PreTrainedModel) -> str:
    weight = model.get_input_embeddings().weight
    return next(name for name, p in model.named_parameters() if p is weight)


def _output_name(model: PreTrainedModel) -> str:
    output: Any = model.get_output_embeddings()
    weight = output.weight
    return next(name for name, p in model.named_parameters(remove_duplicate=False) if p is weight)


def open_window(
    weights: LazyWeights,
    config: PretrainedConfig,
    layer: int,
    streams: Tensor,
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """Layer `layer` of the checkpoint as a window that reads `streams` (see `feed`).

    Raises:
        WeightsError: For tensors that the checkpoint lacks, or that are of other shapes.
    """
    model = empty(window_config(config, layer, len(streams)), dtype, device)
    prefix = layer_prefix(model)
    tensors = {
        name: tensor for name, tensor in model.state_dict().items() if name.startswith(prefix)
    }
    weights.read_into({of_layer(name, prefix, layer): tensor for name, tensor in tensors.items()})
    feed(model, streams)
    return model


def feed(model: PreTrainedModel, streams: Tensor) -> None:
    """Replace the input of a window's layer by `streams[n]` wherever the token id is n.

    Read anew each time.
    """
    arguments: dict[str, Tensor] = {}

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = args[0] if args else kwargs["input"]
        arguments["rows"] = ids[:, 0].cpu()

    def enter(
        _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        stream = streams[arguments["rows"]].to(model.device, model.dtype)
        return entered_by(stream, args, kwargs)

    model.get_input_embeddings().register_forward_pre_hook(look, with_kwargs=True)
    the_layer(model).register_forward_pre_hook(enter, with_kwargs=True)


def rows_of(streams: Tensor, count: int | None = None) -> Tensor:
    """Token ids `[n, T]` that stand for the first `count` streams (all of them by default)."""
    return torch.arange(len(streams) if count is None else count)[:, None].expand(
        -1, streams.shape[1]
    )


def advance(model: PreTrainedModel, streams: Tensor, batch_size: int) -> None:
    """Replace the streams that a window is fed by what its layer makes of them, in place."""
    for ids in rows_of(streams).split(batch_size):
        advance_rows(model, streams, ids)


def advance_rows(model: PreTrainedModel, streams: Tensor, ids: Tensor) -> None:
    """Advance some of the streams (`advance`), by the ids `[B, T]` of `rows_of` for them."""
    streams[ids[:, 0]] = run_to(model, the_layer(model), ids).output.to(streams)


# ---- below the first and above the last layer -------------------------------------------------


@torch.no_grad()
def embed(
    weights: LazyWeights,
    config: PretrainedConfig,
    sequences: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    batch_size: int = 8,
) -> Tensor:
    """Return what enters layer 0 for `sequences` `[N, T]`: `[N, T, D]` in `dtype`, on the CPU.

    Only those rows of the token embedding are read whose tokens occur.
    """
    ids, compact = sequences.unique(return_inverse=True)
    model = empty(window_config(config, 0, len(ids)), dtype, device)
    table = _embedding_name(model)
    head = _output_name(model)
    state = model.state_dict()
    output = head.removesuffix("weight")  # its bias is as long as the whole vocabulary
    needed = [
        n for n in outer_names(model) if n != table and not n.startswith(output) and n in weights
    ]
    weights.read_into({name: state[name] for name in needed})
    state[table].copy_(weights.rows(table, ids))
    streams = torch.empty(*sequences.shape, model.config.hidden_size, dtype=dtype)
    for rows in torch.arange(len(sequences)).split(batch_size):
        streams[rows] = run_to(model, the_layer(model), compact[rows], through=False).stream.to(
            streams
        )
    return streams


class OutputHead:
    """The modules above the last layer.

    The embedding is not read, unless it is also the output matrix. `config`, `dtype`: of the
    original model, and what is computed in.
    """

    def __init__(
        self,
        weights: LazyWeights,
        config: PretrainedConfig,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.model = empty(window_config(config, 0, config.vocab_size), dtype, device)
        table = _embedding_name(self.model)
        head = _output_name(self.model)
        state = self.model.state_dict()
        names = {n: n for n in outer_names(self.model) if n not in (table, head) and n in weights}
        names[table if config.tie_word_embeddings else head] = head
        weights.read_into({stored: state[name] for stored, name in names.items()})
        self.vocabulary: int = config.vocab_size
        self.device = device

    def final(self, stream: Tensor) -> Final:
        """Return the inputs of the output matrix, and that matrix.

        Args:
            stream: `[B, T, D]`, the output of the last layer.
        """
        stream = stream.to(self.model.device, self.model.dtype)
        # The layer, whose weights were never read, hands on the stream instead of what it is given.
        the_layer(self.model).forward = lambda *args, **kwargs: stream
        ids = torch.zeros(stream.shape[:2], dtype=torch.long, device=self.model.device)
        return final(self.model, ids)
