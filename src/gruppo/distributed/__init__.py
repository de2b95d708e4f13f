"""Ranks: reductions over a process group or device mesh."""
