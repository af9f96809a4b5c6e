"""Objects at an address that are replaced only as they were read.

S3 does so by `If-Match`, Google Cloud Storage by generations.

pyarrow has no such writes. Other file systems are read again before they are written, which leaves
a moment between the two.
"""

from __future__ import annotations

import contextlib
import hashlib
import uuid
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qs, quote, urlparse


class WriteConflictError(OSError):
    """An object that another writer has replaced since it was read."""


class StoredObject(NamedTuple):
    """The content of an object, and the tag of this state of it."""

    content: bytes
    tag: str


class ConditionalObjects(Protocol):
    """Objects by their path: a bucket and a key.

    Attributes:
        atomic: Whether the store itself refuses a write to an object that has changed.
    """

    atomic: bool

    def read(self, path: str) -> StoredObject | None:
        """Return an object; None if there is none."""
        ...

    def write(self, path: str, content: bytes, tag: str | None) -> str:
        """Write an object and return its new tag.

        Args:
            path: Its bucket and key.
            content: What it is to hold.
            tag: Of the state that is replaced; None if there must be none.

        Raises:
            WriteConflictError: If it is in another state.
        """
        ...


class ComparedObjects:
    """Objects of any file system: compared with what was read, then written."""

    atomic = False

    def __init__(self, filesystem: Any) -> None:
        self._filesystem = filesystem

    def read(self, path: str) -> StoredObject | None:
        """Return an object, with its digest as the tag."""
        try:
            with self._filesystem.open_input_stream(path) as stream:
                content = stream.read()
        except FileNotFoundError:
            return None
        return StoredObject(content, hashlib.sha256(content).hexdigest())

    def write(self, path: str, content: bytes, tag: str | None) -> str:
        """Write an object that is as it was read."""
        stored = self.read(path)
        if (stored.tag if stored is not None else None) != tag:
            raise WriteConflictError(f"{path} has changed")
        write_object(self._filesystem, path, content)
        return hashlib.sha256(content).hexdigest()


class S3Objects:
    """Objects in S3, or in a store that speaks its protocol."""

    atomic = True

    def __init__(self, filesystem: Any, address: str) -> None:
        import boto3
        from botocore import UNSIGNED
        from botocore.config import Config

        query = {name: values[-1] for name, values in parse_qs(urlparse(address).query).items()}
        endpoint = query.get("endpoint_override")
        scheme = query.get("scheme", "https")
        self._client: Any = boto3.client(
            "s3",
            region_name=filesystem.region or None,
            endpoint_url=f"{scheme}://{endpoint}" if endpoint else None,
            verify=query.get("tls_ca_file_path"),
            config=Config(
                signature_version=UNSIGNED if query.get("anonymous") == "true" else None,
                s3={"addressing_style": "path" if endpoint else "auto"},
                retries={"mode": "standard"},
            ),
        )

    def read(self, path: str) -> StoredObject | None:
        """Return an object, with its ETag."""
        bucket, _, key = path.partition("/")
        try:
            response = self._client.get_object(Bucket=bucket, Key=key)
        except self._client.exceptions.ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] == 404:
                return None
            raise
        return StoredObject(response["Body"].read(), response["ETag"])

    def write(self, path: str, content: bytes, tag: str | None) -> str:
        """Write an object by a request with If-Match, or If-None-Match."""
        bucket, _, key = path.partition("/")
        condition = {"IfNoneMatch": "*"} if tag is None else {"IfMatch": tag}
        try:
            return self._client.put_object(Bucket=bucket, Key=key, Body=content, **condition)[
                "ETag"
            ]
        except self._client.exceptions.ClientError as error:
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            if status in (409, 412) or (status == 404 and tag is not None):
                raise WriteConflictError(f"{path} has changed") from None
            raise


class GcsObjects:
    """Objects in Google Cloud Storage, by its JSON interface."""

    atomic = True

    def __init__(self, address: str) -> None:
        import google.auth
        from google.auth.credentials import AnonymousCredentials
        from google.auth.transport.requests import AuthorizedSession

        parsed = urlparse(address)
        query = {name: values[-1] for name, values in parse_qs(parsed.query).items()}
        endpoint = query.get("endpoint_override", "storage.googleapis.com")
        self._base = f"{query.get('scheme', 'https')}://{endpoint}"
        if parsed.username == "anonymous":
            credentials: Any = AnonymousCredentials()
        else:
            scopes = ["https://www.googleapis.com/auth/devstorage.read_write"]
            credentials, _ = google.auth.default(scopes)
        self._session: Any = AuthorizedSession(credentials)

    def read(self, path: str) -> StoredObject | None:
        """Return an object, with its generation."""
        bucket, _, key = path.partition("/")
        url = f"{self._base}/storage/v1/b/{bucket}/o/{quote(key, safe='')}"
        response = self._session.get(url, params={"alt": "media"}, timeout=60)
        if response.status_code == 404:
            return None
        response.raise_for_status()
        return StoredObject(response.content, response.headers["x-goog-generation"])

    def write(self, path: str, content: bytes, tag: str | None) -> str:
        """Write an object by a request with ifGenerationMatch, 0 for one that is new."""
        bucket, _, key = path.partition("/")
        response = self._session.post(
            f"{self._base}/upload/storage/v1/b/{bucket}/o",
            params={"uploadType": "media", "name": key, "ifGenerationMatch": tag or "0"},
            data=content,
            timeout=600,
        )
        if response.status_code == 412 or (response.status_code == 404 and tag is not None):
            raise WriteConflictError(f"{path} has changed")
        response.raise_for_status()
        return str(response.json()["generation"])


def conditional_objects(filesystem: Any, root: str, address: str) -> ConditionalObjects:
    """Return the objects at an address, with the store's own conditions where it keeps them.

    The store is tested once: of two writes of one new object it must refuse the second.

    Args:
        filesystem: pyarrow's.
        root: Path in it.
        address: The `storage` setting.
    """
    objects: ConditionalObjects | None = None
    scheme = urlparse(address).scheme
    # No package for it, no credentials that it takes, a store without such requests: by comparison
    with contextlib.suppress(Exception):
        if scheme == "s3":
            objects = S3Objects(filesystem, address)
        elif scheme in ("gs", "gcs"):
            objects = GcsObjects(address)
        if objects is not None and _refuses_a_second(objects, filesystem, root):
            return objects
    return ComparedObjects(filesystem)


def _refuses_a_second(objects: ConditionalObjects, filesystem: Any, root: str) -> bool:
    probe = f"{root}/.headfold-probe-{uuid.uuid4().hex}"
    objects.write(probe, b"", None)
    try:
        objects.write(probe, b"", None)
    except WriteConflictError:
        return True
    finally:
        filesystem.delete_file(probe)
    return False


def write_object(filesystem: Any, path: str, content: bytes) -> None:
    """Write an object, whether it exists or not."""
    with open_object(filesystem, path) as stream:
        stream.write(content)


def open_object(filesystem: Any, path: str) -> Any:
    """Return a stream to an object; object stores need no folders."""
    if filesystem.type_name not in ("s3", "gcs"):
        filesystem.create_dir(str(PurePosixPath(path).parent), recursive=True)
    return filesystem.open_output_stream(path)
