"""`gruppo losses`: the table, one formula, a class of the user's, and training with it by name."""

import subprocess
import sys
from pathlib import Path

import pytest

from gruppo.cli.main import run
from gruppo.errors import InputError
from gruppo.loss import LOSSES
from gruppo.trainer import TrainConfig
from gruppo.trainer.build import build_loss

MODULE = '''
from gruppo.loss import NamedLoss, token_level, token_mean

def soft_cap(log_ratio_T, inputs):
    """-2*tanh(r/2)*A"""
    return -2 * (log_ratio_T.exp() / 2).tanh() * inputs.advantages

class SoftCapLoss(NamedLoss):
    """Mine: a soft cap in place of the clip."""

    def __init__(self, **options):
        super().__init__(level=token_level, surrogate=soft_cap, aggregate=token_mean, options=options)

class NoLoss:
    pass
'''


@pytest.fixture
def my_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_losses_of_test.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_losses_of_test"


def test_the_table_has_a_row_for_every_loss(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["losses"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split()[:4] == ["name", "level", "surrogate", "mean"]
    assert [row.split()[0] for row in rows] == list(LOSSES)
    words = dict(zip(LOSSES, rows, strict=True))
    assert words["prime"].split()[-1] == "arXiv:2602.02276"
    assert "TVRegion, pull=0.001" in words["prime"]


@pytest.mark.parametrize("name", LOSSES)
def test_a_name_prints_its_formula(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["losses", name]) == 0
    first, blank, *formula = capsys.readouterr().out.rstrip("\n").split("\n")
    assert first == (LOSSES[name].__doc__ or "").splitlines()[0]
    assert (blank, "\n".join(formula)) == ("", repr(LOSSES[name]()))


def test_a_wrong_name_says_which_is_near() -> None:
    with pytest.raises(InputError, match="there is no loss 'gmop'; did you mean 'gmpo'"):
        run(["losses", "gmop"])


def test_a_class_of_the_users_prints_its_formula(my_losses: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["losses", f"{my_losses}:SoftCapLoss"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Mine: a soft cap in place of the clip.\n") and "surrogate   -2*tanh(r/2)*A" in out
    with pytest.raises(InputError, match="not a loss"):
        run(["losses", f"{my_losses}:NoLoss"])


def test_every_name_and_a_class_of_the_users_can_be_trained_with(my_losses: str) -> None:
    for name, cls in LOSSES.items():
        made = build_loss(TrainConfig(loss=name, beta=0.1))
        assert type(made) is cls and made.beta == 0.1
    mine = build_loss(TrainConfig(loss=f"{my_losses}:SoftCapLoss", beta=0.1, kl_estimator=1))
    assert (type(mine).__name__, mine.beta, mine.kl.__name__) == ("SoftCapLoss", 0.1, "k2")  # type: ignore[attr-defined]


def test_an_unknown_name_lists_all() -> None:
    with pytest.raises(InputError, match=r"'grpoo' is unknown; use one of grpo, .*vapo.*, or your\.module:YourLoss"):
        build_loss(TrainConfig(loss="grpoo"))


@pytest.mark.slow
def test_help_does_not_load_torch() -> None:
    code = (
        "import sys\nfrom gruppo.cli.main import run\n"
        "try:\n    run(['losses', '--help'])\nexcept SystemExit:\n    print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=250)
    assert ran.stdout.rstrip().endswith("False")
