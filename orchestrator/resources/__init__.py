"""Estimates of work before it runs: size, memory, disk and time, on this machine or another."""
