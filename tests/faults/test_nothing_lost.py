"""R-06, R-08, R-16, R-30, R-45, R-52: what a run has learned stays, goes on from the same origin, and has a true
status."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_resume import damage, exit_code, product, tree_hash
from warm_process import WarmProcess, gruppo

from gruppo.run.reader import RunReader
from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.weights.files import read_manifest

pytestmark = pytest.mark.slow

Start = Callable[..., WarmProcess]
Flags = Callable[..., list[str]]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, short_run: Callable[..., dict[str, Any]]) -> Path:
    """A run that nothing disturbed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    GRPOTrainer(TrainConfig(**short_run(run)), quiet=True).train()
    return run


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, short_run: Callable[..., dict[str, Any]]) -> Path:
    """A run with an adapter on a base in a folder of its own, stopped after step 12 of 20."""
    from gruppo.weights.source import resolve

    folder = tmp_path_factory.mktemp("adapted")
    shutil.copytree(resolve("builtin"), folder / "base")
    options = short_run(folder / "run", lora=True, model=str(folder / "base"), steps=12)
    GRPOTrainer(TrainConfig(**options), quiet=True).train()
    return folder


def steps_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def status_in(run: Path) -> str:
    return json.loads((run / "status.json").read_text())["status"]


def resign(checkpoint: Path, name: str) -> None:
    """Give a changed file its right size and hash in the manifest."""
    import hashlib

    manifest = json.loads((checkpoint / "manifest.json").read_text())
    content = (checkpoint / name).read_bytes()
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


# --- pruning ------------------------------------------------------------------------------------------------------


def die_before_pruning(words: list[str], step: int) -> None:
    from gruppo.weights import files

    flush = files._flush

    def flush_and_die(path: Path) -> None:  # the last operation of a commit: the new name is on disk
        flush(path)
        if path.name == "checkpoints" and (path / f"step-{step:06d}").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    files._flush = flush_and_die
    gruppo(words)


def test_a_run_past_a_damaged_checkpoint_keeps_the_one_that_a_signal_made_it_save(
    whole: Path, start: Start, flags: Flags, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = WarmProcess(tmp_path / "log", die_before_pruning, ["train", *flags(run, keep_checkpoints=1)], 10)
    assert process.wait() == -signal.SIGKILL
    process.close()
    assert steps_in(run) == ["step-000005", "step-000010"]
    damage(run / "checkpoints" / "step-000010", "flip a bit")
    assert start(["resume", str(run)], ("recorded", 6, "term")).wait() == 75
    assert steps_in(run) == ["step-000006", "step-000010"]
    read_manifest(run / "checkpoints" / "step-000006")
    last = start(["resume", str(run)])
    assert last.wait() == 0 and "resuming after step 6" in last.output
    assert product(run) == product(whole)
    assert [name for name in steps_in(run) if name.startswith("step-")] == ["step-000020"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a disk, which needs root")
def test_an_old_checkpoint_that_is_busy_does_not_end_the_run(
    short_run: Callable[..., dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    busy = run / "checkpoints" / "step-000001" / "busy"

    def mount(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            busy.mkdir()
            if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", busy], capture_output=True).returncode:
                pytest.skip("a tmpfs cannot be mounted here")

    options = short_run(run, steps=4, save_every=1, keep_checkpoints=1, eval_prompts=0)
    try:
        assert GRPOTrainer(TrainConfig(**options), quiet=True, callbacks=[mount]).train().status == "done"
    finally:
        for left in (run / "checkpoints").glob(".step-000001.*/busy"):
            subprocess.run(["umount", left], check=True)
    assert caplog.text.count("cannot be deleted and stay") == 1
    assert [name for name in steps_in(run) if name.startswith("step-")] == ["step-000004"]


# --- the same origin ----------------------------------------------------------------------------------------------


@pytest.fixture
def part(tmp_path: Path, short_run: Callable[..., dict[str, Any]], sums: Path) -> Path:
    """A run that ended at step 5 and may go further, with data of its own."""
    shutil.copy(sums, tmp_path / "sums.jsonl")
    options = short_run(tmp_path / "run", loss="gspo", seed=7, steps=5, data=str(tmp_path / "sums.jsonl"))
    GRPOTrainer(TrainConfig(**options), quiet=True).train()
    return tmp_path / "run"


def test_a_config_that_lost_lines_is_refused_and_what_changed_is_named(
    part: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (part / "config.yaml").read_text().splitlines(keepends=True)
    lost = ("loss:", "seed:", "lr:")
    (part / "config.yaml").write_text("".join(line for line in lines if not line.startswith(lost)))
    before = tree_hash(part)
    assert exit_code(["resume", str(part), "--steps", "6"]) == 2
    message = capsys.readouterr().err
    for change in ("loss 'gspo' -> 'grpo'", "seed 7 -> 0", "lr 0.001 -> None", "--accept-changes"):
        assert change in message
    assert tree_hash(part) == before
    assert exit_code(["resume", str(part), "--steps", "6", "--accept-changes"]) == 0
    (event,) = [event for event in RunReader(part).events() if event["event"] == "changes"]
    assert "seed 7 -> 0" in event["changes"]
    assert exit_code(["resume", str(part), "--steps", "7"]) == 0  # that is what it is made from now


def test_data_that_changed_is_refused(part: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = part.parent / "sums.jsonl"
    rows = data.read_text().splitlines(keepends=True)
    data.write_text("".join(rows[:-20]))
    before = tree_hash(part)
    assert exit_code(["resume", str(part), "--steps", "6"]) == 2
    message = capsys.readouterr().err
    assert f"prompts to train on '{len(rows) - 16} prompts (" in message
    assert f"-> '{len(rows) - 36} prompts (" in message
    assert tree_hash(part) == before
    data.write_text("".join([rows[0].replace('"answer": "', '"answer": "9'), *rows[1:]]))  # as many, one other
    assert exit_code(["resume", str(part), "--steps", "6"]) == 2
    data.write_text("".join(rows))
    assert exit_code(["resume", str(part), "--steps", "6"]) == 0


@pytest.mark.parametrize("named", ["../../elsewhere", "/ABSOLUTE/elsewhere", "~/elsewhere"])
@pytest.mark.row("R-47", "a run directory of a stranger whose config names ../x or an absolute output")
def test_a_run_directory_writes_where_it_lies_whatever_its_config_names(
    named: str, part: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home" / "deep").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "home" / "deep")
    config = part / "config.yaml"
    lines = [line for line in config.read_text().splitlines() if not line.startswith("output:")]
    config.write_text("\n".join([*lines, f"output: {named.replace('/ABSOLUTE', str(tmp_path / 'home'))}", ""]))
    around = {path for path in tmp_path.rglob("*") if not path.is_relative_to(part)}
    assert exit_code(["resume", str(part), "--steps", "6"]) == 0
    assert {path for path in tmp_path.rglob("*") if not path.is_relative_to(part)} == around
    assert RunReader(part).status()["step"] == 6


@pytest.mark.parametrize(("verb", "name"), [("eval", "eval.parquet"), ("report", "report.html")])
@pytest.mark.row("R-47", "a run directory of a stranger whose eval.parquet or report.html is a link")
def test_a_link_in_a_run_directory_is_replaced_and_not_followed(
    verb: str, name: str, part: Path, tmp_path: Path
) -> None:
    target = tmp_path / "of-mine"
    target.write_text("mine")
    (part / name).symlink_to(target)
    assert exit_code([verb, str(part)]) == 0
    assert target.read_text() == "mine"
    assert not (part / name).is_symlink() and (part / name).stat().st_size > 100


def test_a_link_that_the_user_names_for_a_report_is_followed(part: Path, tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to(tmp_path / "page.html")
    assert exit_code(["report", str(part), "--output", str(tmp_path / "link.html")]) == 0
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "page.html").stat().st_size > 100
    assert exit_code(["report", str(part), "--output", "/dev/null"]) == 0
    assert Path("/dev/null").is_char_device()


@pytest.mark.row("R-47", "../x and an absolute path as the user's own output")
def test_an_output_of_the_users_own_is_made_there_and_nowhere_else(flags: Flags, start: Start, tmp_path: Path) -> None:
    # Flags and config are the user's; code that they name is run, so an output is not confined to a root.
    (tmp_path / "a").mkdir()
    run = start(["train", *flags(Path(f"{tmp_path}/a/../b"), steps=1, eval_prompts=0)])
    assert run.wait() == 0, run.output
    assert (tmp_path / "b" / "model").is_dir() and list((tmp_path / "a").iterdir()) == []
    refused = start(["train", *flags(Path(f"{tmp_path}/new/deep/run"), model=str(tmp_path / "a"))])
    assert refused.wait() == 2 and not (tmp_path / "new").exists()
    late = start(["train", *flags(Path(f"{tmp_path}/new/../deep/run"), lora=True, lora_targets="no_such")])
    assert late.wait() == 2, late.output  # with the directory made
    assert not (tmp_path / "new").exists() and not (tmp_path / "deep").exists()


def test_a_run_without_its_origin_is_refused(part: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in (b"", b"[]", b'{"seed": '):
        (part / "origin.json").write_bytes(content)
        assert exit_code(["resume", str(part), "--steps", "6"]) == 2
        assert "origin.json cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("lost", [["status.json"], ["status.json", "metrics.jsonl"]])
def test_a_changed_config_is_refused_though_a_full_disk_dropped_records(
    lost: list[str], part: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in lost:
        (part / name).unlink()
    config = part / "config.yaml"
    config.write_text(config.read_text().replace("seed: 7\n", "seed: 8\n"))
    assert exit_code(["resume", str(part), "--steps", "6"]) == 2
    assert "seed 7 -> 8" in capsys.readouterr().err


def test_a_run_whose_origin_lacks_options_is_refused_until_they_are_accepted(
    part: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    origin = json.loads((part / "origin.json").read_text())
    no_seed = {name: value for name, value in origin.items() if name != "seed"}
    cases = (({}, "origin.json is damaged and lacks "), (no_seed, "lacks seed."), (origin | {"seed": 9}, "seed 9 -> 7"))
    for content, lacking in cases:
        (part / "origin.json").write_text(json.dumps(content))
        assert exit_code(["resume", str(part), "--steps", "6"]) == 2
        message = capsys.readouterr().err
        assert lacking in message and "--accept-changes" in message
    del origin["held-out prompts"]
    (part / "origin.json").write_text(json.dumps(origin))
    assert exit_code(["resume", str(part), "--steps", "6"]) == 2
    assert "origin.json is damaged and lacks held-out prompts." in capsys.readouterr().err
    assert exit_code(["resume", str(part), "--steps", "6", "--accept-changes"]) == 0
    assert exit_code(["resume", str(part), "--steps", "7"]) == 0
    # An option that came with a newer version of gruppo, at its default.
    origin = json.loads((part / "origin.json").read_text())
    del origin["rank_deadline"]
    (part / "origin.json").write_text(json.dumps(origin))
    assert exit_code(["resume", str(part), "--steps", "8"]) == 0


ADAPTER_WORDS = {
    "resume": ["resume", "RUN", "--steps", "14"],
    "eval": ["eval", "RUN"],
    "sample": ["sample", "1+1=", "--run", "RUN"],
    "export": ["export", "RUN", "NEW"],
    "merge": ["export", "RUN", "NEW", "--merge"],
}


@pytest.mark.parametrize("verb", ADAPTER_WORDS)
@pytest.mark.row("R-52", "a base of the same shape with another weight, by every verb")
def test_an_adapter_on_another_base_is_refused(
    verb: str, adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"RUN": str(adapted / "run"), "NEW": str(tmp_path / "new")}
    words = [places.get(word, word) for word in ADAPTER_WORDS[verb]]
    weights = adapted / "base" / "model.safetensors"
    good = weights.read_bytes()
    tensors = load_file(weights)
    name = next(name for name in tensors if "q_proj" in name)
    save_file({**tensors, name: tensors[name] * 1.01}, weights, metadata={"format": "pt"})
    try:
        assert exit_code(words) == 2
    finally:
        weights.write_bytes(good)
    message = capsys.readouterr().err
    expected = "base weights '" if verb == "resume" else "was trained on other weights than those of"
    assert expected in message
    assert not (tmp_path / "new").exists()


def test_an_adapter_on_its_own_base_is_accepted_wherever_both_lie(adapted: Path, tmp_path: Path) -> None:
    shutil.copytree(adapted / "run" / "model", tmp_path / "adapter")
    shutil.copytree(adapted / "base", tmp_path / "base")
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": str(tmp_path / "base")}))
    assert exit_code(["export", str(tmp_path / "adapter"), str(tmp_path / "copy")]) == 0
    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("adapter", "copy")]
    assert manifests[0]["base"] == manifests[1]["base"]
    assert exit_code(["sample", "1+1=", "--model", str(tmp_path / "copy")]) == 0


def test_a_flipped_bit_in_an_exported_model_is_noticed(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(whole / "model", tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    assert exit_code(["sample", "1+1=", "--model", str(tmp_path / "model")]) == 6
    assert "model.safetensors is damaged" in capsys.readouterr().err
    (tmp_path / "model" / "manifest.json").unlink()
    assert exit_code(["sample", "1+1=", "--model", str(tmp_path / "model")]) == 0


# --- checkpoints that are whole and wrong -------------------------------------------------------------------------


def put(checkpoint: Path, file: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the first tensor of a file, and the manifest with it."""
    tensors = load_file(checkpoint / file)
    name = next(name for name in tensors if tensors[name].dim() == 2)
    save_file({**tensors, name: change(tensors[name])}, checkpoint / file)
    resign(checkpoint, file)


WRONG: dict[str, Callable[[Path], None]] = {
    "int8 weights": lambda c: put(c, "weights.safetensors", lambda t: (t * 100).to(torch.int8)),
    "bfloat16 weights": lambda c: put(c, "weights.safetensors", lambda t: t.bfloat16()),
    "NaN weights": lambda c: put(c, "weights.safetensors", lambda t: t * float("nan")),
    "NaN in the optimizer": lambda c: put(c, "optimizer.safetensors", lambda t: t * float("nan")),
    "int8 in the optimizer": lambda c: put(c, "optimizer.safetensors", lambda t: t.to(torch.int8)),
    "no groups": lambda c: ((c / "optimizer.json").write_text('{"scalars": {}}'), resign(c, "optimizer.json")),
    "other groups": lambda c: (
        (c / "optimizer.json").write_text('{"scalars": {}, "param_groups": []}'), resign(c, "optimizer.json"),
    ),
    "no state": lambda c: ((c / "trainer.json").write_text("[]"), resign(c, "trainer.json")),
    "wrong state": lambda c: (
        (c / "trainer.json").write_text((c / "trainer.json").read_text().replace('"step": 20', '"step": "x"')),
        resign(c, "trainer.json"),
    ),
    "manifest of nothing": lambda c: (c / "manifest.json").write_text('{"kind": "training", "step": 20, "files": {}}'),
}  # fmt: skip


@pytest.mark.parametrize("how", WRONG)
def test_a_checkpoint_that_cannot_be_right_is_passed_over_and_written_again(
    how: str, whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "model")
    WRONG[how](run / "checkpoints" / "step-000020")
    trainer = GRPOTrainer(TrainConfig.of_run(run), resume=True, quiet=True)
    assert trainer.step_number == 15
    assert "skipping a checkpoint" in caplog.text and "step-000020" in caplog.text
    trainer.train()
    assert product(run) == product(whole)
    read_manifest(run / "checkpoints" / "step-000020")
    again = GRPOTrainer(TrainConfig.of_run(run), resume=True, quiet=True)
    again.close()
    assert again.step_number == 20


def test_with_only_such_checkpoints_resume_exits_6_with_the_reason(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints" / "step-000015")
    WRONG["int8 weights"](run / "checkpoints" / "step-000020")
    before = tree_hash(run)
    assert exit_code(["resume", str(run)]) == 6
    assert "holds torch.int8, the model torch.float32" in capsys.readouterr().err
    assert tree_hash(run) == before


# --- ends that save -----------------------------------------------------------------------------------------------


@pytest.fixture
def breaking_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A reward that fails once a file is there; deleting the file repairs it."""
    fault = tmp_path / "fault"
    (tmp_path / "my_breaking_reward.py").write_text(
        "import os\n"
        "def score(completions, answer, **columns):\n"
        f"    if os.path.exists({str(fault)!r}): raise RuntimeError('the service is down')\n"
        "    return [float(c == a) for c, a in zip(completions, answer)]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    yield fault
    sys.modules.pop("my_breaking_reward", None)


def test_a_run_that_its_reward_ends_is_saved_and_goes_on_to_the_same_bits(
    breaking_reward: Path, short_run: Callable[..., dict[str, Any]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"steps": 6, "save_every": 50, "rewards": ["my_breaking_reward:score"]}
    GRPOTrainer(TrainConfig(**short_run(tmp_path / "whole", **options)), quiet=True).train()
    run = tmp_path / "run"

    def break_it(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
        if step == 3:
            breaking_reward.touch()

    from gruppo.errors import RewardError

    with pytest.raises(RewardError, match="the service is down"):
        GRPOTrainer(TrainConfig(**short_run(run, **options)), quiet=True, callbacks=[break_it]).train()
    assert steps_in(run) == ["step-000003"]
    assert RunReader(run).status()["status"] == "failed" and RunReader(run).status()["step"] == 3
    breaking_reward.unlink()
    assert exit_code(["resume", str(run)]) == 0
    assert product(run) == product(tmp_path / "whole")


def test_a_run_that_nan_gradients_end_saves_the_weights_before_them(
    short_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    from gruppo.errors import NumericError

    trainer = GRPOTrainer(TrainConfig(**short_run(tmp_path / "run", save_every=50, eval_prompts=0)), quiet=True)
    kept: list[dict[str, torch.Tensor]] = []

    def poison(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            kept.append({name: p.detach().clone() for name, p in trainer.model.weights.named().items()})
            next(iter(trainer.model.model.parameters())).register_hook(lambda g: g * float("nan"))

    trainer.callbacks.append(poison)
    with pytest.raises(NumericError):
        trainer.train()
    assert steps_in(tmp_path / "run") == ["step-000004"]  # two steps were skipped, the third ended the run
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-000004" / "weights.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in kept[0].items())


def test_a_run_that_an_exception_ends_between_two_updates_of_a_step_keeps_the_checkpoint_before(
    short_run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    trainer = GRPOTrainer(TrainConfig(**short_run(tmp_path / "run", save_every=2, minibatches=2)), quiet=True)
    step, calls = trainer.model.clip_grad_and_step, []

    def out_of_memory(*args: Any) -> Any:
        calls.append(trainer.step_number)
        if calls.count(3) == 2:  # the second update of step 4
            raise MemoryError
        return step(*args)

    trainer.model.clip_grad_and_step = out_of_memory  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        trainer.train()
    assert steps_in(tmp_path / "run") == ["step-000002"]
    assert RunReader(tmp_path / "run").status()["error"].startswith("MemoryError")


def test_a_run_killed_while_it_loads_starts_over(whole: Path, flags: Flags, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = WarmProcess(tmp_path / "log", die_while_loading, ["train", *flags(run)])
    assert process.wait() == -signal.SIGKILL
    process.close()
    assert {path.name for path in run.iterdir()} == {"config.yaml", "env.json", "lock"}
    assert exit_code(["resume", str(run)]) == 0
    assert product(run) == product(whole)


def die_while_loading(words: list[str]) -> None:
    from gruppo.trainer import build

    build.build_model = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    gruppo(words)


# --- a model that can be saved ------------------------------------------------------------------------------------

NO_EFFECT = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "bos_token_id": 1, "eos_token_id": 2}
"""A generation config as many hub models have it: transformers loads it, and refuses to save it."""


@pytest.fixture
def greedy_base(tmp_path: Path) -> Path:
    from gruppo.weights.source import resolve

    shutil.copytree(resolve("builtin"), tmp_path / "base")
    (tmp_path / "base" / "generation_config.json").write_text(json.dumps(NO_EFFECT))
    return tmp_path / "base"


def generation_in(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "generation_config.json").read_text())
    return {name: found.get(name) for name in NO_EFFECT}


def test_a_model_with_generation_options_of_no_effect_is_saved_with_them(
    greedy_base: Path, start: Start, flags: Flags, tmp_path: Path
) -> None:
    run, options = tmp_path / "run", {"model": greedy_base, "steps": 4, "keep_best": True, "eval_every": 1}
    process = start(["train", *flags(run, **options)])
    assert process.wait() == 0, process.output
    assert generation_in(run / "model") == NO_EFFECT
    if (run / "best").exists():  # an evaluation was better than that of the start
        assert generation_in(run / "best") == NO_EFFECT
    exported = start(["export", str(run), str(tmp_path / "exported")])
    assert exported.wait() == 0, exported.output
    assert generation_in(tmp_path / "exported") == NO_EFFECT


def test_an_adapter_is_merged_into_a_model_with_generation_options_of_no_effect(
    greedy_base: Path, start: Start, flags: Flags, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(["train", *flags(run, model=greedy_base, steps=2, lora=True)])
    assert process.wait() == 0, process.output
    merged = start(["export", str(run), str(tmp_path / "merged"), "--merge"])
    assert merged.wait() == 0, merged.output
    assert generation_in(tmp_path / "merged") == NO_EFFECT


# --- a status that is true ----------------------------------------------------------------------------------------


def without_room(words: list[str], step: int) -> None:
    """`gruppo WORDS` that gets SIGTERM after a step, when no file can be longer than a few kB any more."""
    from gruppo.run.directory import RunDirectory

    log = RunDirectory.log_metrics

    def log_and_fill(self: RunDirectory, at: int, metrics: Any) -> None:
        log(self, at, metrics)
        if at == step:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
            os.kill(os.getpid(), signal.SIGTERM)

    RunDirectory.log_metrics = log_and_fill
    gruppo(words)


def test_a_run_that_is_stopped_and_cannot_be_saved_has_failed(flags: Flags, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = WarmProcess(tmp_path / "log", without_room, ["train", *flags(run, save_every=3)], 4)
    assert process.wait() == 6, process.output
    process.close()
    assert status_in(run) == "failed" and steps_in(run) == ["step-000003"]
    assert "the steps after 3 are lost" in process.output
    assert not (run / "lock").exists()


def test_the_status_of_a_killed_run_is_killed_for_readers(start: Start, flags: Flags, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start(["train", *flags(run, steps=5000, save_every=2, eval_prompts=0, completions_every=0)])
    process.wait_until((run / "checkpoints" / "step-000004").exists)
    found = RunReader(run).status()
    assert found["status"] == "running" and found["step"] >= 2
    process.kill()
    process.wait()
    assert status_in(run) == "running" and RunReader(run).status()["status"] == "killed"


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk, which needs root")
def test_the_status_is_true_on_a_disk_without_room_for_a_new_file(tmp_path: Path) -> None:
    from gruppo.run.directory import RunDirectory

    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here")
    try:
        run = RunDirectory.create(str(disk / "run"), "steps: 3\n")
        run.set_status("running", 3)
        with pytest.raises(OSError, match="No space"), (disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(b"x" * 512)
        run.set_status("failed", 7, error="CheckpointError: " + "no room " * 1000)
        assert run.status()["status"] == "failed" and run.status()["step"] == 7
        with run:
            pass
    finally:
        subprocess.run(["umount", disk], check=True)


# --- signals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_closed_terminal_and_a_warning_of_the_queue_save_the_run(
    number: signal.Signals, start: Start, flags: Flags, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(["train", *flags(run, steps=5000, save_every=5000, eval_prompts=0, completions_every=0)])
    process.wait_until(lambda: (run / "metrics.jsonl").exists())
    for _ in range(3):  # a terminal that closes sends several
        os.kill(process.process.pid or 0, number)
    assert process.wait() == 75, process.output
    assert status_in(run) == "stopped" and len(steps_in(run)) == 1


@pytest.mark.row("R-30", "an update that makes the weights infinite")
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lr": 1e300, "eval_prompts": 0}, "model.embed_tokens.weight holds non-finite numbers after the last update"),
        ({"weight_decay": 1e308, "eval_prompts": 0}, "holds non-finite numbers after the last update"),
        ({"lr": 1e300, "eval_prompts": 8}, "the model gives NaN for a token"),
    ],
)
def test_weights_that_an_update_ruined_end_the_run_with_3_and_are_not_to_be_resumed(
    changes: dict[str, Any], says: str, start: Start, flags: Flags, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    changes = {"lora": False} | changes
    ended = start(["train", *flags(run, steps=1, eval_every=0, **changes)])
    assert ended.wait() == 3, ended.output
    assert says in ended.output and "Lower lr, or weight_decay" in ended.output
    assert "gruppo resume" not in ended.output and "could not be saved" not in ended.output
    assert RunReader(run).status()["status"] == "failed"
    assert not list(run.glob("checkpoints/step-*")) and not (run / "model").exists()
