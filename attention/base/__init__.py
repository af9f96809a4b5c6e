"""What every package uses and nothing of which is about attention: progress, messages, times, memory of the process."""
