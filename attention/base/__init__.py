"""Shared helpers of all packages that are not specific to attention.

Progress, messages, times, memory of the process.
"""
