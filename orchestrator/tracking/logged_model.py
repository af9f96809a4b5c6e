"""A checkpoint as a model of MLflow: a file `MLmodel` and a few small files next to its weights.

`mlflow.pyfunc.load_model`, and for a stock format `mlflow.transformers.load_model`, then load the
folder itself, from any path, and the weights are stored once. MLflow's own `save_model` would write
them again, in a subfolder.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

MLMODEL = "MLmodel"
_TOKENIZER = "tokenizer_config.json"
_REQUIREMENTS = ("mlflow", "torch", "transformers", "accelerate")
_LOADER = "orchestrator.tracking.pyfunc_model"
"""For Headfold's own format, which MLflow has no flavour for."""
_NEW_TOKENS = 64  # of a prediction, by default


def write_mlmodel(folder: str | Path, base_model: str) -> bool:
    """Describe a checkpoint to MLflow, in its own folder.

    Args:
        folder: The checkpoint.
        base_model: Name of the model that it was made from.

    Returns:
        False, with nothing written, for one without a tokenizer, which no pipeline takes.
    """
    from mlflow import pyfunc
    from mlflow.models import Model, ModelSignature
    from mlflow.types.schema import ColSpec, DataType, ParamSchema, ParamSpec, Schema

    from attention.checkpoint import Checkpoint
    from attention.modeling.model_classes import TYPE_PREFIX

    folder = Path(folder)
    if not (folder / _TOKENIZER).is_file():
        return False
    config = Checkpoint.open(folder).config
    headfold_format = config.model_type.startswith(TYPE_PREFIX)
    text = Schema([ColSpec("string")])
    params = ParamSchema([ParamSpec("max_new_tokens", DataType.long, _NEW_TOKENS)])
    model = Model(signature=ModelSignature(text, text, params))
    model.model_size_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if not headfold_format:
        _add_stock_flavour(model, folder, config, base_model)
    loader = _LOADER if headfold_format else "mlflow.transformers"
    pyfunc.add_to_model(model, loader_module=loader, python_env="python_env.yaml")
    packages = [f"{name}=={version(name).partition('+')[0]}" for name in _REQUIREMENTS]
    if headfold_format:
        packages.append("headfold")
    requirements = "".join(f"{package}\n" for package in packages)
    (folder / "requirements.txt").write_text(requirements, encoding="utf-8")
    python = "dependencies:\n- -r requirements.txt\n"
    (folder / "python_env.yaml").write_text(python, encoding="utf-8")
    model.save(str(folder / MLMODEL))
    return True


def _add_stock_flavour(model: Any, folder: Path, config: Any, base_model: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    tokenizer.save_pretrained(folder / "components" / "tokenizer")  # MLflow looks nowhere else
    model.add_flavor(
        "transformers",
        transformers_version=version("transformers"),
        code=None,
        task="text-generation",
        instance_type="TextGenerationPipeline",
        pipeline_model_type=(config.architectures or [""])[0],
        torch_dtype=f"{config.dtype}",
        components=["tokenizer"],
        tokenizer_type=type(tokenizer).__name__,
        model_binary=".",
        source_model_name=base_model,
    )
