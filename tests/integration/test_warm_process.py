"""A warm process is to a test what a process of its own is."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from warm_process import Command, run_python

CODE = """
import os, sys
print(__name__, sys.argv, sys.path[:2], os.getcwd(), os.environ["MINE"], sys.stdin.read(), "é")
print("a \\udc80 name", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize(
    "words", [["-c", CODE, "a", "-b"], ["script.py", "a"], ["-m", "script", "a"]], ids=lambda w: w[0]
)
def test_its_words_folder_environment_pipes_and_exit_code_are_those_of_a_process(
    words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(CODE)
    (tmp_path / "typed").write_text("typed")
    settings = {"MINE": "mine", "PYTHONPATH": "/some/place", "PYTHONIOENCODING": "latin-1", "PYTHONWARNINGS": "ignore"}
    options = {"cwd": tmp_path, "env": os.environ | settings, "capture_output": True}
    with (tmp_path / "typed").open() as typed:
        real = subprocess.run([sys.executable, *words], stdin=typed, **options)
    with (tmp_path / "typed").open() as typed:
        warm = run_python(words, stdin=typed, **options)
    assert (warm.returncode, warm.stdout, warm.stderr) == (real.returncode, real.stdout, real.stderr)
    assert real.returncode == 3 and b"'/some/place'" in real.stdout and real.stdout.endswith(b"mine typed \xe9\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_signal_ends_it(number: signal.Signals) -> None:
    with Command(["-c", "import time; print('begun', flush=True); time.sleep(1000)"], stdout=subprocess.PIPE) as warm:
        assert warm.stdout is not None and warm.stdout.readline() == b"begun\n" and warm.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            warm.wait(0.01)
        warm.send_signal(number)
        assert warm.wait(60) == -number
