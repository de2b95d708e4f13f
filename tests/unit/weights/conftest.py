"""Weights are tested with the tiny models of the actor's tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "model"))
