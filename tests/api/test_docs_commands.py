"""Commands of README and docs: `gruppo ...` runs for real, made small; the rest names files, targets, extras."""

import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest

from gruppo.cli import arguments
from gruppo.cli.main import VERBS, run

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.M | re.S)
FOLLOWED = {"extending.md"}  # literally, by tests/integration/test_extending.py

PARSED = {
    r"--sampler[ =]vllm": "needs vLLM",
    r"hf://|ms://": "needs a network",
    r"reasoning_gym:": "needs the extra tasks",
    r"--rebuild-base": "trains the base for minutes; tests/unit/task has it",
    r"--llm\b": "fetches a model of 92 MB; make demo-llm runs it",
    r"--quantize": "needs the extra qlora",
    r"--ray\b": "starts a cluster, with the extra ray; tests/distributed/test_ray.py has it",
    r"--lora-modules-to-save lm_head": "the head of the embedded model is its embedding",
    r"--chat\b": "the embedded model has no chat template",
    r"--wandb|--trackio": "needs an account or the extra",
    r"^view ": "serves until Ctrl-C; tests/report has it",
}
"""Commands that only the real parser sees, and why."""

OUTSIDE = {"vllm", "tensorboard", "cd", "git", "export", "kill", "ray"}
"""Programs of others."""

SIZES = {
    "--steps": "2",
    "--prompts-per-step": "4",
    "--minibatches": "2",
    "--group-size": "4",
    "--max-new-tokens": "4",
    "--eval-prompts": "4",
    "--eval-every": "0",
    "--overlong-cache": "0",
    "--threads": "1",
}
LIMITS = {
    "resume": {"--steps": "3"},
    "eval": {"--max-new-tokens": "4", "--limit": "4"},
    "sample": {"--max-new-tokens": "4"},
}

FILES = {
    "problems.jsonl": "".join(
        f'{{"prompt": "{a}+{b}=", "answer": "{a + b:03}", "solution": "{a + b:03}"}}\n'
        for a in range(10, 40)
        for b in range(10, 13)
    ),
    "heldout.jsonl": "".join(f'{{"prompt": "{a}+{a}=", "answer": "{a + a:03}"}}\n' for a in range(50, 60)),
    "tulu.jsonl": '{"messages": [{"role": "user", "content": "1+1="}], "ground_truth": "2", "dataset": "math"}\n',
    "run.yaml": "model: builtin\ndata: problems.jsonl\nrewards: [number_match]\nmax_new_tokens: 4\n",
    "config.yaml": "model_name_or_path: Qwen/Qwen3-0.6B\nmax_steps: 100\nnum_generations: 8\n",
    "maxrl.sh": "python maxrl.py --model_name_or_path Qwen/Qwen3-0.6B --max_steps 100 --num_generations 8\n",
    "scripts/train/qwen/grpo.sh": "python open_instruct/grpo_fast.py --model_name_or_path Qwen/Qwen3-0.6B --beta 0.0\n",
    "train_grpo.py": "MAX_STEPS = 100\nNUM_GENERATIONS = 8\n",
    "my_rewards.py": (
        "def right(completions, answer, **_):\n"
        "    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]\n"
    ),
}


@dataclass(frozen=True, slots=True)
class Command:
    page: str
    line: int
    words: tuple[str, ...]
    target: str = ""
    """File that its output goes to."""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {shlex.join(self.words)}"


def commands(page: Path) -> Iterator[Command]:
    text = page.read_text(encoding="utf-8")
    for block in SHELL_BLOCK.finditer(text):
        first = text.count("\n", 0, block.start()) + 2
        for number, line in enumerate(re.sub(r"\\\n", " ", block[1]).splitlines()):
            words = shlex.split(line, comments=True)
            target = words[words.index(">") + 1] if ">" in words else ""
            words = words[: words.index(">")] if target else words
            while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
                words = words[1:]
            if words:
                yield Command(page.name, first + number, tuple(words), target)


ALL = [command for page in PAGES for command in commands(page) if page.name not in FOLLOWED]
OF_PAGE = {page.name: [c for c in ALL if c.page == page.name and c.words[0] == "gruppo"] for page in PAGES}
OF_PAGE = {name: found for name, found in OF_PAGE.items() if found}


@pytest.fixture(scope="module")
def finished_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs that a page may speak of without having made them: `runs/lora` has an adapter, any other all weights."""
    folder, made = tmp_path_factory.mktemp("runs"), {}
    for name, flags in {"full": [], "lora": ["--lora"]}.items():
        made[name] = folder / name
        sizes = [word for pair in SIZES.items() for word in pair]
        assert run(["demo", *sizes, *flags, "--completions-every", "1", "--output", str(made[name])]) == 0
    return made


def smaller(words: list[str]) -> list[str]:
    """The same command at a size for a test: few tokens and steps, and the embedded model for one of a hub."""
    words = ["builtin" if re.match(r"Qwen/", word) else word for word in words]
    sizes = SIZES if words[0] in ("train", "demo") else LIMITS.get(words[0], {})
    for flag, value in sizes.items():
        if flag == "--steps" and "--epochs" in words:
            continue
        if flag in words:
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    return words


class Parsed(Exception):
    """Raised once the real parser has accepted the words."""


def parse_only(words: list[str]) -> None:
    real = arguments.parse_words

    def stop_after_parsing(*args, **kwargs):
        real(*args, **kwargs)
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "parse_words", stop_after_parsing)
        with pytest.raises(Parsed):
            run(words)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what starts a worker process
@pytest.mark.parametrize("page", OF_PAGE)
def test_commands_of_a_page_run_in_their_order(page, tmp_path, monkeypatch, finished_runs):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for command in OF_PAGE[page]:
        words = list(command.words[1:])
        if any(re.search(pattern, shlex.join(words)) for pattern in PARSED):
            parse_only(words)
            continue
        if words[0] not in ("train", "demo"):
            for folder in re.findall(r"runs/[\w-]+", shlex.join(words)):
                if not Path(folder).exists():
                    shutil.copytree(finished_runs["lora" if "lora" in folder else "full"], folder)
        if command.target:
            with open(command.target, "w") as file, redirect_stdout(file):
                assert run(words) == 0, str(command)
        else:
            assert run(smaller(words)) == 0, str(command)


@pytest.mark.parametrize("command", [c for c in ALL if c.words[0] != "gruppo"], ids=str)
def test_other_commands_name_what_exists(command):
    program, *rest = command.words
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M)
        assert rest and set(rest) <= set(targets)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert rest[0] == "install"
        for word in rest[1:]:
            assert set(re.findall(r"\w+", "".join(re.findall(r"\[(.*)\]", word)))) <= extras.keys()
            assert not word.endswith(".txt") or (ROOT / word).is_file()
    elif program.endswith(("python", ".sh")):
        script = program if program.endswith(".sh") else rest[0]
        if script == "-m":
            return
        source = (ROOT / script).read_text(encoding="utf-8")
        assert all(word in source for word in rest if word.startswith("--"))
    else:
        assert program in OUTSIDE


BY_HAND = {
    "check": "lint and test, which CI runs",
    "ci": "what CI runs",
    "clean": "removes what the others made",
    "demo": "gruppo demo: tests/install runs it from a wheel",
    "docs": "writes pages; test_readme.py compares them with what it would write",
    "figures": "writes pictures",
    "format": "changes files",
    "gpu": "needs a GPU",
    "nightly": "itself",
    "quick": "a part of test",
    "screenshots": "writes pictures",
}
"""Targets that neither CI nor `make nightly` runs, and why."""

WITHOUT_TARGET = {
    "benchmarks/step.py": "needs a GPU",
    "benchmarks/sample.py": "needs a GPU",
    "benchmarks/train.py": "needs a GPU",
    "benchmarks/real_learning.py": "needs a GPU",
    "benchmarks/real_tools.py": "needs a GPU",
    "benchmarks/communication.py": "tests/distributed/test_communication.py runs it",
}
"""Scripts of a page that no target runs, and why."""


def test_every_target_is_run_by_ci_or_nightly_and_stands_in_the_help():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z][\w-]*):", makefile, re.M)) | {"ci", "nightly"}
    ci, nightly = (set(re.findall(rf"^{name} := (.*)", makefile, re.M)[0].split()) for name in ("CI", "NIGHTLY"))
    nightly = nightly - {"$(CI)"} | ci
    assert nightly <= targets
    recipes = re.findall(rf"^(?:{'|'.join(nightly)}):.*\n((?:\t.*\n)+)", makefile, re.M)
    nightly |= {word for recipe in recipes for word in re.findall(r"\$\(MAKE\) ([a-z][\w-]*)", recipe)}
    assert targets == nightly | BY_HAND.keys() and not nightly & BY_HAND.keys()
    help_text = makefile.partition("PYTHON ?=")[0]
    assert targets - {"setup", "clean"} == set(re.findall(r"make ([a-z][\w-]*)", help_text))
    in_ci = set(re.findall(r"^# \* make ([\w-]+)", help_text, re.M))
    assert ci == in_ci | {"setup", "test", "lint"}
    assert re.findall(r"^make (.*)", (ROOT / ".ci" / "run").read_text(), re.M) == ["ci"]


def test_every_script_of_a_page_is_run_by_a_target():
    makefile = (ROOT / "Makefile").read_text()
    shown = {word for c in ALL for word in c.words if re.fullmatch(r"benchmarks/\w+\.(py|sh)", word)}
    run_by_one = set(re.findall(r"benchmarks/\w+\.(?:py|sh)", makefile))
    assert shown <= run_by_one | WITHOUT_TARGET.keys()
    assert not WITHOUT_TARGET.keys() & run_by_one


def test_the_environment_of_the_peers_has_what_the_benchmarks_import():
    """Of gruppo they import the trainer, whose packages are in an extra; `make bench` in a fresh clone needs them."""
    setup = (ROOT / "benchmarks" / "setup_peers.sh").read_text(encoding="utf-8")
    assert re.findall(r"--editable (\S+)", setup) == ["'.[train]'"]
    assert "from gruppo.trainer" in (ROOT / "benchmarks" / "loop_cpu.py").read_text(encoding="utf-8")


def test_nightly_writes_no_figures_into_the_tree():
    recipe = re.findall(r"^bench-all:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)[0]
    recipe = recipe.replace("$(MAKE) bench ", "benchmarks/core_cpu.py ")
    ran = dict(re.findall(r"benchmarks/(\w+\.py) (.*)", recipe))
    writing = {p.name for p in (ROOT / "benchmarks").glob("*.py") if '"results"' in p.read_text(encoding="utf-8")}
    assert {"core_cpu.py", "loop_cpu.py", "head.py"} <= writing & ran.keys()
    assert all("--output .nightly" in ran[name] for name in writing & ran.keys())


def test_a_goal_of_speed_that_is_missed_does_not_end_the_benchmarks(tmp_path):
    makefile = (ROOT / "Makefile").read_text()
    # Stands for each script: it writes its figures and ends as one that missed a goal.
    stand_in = '#!/bin/sh\necho "$1"\ncase "$2 $3" in "--output .nightly/"*.json) echo {} >"$3"; exit 1;; esac\n'
    for name in (".venv", ".venv-bench"):
        folder = tmp_path / name / "bin"
        folder.mkdir(parents=True)
        (folder / "python").write_text(stand_in)
        (folder / "python").chmod(0o755)
    (tmp_path / "Makefile").write_text(re.sub(r"^\t.*setup_peers.*\n", "", makefile, flags=re.M))
    for name in ("pyproject.toml", "constraints.txt", ".venv/.installed"):
        (tmp_path / name).touch()
    ran = subprocess.run(["make", "bench-all"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    wanted = re.findall(r"benchmarks/(\w+)\.py", makefile.split("\nbench: ")[1].split("\nCI := ")[0])
    assert re.findall(r"^benchmarks/(\w+)", ran.stdout, re.M) == wanted and len(wanted) >= 6


def test_nightly_goes_on_after_a_failure_and_ends_with_a_table(tmp_path):
    makefile = re.sub(r"^NIGHTLY := .*", "NIGHTLY := one two three", (ROOT / "Makefile").read_text(), flags=re.M)
    ends = {"one": "true", "two": "false", "three": "true"}
    more = "".join(f"{name}:\n\t@echo 'output of {name}'; {end}\n" for name, end in ends.items())
    (tmp_path / "Makefile").write_text(f"{makefile}\n{more}")
    words = ["make", "--no-print-directory", "nightly"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    table = [re.sub(r" +\d+ min +", " N min ", line) for line in ran.stdout.splitlines()[-3:]]
    assert [table[0], table[2]] == ["ok     one N min output of one", "ok     three N min output of three"]
    assert re.fullmatch(r"failed two N min make.*: \*\*\* .* Error 1", table[1])
    assert ran.returncode != 0
    assert "output of two" in ran.stdout and "output of two" in (tmp_path / ".nightly" / "two.log").read_text()


def test_every_verb_is_shown_and_run():
    shown = {
        words for found in OF_PAGE.values() for c in found for words in VERBS if c.words[1 : len(words) + 1] == words
    }
    assert shown == set(VERBS)
