"""Checkpoints: the newest whole one is resumed from, the oldest go, and nothing starts over silently."""

import json
import shutil
from pathlib import Path

import pytest

from gruppo.errors import CheckpointError
from gruppo.run.checkpoints import Checkpoints


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", keep=2)


def save(checkpoints: Checkpoints, step: int, text: str = "x") -> None:
    checkpoints.save(step, lambda folder: (folder / "state").write_text(text) and None)


def newest(checkpoints: Checkpoints) -> Path | None:
    return checkpoints.load(lambda folder: folder)


def names(checkpoints: Checkpoints) -> list[str]:
    return sorted(path.name for path in checkpoints.folder.iterdir())


def test_the_newest_stay(checkpoints: Checkpoints) -> None:
    for step in (5, 999_999, 1_000_000):  # by number: as names, the last would be the first to go
        save(checkpoints, step)
    assert names(checkpoints) == ["step-1000000", "step-999999"]
    assert newest(checkpoints).name == "step-1000000"
    facts = json.loads((newest(checkpoints) / "manifest.json").read_text())
    assert (facts["kind"], facts["step"]) == ("training", 1_000_000)


def test_one_that_is_there_is_not_written_again_unless_it_is_damaged(checkpoints: Checkpoints) -> None:
    save(checkpoints, 5, "first")
    save(checkpoints, 5, "second")
    assert (newest(checkpoints) / "state").read_text() == "first"
    (newest(checkpoints) / "manifest.json").unlink()
    save(checkpoints, 5, "third")
    assert (newest(checkpoints) / "state").read_text() == "third"


def test_one_that_is_not_whole_is_skipped_with_the_reason(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    save(checkpoints, 5)
    save(checkpoints, 10)
    (checkpoints.folder / "step-000010" / "manifest.json").unlink()
    assert newest(checkpoints).name == "step-000005"
    (record,) = caplog.records
    assert record.getMessage().startswith("skipping a checkpoint: ")
    assert "step-000010 has no manifest.json: it was never finished" in record.getMessage()


def test_without_a_whole_one_nothing_starts_over(checkpoints: Checkpoints) -> None:
    assert newest(checkpoints) is None
    save(checkpoints, 5)
    (checkpoints.folder / "step-000005" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoints in .* is whole; nothing was changed"):
        newest(checkpoints)


def test_folders_of_other_names_are_left_alone(checkpoints: Checkpoints) -> None:
    (checkpoints.folder / "step-best").mkdir(parents=True)
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert names(checkpoints) == ["step-000002", "step-000003", "step-best"]


# --- pruning ------------------------------------------------------------------------------------------------------


def test_the_one_just_saved_stays_beside_a_damaged_later_one(tmp_path: Path) -> None:
    before = Checkpoints(tmp_path / "checkpoints", keep=2)
    save(before, 10)
    save(before, 20)  # killed before the pruning that keep=1 would bring
    (tmp_path / "checkpoints" / "step-000020" / "state").write_text("damaged")
    after = Checkpoints(tmp_path / "checkpoints", keep=1)
    assert newest(after).name == "step-000010"
    save(after, 11)
    assert names(after) == ["step-000011", "step-000020"]
    assert newest(after).name == "step-000011"


@pytest.mark.parametrize("stray", ["file", "empty folder", "other manifest", "link", "parquet"])
def test_what_is_not_ours_neither_goes_nor_counts(stray: str, checkpoints: Checkpoints, tmp_path: Path) -> None:
    checkpoints.folder.mkdir()
    (checkpoints.folder / "step-000001.bak").mkdir()
    (checkpoints.folder / "step-7").mkdir()
    path = checkpoints.folder / "step-000001"
    if stray == "file":
        path.write_text("notes")
    elif stray == "link":
        save(Checkpoints(tmp_path / "foreign", keep=1), 1)
        path.symlink_to(tmp_path / "foreign" / "step-000001")
    elif stray == "parquet":
        path = path.with_suffix(".parquet")
        path.write_text("x")
    else:
        path.mkdir()
        if stray == "other manifest":
            (path / "manifest.json").write_text(json.dumps({"kind": "model", "files": {}}))
    for step in (2, 3, 4):
        save(checkpoints, step)
    assert names(checkpoints) == sorted([path.name, "step-000001.bak", "step-000003", "step-000004", "step-7"])


def test_a_later_stray_does_not_push_the_newest_out(checkpoints: Checkpoints) -> None:
    (checkpoints.folder / "step-000099").mkdir(parents=True)
    (checkpoints.folder / "step-notes.txt").write_text("mine")
    only = Checkpoints(checkpoints.folder, keep=1)
    for step in (1, 2):
        save(only, step)
    assert names(only) == ["step-000002", "step-000099", "step-notes.txt"]


def test_what_is_in_the_way_of_a_checkpoint_is_moved_and_not_deleted(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints.folder.mkdir()
    (checkpoints.folder / "step-000005").write_text("mine")
    save(checkpoints, 5)
    assert newest(checkpoints).name == "step-000005"
    (moved,) = checkpoints.folder.glob("damaged-*")
    assert moved.read_text() == "mine" and moved.name in caplog.text


def test_a_later_one_that_was_refused_is_written_again(checkpoints: Checkpoints) -> None:
    save(checkpoints, 5)
    save(checkpoints, 10, "refused")

    def read(folder: Path) -> str:
        if (folder / "state").read_text() == "refused":
            raise CheckpointError(f"{folder} holds NaN")
        return folder.name

    later = Checkpoints(checkpoints.folder, keep=2)
    assert later.load(read) == "step-000005"
    save(later, 10, "good")
    assert later.load(read) == "step-000010"


def test_folders_behind_a_link_are_not_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = Checkpoints(tmp_path / "other", keep=9)
    save(other, 1)
    (tmp_path / "checkpoints").symlink_to(tmp_path / "other")
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    for step in (2, 3):
        save(checkpoints, step)
    assert names(checkpoints) == ["step-000001", "step-000002", "step-000003"]
    assert caplog.text.count("the folder is a link") == 1


def test_an_old_one_that_cannot_be_deleted_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    save(checkpoints, 1)
    rename, rmtree = Path.rename, shutil.rmtree

    def busy(path: Path, target: Path) -> Path:
        if path.name == "step-000001":
            raise OSError(16, "Device or resource busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", busy)
    save(checkpoints, 2)
    save(checkpoints, 3)
    monkeypatch.undo()
    assert names(checkpoints) == ["step-000001", "step-000003"]
    assert caplog.text.count("cannot be deleted and stay: [Errno 16] Device or resource busy") == 1

    def busy_inside(path: Path, **options: bool) -> None:
        if not options.get("ignore_errors"):
            raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(shutil, "rmtree", busy_inside)
    save(checkpoints, 4)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    assert newest(checkpoints).name == "step-000004"
    save(checkpoints, 5)
    assert names(checkpoints) == ["step-000005"]  # what was half-deleted goes with the next


def test_a_manifest_that_names_nothing_or_another_step_is_no_checkpoint(checkpoints: Checkpoints) -> None:
    for step in (5, 10, 15):
        save(Checkpoints(checkpoints.folder, keep=9), step)
    (checkpoints.folder / "step-000015" / "manifest.json").write_text('{"kind": "training", "step": 15, "files": {}}')
    manifest = checkpoints.folder / "step-000010" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 10', '"step": 9'))
    assert newest(checkpoints).name == "step-000005"
