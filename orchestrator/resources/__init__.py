"""What work takes, before it is run: sizes, memory, disk and time, on this machine or on another one."""
