"""Streamed rollouts: long completions do not hold up a step, and no trained token is older than the bound."""

import json
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from processes import wait_until

from gruppo.errors import InputError, RewardError
from gruppo.rollout.handover import CopiedModel
from gruppo.rollout.stream import Streamed
from gruppo.run.signals import Interrupted
from gruppo.sampler import TorchSampler
from gruppo.sampler.base import SampleRequest, Samples, SamplingParams
from gruppo.trainer import GRPOTrainer, TrainConfig

pytestmark = pytest.mark.slow

Make = Callable[..., GRPOTrainer]
SHORT, LONG = 0.08, 0.8
"""Seconds of a group; every fourth prompt is a long one."""
PER_STEP = 8


def is_long(index: int) -> bool:
    return index % 4 == 0


class Engine(TorchSampler):
    """An engine of 16 places: groups are sampled at the same time, and each takes as long as its prompt says."""

    held: Callable[[int, int], bool] = staticmethod(lambda sampled, now: False)
    """Whether a long group is not yet complete, by the version that sampled it and the one that is loaded now."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.lock = threading.Condition()
        self.places = ThreadPoolExecutor(2 * PER_STEP)

    def submit(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Future[Samples]]:
        return [self.places.submit(self._one, request, params) for request in requests]

    def _one(self, request: SampleRequest, params: SamplingParams) -> Samples:
        with self.lock:
            (drawn,) = super().submit([request], params)
            sampled = self.model.version
        time.sleep(LONG if is_long(request.prompt.index) else SHORT)
        with self.lock:
            while is_long(request.prompt.index) and self.held(sampled, self.model.version):
                self.lock.wait(0.01)
        return drawn.result()


class EngineWeights(CopiedModel):
    """A copy of the model in such an engine."""

    def __init__(self, model: Any, make: Any) -> None:
        super().__init__(model, Engine)

    def load(self, published: Any) -> None:
        with self.sampler.lock:
            super().load(published)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gruppo.trainer.build.CopiedModel", EngineWeights)


class Ages:
    """Callback: the age of every trained token's policy, in updates, by its own count of the updates."""

    def __init__(self) -> None:
        self.before, self.ages, self.prompts = 0, list[int](), list[int]()

    def __call__(self, trainer: GRPOTrainer, _step: int, _metrics: Any) -> None:
        for group in trainer.kept:
            self.prompts.append(group.prompt.index)
            self.ages += [self.before - rollout.trajectory.versions[0] for rollout in group.rollouts]
        self.before = trainer.model.version


def events(trainer: GRPOTrainer, kind: str) -> list[dict[str, Any]]:
    lines = (trainer.run.path / "events.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == kind]


@pytest.mark.clock
def test_long_completions_do_not_hold_up_a_step(make_trainer: Make, engine: None, tmp_path: Path) -> None:
    seconds, trained = {}, {}
    for streaming in (False, True):
        ages = Ages()
        options = {"max_staleness": 8, "streaming": streaming, "steps": 8, "prompts_per_step": PER_STEP}
        trainer = make_trainer(**options, output=str(tmp_path / str(streaming)), callbacks=[ages])
        started = time.monotonic()
        trainer.train()
        seconds[streaming], trained[streaming] = (time.monotonic() - started) / 8, ages
    assert seconds[False] > 0.9 * LONG  # the longest completion of a step
    assert seconds[True] < 0.75 * seconds[False]  # a quarter where nothing else runs
    assert len(trained[True].prompts) == len(trained[False].prompts) == 8 * PER_STEP
    assert max(trained[True].ages) <= 8
    assert sum(map(is_long, trained[True].prompts)) > 0  # they come later, and they come


def test_what_is_older_than_the_bound_is_dropped_and_sampled_again(
    make_trainer: Make, engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = 2 * 4  # two steps of four updates
    # However long a step takes, those of the first weights are not complete before they are too old.
    monkeypatch.setattr(Engine, "held", staticmethod(lambda sampled, now: sampled == 0 and now <= bound))
    ages = Ages()
    options = {"max_staleness": 2, "streaming": True, "steps": 12, "prompts_per_step": PER_STEP}
    trainer = make_trainer(**options, epochs_per_batch=2, minibatches=2, callbacks=[ages])
    trainer.train()
    assert max(ages.ages) <= bound
    rows = [row for row in trainer.run.metrics() if row["step"]]
    assert max(row["rollout/staleness"] for row in rows) == max(ages.ages)
    dropped = [index for event in events(trainer, "rollouts_dropped") for index in event["prompts"]]
    assert len(dropped) == sum(row["rollout/dropped"] for row in rows) > 0
    assert all(map(is_long, dropped))


@pytest.mark.parametrize("more", [
    {"dynamic_sampling": 3, "retire_solved": 1},
    {"dynamic_sampling": 2, "advantage": "reinforce_pp"},
    {"advantage": "remax"},
    {"epochs_per_batch": 2, "minibatches": 2},
    {"lora": True, "beta": 0.01},
    {"kl_in_reward": 0.1, "kl_target": 1.0, "ref_every": 2, "overlong_cache": 2},
    {"entropy_coef": 0.01, "entropy_target": 0.5, "correction": "mask"},
    {"eval_prompts": 8, "eval_every": 2, "eval_samples": 2, "keep_best": True},
    {"loss": "gspo", "rewards": ("exact_match", "length_penalty"), "reward_weights": (1.0, 0.1)},
    {"completions_every": 1, "tensorboard": True},
])  # fmt: skip
def test_every_other_option_goes_with_it(more: dict[str, Any], make_trainer: Make) -> None:
    ages = Ages()
    trainer = make_trainer(max_staleness=2, streaming=True, steps=5, callbacks=[ages], **more)
    result = trainer.train()
    assert result.status == "done" and result.step == 5
    updates = more.get("epochs_per_batch", 1) * more.get("minibatches", 1)
    assert max(ages.ages) <= 2 * updates
    if "dynamic_sampling" in more:
        rows = [row for row in result.metrics if row["step"]]
        assert all(row["dynamic/groups_kept"] <= 4 for row in rows)
        assert all(
            row["dynamic/groups_kept"] == 4 or row["dynamic/groups_sampled"] == 4 * more["dynamic_sampling"]
            for row in rows
        )
    else:
        assert len(ages.prompts) == 5 * 4


def test_a_stopped_run_keeps_complete_groups_and_samples_the_others_again(
    make_trainer: Make, engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_stopped = threading.Event()
    monkeypatch.setattr(Engine, "held", staticmethod(lambda sampled, now: sampled >= 2 and not is_stopped.is_set()))

    def stop(trainer: GRPOTrainer, step: int, _metrics: Any) -> None:
        if step == 4:
            wait_until(trainer.schedule._returned.qsize, seconds=60.0)  # something is complete
            trainer.stop.signal = signal.SIGTERM

    options = {"max_staleness": 8, "streaming": True, "steps": 8, "prompts_per_step": PER_STEP}
    first = make_trainer(**options, callbacks=[stop])
    assert first.train().status == "stopped"
    is_stopped.set()
    left = first.schedule
    assert isinstance(left, Streamed) and left._ready and left._flying
    again = make_trainer(**options, resume=True)
    read = again.schedule
    assert isinstance(read, Streamed)
    assert [flight.group for flight in read._ready] == [flight.group for flight in left._ready]
    in_flight = [flight.prompt.index for flight in left._flying]
    assert [prompt.index for _, prompt in read._next][: len(in_flight)] == in_flight
    result = again.train()
    assert result.status == "done"
    assert [row["step"] for row in result.metrics] == list(range(1, 9))
    assert [event["prompts"] for event in events(again, "rollouts_again")] == [in_flight]


def test_a_step_that_is_stopped_while_it_waits_loses_no_group(
    make_trainer: Make, engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "held", staticmethod(lambda sampled, now: True))
    monkeypatch.setitem(globals(), "is_long", lambda index: index % 4 != 0)  # too few short ones for a step
    trainer = make_trainer(max_staleness=8, streaming=True, steps=8, prompts_per_step=PER_STEP)
    ahead = trainer.schedule

    def poll() -> None:
        if ahead._flying and all(is_long(flight.prompt.index) for flight in ahead._flying):
            raise Interrupted("SIGTERM")

    ahead.poll = poll
    with pytest.raises(Interrupted):
        trainer.step()
    waiting = [*ahead._ready, *ahead._flying]
    assert len(ahead._ready) > 0 and len({flight.prompt.index for flight in waiting}) == 2 * PER_STEP


@pytest.mark.parametrize("before", [{}, {"max_staleness": 1}, {"max_staleness": 1, "streaming": True}])
@pytest.mark.parametrize("after", [{"max_staleness": 1}, {"max_staleness": 2, "streaming": True}, {}])
def test_a_run_may_change_its_schedule(
    before: dict[str, Any], after: dict[str, Any], small_config: Callable[..., TrainConfig]
) -> None:
    GRPOTrainer(small_config(steps=2, **before), quiet=True).train()
    going_on = GRPOTrainer(small_config(steps=4, **after), resume=True, accept_changes=True, quiet=True)
    assert going_on.train().step == 4


def test_a_reward_that_breaks_ends_the_run_with_its_own_text(make_trainer: Make, tmp_path: Path) -> None:
    calls = []

    def breaks(completions: list[str], **_: Any) -> list[float]:
        calls.append(len(completions))
        if len(calls) > 12:
            raise ValueError("the grader is gone")
        return [float(len(text)) for text in completions]

    options = {"steps": 9, "max_staleness": 1, "streaming": True, "group_size": 8, "prompts_per_step": 8}
    small = TrainConfig(output=str(tmp_path / "run"), max_new_tokens=4, eval_prompts=0, tensorboard=False, **options)
    with pytest.raises(RewardError, match="the grader is gone"):
        GRPOTrainer(small, rewards=[breaks], quiet=True).train()


@pytest.mark.parametrize(("options", "message"), [
    ({"streaming": True}, "streaming=true needs max_staleness of at least 1"),
    ({"streaming": True, "max_staleness": 1, "lora": True, "sampler": "vllm:start"}, "cannot go with lora=true and"),
    ({"streaming": True, "max_staleness": 1, "sampler": "vllm"}, "the engine of sampler='vllm' rests meanwhile"),
])  # fmt: skip
def test_what_cannot_stream_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainConfig.read(options)
