"""What one GPU does with Headfold: `make gpu` measures it in parts that can be resumed, docs/gpu.md shows it."""
