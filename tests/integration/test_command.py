"""R-51: the command as a process: quick help, light imports, closed pipes, odd terminals."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
GRUPPO = [sys.executable, "-m", "gruppo"]


def environment(**changes: str) -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"} | changes


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


def test_a_reader_that_leaves_early_is_no_error() -> None:
    for words in ("--help", "train --help"):
        done = subprocess.run(
            ["bash", "-c", f'set -o pipefail; "$0" -m gruppo {words} | head -1', sys.executable],
            capture_output=True,
            text=True,
        )
        assert "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr
        assert len(done.stdout.splitlines()) == 1


def test_a_closed_output_is_no_error() -> None:
    done = subprocess.run(["bash", "-c", '"$0" -m gruppo --help >&-', sys.executable], capture_output=True, text=True)
    assert "Traceback" not in done.stderr


TINY = "--prompts-per-step 2 --group-size 2 --max-new-tokens 4 --eval-prompts 4 --no-tensorboard --threads 1"


def test_a_narrow_terminal_in_the_c_locale_sees_the_whole_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [*GRUPPO, "train", "--steps", "2", *TINY.split(), "--output", str(tmp_path / "run")],
        capture_output=True,
        env=environment(LC_ALL="C", COLUMNS="20", PYTHONIOENCODING="ascii"),
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    done.stdout.decode("ascii")
    assert b"step 2/2" in done.stdout
    assert done.stderr == b""
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "done"


def test_a_run_whose_reader_leaves_ends_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            "bash",
            "-c",
            f'"$0" -m gruppo train --steps 500 {TINY} --output "$1" | head -8',
            sys.executable,
            str(tmp_path / "run"),
        ],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=120,
    )
    assert "Traceback" not in done.stderr
    assert len(done.stdout.splitlines()) == 8
    assert json.loads((tmp_path / "run" / "status.json").read_text())["status"] == "failed"
    assert not (tmp_path / "run" / "lock").exists()
