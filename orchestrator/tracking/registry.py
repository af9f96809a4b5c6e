"""MLflow's registry: promoted checkpoints as versions of a model, and the aliases that point to them."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlparse
from urllib.request import url2pathname

from attention.base.messages import reason
from orchestrator.tracking.errors import TrackingError, redact
from orchestrator.tracking.logged_model import MLMODEL

ABOUT = (
    "Checkpoints whose KV cache Headfold has made smaller, promoted by its searches. The alias kv25 is the best that "
    "keeps 25 % of the cache, kv25-2 the second best; tags of a version say which search, recipe and trial made it."
)


class Registry:
    """The registry of the store at `uri`, which has the runs of an experiment too."""

    uri: str
    experiment_id: str
    client: Any

    def register(self, name: str, folder: str | Path, run_id: str, *, tags: Mapping[str, Any], description: str) -> str:
        """Register a checkpoint folder as a version of the model `name`, with its tags; once for each run. Returns the
        version. Raises TrackingError if the store refuses."""
        with self._registry(name):
            if not self.client.search_registered_models(f"name = '{name}'"):
                self.client.create_registered_model(name, description=ABOUT)
            place = str(folder)
            for known in self.client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'"):
                if known.tags.get("folder") == place:
                    return str(known.version)
            labels = {key: str(value) for key, value in tags.items()} | {"folder": place}
            server, model, source = self.uri.startswith(("http://", "https://")), None, place
            if (Path(folder) / MLMODEL).is_file():
                model, source = self._logged_model(name, Path(folder), run_id, labels, upload=server)
            elif server:  # which takes no bare local folder
                self.client.log_artifacts(run_id, place, "model")
                source = f"{self.client.get_run(run_id).info.artifact_uri}/model"
            told = {"run_id": run_id, "tags": labels, "description": description, "model_id": model and model.model_id}
            made = self.client.create_model_version(name, source, **told)
            if model is not None:
                versions = [{"name": name, "version": made.version}]
                self.client.set_logged_model_tags(model.model_id, {"mlflow.modelVersions": json.dumps(versions)})
            return str(made.version)

    def _logged_model(
        self, name: str, folder: Path, run_id: str, tags: dict[str, str], upload: bool
    ) -> tuple[Any, str]:
        """The logged model of a run, made once, and where a version of it is loaded from. Its weights are uploaded to a
        server; a store on this machine has links to them, and a place to write notes to that is not the checkpoint."""
        from mlflow.entities import LoggedModelOutput

        mine = f"source_run_id = '{run_id}'"
        known = [m for m in self.client.search_logged_models([self.experiment_id], mine) if m.tags.get("folder")]
        named = re.sub(r"[/:.%\"']", "-", name)
        model = next((m for m in known if m.tags["folder"] == str(folder)), None) or self.client.create_logged_model(
            self.experiment_id, named, source_run_id=run_id, tags=tags, model_type="transformers"
        )
        source = model.artifact_location
        if upload:
            self.client.log_model_artifacts(model.model_id, str(folder))
        else:
            local = urlparse(source).scheme in ("", "file")
            source = str(_linked(Path(url2pathname(urlparse(source).path)), folder) if local else folder)
        if model.model_id not in {m.model_id for m in self.client.get_run(run_id).outputs.model_outputs}:
            self.client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=0)])
        self.client.finalize_logged_model(model.model_id, "READY")
        return model, source

    def holder(self, name: str, alias: str) -> str | None:
        """The version that an alias points to; None if it points nowhere. Raises TrackingError."""
        with self._registry(name):
            version = self.client.get_registered_model(name).aliases.get(alias)
        return None if version is None else str(version)

    def point(self, name: str, alias: str, version: str) -> None:
        """Let an alias point to a version, in one step: there is no moment without it. Raises TrackingError."""
        with self._registry(name):
            self.client.set_registered_model_alias(name, alias, version)

    @contextlib.contextmanager
    def _registry(self, name: str) -> Iterator[None]:
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            raise TrackingError(f"the registry at {redact(self.uri)} refused {name}: {reason(error, redact)}") from None


def _linked(place: Path, folder: Path) -> Path:
    """Fill `place` with hard links to the files of a folder: MLflow follows no link that leads out of it. On another
    file system, or one without links: the folder itself."""
    try:
        for one in (path for path in folder.rglob("*") if path.is_file()):
            link = place / one.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            if not link.exists():
                link.hardlink_to(one)
    except OSError:
        return folder
    return place
