"""The model that `mlflow.pyfunc.load_model` makes of a checkpoint in Headfold's own format.

MLflow imports this file by name, so the environment that loads such a checkpoint needs Headfold;
stock formats are loaded by MLflow's own transformers flavour.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer, pipeline

from attention.io import checkpoint


class TextGeneration:
    """Continues texts as a pipeline of transformers does: results begin with the prompt."""

    def __init__(self, folder: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = checkpoint.load(folder)
        self._pipeline: Any = pipeline("text-generation", model=model, tokenizer=tokenizer)

    def predict(self, texts: Any, params: dict[str, Any] | None = None) -> list[str]:
        """Continue each text of a data frame's first column, which is what MLflow passes."""
        prompts = [str(text) for text in texts.iloc[:, 0]]
        return [result[0]["generated_text"] for result in self._pipeline(prompts, **(params or {}))]


def _load_pyfunc(folder: str) -> TextGeneration:
    """Load the checkpoint of a folder; the name is MLflow's."""
    return TextGeneration(folder)
