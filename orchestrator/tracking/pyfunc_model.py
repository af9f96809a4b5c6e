"""What `mlflow.pyfunc.load_model` makes of a checkpoint in Headfold's own format: MLflow imports this file by name.

So the environment that loads it needs Headfold; stock formats are loaded by MLflow's own transformers flavour.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer, pipeline

from attention.io import checkpoint


class TextGeneration:
    """Continues texts, as a pipeline of transformers does: what is returned begins with the text that was given."""

    def __init__(self, folder: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        self._pipeline: Any = pipeline("text-generation", model=checkpoint.load(folder), tokenizer=tokenizer)

    def predict(self, texts: Any, params: dict[str, Any] | None = None) -> list[str]:
        """`texts`: a column, as MLflow makes it of what it is given."""
        prompts = [str(text) for text in texts.iloc[:, 0]]
        return [made[0]["generated_text"] for made in self._pipeline(prompts, **(params or {}))]


def _load_pyfunc(folder: str) -> TextGeneration:
    """The name that MLflow calls."""
    return TextGeneration(folder)
