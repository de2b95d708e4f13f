"""Scripts of TRL: the columns of docs/coming_from.md differ in imports and construction alone; the right one runs."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```python title=.*?\n(.*?)^```$", re.M | re.S)
QUICK_TRL, QUICK, SHARED, GSM8K_TRL, GSM8K, OPTIONS = (block[1] for block in BLOCK.finditer(PAGE))

QUESTIONS = [
    {"question": f"Ann has {n} pens and buys {n % 7 + 2} more. How many?", "answer": f"{n}+...\n#### {n + n % 7 + 2}"}
    for n in range(1_000, 1_040)
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory as the scripts expect it: a model folder with a chat template, and data."""
    specification = importlib.util.spec_from_file_location("example", ROOT / "examples" / "04_gsm8k_lora.py")
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    example.make_byte_model(tmp_path / "models" / "qwen")
    deepmath = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "solution": f"${n + 1}$"} for n in range(40)]
    for name, rows in (("gsm8k", QUESTIONS), ("deepmath", deepmath)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def run(script: str, folder: Path) -> str:
    (folder / "script.py").write_text(script)
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    environment = os.environ | offline | {"PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def smaller(script: str, **sizes: int) -> str:
    """The script with other numbers, each of which must stand in it."""
    for name, value in sizes.items():
        script, found = re.subn(rf"\b{name}=\d+", f"{name}={value}", script)
        assert found == 1, name
    return script


def statements(script: str) -> list[str]:
    """Statements of a script as text, without imports and without the arguments of the trainer."""
    kept = []
    for line in ast.parse(script).body:
        if isinstance(line, ast.Import | ast.ImportFrom):
            continue
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "trainer":
            assert isinstance(line.value, ast.Call)
            line.value.args, line.value.keywords = [], []
        kept.append(ast.unparse(line))
    return kept


@pytest.mark.parametrize(("theirs", "ours"), [(QUICK_TRL, QUICK), (GSM8K_TRL, GSM8K)], ids=["quick start", "gsm8k"])
def test_the_columns_differ_in_imports_and_construction_alone(theirs, ours):
    assert statements(theirs) == statements(ours)
    assert "trainer = GRPOTrainer()" in statements(ours)


@pytest.mark.long
@pytest.mark.slow
def test_the_gsm8k_script_trains_a_local_model_folder(folder):
    small = smaller(GSM8K, prompts_per_step=2, group_size=4, max_new_tokens=8, steps=2)
    run(SHARED + small, folder)
    lines = [json.loads(line) for line in (folder / "runs/gsm8k/metrics.jsonl").read_text().splitlines()]
    rewards = re.findall(r"^def (\w+_func)", SHARED, re.M)
    assert len(rewards) == 2
    assert all(f"reward/{name}/mean" in lines[-1] for name in rewards)
    config = yaml.safe_load((folder / "runs/gsm8k/config.yaml").read_text())
    assert config["rewards"] == [f"object:{name}" for name in rewards]
    assert (config["lora_rank"], config["lora_alpha"], config["lr"]) == (16, 64, 5e-6)

    import pyarrow.parquet as pq

    row = pq.read_table(folder / "runs/gsm8k/completions/step-000002.parquet").to_pylist()[0]
    question = re.search(r"Ann has (\d+) pens and buys (\d+) more", row["prompt"])
    assert row["prompt"].startswith("<|system|>Respond with <reasoning>")
    assert json.loads(row["columns"])["answer"] == str(int(question[1]) + int(question[2]))
    assert (folder / "runs/gsm8k/model/adapter_config.json").is_file()


@pytest.mark.long
@pytest.mark.slow
def test_the_quick_start_trains_with_its_defaults_made_small(folder):
    small = QUICK.replace(
        'answer_column="solution"',
        'answer_column="solution", steps=1, prompts_per_step=2, group_size=2, max_new_tokens=4, eval_prompts=2',
    )
    assert small != QUICK
    run(small, folder)
    before, line = [json.loads(line) for line in (folder / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert (before["step"], line["step"]) == (0, 1)
    assert line["reward/math_match/abstain_frac"] == 0.0  # it read the column `solution`


@pytest.mark.long
@pytest.mark.slow
def test_a_script_with_options_trains_with_those_of_the_command_that_started_it(folder):
    command = re.search(r"^(gruppo convert trl accelerate .*?) > maxrl.yaml$", PAGE, re.M | re.S)[1].replace("\\\n", "")
    made = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    (folder / "maxrl.yaml").write_text(made.stdout)
    out = run(OPTIONS, folder)
    assert "runs/maxrl is the run directory; its model goes to runs/maxrl/model" in out
    config = yaml.safe_load((folder / "runs/maxrl/config.yaml").read_text())
    expected = {
        "advantage": "maxrl", "lr": 3e-6, "lora_targets": ["q_proj", "v_proj"], "group_size": 4,
        "prompts_per_step": 2,  # 8 completions of a device / 4
        "rewards": ["think_format", "math_match"], "reward_weights": [0.5, 1.0],
    }  # fmt: skip
    assert {name: config[name] for name in expected} == expected
    assert (folder / "runs/maxrl/model/adapter_config.json").is_file()


def test_the_rewards_give_what_the_demo_gives():
    """By hand: the layout earns 0.5, and the right answer 2; without tags the whole text is read as the answer."""
    namespace: dict = {}
    exec(SHARED, namespace)
    answer = "<reasoning>\n3+4\n</reasoning>\n<answer>\n7\n</answer>\n"
    cases = {
        answer: [0.5, 2.0],
        answer.replace("7", "8"): [0.5, 0.0],
        "<reasoning>3+4</reasoning> <answer>7</answer>": [0.5, 2.0],
        "7": [0.0, 2.0],
        "seven": [0.0, 0.0],
    }
    completions = [[{"role": "assistant", "content": text}] for text in cases]
    given = [f(prompts=[[]] * 5, completions=completions, answer=["7"] * 5) for f in namespace["rewards"]]
    assert [list(row) for row in zip(*given, strict=True)] == list(cases.values())
    assert namespace["to_chat"](QUESTIONS[0])["answer"] == "1008"


def test_the_example_of_convert_is_what_it_prints():
    """Each line of the example is one of the file that a configuration with these options becomes."""
    from gruppo.convert import convert

    shown = re.search(r"^```yaml\n(# From TRL.*?)^```$", PAGE, re.M | re.S)[1].splitlines()
    words = """--model_name_or_path Qwen/Qwen2.5-1.5B-Instruct --max_prompt_length 512 --per_device_train_batch_size 16
        --gradient_accumulation_steps 4 --num_processes 8 --num_generations 16 --loss_type dapo --save_strategy epoch
        --push_to_hub"""
    printed = convert("trl", words.split()).text().splitlines()
    assert [line for line in shown if line not in printed] == []


def test_the_page_denies_nothing_that_the_program_has():
    rows = dict(re.findall(r"^\| ([\w, ]+) \| .*? \| (.*) \|$", PAGE.split("### TRL: what is different")[1], re.M))
    assert "`torchrun -m gruppo train`" in rows["several GPUs"] and rows["images"].startswith("[no]")
    assert "longer than `reward_deadline` is abandoned" in " ".join(PAGE.split())
