"""Upload of an exported checkpoint to the Hugging Face hub, shown before it is done.

The token is huggingface_hub's own affair (`hf auth login`, or HF_TOKEN): it is neither taken as an
option nor printed.
"""

from __future__ import annotations

from pathlib import Path

from attention.base.messages import reason
from attention.io.replacing import DIGESTS
from orchestrator.config.schema import ConfigError

_NOT_UPLOADED = ("lineage.json", "export.json", DIGESTS)
"""Files that name folders and runs of the machine that wrote them, and the digests of all."""


class PushError(RuntimeError):
    """The hub has not taken an upload."""


def check_repository(name: str | None) -> str | None:
    """Return the name of a repository as it is.

    Raises:
        ConfigError: Unless it has the form OWNER/NAME.
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    if name is None:
        return None
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        problem = reason(error)
        raise ConfigError(f"push: {name!r} is no name of a repository: {problem}") from None
    if "/" not in name:
        raise ConfigError(
            f"push: expected OWNER/NAME, got {name!r}; give the account or organisation too"
        )
    return name


def to_upload(folder: str | Path) -> dict[str, int]:
    """Return the bytes of each file of a folder that would go to the hub."""
    root = Path(folder)
    files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*"))}
    return {
        name: path.stat().st_size
        for name, path in files.items()
        if path.is_file() and name not in _NOT_UPLOADED
    }


def size_of(count: int) -> str:
    """Return a number of bytes for people."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} GB"
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count} bytes"


def upload(folder: str | Path, repository: str) -> str:
    """Upload to the main branch of a repository, which is created, private, if there is none.

    Returns:
        Its address.

    Raises:
        PushError: If the hub refuses or is away; the message does not contain the token.
    """
    from huggingface_hub import HfApi, get_token

    api = HfApi()
    try:
        address = api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message="Upload of a checkpoint converted by Headfold",
            ignore_patterns=list(_NOT_UPLOADED),
        )
    except Exception as error:  # of the hub, its HTTP client and the network: of a dozen types
        token = get_token()
        message = reason(error, lambda text: text.replace(token, "***") if token else text)
        raise PushError(f"push to {repository}: {type(error).__name__}: {message}") from None
    return str(address)
