"""R-08 to R-10: disks that are full, small or read-only. They are real ones: a tmpfs that only the run sees."""

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_resume import product, tensor_hash, tree_hash
from warm_process import WarmProcess, can_mount, fill, gruppo, mount, on_small_disk

from gruppo.trainer import GRPOTrainer, TrainConfig

pytestmark = pytest.mark.slow

Flags = Callable[..., list[str]]
MIB = 2**20
"""A checkpoint of the embedded model takes about two: 0.7 of weights, the rest of AdamW."""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[Callable[..., WarmProcess]]:
    """Start a function of `warm_process` in a process of its own."""
    started: list[WarmProcess] = []

    def start(target: Callable[..., None], *args: Any) -> WarmProcess:
        started.append(WarmProcess(tmp_path / f"process-{len(started)}.log", target, *args))
        return started[-1]

    yield start
    for each in started:
        each.close()


@pytest.fixture
def disk(tmp_path: Path, process: Callable[..., WarmProcess]) -> Path:
    """A folder on which a process can have a disk of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if process(can_mount, str(folder)).wait():
        pytest.skip("a process may not mount a file system of its own here")
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, short_run: Callable[..., dict[str, Any]]) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    GRPOTrainer(TrainConfig(**short_run(run)), quiet=True).train()
    return run


def on_disk_filled_before(arguments: list[str], disk: str, kept: str, step: int) -> None:
    """The command line on a disk that something else fills before the checkpoint of a step."""
    from gruppo.run.checkpoints import Checkpoints

    save = Checkpoints.save

    def fill_and_save(self: Checkpoints, at: int, *rest: Any) -> None:
        if at == step:
            fill(Path(disk))
        save(self, at, *rest)

    Checkpoints.save = fill_and_save  # pyright: ignore[reportAttributeAccessIssue]
    on_small_disk(arguments, disk, 9 * MIB, kept)


@pytest.mark.row("R-08", "a tmpfs that is full before the third checkpoint")
def test_a_disk_that_is_full_at_a_checkpoint_ends_the_run_with_6_and_with_room_it_goes_on_to_the_same_bits(
    disk: Path, process: Callable[..., WarmProcess], flags: Flags, tmp_path: Path, undisturbed: Path
) -> None:
    kept = tmp_path / "kept"
    words = ["train", *flags(disk / "run")]
    ended = process(on_disk_filled_before, words, str(disk), str(kept), 15)
    assert ended.wait() == 6, ended.output
    assert "No space left on device" in ended.output and "MiB free" in ended.output
    size = sum(p.stat().st_size for p in (kept / "run/checkpoints/step-000010").rglob("*") if p.is_file()) / MIB
    assert f"a checkpoint needs about {size:.1f} MiB; the steps after 10 are lost" in " ".join(ended.output.split())
    assert f"go on from it: gruppo resume {disk}/run" in ended.output
    run = kept / "run"
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-000005", "step-000010"]
    assert json.loads((run / "status.json").read_text())["status"] == "failed"
    assert not (run / "lock").exists()
    resumed = process(gruppo, ["resume", str(run)])
    assert resumed.wait() == 0, resumed.output
    assert "resuming after step 10" in resumed.output
    assert product(run) == product(undisturbed)


def with_file_limit(arguments: list[str], size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    gruppo(arguments)


@pytest.mark.row("R-08", "RLIMIT_FSIZE below the size of the optimizer's file")
def test_a_file_that_may_not_grow_ends_the_run_with_6_and_leaves_no_half_checkpoint(
    process: Callable[..., WarmProcess], flags: Flags, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = process(with_file_limit, ["train", *flags(run)], 1_000_000)
    assert ended.wait() == 6, ended.output
    assert "File too large" in ended.output and "Traceback" not in ended.output
    assert list((run / "checkpoints").iterdir()) == []
    assert json.loads((run / "status.json").read_text())["status"] == "failed"


@pytest.mark.row("R-09", "a tmpfs that is full for some steps")
def test_records_that_find_no_room_are_counted_and_the_run_ends_in_the_same_weights(
    disk: Path, process: Callable[..., WarmProcess], flags: Flags, tmp_path: Path, short_run: Callable[..., Any]
) -> None:
    long = {"steps": 40, "save_every": 1000, "eval_prompts": 0, "completions_every": 1, "prompts_per_step": 2}
    whole = tmp_path / "whole"
    GRPOTrainer(TrainConfig(**short_run(whole, **long)), quiet=True).train()
    kept = tmp_path / "kept"
    words = ["train", *flags(disk / "run", **long)]
    ended = process(on_small_disk_filled, words, str(disk), 16 * MIB, str(kept))
    assert ended.wait() == 0, ended.output
    assert ended.output.count("the run goes on without such records") == 1
    lines = [json.loads(line) for line in (kept / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 40 and lines[-1]["log/dropped"] >= 3
    assert tensor_hash(kept / "run" / "model") == tensor_hash(whole / "model")


def on_small_disk_filled(arguments: list[str], disk: str, size: int, kept: str) -> None:
    on_small_disk(arguments, disk, size, kept, fill_after=10)


@pytest.mark.row("R-10", "a tmpfs with room for one file")
def test_a_disk_without_room_for_a_run_is_named_and_nothing_is_left(
    disk: Path, process: Callable[..., WarmProcess], flags: Flags, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    ended = process(on_small_disk, ["train", *flags(disk / "run")], str(disk), 4096, str(kept))
    assert ended.wait() == 2, ended.output
    assert f"output='{disk}/run' cannot be written" in ended.output and "No space left" in ended.output
    assert "Traceback" not in ended.output
    assert list(kept.iterdir()) == []


@pytest.mark.row("R-10", "a tmpfs too small for the checkpoints of the run")
@pytest.mark.parametrize("size", [1 * MIB, 5 * MIB])
def test_a_disk_too_small_for_a_run_is_named_before_the_first_step(
    size: int, disk: Path, process: Callable[..., WarmProcess], flags: Flags, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    ended = process(on_small_disk, ["train", *flags(disk / "run")], str(disk), size, str(kept))
    assert ended.wait() == 2, ended.output
    said = " ".join(ended.output.split())
    # 166,336 parameters of 4 bytes, three times: weights and two moments; 3 of them, the model, 4 files of completions
    assert "the run writes up to 6.4 MiB there: 3 checkpoint(s) of 1.9 MiB (keep_checkpoints=2" in said
    assert "0.6 MiB of models, 0.1 MiB of completions (completions_every=5, max_new_tokens=4)" in said
    assert f"output='{disk}/run' is on a disk with {size // MIB}.0 MiB free" in said and "choose another output" in said
    assert list(kept.iterdir()) == []


@pytest.mark.row("R-10", "a tmpfs too small to go on")
def test_a_disk_too_small_to_go_on_is_named_and_nothing_is_changed(
    disk: Path, process: Callable[..., WarmProcess], tmp_path: Path, undisturbed: Path
) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(undisturbed, kept / "run")
    before = tree_hash(kept)
    ended = process(resume_on_small_disk, ["resume", f"{disk}/run", "--steps", "30"], str(disk), str(kept))
    assert ended.wait() == 2, ended.output
    said = " ".join(ended.output.split())
    # Two checkpoints are there: one more, the model again, 2 files of completions
    assert "the run writes up to 2.6 MiB there: 1 checkpoint(s) of 1.9 MiB" in said
    assert tree_hash(tmp_path / "after") == before


def resume_on_small_disk(arguments: list[str], disk: str, kept: str) -> None:
    """The command line on a disk that holds a copy of `kept` and has 1 MiB more; what is on it at the end is copied."""
    size = sum(-(-path.stat().st_size // 4096) * 4096 for path in Path(kept).rglob("*") if path.is_file())
    on_small_disk(arguments, disk, size + MIB, str(Path(kept).parent / "after"), filled_from=kept)


@pytest.mark.row("R-10", "a tmpfs with just enough room")
def test_what_is_estimated_is_what_a_run_writes(
    disk: Path, process: Callable[..., WarmProcess], flags: Flags, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    ended = process(on_small_disk, ["train", *flags(disk / "run")], str(disk), 7 * MIB, str(kept))
    assert ended.wait() == 0, ended.output
    written = sum(path.stat().st_size for path in (kept / "run").rglob("*") if path.is_file())
    assert written / MIB == pytest.approx(2 * 1.9 + 0.6 + 0.1, abs=0.2)  # the third checkpoint was there for a moment


def on_full_disk(arguments: list[str], disk: str, kept: str) -> None:
    """The command line on a disk that holds a copy of `kept` and is full; what is on it at the end is copied."""
    from gruppo.cli.main import main

    mount(disk, f"size={16 * MIB}")
    shutil.copytree(kept, disk, dirs_exist_ok=True)
    fill(Path(disk))
    try:
        main(list(arguments))
    finally:
        (Path(disk) / "filler").unlink()
        shutil.copytree(disk, Path(kept).parent / "after")


@pytest.mark.row("R-08", "eval and report where a full or read-only disk holds the run")
@pytest.mark.parametrize("state", ["full", "read-only"])
def test_a_disk_that_takes_no_file_costs_neither_the_numbers_of_an_evaluation_nor_earlier_files(
    state: str, disk: Path, process: Callable[..., WarmProcess], tmp_path: Path, undisturbed: Path
) -> None:
    begin, reason = (on_full_disk, "No space left") if state == "full" else (on_read_only_disk, "Read-only file system")
    for name, words in (("eval.parquet", ["eval", f"{disk}/run"]), ("report.html", ["report", f"{disk}/run"])):
        kept = tmp_path / name / "kept"
        shutil.copytree(undisturbed, kept / "run")
        (kept / "run" / name).write_text("of last week")
        ended = process(begin, words, str(disk), str(kept))
        assert ended.wait() == 2, ended.output
        assert reason in ended.output and "Traceback" not in ended.output
        assert name != "eval.parquet" or "95 % interval" in ended.output
        after = tmp_path / name / "after" if state == "full" else kept
        assert (after / "run" / name).read_text() == "of last week"


def on_read_only_disk(arguments: list[str], disk: str, kept: str) -> None:
    on_small_disk(arguments, disk, 64 * MIB, kept, read_only=True)


@pytest.mark.row("R-10", "a disk that is mounted read-only")
@pytest.mark.parametrize(
    "verb",
    [
        "train",
        "resume",
    ],
)
def test_a_read_only_disk_is_named(
    verb: str, disk: Path, process: Callable[..., WarmProcess], flags: Flags, tmp_path: Path, undisturbed: Path
) -> None:
    kept = tmp_path / "kept"
    shutil.copytree(undisturbed, kept / "run")
    before = tree_hash(kept)
    words = ["train", *flags(disk / "new")] if verb == "train" else ["resume", f"{disk}/run", "--steps", "30"]
    ended = process(on_read_only_disk, words, str(disk), str(kept))
    assert ended.wait() == 2, ended.output
    assert "Read-only file system" in ended.output and "Traceback" not in ended.output
    assert tree_hash(kept) == before
