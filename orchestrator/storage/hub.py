"""Upload of an exported checkpoint to the Hugging Face hub, shown before it is done. The token is huggingface_hub's own
affair (`hf auth login`, or HF_TOKEN): it is neither taken as an option nor printed."""

from __future__ import annotations

from pathlib import Path

from attention.base.messages import reason
from attention.io.replacing import DIGESTS
from orchestrator.config.schema import ConfigError

LEFT_OUT = ("lineage.json", "export.json", DIGESTS)
"""Files that name folders and runs of the machine where they were made, and the digests of all."""


class PushError(RuntimeError):
    """The hub has not taken an upload."""


def check_repository(name: str | None) -> str | None:
    """The name as it is. Raises ConfigError unless it can be one: OWNER/NAME."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if name is None:
        return None
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise ConfigError(f"push: {name!r} is no name of a repository: {reason(error)}") from None
    if "/" not in name:
        raise ConfigError(f"push: expected OWNER/NAME, got {name!r}; give the account or organisation too")
    return name


def to_upload(folder: str | Path) -> dict[str, int]:
    """Files of a folder that would go to the hub, and their bytes."""
    root = Path(folder)
    files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
    return {name: path.stat().st_size for name, path in files.items() if name not in LEFT_OUT}


def size_of(count: int) -> str:
    """Bytes for people."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count} bytes"


def upload(folder: str | Path, repository: str) -> str:
    """Upload to the main branch of a repository, which is made private if it is not there; returns its address.

    Raises PushError, in words without the token.
    """
    from huggingface_hub import HfApi, get_token

    api = HfApi()
    try:
        place = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Upload of a checkpoint converted by Headfold",
            ignore_patterns=list(LEFT_OUT),
        )
    except Exception as error:  # of the hub, its HTTP client and the network: of a dozen types
        token = get_token()
        said = reason(error, lambda text: text.replace(token, "***") if token else text)
        raise PushError(f"push to {repository}: {type(error).__name__}: {said}") from None
    return str(place)
