"""The map of a training step: what the script lists is what the page on the flow of data tells."""

import importlib.util
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_the_page_on_the_flow_of_data_names_every_type_that_holds_a_sequence_in_a_step() -> None:
    path = ROOT / "benchmarks" / "step_trace.py"
    spec = importlib.util.spec_from_file_location("step_trace", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["step_trace"] = module
    spec.loader.exec_module(module)
    trace = module.trace_step()
    assert "GRPOTrainer.step" in trace.functions["trainer/trainer.py"]
    page = (ROOT / "docs" / "dataflow.md").read_text(encoding="utf-8")
    assert len(trace.holders) > 3 and not [name for name in trace.holders if f"`{name}`" not in page]
