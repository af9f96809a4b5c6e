"""What a checkpoint is worth: losses, tasks of lm-evaluation-harness, generated text, long contexts."""
