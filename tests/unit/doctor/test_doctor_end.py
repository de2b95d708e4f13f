"""The end of a run: the state line and the findings of the doctor, which never fail it."""

from pathlib import Path
from typing import Any

import pytest

from gruppo import doctor
from gruppo.run.reader import RunReader
from gruppo.trainer import GRPOTrainer, TrainConfig

SMALL: dict[str, Any] = {
    "prompts_per_step": 4,
    "group_size": 4,
    "steps": 10,
    "lr": 1e-4,
    "eval_prompts": 0,
    "tensorboard": False,
    "threads": 1,
}


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_run_ends_with_its_state_and_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = TrainConfig(**SMALL, max_new_tokens=2, output=str(tmp_path / "run"))
    GRPOTrainer(config).train()
    out = printed(capsys)
    state, found = doctor.summary(RunReader(tmp_path / "run"))
    assert [each.rule for each in found] == ["truncation", "too_hard"]
    assert state.text in out
    assert f"problem: {found[0].text}. completion/truncated_frac is 1, above 0.5: raise max_new_tokens" in out
    assert "more: gruppo doctor " in out


def test_a_run_that_fails_is_told_with_its_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(trainer: Any, step: int, metrics: dict[str, float]) -> bool:
        raise ValueError("out of [red]luck")

    config = TrainConfig(**SMALL, max_new_tokens=4, output=str(tmp_path / "run"))
    with pytest.raises(ValueError, match="luck"):
        GRPOTrainer(config, callbacks=[breaks]).train()
    assert "failed before its first step: ValueError: out of [red]luck" in printed(capsys)


def test_a_doctor_that_fails_costs_its_text_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(run: Any) -> Any:
        raise RuntimeError("no diagnosis")

    monkeypatch.setattr(doctor, "summary", breaks)
    config = TrainConfig(**SMALL | {"steps": 1}, max_new_tokens=4, output=str(tmp_path / "run"))
    assert GRPOTrainer(config).train().status == "done"
