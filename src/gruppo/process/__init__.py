"""Processes: streams that never end a run, child processes, and objects by name."""
