"""A bucket on a fake of S3 (moto) that speaks its protocol over HTTP."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

SETTINGS = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_EC2_METADATA_DISABLED": "true"}


@contextmanager
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a folder in it, for this process and those that it starts."""
    from orchestrator.storage.mirror import open_address

    server_of = pytest.importorskip("moto.server")
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    server = server_of.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        settings = f"scheme=http&endpoint_override={host}:{port}&region=us-east-1&allow_bucket_creation=true"
        name = f"headfold-test-{uuid.uuid4().hex[:8]}"  # all of moto's servers in one process have the same buckets
        address = f"s3://{name}/runs?{settings}"
        open_address(address)[0].create_dir(name)
        yield address
    finally:
        server.stop()
