"""What a search needs, before it starts: memory of each process by parts, whether GPUs have as much, disk."""
