"""The run directory: owned by one process, records that survive being cut off."""

import errno
import fcntl
import json
import os
import resource
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gruppo.errors import InputError
from gruppo.run import lock
from gruppo.run.directory import RunDirectory
from gruppo.run.lock import RunLock, is_owned
from gruppo.types import Group, Prompt, Rollout, Trajectory

CONFIG = "steps: 3\nstop: [END]\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(str(tmp_path / "run"), CONFIG)


def test_a_new_run_holds_its_config_and_environment(run: RunDirectory) -> None:
    assert run.config() == {"steps": 3, "stop": ["END"], "output": str(run.path)}
    environment = json.loads((run.path / "env.json").read_text())
    assert environment["packages"].keys() >= {"gruppo", "torch", "transformers", "peft", "safetensors", "numpy"}
    assert environment["threads"] == 1


def test_the_environment_names_no_person_machine_or_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secretsecret")
    run = RunDirectory.create(str(tmp_path / "run"), CONFIG)
    text = (run.path / "env.json").read_text()
    assert "hf_secretsecret" not in text and socket.gethostname() not in text and str(Path.home()) not in text


@pytest.mark.row("R-07", "directories in use")
def test_a_used_directory_is_refused_and_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    for name in ("notes.txt", "config.yaml"):
        (folder / name).write_text("mine")
        for overwrite in (False, True):
            with pytest.raises(
                InputError, match=r"exists already and is not a run; nothing was touched\. Choose another"
            ):
                RunDirectory.create(str(folder), CONFIG, overwrite=overwrite)
    assert {p.name: p.read_text() for p in folder.iterdir()} == {"notes.txt": "mine", "config.yaml": "mine"}


def begun(folder: Path, *saved: str) -> Path:
    """A run that took a step and was killed, with a user's file beside its own."""
    run = RunDirectory.create(str(folder), "steps: 8\n")
    run.set_status("running", 1)
    run.log_metrics(1, {"reward/mean": 0.5})
    for name in ("tensorboard", "sync/version-1", "checkpoints/.step-000005.tmp-1f00ab12", *saved):
        (folder / name).mkdir(parents=True)
        (folder / name / "file").write_text("x")
    (folder / "notes.txt").write_text("mine")
    return folder


def test_a_run_that_was_never_saved_is_started_again_and_leaves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = begun(tmp_path / "run")
    RunDirectory.create(str(folder), CONFIG)
    assert {p.name for p in folder.iterdir()} == {"config.yaml", "env.json", "lock", "notes.txt"}
    assert (folder / "config.yaml").read_text() == CONFIG
    assert "ended before its first checkpoint; it starts over" in caplog.text


@pytest.mark.parametrize("saved", ["checkpoints/step-000005", "model"])
def test_a_run_that_was_saved_is_overwritten_on_request_alone(saved: str, tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", saved)
    before = {p for p in folder.rglob("*") if p.name != "lock"}
    with pytest.raises(
        InputError,
        match=r"exists already; nothing was touched\. Go on with `gruppo resume .*--overwrite \(in Python "
        r"GRPOTrainer\(config, overwrite=True\)\)",
    ):
        RunDirectory.create(str(folder), CONFIG)
    assert set(folder.rglob("*")) == before
    RunDirectory.create(str(folder), CONFIG, overwrite=True)
    assert {p.name for p in folder.iterdir()} == {"config.yaml", "env.json", "lock", "notes.txt"}


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a lock that is not given back."""
    monkeypatch.setattr(lock, "WAIT_S", 0.1)


def test_a_living_run_is_not_overwritten(run: RunDirectory, short_wait: None) -> None:
    with pytest.raises(InputError, match=rf"is in use by process {os.getpid()}"):
        RunDirectory.create(str(run.path), "steps: 1\n", overwrite=True)
    assert (run.path / "config.yaml").read_text() == CONFIG


def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt), RunDirectory.create(str(folder), CONFIG):
        (folder / "tensorboard").mkdir()
        (folder / "tensorboard" / "events").write_text("x")
        raise KeyboardInterrupt
    assert not folder.exists()


def test_what_a_killed_run_left_half_written_goes_when_it_goes_on(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", "checkpoints/step-000005", ".model.tmp-2e00ab12")
    (folder / ".status.json.tmp-3d00ab12").write_text("{")
    RunDirectory.reopen(folder).go_on_after(5, CONFIG)
    left = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if "tmp" in p.name}
    assert left == set() and (folder / "checkpoints" / "step-000005" / "file").exists()


def test_an_empty_directory_is_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert RunDirectory.create(str(tmp_path / "run"), CONFIG).path == tmp_path / "run"


@pytest.mark.parametrize("name", ["file/below", "n" * 300, "nul\0byte"])
def test_a_name_that_cannot_be_a_directory_is_an_input_error(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="output="):
        RunDirectory.create(f"{tmp_path}/{name}", CONFIG)


def test_a_second_owner_is_refused_while_the_first_lives(run: RunDirectory, short_wait: None) -> None:
    with pytest.raises(InputError, match=rf"is in use by process {os.getpid()} on {socket.gethostname()}"):
        RunDirectory.reopen(run.path)


def test_a_lock_given_back_can_be_taken(run: RunDirectory) -> None:
    with run:
        pass
    assert RunDirectory.reopen(run.path).path == run.path
    assert json.loads((run.path / "lock").read_text())["pid"] == os.getpid()


@pytest.mark.row("R-55", "what a dead process, another machine or nobody has left in the lock")
@pytest.mark.parametrize("content", ["", '{"pid": 12', "[1, 2]", '{"pid": 1, "host": "elsewhere"}'])
def test_a_lock_that_nobody_holds_is_taken_whatever_it_says(content: str, run: RunDirectory) -> None:
    with run:
        pass
    (run.path / "lock").write_text(content)
    assert not is_owned(run.path)
    again = RunDirectory.reopen(run.path)
    assert json.loads((run.path / "lock").read_text())["pid"] == os.getpid() and is_owned(run.path)
    with again:
        pass
    assert not (run.path / "lock").exists()


@pytest.mark.row("R-55", "flock of a process that says nothing")
def test_a_lock_whose_owner_is_not_known_is_respected(run: RunDirectory, short_wait: None) -> None:
    with run:
        pass
    with open(run.path / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"run is in use by another process; stop it first"):
            RunDirectory.reopen(run.path)
    RunDirectory.reopen(run.path)


def test_to_ask_whether_a_run_is_owned_does_not_refuse_its_next_owner(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run:
        pass
    asking = open(run.path / "lock", "w")  # noqa: SIM115
    fcntl.flock(asking, fcntl.LOCK_SH)
    monkeypatch.setattr("gruppo.weights.files.time.sleep", lambda seconds: asking.close())
    RunDirectory.reopen(run.path)


def test_an_owner_that_waited_for_a_lock_that_was_removed_takes_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = RunLock(tmp_path)
    monkeypatch.setattr("gruppo.weights.files.time.sleep", lambda seconds: first.give_back())
    second = RunLock(tmp_path)
    with pytest.raises(InputError, match="in use by process"):
        RunLock(tmp_path)
    second.give_back()
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_locks_is_named_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = RunLock(tmp_path)
    assert "lock cannot be locked: a second process on this run would not be refused" in caplog.text
    assert is_owned(tmp_path)
    lock.give_back()
    assert not is_owned(tmp_path)


def test_a_directory_in_the_place_of_the_lock_is_an_input_error(run: RunDirectory) -> None:
    (run.path / "lock").unlink()
    (run.path / "lock").mkdir()
    with pytest.raises(
        InputError, match=r"lock is a folder, and a run has a regular file of that name; .* Move it away"
    ):
        RunDirectory.reopen(run.path)


RACE = """
import sys, time
from pathlib import Path
from gruppo.errors import InputError
from gruppo.run import lock
lock.WAIT_S = 0.0
start, kept = float(sys.argv[2]), []
for round_ in range(100):
    while time.time() < start + round_ / 100:
        pass
    try:
        kept.append(lock.RunLock(Path(sys.argv[1]) / str(round_)))
        print(round_)
    except InputError:
        pass
print("end", flush=True)
sys.stdin.read()
"""


@pytest.mark.row("R-55", "four processes at the lock of a dead one, 100 times")
def test_of_processes_that_find_a_dead_owners_lock_at_once_one_takes_it(tmp_path: Path) -> None:
    for round_ in range(100):
        (tmp_path / str(round_)).mkdir()
        (tmp_path / str(round_) / "lock").write_text(json.dumps({"pid": 1, "host": socket.gethostname()}))
    words = [sys.executable, "-c", RACE, str(tmp_path), str(time.time() + 1)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    racers = [subprocess.Popen(words, **pipes) for _ in range(4)]
    # All of them live until the last round of each is over.
    taken = [int(line) for racer in racers for line in iter(racer.stdout.readline, "end\n")]
    for racer in racers:
        racer.communicate()
    assert sorted(taken) == list(range(100))


def test_a_directory_without_a_config_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a run directory: it has no config\.yaml"):
        RunDirectory.reopen(tmp_path)


def test_a_run_that_was_moved_knows_where_it_lies(run: RunDirectory, tmp_path: Path) -> None:
    with run:
        pass
    run.path.rename(tmp_path / "moved")
    assert RunDirectory.reopen(tmp_path / "moved").config()["output"] == str(tmp_path / "moved")


# --- records ------------------------------------------------------------------------------------------------------


def test_metrics_are_one_sorted_line_per_step(run: RunDirectory) -> None:
    run.log_metrics(1, {"b": 0.1, "a": 2.0})
    run.log_metrics(2, {"a": 3.0})
    assert (run.path / "metrics.jsonl").read_text() == '{"step": 1, "a": 2.0, "b": 0.1}\n{"step": 2, "a": 3.0}\n'


def test_forgetting_keeps_the_bytes_of_what_stays(run: RunDirectory) -> None:
    for step in range(4):
        run.log_metrics(step, {"x": 0.1 + 0.2 + step, "tiny": 1e-300, "third": 1 / 3})
        run.log_timings(step, {"sample": 0.123456789})
    lines = (run.path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    run.forget_after(2)
    assert (run.path / "metrics.jsonl").read_bytes() == b"".join(lines[:3])
    assert len((run.path / "timings.jsonl").read_text().splitlines()) == 3


def test_a_last_line_cut_off_by_a_crash_is_left_out(run: RunDirectory) -> None:
    run.log_metrics(1, {"x": 1.0})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "x"')
    assert run.metrics() == [{"step": 1, "x": 1.0}]
    run.forget_after(5)
    assert (run.path / "metrics.jsonl").read_text() == '{"step": 1, "x": 1.0}\n'


def test_forgetting_drops_the_completions_of_later_steps(run: RunDirectory) -> None:
    for step in (1, 2, 10):
        run.write_completions(step, groups("x"))
    run.forget_after(2)
    assert sorted(p.name for p in (run.path / "completions").iterdir()) == [
        "step-000001.parquet",
        "step-000002.parquet",
    ]


def test_a_metric_that_is_not_a_number_does_not_end_the_run(run: RunDirectory) -> None:
    # JSON has no NaN; a reader in a browser would refuse the whole file.
    run.log_metrics(1, {"policy/loss": float("nan"), "optim/grad_norm": float("inf"), "reward/mean": 0.5})
    line = json.loads((run.path / "metrics.jsonl").read_text(), parse_constant=lambda c: pytest.fail(c))
    assert line == {"step": 1, "optim/grad_norm": None, "policy/loss": None, "reward/mean": 0.5}


def groups(text: str) -> tuple[Group, ...]:
    sequence = Trajectory(
        prompt=Prompt(token_ids=(1, 5)),
        tokens=(8, 2),
        logps=(-0.5, -0.25),
        text=text,
        stop_reason="stop",
        versions=(3, 3),
    )
    rewards, nothing = {"match": 1.0, "form": None}, {"match": None, "form": None}
    rollouts = (
        Rollout(trajectory=sequence, reward=1.0, rewards=rewards, correct=True, shaped=0.75, advantage=0.5),
        Rollout(trajectory=sequence, reward=None, rewards=nothing, errors={"form": "KeyError: 7"}),
    )
    return (Group(prompt=Prompt(token_ids=(1, 5), text="p", index=4), rollouts=rollouts),)


def test_the_status_is_replaced_as_a_whole(run: RunDirectory) -> None:
    run.set_status("running", 0)
    run.set_status("done", 20)
    assert json.loads((run.path / "status.json").read_text()) == {"status": "done", "step": 20}
    assert not list(run.path.glob("*tmp*"))


# --- a disk that is full, a process that is gone, a machine that is another -------------------------------------------


@pytest.mark.row("R-09", "files that cannot be written")
def test_records_that_cannot_be_written_are_counted_and_stop_nothing(tmp_path: Path, caplog) -> None:
    run = RunDirectory(tmp_path)
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    run.log_metrics(1, {"a": 1.0})
    run.log_metrics(2, {"a": 2.0})
    assert run.dropped == 2
    assert [r.message.split(" (")[0] for r in caplog.records] == ["metrics.jsonl cannot be written"]
    (tmp_path / "metrics.jsonl").unlink()
    run.log_metrics(3, {"a": 3.0})
    assert run.metrics() == [{"step": 3, "a": 3.0, "log/dropped": 2.0}]


@pytest.mark.row("R-09", "half a line")
def test_half_a_line_does_not_hide_the_next(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.log_metrics(1, {"a": 1.0})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
    try:
        run.log_metrics(2, {"a": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "metrics.jsonl").stat().st_size == size
    run.log_metrics(3, {"a": 3.0})
    assert [line["step"] for line in run.metrics()] == [1, 3]


@pytest.mark.row("R-02", "other versions and threads in env.json")
def test_what_changed_since_the_run_began_is_named(tmp_path: Path) -> None:
    run = RunDirectory.create(str(tmp_path / "run"), CONFIG)
    assert run.environment_changes() == []
    file = run.path / "env.json"
    env = json.loads(file.read_text())
    now = env["threads"], env["packages"]["torch"]
    env["threads"], env["packages"]["torch"] = 77, "2.0.0"
    file.write_text(json.dumps(env))
    assert run.environment_changes() == [f"threads 77 -> {now[0]}", f"torch 2.0.0 -> {now[1]}"]


# --- links --------------------------------------------------------------------------------------------------------


def test_links_in_a_run_are_not_followed_when_it_goes_on(tmp_path: Path) -> None:
    folder, victims = begun(tmp_path / "run", "checkpoints/step-000005"), tmp_path / "victims"
    victims.mkdir()
    for name in ("status.json.tmp", "config.yaml.tmp", "metrics.jsonl.tmp", "metrics.tmp", "timings.jsonl"):
        (victims / name).write_text("precious")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(victims / name)
    (folder / "events.jsonl").symlink_to(victims / "made-by-the-run")
    (victims / "step-000099.parquet").write_text("precious")
    (folder / "completions").symlink_to(victims)
    run = RunDirectory.reopen(folder)
    run.go_on_after(5, CONFIG)
    run.set_status("running", 5)
    run.log_timings(6, {"sample": 1.0})
    run.log_event("start")
    assert {p.name: p.read_text() for p in victims.iterdir()} == dict.fromkeys(
        ("status.json.tmp", "config.yaml.tmp", "metrics.jsonl.tmp", "metrics.tmp", "timings.jsonl"), "precious"
    ) | {"step-000099.parquet": "precious"}
    assert run.dropped == 1  # the event: its file is a link to nowhere


def test_records_that_are_no_records_are_left_out_when_a_run_goes_on(tmp_path: Path) -> None:
    folder = begun(tmp_path / "run", "checkpoints/step-000005")
    (folder / "metrics.jsonl").write_bytes(b'{"step": 1, "a": 1.0}\n[1]\n5\n{"a": 2.0}\n{"step": "x"}\n\xff\n')
    (folder / "env.json").write_text("[]")
    run = RunDirectory.reopen(folder)
    run.go_on_after(5, CONFIG)
    assert run.metrics() == [{"step": 1, "a": 1.0}]
    assert run.environment_changes() == ["env.json cannot be read"]


def test_a_signal_while_the_lock_is_taken_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def leave(*_: object) -> int:
        raise SystemExit(143)

    for place in ("gruppo.run.lock.socket.gethostname", "gruppo.weights.files.take_flock"):
        monkeypatch.setattr(place, leave)
        with pytest.raises(SystemExit):
            RunDirectory.create(str(tmp_path / "new" / "run"), "steps: 1\n")
        assert list(tmp_path.iterdir()) == []
        monkeypatch.undo()
