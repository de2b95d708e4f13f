"""Each rule fires on a run in which its fault was really made, and none on healthy runs."""

import re
from pathlib import Path

import pytest
from real_runs import FAULTS, HEALTHY, LEARNS_ALL_THE_SAME, healthy
from safetensors.torch import load_file

from gruppo.doctor import findings, state_line, summary

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what starts a worker process
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_real_fault_is_found(fault: str, tmp_path: Path, record_property) -> None:
    rules, make = FAULTS[fault]
    first, *others = rules.split()
    state, found = summary(make(tmp_path / "run"))
    record_property("doctor", f"{fault:66} {state.name:10} {', '.join(each.rule for each in found)}\n    {state.text}")
    assert found and found[0].rule == first, (state, found)
    assert {each.rule for each in found} >= {*others}
    assert "it learned" not in state.text or fault in LEARNS_ALL_THE_SAME, state


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_run_has_no_finding_and_learned(name: str, tmp_path: Path, record_property) -> None:
    state, found = summary(healthy(name, tmp_path / "run"))
    rules = ", ".join(each.rule for each in found) or "nothing"
    record_property("doctor", f"{name:66} {state.name:10} {rules}\n    {state.text}")
    assert found == []
    assert state.name == "finished", state
    assert ("it learned" in state.text) == (name not in ("a reward without right or wrong", "share of right digits"))


def test_updates_that_the_rule_calls_lost_changed_no_weight(tmp_path: Path) -> None:
    """The rule estimates from the optimizer's state; the weights of two checkpoints tell whether it is right."""
    from real_runs import trained

    run = trained(tmp_path / "lost", lr=1e-10, save_every=6)
    first, last = (load_file(run.path / "checkpoints" / f"step-{n:06d}" / "weights.safetensors") for n in (6, 12))
    equal = sum(int((first[name] == last[name]).sum()) for name in first) / sum(w.numel() for w in first.values())
    (found,) = findings(run)
    assert found.rule == "precision_lost" and equal > 0.9
    (share,) = re.findall(r"(\d+)% of the updates", found.evidence)
    assert abs(int(share) / 100 - equal) < 0.1


def test_a_policy_that_was_ruined_is_called_collapsed(tmp_path: Path) -> None:
    from real_runs import trained

    run = trained(tmp_path / "run", lr=2e-2, steps=40, warmup_steps=20)
    assert state_line(run).name == "collapsed"
