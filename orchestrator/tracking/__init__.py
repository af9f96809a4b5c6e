"""MLflow: runs, the server on the head node, and the outbox for when it is away."""
