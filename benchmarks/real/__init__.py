"""The whole pipeline on a real public model: `python -m benchmarks.real`."""
