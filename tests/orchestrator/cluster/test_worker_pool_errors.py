"""What the pool makes of the errors of a group: by their types others decide whether a failure counts."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorDiedError
from ray.train import WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from orchestrator.cluster import worker_pool
from orchestrator.cluster.session import last_error
from orchestrator.training.run import lost
from trainers.jobs.checkpoints import AddressAwayError, CheckpointNotSentError
from trainers.jobs.memory import MicroBatchLoweredError

GONE = WorkerHealthCheckFailedError("A worker health check failed.\nWorker info: ...", failure=ActorDiedError())


def message(*failures: Exception) -> str:
    return worker_pool._error_message(WorkerGroupError("failed", dict(enumerate(failures))))


@pytest.mark.parametrize(
    ("failures", "was_lost"),
    [
        ([GONE], True),
        ([GONE, RuntimeError("NCCL error: remote process exited")], True),
        ([RuntimeError("Connection reset by peer"), GONE], True),
        ([CheckpointNotSentError("the address does not answer")], True),
        ([AddressAwayError("the address does not answer")], True),
        ([ValueError("the loss is not finite"), RuntimeError("Connection closed by peer")], False),
        ([RuntimeError("Connection closed by peer"), ValueError("a\nlong\ntext")], False),
    ],
    ids=["node", "node-first", "node-last", "storage", "address", "own-first", "own-last"],
)
def test_lost_machines_are_no_failures_of_the_training(failures: list[Exception], was_lost: bool) -> None:
    ended = last_error(message(*failures))
    assert lost(ended) is was_lost
    if not was_lost:
        assert ended.startswith("ValueError: ")


def test_a_smaller_micro_batch_is_no_failure() -> None:
    lowered = MicroBatchLoweredError("rank 3: CUDA out of memory")
    error = WorkerGroupError("failed", {0: RuntimeError("Connection closed by peer"), 3: lowered})
    assert worker_pool._is_excused(error, worker_pool._error_message(error))
    other = WorkerGroupError("failed", {0: ValueError("the loss is not finite")})
    assert not worker_pool._is_excused(other, worker_pool._error_message(other))


def test_an_error_of_the_start_is_one_line() -> None:
    text = "Training failed due to controller error:\nOne of the worker actors failed to initialize\n\nx"
    error = last_error(worker_pool._error_message(RuntimeError(text)))
    assert lost(error) and "worker actors failed to initialize" in error
