"""Numbers that a person reads: evaluation, plan, rollout metrics, each by hand."""

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from gruppo.parallel.ranks import Ranks
from gruppo.rollout.driver import Driver
from gruppo.rollout.evaluate import evaluate, pass_at_k_metrics, wilson_interval
from gruppo.rollout.source import rollout_metrics
from gruppo.sampler import SamplingParams
from gruppo.trainer import TrainConfig
from gruppo.trainer.estimate import RunEstimate, estimate_run, replicates, whole_state
from gruppo.types import Group, Prompt, Rollout, Trajectory

# --- evaluation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        # Newcombe 1998 (Statistics in Medicine 17:857), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
        # the ends mirror each other
        (20, 20, 1 - 0.1611, 1.0),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilsons_interval_is_the_published_one(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


def test_pass_at_k_by_hand() -> None:
    # Three prompts with 0, 1 and 4 right of 4. pass@2 of 1 in 4: 1 - C(3,2)/C(4,2) = 1/2.
    metrics = pass_at_k_metrics([0, 1, 4], 4)
    assert metrics["eval/pass@1"] == pytest.approx((0 + 1 / 4 + 1) / 3)
    assert metrics["eval/pass@2"] == pytest.approx((0 + 1 / 2 + 1) / 3)
    assert metrics["eval/pass@4"] == pytest.approx((0 + 1 + 1) / 3)
    assert {k for k in metrics if not k.endswith(("_low", "_high"))} == {f"eval/pass@{k}" for k in (1, 2, 4)}


def test_the_interval_of_pass_at_k_is_that_of_a_mean_over_prompts() -> None:
    metrics = pass_at_k_metrics([1, 2, 2, 3], 4)
    # values 1/4, 1/2, 1/2, 3/4: mean 1/2 of 4 prompts; Wilson: 1/2 +- z sqrt(1/16 + z^2/64) / (1 + z^2/4), z = 1.96
    half = 1.96 * sqrt(1 / 16 + 1.96**2 / 64) / (1 + 1.96**2 / 4)
    assert metrics["eval/pass@1_low"] == pytest.approx(0.5 - half, abs=1e-4)
    assert metrics["eval/pass@1_high"] == pytest.approx(0.5 + half, abs=1e-4)


def test_the_interval_of_pass_at_k_has_a_width_when_all_prompts_agree() -> None:
    metrics = pass_at_k_metrics([4] * 64, 4)
    assert (metrics["eval/pass@4"], metrics["eval/pass@4_high"]) == (1.0, 1.0)
    assert metrics["eval/pass@4_low"] == pytest.approx(1 / (1 + 1.96**2 / 64), abs=1e-4)  # 0.943, the rule of four


@pytest.mark.parametrize(("p", "k"), [(0.9, 4), (0.5, 1), (0.1, 2)])
def test_the_interval_of_pass_at_k_covers_the_truth(p: float, k: int) -> None:
    """400 evaluations of 64 prompts with 4 samples each: the true pass@k lies inside at least 95 % of the time."""
    import random

    draw = random.Random(0)
    truth, inside = 1 - (1 - p) ** k, 0
    for _ in range(400):
        metrics = pass_at_k_metrics([sum(draw.random() < p for _ in range(4)) for _ in range(64)], 4)
        inside += metrics[f"eval/pass@{k}_low"] <= truth <= metrics[f"eval/pass@{k}_high"]
    assert inside / 400 >= 0.95


def test_pass_at_k_stops_at_the_number_of_samples() -> None:
    assert {k for k in pass_at_k_metrics([1], 6) if k[-1].isdigit()} == {f"eval/pass@{k}" for k in (1, 2, 4)}


def sequence(text: str = "7", *, tokens: tuple[int, ...] = (8, 2), truncated: bool = False) -> Trajectory:
    return Trajectory(
        prompt=Prompt(token_ids=(1, 5)),
        tokens=tokens,
        logps=(-0.5,) * len(tokens),
        text=text,
        stop_reason="length" if truncated else "stop",
    )


class ScriptedSampler:
    """Answers greedy requests with the first text of each prompt, others with the rest."""

    def __init__(self, texts: list[list[str]]) -> None:
        self.texts = texts
        self.asked: list[SamplingParams] = []

    def draw(self, batch: Any, num_samples: int = 1, params: Any = None) -> list[tuple[Trajectory, ...]]:
        self.asked.append(params)
        chosen = [t[:1] if params.temperature == 0 else t[1 : 1 + num_samples] for t in self.texts]
        return [tuple(sequence(x) for x in row) for row in chosen]


def test_evaluation_counts_greedy_and_sampled_answers() -> None:
    from gruppo.reward import RewardScorer

    prompts = [Prompt(token_ids=(1, i), source=f"p{i}", columns={"answer": "7"}, index=i) for i in range(4)]
    texts = [["7", "7", "7"], ["7", "x", "7"], ["x", "x", "x"], ["7", "x", "x"]]
    sampler = ScriptedSampler(texts)
    with RewardScorer(["exact_match"]) as scorer:
        result = evaluate(
            prompts,
            Driver(sampler=sampler, scorer=scorer),
            SamplingParams(temperature=0.6, max_new_tokens=9),
            num_samples=2,
        )
    assert result.accuracy == 3 / 4
    assert (result.metrics["eval/accuracy_low"], result.metrics["eval/accuracy_high"]) == wilson_interval(3, 4)
    assert result.metrics["eval/reward"] == 3 / 4
    assert result.metrics["eval/pass@1"] == (1 + 1 / 2 + 0 + 0) / 4
    assert result.metrics["eval/pass@2"] == 2 / 4
    assert [r.reward for r in result.greedy] == [1.0, 1.0, 0.0, 1.0]
    assert [r.trajectory.text for r in result.greedy] == ["7", "7", "x", "7"]
    assert [(p.temperature, p.max_new_tokens) for p in sampler.asked] == [(0.0, 9), (0.6, 9)]


@pytest.mark.parametrize(("correct_at", "accuracy"), [(0.5, 1.0), (1.0, 0.5)])
def test_what_counts_as_correct_is_a_threshold(correct_at: float, accuracy: float) -> None:
    from gruppo.reward import RewardScorer, load_reward

    reward = load_reward(lambda completions: [1.0 if c == "7" else 0.5 for c in completions], name="f", isolated=False)
    prompts = [Prompt(token_ids=(1,), index=i) for i in range(2)]
    with RewardScorer([reward], correct_at=correct_at) as scorer:
        result = evaluate(prompts, Driver(sampler=ScriptedSampler([["7"], ["x"]]), scorer=scorer), SamplingParams())
    assert result.accuracy == accuracy


# --- rollouts -----------------------------------------------------------------------------------------------------


def test_the_same_prompt_drawn_twice_is_scored_as_two_groups() -> None:
    from gruppo.reward import RewardScorer, load_reward

    seen: list[Any] = []
    reward = load_reward(lambda completions: [float(c) for c in completions], name="f", isolated=False)
    prompts = [Prompt(token_ids=(1,), source="p", index=i) for i in range(2)]
    responses = [tuple(sequence(x) for x in texts) for texts in ("12", "345")]
    with RewardScorer([reward]) as scorer:
        plain = scorer.score
        scorer.score = lambda *args, **kw: seen.append(kw["group_ids"]) or plain(*args, **kw)  # type: ignore
        groups, _ = Driver(sampler=ScriptedSampler([]), scorer=scorer).score(prompts, responses, step=0, seed=0)
    assert seen == [[0, 0, 1, 1, 1]]
    assert [[r.reward for r in group.rollouts] for group in groups] == [[1.0, 2.0], [3.0, 4.0, 5.0]]


def rollout(reward: float | None, advantage: float, **options: Any) -> Rollout:
    correct = None if reward is None else reward >= 1.0
    return Rollout(
        trajectory=sequence(**options), reward=reward, rewards={"r": reward}, correct=correct, advantage=advantage
    )


def groups() -> tuple[Group, ...]:
    prompt = Prompt(token_ids=(1, 5))
    return (
        Group(prompt=prompt, rollouts=(rollout(1.0, 0.5), rollout(0.0, -0.5, tokens=(8, 9, 10, 2)))),
        Group(prompt=prompt, rollouts=(rollout(1.0, 0.0), rollout(1.0, 0.0, text=" ", tokens=(2,)))),
        Group(prompt=prompt, rollouts=(rollout(0.0, 0.0), rollout(0.0, 0.0, tokens=(8, 8, 8), truncated=True))),
        Group(prompt=prompt, rollouts=(rollout(None, 0.0), rollout(0.5, 0.0))),
    )


def test_rollout_metrics_by_hand() -> None:
    # Rewards 1 0 | 1 1 | 0 0 | none 0.5; every token has log-prob -0.5, and no sampler said its entropy.
    assert rollout_metrics(groups()) == pytest.approx(
        {
            "group/zero_std_frac": 3 / 4,
            "group/all_right_frac": 1 / 4,
            "group/all_wrong_frac": 1 / 4,
            "completion/len_mean": (2 + 4 + 2 + 1 + 2 + 3 + 2 + 2) / 8,
            "completion/len_p95": 4.0,
            "completion/truncated_frac": 1 / 8,
            "completion/empty_frac": 1 / 8,
            "rollout/entropy": 0.5,
        }
    )


def test_the_entropy_of_rollouts_is_the_samplers_own_where_it_is_known() -> None:
    known = replace(sequence(tokens=(8, 2)), entropies=(0.25, 0.75))
    unknown = sequence(tokens=(8, 9, 2))  # three tokens of log-prob -0.5
    rollouts = tuple(Rollout(trajectory=s, reward=0.0) for s in (known, unknown))
    metrics = rollout_metrics([Group(prompt=Prompt(token_ids=(1,)), rollouts=rollouts)])
    assert metrics["rollout/entropy"] == pytest.approx((0.25 + 0.75 + 3 * 0.5) / 5)


def test_masking_a_truncated_rollout_keeps_it_in_the_batch_unscored(make_trainer: Callable[..., Any]) -> None:
    stage = make_trainer().advantages
    for mask_truncated, scored in ((False, [2, 4, 2, 1, 2, 3, 2, 2]), (True, [2, 4, 2, 1, 2, 0, 2, 2])):
        assigned = replace(stage, mask_truncated=mask_truncated).assign(groups())
        rollouts = [r for g in assigned for r in g.rollouts]
        assert [r.num_scored for r in rollouts] == scored
        assert [r.trajectory for r in rollouts] == [r.trajectory for g in groups() for r in g.rollouts]
        # Rewards 1 0 | 1 1 | 0 0 | none 0.5: masked or not, a rollout counts in the mean of its group.
        assert [r.advantage > 0 for r in rollouts] == [True] + [False] * 7


# --- plan ---------------------------------------------------------------------------------------------------------

PLAN: dict[str, Any] = {
    "num_prompts": 1000,
    "mean_prompt_tokens": 20.0,
    "parameters": 1_000_000,
    "trainable": 1_000_000,
    "hidden_size": 64,
    "num_layers": 2,
    "vocabulary": 100,
}
CONFIG = TrainConfig(
    prompts_per_step=8, group_size=4, steps=50, epochs_per_batch=2, minibatches=2, max_new_tokens=30,
    tokens_per_microbatch=500,
)  # fmt: skip


def plan_of(config: TrainConfig, **sizes: Any) -> RunEstimate:
    """The plan for a model of these sizes and for prompts that are all of the mean length."""
    shape = {"hidden_size": sizes["hidden_size"], "vocab_size": sizes["vocabulary"]}
    shape["num_hidden_layers"] = sizes["num_layers"]
    trains = SimpleNamespace(numel=lambda: sizes["trainable"], requires_grad=True)
    frozen = SimpleNamespace(numel=lambda: sizes["parameters"] - sizes["trainable"], requires_grad=False)
    inner = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(**shape)), parameters=lambda: [trains, frozen]
    )
    device = SimpleNamespace(type="cuda" if sizes.get("is_cuda") else "cpu")
    prompt = Prompt(token_ids=(0,) * int(sizes["mean_prompt_tokens"]))
    dtype = SimpleNamespace(itemsize=sizes.get("bytes_per", 4))
    parts = {
        "model": inner,
        "logp_model": SimpleNamespace(base=inner),
        "ranks": Ranks(),
        "num_shards": 1,
        "copy_bytes": 0,
    }
    model: Any = SimpleNamespace(**parts, device=device, dtype=dtype)
    return estimate_run(config, model, [prompt] * sizes["num_prompts"])


def test_the_plan_by_hand() -> None:
    plan = plan_of(CONFIG, **PLAN)
    assert plan.sequences_per_step == 8 * 4
    assert plan.tokens_per_step == 32 * (20 + 30)
    assert plan.microbatches == 4  # 1600 tokens in parts of 500
    assert plan.optimizer_steps == 50 * 2 * 2
    assert plan.epochs == 50 * 8 / 1000
    # weights 4 MB; gradient and two moments 12 MB; 16 vectors of 64 floats for 500 tokens in 2 layers; logits 3 times
    assert plan.memory == 4_000_000 + 12_000_000 + 500 * 64 * 2 * 16 * 4 + 500 * 100 * 4 * 3


def test_the_plan_knows_that_the_head_walks_over_a_large_vocabulary() -> None:
    large = PLAN | {"vocabulary": 150_000}
    adapter = plan_of(CONFIG.model_copy(update={"lora": True}), **large).memory
    others = plan_of(CONFIG, **PLAN).memory - 500 * 100 * 4 * 3
    # float32 directions of all 500 tokens, d_hidden twice, six numbers per token, two sums per 256 columns
    walk = 500 * 150_000 * 4 + 2 * (500 * 64 * 4) + 500 * 24 + 500 * 586 * 8
    assert adapter == others + walk
    # trained: also d_weight in float32 and the scaled hidden states of a window
    assert plan_of(CONFIG, **large).memory == adapter + 150_000 * 64 * 4 + 500 * 64 * 4


def test_the_plan_counts_a_frozen_copy_only_where_there_is_one() -> None:
    plain = plan_of(CONFIG, **PLAN).memory
    with_kl = plan_of(CONFIG.model_copy(update={"beta": 0.1}), **PLAN).memory
    with_adapter = plan_of(CONFIG.model_copy(update={"beta": 0.1, "lora": True}), **PLAN).memory
    in_reward = plan_of(CONFIG.model_copy(update={"kl_in_reward": 0.1}), **PLAN).memory
    assert with_kl - plain == in_reward - plain == 4_000_000
    assert with_adapter == plain


def test_what_weights_gradients_and_optimizer_take_by_hand() -> None:
    adapter = CONFIG.model_copy(update={"lora": True, "beta": 0.1})
    assert whole_state(CONFIG, 100, 100, 4).total == 100 * 4 + 100 * 12
    assert whole_state(CONFIG, 100, 100, 2).total == 100 * 2 + 100 * 4 + 100 * 12
    assert whole_state(CONFIG.model_copy(update={"beta": 0.1}), 100, 100, 4).total == 100 * 4 + 100 * 12 + 100 * 4
    assert whole_state(adapter, 100, 10, 2).total == 100 * 2 + 10 * 4 + 10 * 12


def test_a_small_model_is_kept_whole_on_every_rank_and_a_large_one_is_not(tmp_path: Path) -> None:
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126}  # 405 billion: 6 TB of state
    LlamaConfig(**sizes, num_attention_heads=128, num_key_value_heads=8).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()  # it is not read for this
    auto = CONFIG.model_copy(update={"dtype": "float32"})
    assert auto.shard == "auto"
    found = {name: replicates(auto, name, Ranks()) for name in ("builtin", str(tmp_path))}
    assert found == {"builtin": True, str(tmp_path): False}
    none, full = (auto.model_copy(update={"shard": choice}) for choice in ("none", "full"))
    assert replicates(none, str(tmp_path), Ranks()) and not replicates(full, "builtin", Ranks())


def test_recomputation_and_bfloat16_change_the_estimate() -> None:
    plain = plan_of(CONFIG, **PLAN).memory
    less = plan_of(CONFIG.model_copy(update={"gradient_checkpointing": True}), **PLAN).memory
    # Of each of 2 layers one vector instead of 16, and all 16 of the one that is computed again
    assert plain - less == 500 * 64 * (2 * 15 - 16) * 4
    half = plan_of(CONFIG, **PLAN, bytes_per=2).memory
    # Half of the weights and activations, and a master copy of the weights in float32
    assert plain - half == 2_000_000 + 500 * 64 * 2 * 16 * 2 - 4_000_000
    lora = CONFIG.model_copy(update={"lora": True})
    adapter = [plan_of(lora, **(PLAN | {"trainable": 1000}), bytes_per=n).memory for n in (4, 2)]
    assert adapter[0] - adapter[1] == 2_000_000 + 500 * 64 * 2 * 16 * 2 - 4000


def test_without_a_token_budget_there_is_one_micro_batch() -> None:
    assert plan_of(CONFIG.model_copy(update={"tokens_per_microbatch": None}), **PLAN).microbatches == 1


def test_the_plan_in_words() -> None:
    lines = plan_of(CONFIG, **PLAN).lines(CONFIG)
    assert lines[0] == "8 prompts x 4 completions = 32 sequences per step, at most 1,600 tokens, in 4 micro-batch(es)"
    assert lines[1] == (
        "50 steps x 2 epoch(s) x 2 minibatch(es) = 200 optimizer steps; each prompt is seen 0.4 time(s)"
    )
    assert lines[2].startswith("1,000,000 of 1,000,000 parameters train; about 20 MiB of memory")


def test_the_plan_of_ranks_in_words() -> None:
    plan = replace(plan_of(CONFIG, **PLAN), memory=30 * 2**20, ranks=2, copy=4 * 2**20)
    assert plan.lines(CONFIG)[2] == (
        "1,000,000 of 1,000,000 parameters train; about 30 MiB of memory on each of 2 ranks (estimate), and 4 MiB more "
        "on the first, from which sampler torch samples"
    )


def test_the_plan_counts_a_shared_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """2 prompts of 1000 tokens, 8 completions of 500: 24,000 tokens repeated, 10,000 shared."""
    monkeypatch.setattr("gruppo.trainer.estimate.bytes_per_token", lambda *_, **__: 1.0)  # measured on a GPU only
    monkeypatch.setattr("gruppo.trainer.estimate.refusal", lambda _: None)
    monkeypatch.setattr("gruppo.trainer.estimate._kept_cache", lambda *_: 0)
    config = TrainConfig(prompts_per_step=2, group_size=8, max_new_tokens=500, tokens_per_microbatch=6000)
    given = PLAN | {"mean_prompt_tokens": 1000.0, "hidden_size": 1024, "is_cuda": True}
    plan = plan_of(config, **given)
    assert (plan.tokens_per_step, plan.computed_tokens, plan.prompt_copies, plan.microbatches) == (24_000, 10_000, 1, 2)
    expected = "layout auto: prompt tokens computed 1x instead of 8x, up to 2.4x fewer tokens"
    assert plan.lines(config)[2] == expected
    # 3000 tokens hold the prompt and four completions: each group in two parts, and twice its prompt
    split = plan_of(config.model_copy(update={"tokens_per_microbatch": 3000}), **given)
    assert (split.computed_tokens, split.prompt_copies, split.microbatches) == (12_000, 2, 4)
    padded = plan_of(config.model_copy(update={"layout": "padded"}), **given)
    assert (padded.computed_tokens, padded.prompt_copies, padded.microbatches) == (24_000, 8, 4)


def test_the_plan_says_that_dynamic_sampling_takes_further_prompts() -> None:
    config = CONFIG.model_copy(update={"dynamic_sampling": 10})
    assert any("up to 10 batch(es) of prompts per step" in line for line in plan_of(config, **PLAN).lines(config))
    assert not any("dynamic" in line for line in plan_of(CONFIG, **PLAN).lines(CONFIG))


def test_a_rollout_can_be_replaced() -> None:
    assert replace(rollout(1.0, 0.5), advantage=0.0).advantage == 0.0
