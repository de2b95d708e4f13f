"""Losses, advantages and metrics as classes and objects: the run of their names, and what an object leaves out."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo.advantage import GRPOAdvantage, RLOOAdvantage
from gruppo.errors import InputError
from gruppo.keys import Key
from gruppo.loss import CORRECTIONS, GRPOLoss, GSPOLoss
from gruppo.metric import Metric
from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.trainer.build import check_ranks
from gruppo.trainer.inputs import resolve_inputs

Config = Callable[..., TrainConfig]


class OwnLoss(GSPOLoss):
    """A loss of a notebook's cell."""


class Unlikely(Metric):
    """Tokens of a step to which the policy gives less than one half."""

    keys = (Key("live/unlikely", "tokens with a probability below 0.5", "live tokens"),)
    sums = ("unlikely",)

    def measure(self, inputs: Any) -> dict[str, torch.Tensor]:
        return {"unlikely": (inputs.logps < -0.6931).sum()}

    def report(self, totals: Any) -> dict[str, float]:
        return {"live/unlikely": totals["unlikely"]}


def weights(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.weights.named().items()}


def trained(config: TrainConfig, **given: Any) -> tuple[GRPOTrainer, dict[str, torch.Tensor]]:
    trainer = GRPOTrainer(config, quiet=True, **given)
    trainer.train()
    return trainer, weights(trainer)


def test_a_class_in_a_config_is_its_name() -> None:
    config = TrainConfig(loss=OwnLoss, advantage=RLOOAdvantage, metrics=[Unlikely])  # type: ignore[arg-type]
    assert config.loss == f"{__name__}:OwnLoss"
    assert config.advantage == "gruppo.advantage.baseline:RLOOAdvantage"
    assert config.metrics == (f"{__name__}:Unlikely",)
    here = type("Here", (GRPOLoss,), {"__module__": "__main__", "__qualname__": "Here"})
    assert TrainConfig(loss=here).loss == "__main__:Here"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"), [("loss", GRPOLoss()), ("advantage", GRPOAdvantage()), ("metrics", [Unlikely()])]
)
def test_an_object_in_a_config_is_told_where_it_goes(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"a config holds names; give it to GRPOTrainer\(config, {name}=...\)"):
        TrainConfig(**{name: value})


def test_a_class_inside_of_a_function_has_no_name() -> None:
    class Inner(GRPOLoss):
        pass

    with pytest.raises(InputError, match="defined inside a function, where no name finds it"):
        TrainConfig(loss=Inner)  # type: ignore[arg-type]


def test_objects_give_the_run_that_names_with_options_give(small_config: Config, tmp_path: Path) -> None:
    options: dict[str, Any] = {"steps": 2, "lr": 1e-3, "epochs_per_batch": 2}
    named = {"loss": "gspo", "clip_range": 3e-4, "beta": 0.1, "advantage": "rloo", "normalization": "centered"}
    by_name, theirs = trained(small_config(**options, **named, output=str(tmp_path / "names")))
    objects = {
        "loss": GSPOLoss(clip_range=3e-4, beta=0.1),
        "advantage": RLOOAdvantage(normalization="centered"),
        "metrics": [Unlikely()],
    }
    by_object, own = trained(small_config(**options, output=str(tmp_path / "objects")), **objects)
    assert own.keys() == theirs.keys() and all(torch.equal(own[n], theirs[n]) for n in own)
    _, usual = trained(small_config(**options, output=str(tmp_path / "usual")))
    assert not all(torch.equal(own[n], usual[n]) for n in own)
    config = by_object.run.config()
    assert (config["loss"], config["advantage"], config["metrics"]) == (
        "object:GSPOLoss",
        "object:RLOOAdvantage",
        ["object:Unlikely"],
    )
    assert by_object.run.metrics()[-1].keys() - by_name.run.metrics()[-1].keys() == {"live/unlikely"}


def test_a_run_of_such_objects_goes_on_with_them_alone(small_config: Config, tmp_path: Path) -> None:
    whole, expected = trained(small_config(steps=3, output=str(tmp_path / "whole")), loss=OwnLoss())
    trained(small_config(steps=2), loss=OwnLoss())
    config = TrainConfig.of_run(small_config().output, {"steps": 3})
    with pytest.raises(InputError, match=r"made with Python objects, which its directory cannot hold: loss='OwnLoss'"):
        GRPOTrainer(config, resume=True, quiet=True)
    with pytest.raises(InputError, match=r"loss 'object:OwnLoss' -> 'object:GRPOLoss'"):
        GRPOTrainer(config, resume=True, quiet=True, loss=GRPOLoss())
    resumed, found = trained(config, resume=True, loss=OwnLoss())
    assert all(torch.equal(found[n], expected[n]) for n in expected)
    assert resumed.run.metrics() == whole.run.metrics()


@pytest.mark.parametrize(
    "option",
    [
        {"clip_range": 0.3},
        {"tau": 2.0},
        {"loss_options": {"share": 0.5}},
        {"beta": 0.1},
        {"kl_estimator": 1},
        {"entropy_coef": 0.1},
        {"entropy_target": 0.3},
        {"correction": "truncate"},
    ],
)
def test_an_option_that_a_loss_object_would_ignore_is_refused(option: dict[str, Any], small_config: Config) -> None:
    (name,) = option
    with pytest.raises(InputError, match=rf"^(advanced\.)?{name}=.* make the object with it"):
        GRPOTrainer(small_config(**option), quiet=True, loss=GRPOLoss())


@pytest.mark.parametrize("option", [{"normalization": "centered"}, {"advantage_options": {"eps": 1.0}}])
def test_an_option_that_an_advantage_object_would_ignore_is_refused(
    option: dict[str, Any], small_config: Config
) -> None:
    (name,) = option
    with pytest.raises(InputError, match=rf"^{name}=.* goes with the name of advantage"):
        GRPOTrainer(small_config(**option), quiet=True, advantage=GRPOAdvantage())


def test_scale_is_an_argument_of_the_call_and_counts_for_an_object_too(small_config: Config, tmp_path: Path) -> None:
    found = []
    for scale in ("group", "none"):
        config = small_config(scale=scale, output=str(tmp_path / scale))
        trainer = GRPOTrainer(config, quiet=True, advantage=GRPOAdvantage(normalization="standard"))
        trainer.step()
        trainer.close()
        found.append([r.advantage for g in trainer.groups for r in g.rollouts])
    assert found[0] != found[1]


def test_rollouts_from_older_weights_need_a_loss_object_that_corrects_for_it(
    small_config: Config, tmp_path: Path
) -> None:
    config = small_config(max_staleness=1, output=str(tmp_path / "a"))
    with pytest.raises(InputError, match=r"does not correct for it; make it with a correction of .* correction='none'"):
        GRPOTrainer(config, quiet=True, loss=GRPOLoss())
    GRPOTrainer(config, quiet=True, loss=GRPOLoss(correction=CORRECTIONS["truncate"])).close()
    without = small_config(max_staleness=1, correction="none", output=str(tmp_path / "b"))
    GRPOTrainer(without, quiet=True, loss=GRPOLoss()).close()


def test_on_several_ranks_an_object_is_refused(small_config: Config) -> None:
    ranks: Any = object()
    for given in ({"loss": GRPOLoss()}, {"metrics": [Unlikely()]}):
        config, objects = resolve_inputs(small_config(), **given)
        with pytest.raises(InputError, match="an object is for one process; on several ranks give a name"):
            check_ranks(config, objects, ranks)


@pytest.mark.parametrize(("name", "value"), [("loss", 3), ("advantage", 3), ("metrics", [3])])
def test_what_is_no_part_is_refused(name: str, value: Any, small_config: Config) -> None:
    with pytest.raises(InputError, match=rf"^{name}"):
        GRPOTrainer(small_config(), quiet=True, **{name: value})
