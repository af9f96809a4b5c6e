"""Pictures of a search and of a checkpoint, for MLflow and for the report: matplotlib figures from plain records."""
