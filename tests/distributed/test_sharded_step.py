"""FSDP2 over the model as it is built: on two and three ranks every parameter has the gradient of one process."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from sharded_step import CASES, run

SCRIPT = Path(__file__).with_name("sharded_step.py")
ON_THREE = ("grpo", "tied, walked", "one forward")
pytestmark = [pytest.mark.slow, pytest.mark.ranks]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What each of so many ranks has computed of every case; they are started once."""

    @cache
    def results(world: int) -> list[dict[str, Any]]:
        folder = tmp_path_factory.mktemp("ranks")
        outs = [folder / f"{rank}.json" for rank in range(world)]
        cases = CASES if world == 2 else ON_THREE
        started = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(rank), str(world), str(folder / "store"), str(out), *cases],
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank, out in enumerate(outs)
        ]
        for process in started:
            _, errors = process.communicate(timeout=200)
            assert process.returncode == 0, errors[-3000:]
        return [json.loads(out.read_text()) for out in outs]

    return results


@pytest.mark.parametrize(
    ("case", "world"),
    [*((case, 2) for case in CASES), *((case, 3) for case in ON_THREE)],
)
def test_gradients_of_all_parameters_are_those_of_one_process(case: str, world: int, ranks: Any) -> None:
    alone = run(case)
    for result in ranks(world):
        ranked = result[case]
        assert ranked["grads"].keys() == alone["grads"].keys()
        for name, expected in alone["grads"].items():
            got = ranked["grads"][name]
            if expected is None:  # no sequence has a signal: nothing is computed
                assert got is None or not any(got), name
                continue
            assert got is not None, name
            largest = max(map(abs, expected)) or 1.0
            assert max(abs(a - b) for a, b in zip(expected, got, strict=True)) <= 1e-6 * largest, name
        assert ranked["loss"] == pytest.approx(alone["loss"], abs=1e-6)
        assert ranked["terms"] == pytest.approx(alone["terms"], abs=1e-6)
        assert ranked["metrics"] == pytest.approx(alone["metrics"], rel=1e-5, abs=1e-6)
        if alone["norm"] is not None:
            assert ranked["norm"] == pytest.approx(alone["norm"], rel=1e-6)
