"""MLflow: runs of searches, its server on the head node, its page; gauges in Ray's metrics."""
