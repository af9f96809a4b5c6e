"""MLflow: runs, what they are to hold, and the server on the head node; gauges in Ray's metrics."""
