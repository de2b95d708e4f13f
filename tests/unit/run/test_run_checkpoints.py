"""Checkpoints: the newest whole one is resumed from, the oldest go, and nothing starts over silently."""

import json
from pathlib import Path

import pytest

from gruppo.errors import CheckpointError
from gruppo.run.checkpoints import Checkpoints


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def save(checkpoints: Checkpoints, step: int, text: str = "x") -> None:
    checkpoints.save(step, lambda folder: (folder / "state").write_text(text) and None)


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_the_newest_stay(checkpoints: Checkpoints) -> None:
    for step in (5, 999_999, 1_000_000):  # by number: as names, the last would be the first to go
        save(checkpoints, step)
    assert names(checkpoints) == ["step-1000000", "step-999999"]
    assert checkpoints.newest().name == "step-1000000"
    facts = json.loads((checkpoints.newest() / "manifest.json").read_text())
    assert (facts["kind"], facts["step"]) == ("training", 1_000_000)


def test_one_that_is_there_is_not_written_again_unless_it_is_damaged(checkpoints: Checkpoints) -> None:
    save(checkpoints, 5, "first")
    save(checkpoints, 5, "second")
    assert (checkpoints.newest() / "state").read_text() == "first"
    (checkpoints.newest() / "manifest.json").unlink()
    save(checkpoints, 5, "third")
    assert (checkpoints.newest() / "state").read_text() == "third"


def test_one_that_is_not_whole_is_skipped_with_the_reason(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    save(checkpoints, 5)
    save(checkpoints, 10)
    (checkpoints.folder / "step-000010" / "manifest.json").unlink()
    assert checkpoints.newest().name == "step-000005"
    (record,) = caplog.records
    assert record.getMessage().startswith("skipping a checkpoint: ")
    assert "step-000010 has no manifest.json: it was never finished" in record.getMessage()


def test_without_a_whole_one_nothing_starts_over(checkpoints: Checkpoints) -> None:
    assert checkpoints.newest() is None
    save(checkpoints, 5)
    (checkpoints.folder / "step-000005" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints in .* is whole; nothing was changed"):
        checkpoints.newest()


def test_folders_of_other_names_are_left_alone(checkpoints: Checkpoints) -> None:
    (checkpoints.folder / "step-best").mkdir(parents=True)
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert names(checkpoints) == ["step-000002", "step-000003", "step-best"]
