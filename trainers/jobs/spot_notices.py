"""The notice of a cloud that it takes a machine away, turned into a drain of the Ray node.

Ray reads no such notice itself. So one worker on each node of a training polls the metadata server
of its machine every other second; this starts nothing on the nodes, and no process that would keep
an idle one alive. At a notice the workers save a checkpoint, and Ray is requested to drain the node
within the remaining time: nothing new is placed there, and its loss does not count as a failure.

Kubernetes gives its notice to a hook of the container instead (preStop), within the pod's
`terminationGracePeriodSeconds`: `python -m trainers.jobs.spot_notices --seconds 100`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

import psutil

logger = logging.getLogger(__name__)

POLL_SECONDS = 2.0
_ANSWER_SECONDS = 1.0
_TRIES = 3
"""Times that a metadata server is looked for, in all."""
_LINK_LOCAL = "http://169.254.169.254"
_GCE_SECONDS = 30.0
_GCE_MAINTENANCE_SECONDS = 3600.0
_TOKEN_SECONDS = 21600
_NO_ANSWER = (OSError, ValueError, KeyError, HTTPException)


@dataclass(frozen=True)
class Notice:
    """The announcement of a machine's end.

    Attributes:
        seconds: Until then.
        source: Who has said so, in words.
    """

    seconds: float
    source: str


def ec2_notice() -> Notice | None:
    """Ask the metadata service of EC2, version 2.

    Raises:
        OSError: Where there is none.
    """
    base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", _LINK_LOCAL).rstrip("/")
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_SECONDS)}
    token = _answer(f"{base}/latest/api/token", ttl, method="PUT")
    if not token:
        raise OSError("the metadata service gives no token")
    action = _answer(
        f"{base}/latest/meta-data/spot/instance-action", {"X-aws-ec2-metadata-token": token}
    )
    if not action:
        return None
    record = json.loads(action)
    until = datetime.fromisoformat(record["time"].replace("Z", "+00:00"))
    return Notice(_seconds_until(until), f"EC2: {record['action']}")


def gce_notice() -> Notice | None:
    """Ask the metadata server of Google Compute Engine.

    Raises:
        OSError: Where there is none.
    """
    host = os.environ.get("GCE_METADATA_HOST", "metadata.google.internal")
    base, header = f"http://{host}/computeMetadata/v1/instance", {"Metadata-Flavor": "Google"}
    preempted = _answer(f"{base}/preempted", header)
    if preempted is None:
        raise OSError("the metadata server does not know this machine")
    if preempted.strip() == "TRUE":
        return Notice(_GCE_SECONDS, "GCE: preempted")
    # A machine with a GPU does not move to another host: it is ended, an hour later
    maintenance = (_answer(f"{base}/maintenance-event", header) or "NONE").strip()
    if maintenance.startswith("TERMINATE"):
        return Notice(_GCE_MAINTENANCE_SECONDS, f"GCE: {maintenance}")
    return None


def azure_notice() -> Notice | None:
    """Ask Azure's metadata service for scheduled events of this machine.

    HEADFOLD_AZURE_METADATA is another address of it, since Azure has no variable for that.

    Raises:
        OSError: Where there is none.
    """
    name = _azure("instance/compute/name?api-version=2021-02-01&format=text")
    events = _azure("scheduledevents?api-version=2020-07-01")
    for event in json.loads(events)["Events"]:
        ends = event["EventType"] in ("Preempt", "Terminate")
        if ends and name.strip() in event.get("Resources", ()):
            when = event.get("NotBefore")
            seconds = _seconds_until(parsedate_to_datetime(when)) if when else 0.0
            return Notice(seconds, f"Azure: {event['EventType']}")
    return None


def on_azure() -> None:
    """Ask Azure's metadata service for the name of this machine alone.

    The first question for events, which switches them on, may take two minutes to be answered.

    Raises:
        OSError: Where there is none.
    """
    _azure("instance/compute/name?api-version=2021-02-01&format=text")


def _azure(path: str) -> str:
    base = os.environ.get("HEADFOLD_AZURE_METADATA", _LINK_LOCAL).rstrip("/")
    answer = _answer(f"{base}/metadata/{path}", {"Metadata": "true"})
    if answer is None:
        raise OSError("the metadata service does not know this machine")
    return answer


class Cloud(NamedTuple):
    """The questions for a cloud's metadata service.

    Attributes:
        recognise: Raises an error on a machine of another cloud.
        notice: Returns the notice, if there is one.
    """

    recognise: Callable[[], object]
    notice: Callable[[], Notice | None]


CLOUDS: Mapping[str, Cloud] = {
    "EC2": Cloud(ec2_notice, ec2_notice),
    "GCE": Cloud(gce_notice, gce_notice),
    "Azure": Cloud(on_azure, azure_notice),
}


def _answer(url: str, headers: Mapping[str, str], method: str = "GET") -> str | None:
    """Return what a metadata server answers; None for what it does not have.

    Raises:
        OSError: If it does not answer.
    """
    request = urllib.request.Request(url, headers=dict(headers), method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_SECONDS) as stream:
            return stream.read().decode()
    except urllib.error.HTTPError as error:
        if error.code >= 500:
            raise
        return None


def _seconds_until(when: datetime) -> float:
    return max(0.0, when.timestamp() - time.time())


# ---- on a node of a training ---------------------------------------------------------------------


class NoticeWatch:
    """Watches for the notice of this machine's cloud, in a thread, until the process ends.

    Args:
        on_notice: Called once with the first notice, in that thread.
    """

    def __init__(self, on_notice: Callable[[Notice], object]) -> None:
        self.seen = threading.Event()
        self._on_notice = on_notice
        self.thread = threading.Thread(target=self._watch, name="headfold-spot-notice", daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        ask = self._cloud()
        while ask is not None:
            notice = None
            with contextlib.suppress(*_NO_ANSWER):  # it may be away for a while
                notice = ask()
            if notice is not None:
                self.seen.set()  # first, so that workers save their state during the call of Ray
                self._on_notice(notice)
                return
            time.sleep(POLL_SECONDS)

    def _cloud(self) -> Callable[[], Notice | None] | None:
        """Return the metadata service of this machine; None outside of the clouds."""
        for attempt in range(_TRIES):
            for cloud in CLOUDS.values():
                with contextlib.suppress(*_NO_ANSWER):
                    cloud.recognise()
                    return cloud.notice
            if attempt + 1 < _TRIES:
                time.sleep(POLL_SECONDS)
        return None


def drain_node(notice: Notice, address: str | None = None, node_id: str | None = None) -> bool:
    """Request Ray to drain a node, by its command line.

    Args:
        notice: Why, and when.
        address: Of the cluster; None: that of this machine's Ray.
        node_id: Of the node; None: this machine's.

    Returns:
        Whether the request succeeded.
    """
    ray = Path(sys.executable).with_name("ray")
    command = [str(ray) if ray.exists() else "ray", "drain-node"]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION"]
    command += ["--address", address] if address else []
    command += ["--node-id", node_id] if node_id else []
    command += ["--reason-message", notice.source]
    command += ["--deadline-remaining-seconds", str(int(notice.seconds))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["unknown error"])[-1]
        logger.warning("%s: the node cannot be drained: %s", notice.source, last)
    else:
        logger.warning(
            "%s: the node goes in %.0f s; a checkpoint is saved", notice.source, notice.seconds
        )
    return done.returncode == 0


# ---- in a hook of a container --------------------------------------------------------------------


def leave_container() -> int:
    """Drain the Ray node of this container, and wait while its workers save a checkpoint."""
    parser = argparse.ArgumentParser(description=leave_container.__doc__)
    parser.add_argument(
        "--seconds", type=float, required=True, help="Until the container is killed."
    )
    seconds: float = parser.parse_args().seconds
    started = time.monotonic()
    if not drain_node(Notice(seconds, "the container is stopped")):
        return 1
    while _trains_here() and time.monotonic() - started < seconds:
        time.sleep(1.0)
    return 0


def _trains_here() -> bool:
    """Whether a training's worker runs in this container; an idle one is released at once."""
    titles = (" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))
    return any("ray::RayTrainWorker" in title for title in titles)


if __name__ == "__main__":
    sys.exit(leave_container())
