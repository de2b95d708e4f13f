"""R-51: the command as a process: quick help, light imports, closed pipes, odd terminals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from warm_process import Command, run_python

pytestmark = pytest.mark.slow
GRUPPO = [sys.executable, "-m", "gruppo"]


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"} | changes


@pytest.mark.clock
def test_help_answers_within_a_second() -> None:
    # The best of three: the machine may be busy with other tests.
    times = []
    for _ in range(3):
        started = time.monotonic()
        done = subprocess.run([*GRUPPO, "--help"], capture_output=True, text=True)
        times.append(time.monotonic() - started)
        assert done.returncode == 0 and done.stdout.startswith("gruppo: group-relative policy optimization")
    assert min(times) < 1.0


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["demo", "--help"], ["sample", "--help"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    program = (
        "import sys\n"
        "from gruppo.cli.main import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit as ended:\n"
        "    assert ended.code == 0\n"
        "heavy = {'torch', 'transformers', 'peft', 'pyarrow', 'tensorboard', 'altair'} & set(sys.modules)\n"
        "print(sorted(heavy), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")


def test_importing_the_package_imports_nothing_heavy() -> None:
    program = "import sys, gruppo, gruppo.types, gruppo.errors; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "False False\n"


@pytest.mark.row("R-51", "head")
def test_a_reader_that_leaves_early_is_no_error() -> None:
    for words in ("--help", "train --help"):
        done = subprocess.run(
            ["bash", "-c", f'set -o pipefail; "$0" -m gruppo {words} | head -1', sys.executable],
            capture_output=True,
            text=True,
        )
        assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
        assert len(done.stdout.splitlines()) == 1


@pytest.mark.row("R-51", "stdout closed")
def test_a_closed_output_is_no_error() -> None:
    done = subprocess.run(["bash", "-c", '"$0" -m gruppo --help >&-', sys.executable], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


TINY = "--prompts-per-step 2 --group-size 2 --max-new-tokens 4 --eval-prompts 4 --no-tensorboard --threads 1"


@pytest.mark.long
@pytest.mark.row("R-51", "LC_ALL=C, 20 columns")
def test_a_narrow_terminal_in_the_c_locale_sees_the_whole_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [*GRUPPO, "train", "--steps", "2", *TINY.split(), "--output", str(tmp_path / "run")],
        capture_output=True,
        env=environment(LC_ALL="C", COLUMNS="20", PYTHONIOENCODING="ascii"),
        timeout=250,
    )
    assert done.returncode == 0, done.stderr.decode()
    done.stdout.decode("ascii")
    assert b"step 2/2" in done.stdout
    assert done.stderr == b""
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "done"


# --- printing never stops or delays a run -----------------------------------------------------------------------------


def in_shell(line: str, *words: str, **changes: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", "-c", line, sys.executable, *words],
        capture_output=True,
        text=True,
        env=environment(**changes),
        timeout=250,
    )


def ended(run: Path) -> dict[str, Any]:
    assert not (run / "lock").exists()
    return json.loads((run / "status.json").read_text())


@pytest.mark.long
@pytest.mark.row("R-51", "a reader that leaves")
def test_a_run_whose_reader_leaves_goes_on_to_its_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = in_shell(
        f'"$0" -m gruppo train --steps 60 {TINY} --output "$1" | head -8; exit "${{PIPESTATUS[0]}}"', str(run)
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 8
    assert ended(run) == {"status": "done", "step": 60} and (run / "model").is_dir()


@pytest.mark.long
def test_a_run_in_python_whose_reader_leaves_goes_on_to_its_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    program = (
        "from gruppo.trainer import GRPOTrainer, TrainConfig\n"
        f"GRPOTrainer(TrainConfig(output={str(run)!r}, steps=60, prompts_per_step=2, group_size=2, max_new_tokens=4,\n"
        "    eval_prompts=4, tensorboard=False, threads=1)).train()\n"
    )
    done = in_shell('"$0" -c "$1" | head -3; exit "${PIPESTATUS[0]}"', program)
    assert "Traceback" not in done.stderr
    assert ended(run) == {"status": "done", "step": 60}


@pytest.mark.long
@pytest.mark.row("R-51", "stdout on /dev/full")
def test_a_run_whose_log_is_on_a_full_disk_goes_on_to_its_end(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = in_shell(f'"$0" -m gruppo train --steps 20 {TINY} --output "$1" > /dev/full 2> /dev/full', str(run))
    assert done.returncode == 0
    assert ended(run) == {"status": "done", "step": 20}


@pytest.mark.long
@pytest.mark.row("R-11", "SIGTERM while loading")
def test_a_signal_while_a_run_is_made_leaves_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["-m", "gruppo", "train", *TINY.split(), "--output", run]
    with Command(words, env=environment(), stdout=subprocess.DEVNULL) as process:
        while not (run / "lock").exists():
            assert process.poll() is None
            time.sleep(0.001)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 143
    assert not run.exists()


@pytest.mark.long
def test_a_bare_train_runs(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*GRUPPO, "train"], cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step   2/200"):
                break
        process.send_signal(signal.SIGINT)
        assert "gruppo resume runs/run" in process.stdout.read()
        assert process.wait(timeout=60) == 75


def test_a_launcher_that_is_none_is_refused_with_the_reason(tmp_path: Path) -> None:
    ranked = environment(WORLD_SIZE="2")
    done = run_python(["-m", "gruppo", "train"], cwd=tmp_path, env=ranked, capture_output=True, text=True, timeout=250)
    assert done.returncode == 2 and "RANK, MASTER_ADDR, MASTER_PORT is not set" in done.stderr
    assert list(tmp_path.iterdir()) == []
