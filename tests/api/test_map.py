"""The walks of docs/map.md: a run calls their functions in the order in which the page has them."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

import gruppo
from gruppo.cli.main import run
from gruppo.trainer import GRPOTrainer, TrainConfig

DOCS = Path(__file__).parents[2] / "docs"
SOURCE = f"{Path(gruppo.__file__).parent}/"


def walk(heading: str) -> list[tuple[str, str]]:
    """File and function of each line of a walk."""
    section = (DOCS / "map.md").read_text(encoding="utf-8").split(f"\n### {heading}\n")[1].split("\n##")[0]
    return re.findall(r"^\d+\. `([\w/.]+)`, `([\w.]+)`: ", section, re.M)


class Calls:
    """Functions of gruppo in the order of their first calls, while it is entered."""

    def __enter__(self):
        self.seen: dict[tuple[str, str], None] = {}
        self.before = sys.getprofile()
        sys.setprofile(self.note)
        return self

    def __exit__(self, *error):
        sys.setprofile(self.before)

    def note(self, frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(SOURCE):
            self.seen.setdefault((code.co_filename.removeprefix(SOURCE), code.co_qualname))


@pytest.fixture
def config(tmp_path):
    sizes = {"max_new_tokens": 4, "prompts_per_step": 4, "group_size": 4, "eval_prompts": 0, "threads": 1}
    return TrainConfig(output=str(tmp_path / "run"), steps=1, **sizes)


def test_a_step_calls_the_functions_of_its_walk_in_their_order(config):
    trainer = GRPOTrainer(config, quiet=True)
    with Calls() as calls:
        trainer.train()
    expected = walk("One training step")
    assert len(expected) > 10
    assert [call for call in calls.seen if call in expected] == expected


def test_a_resumed_run_calls_the_functions_of_its_walk_in_their_order(config):
    GRPOTrainer(config, quiet=True).train()
    with Calls() as calls:
        assert run(["resume", config.output, "--steps", "2"]) == 0
    expected = walk("`gruppo resume`")
    assert expected[0] == ("cli/main.py", "VERBS") and len(expected) > 10
    assert [call for call in calls.seen if call in expected] == expected[1:]


def test_a_walk_that_names_what_is_gone_or_in_two_files_is_refused():
    specification = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    generate = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(generate)
    for name in ("Nowhere", "main"):
        with pytest.raises(AssertionError, match=name):
            generate.walk_list([(name, "does it")], generate.places())
