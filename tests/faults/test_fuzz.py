"""Malformed input through the command line: no traceback, no hang, no more memory than there is, the exit code of the
matrix, field, value and remedy in the message, and nothing written.

`make fuzz` runs every case; `make test` a sample of them, and all that once failed.
"""

import hashlib
import os
import re
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from fuzz_cases import GOOD_ROWS, Case, all_cases, copy_model
from warm_process import WarmProcess, gruppo

from gruppo.weights.files import read_header

ROOM = 3 * 2**30
"""Bytes that a case may take beyond what the process has when it begins."""
SECONDS = 40.0
"""For one case, on a busy machine; most need less than one."""
REMEDY = re.compile(
    r"\b(use|give|name|lower|raise|set|choose|leave|load|pass|pip install|write|copy|go on|start|convert|rename|make|"
    r"see|delete|fix|switch|return|fold|read it|check name|did you mean|should|must|looked in|built-ins are|it has|got|"
    r"there (is|are)|looks like|gruppo (reads|never|resume)|only option is|are for|needs|they are|it takes|save to|"
    r"does not take|it is called|twice|full helptext|is not a regular expression|no such file|has no|"
    r"raised|cannot be made|remove)\b|docs/\w+.md|--help|failed:",
    re.I,
)
TRACE = re.compile(r"^Traceback \(most recent call last\)", re.M)


def limited(words: tuple[str, ...], folder: str) -> None:
    """The command line in a folder, with a limit on memory. Runs in a process of its own."""
    os.setsid()
    os.chdir(folder)
    os.environ |= {"TMPDIR": f"{folder}/tmp", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gruppo(words)


def tree(folder: Path) -> dict[str, str]:
    """Every entry of a folder with a hash of its content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        is_source = "__pycache__" in path.parts  # Python's own, of a reward module
        if not is_source and not path.is_fifo():
            found[str(path.relative_to(folder))] = (
                hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            )
    return found


def verdict(case: Case, work: Path) -> str:
    """What is wrong with how a case ended; "" if nothing is."""
    folder = work / "case"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "tmp").mkdir(parents=True)
    case.prepare(folder)
    before = tree(folder)
    log = work / "log.txt"
    log.unlink(missing_ok=True)
    process = WarmProcess(log, limited, case.words, str(folder))
    ends = time.monotonic() + SECONDS
    try:
        while process.process.is_alive() and time.monotonic() < ends:
            time.sleep(0.01)
        if process.process.is_alive():
            return f"still running after {SECONDS:g} s: {process.output[-500:]}"
        code, text = process.wait(), process.output
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.process.pid, signal.SIGKILL)  # what it left behind; it leads a group of its own
        process.close()
    said = " ".join(re.sub("[│╭╰─╮╯]", " ", text).split())
    if code not in case.codes:
        return f"exit code {code}, not {case.codes}: {text[-700:]}"
    if code != 0 and TRACE.search(text.partition("gruppo: ")[0]):
        return f"a traceback: {text[-700:]}"
    if (folder / "canary").exists():
        return "code of the input ran"
    if any((folder / "tmp").iterdir()):
        return f"left in the temporary folder: {sorted(p.name for p in (folder / 'tmp').iterdir())}"
    if code not in (2, 6):
        return ""
    changed = {name for name, _ in tree(folder).items() ^ before.items()}
    if changed:
        return f"written or removed: {sorted(changed)[:5]}: {said[-300:]}"
    missing = [part for part in case.says if part not in said]
    if missing:
        return f"the message lacks {missing}: {said[-500:]}"
    if code == 2 and not REMEDY.search(said):
        return f"the message has no remedy: {said[-500:]}"
    if len(said) > 4000:
        return f"the message has {len(said)} characters: {said[:100]} ... {said[-100:]}"
    return ""


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An adapter's folder, and a run directory with two checkpoints, to copy and spoil."""
    folder = tmp_path_factory.mktemp("originals")
    copy_model(folder / "m")
    (folder / "data.jsonl").write_text(GOOD_ROWS)
    small = [
        "--data",
        "data.jsonl",
        "--steps",
        "4",
        "--save-every",
        "2",
        "--prompts-per-step",
        "2",
        "--group-size",
        "8",
    ]
    small += ["--lr", "1e-3", "--max-new-tokens", "4", "--eval-prompts", "2", "--no-tensorboard", "--threads", "1"]
    for number, words in enumerate((["--output", "run"], ["--output", "lora", "--lora", "--model", "m"])):
        process = WarmProcess(folder / f"{number}.txt", in_folder, ["train", *small, *words], str(folder))
        assert process.wait() == 0, process.output
        process.close()
    shutil.copytree(folder / "lora" / "model", folder / "a")
    for step in (2, 4):  # a run in which no group has a signal has no optimizer state to spoil
        assert read_header(folder / "run" / "checkpoints" / f"step-{step:06d}" / "optimizer.safetensors")[0]
    yield folder
    shutil.rmtree(folder)


def in_folder(words: list[str], folder: str) -> None:
    os.chdir(folder)
    gruppo(words)


def failures(cases: list[Case], work: Path) -> dict[str, str]:
    found = {case.name: verdict(case, work) for case in cases}
    return {name: why for name, why in found.items() if why}


@pytest.mark.slow
def test_malformed_input_is_refused(originals: Path, tmp_path: Path) -> None:
    """A case in fifty; with GRUPPO_FUZZ=all (`make fuzz`) all of them, with another text those whose name has it."""
    chosen = os.environ.get("GRUPPO_FUZZ", "")
    cases = all_cases(originals)
    assert len(cases) >= 500
    if chosen not in ("", "all"):
        cases = [case for case in cases if chosen in case.name]
    elif not chosen:
        cases = cases[::50]
    assert failures(cases, tmp_path) == {}
