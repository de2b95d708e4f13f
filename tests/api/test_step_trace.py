"""How much of the code a training step runs through: the limits that keep it readable in an afternoon."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_a_default_step_runs_through_at_most_30_files_150_functions_and_6_types_that_hold_a_sequence() -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "step_trace.py"
    spec = importlib.util.spec_from_file_location("step_trace", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["step_trace"] = module
    spec.loader.exec_module(module)
    trace = module.trace_step()
    assert len(trace.functions) <= 30, trace
    assert sum(map(len, trace.functions.values())) <= 150, trace
    assert trace.holders == ["Trajectory", "Rollout", "Group", "PackedBatch", "StepPlan", "LossInputs"]
