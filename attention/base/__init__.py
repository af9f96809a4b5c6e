"""What every package uses and nothing of which is about attention.

Progress, messages, times, memory of the process.
"""
