"""Keys of a run's metrics: meaning, population, formula, healthy range, and how values combine.

The tables of `docs/metrics.md`, which describes the populations, are generated from here. The console and the
doctor read it, too. A metric of your own lists its keys in `Metric.keys`; they need no entry here.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Literal

Reduction = Literal["mean", "sum", "max", "min", "last"]


@dataclass(frozen=True, slots=True)
class Key:
    """One number of `metrics.jsonl`. `<name>` in its name stands for any word, `<k>` for any number."""

    name: str
    what: str
    over: str = ""
    formula: str = ""
    """In TeX. ℓ is the policy's log-prob of a token, d = ℓ - ℓ_old, r = e^d, ρ = e^(ℓ_old - ℓ_sampler)."""
    expect: str = ""
    """Healthy values in words. `{}` stands for the typical range; without words, the range is all."""
    typical: tuple[float, float] | None = None
    """Range of nearly every healthy run. Charts show it."""
    alarm: tuple[float, float] | None = None
    """Range outside which something is wrong in nearly every run; `remedy` belongs to it."""
    remedy: str = ""
    reduce: Reduction = "mean"
    """Reduction over micro-batches, updates and ranks."""
    line: str = ""
    """Format on the console, if it is shown there; `rest` is 1 minus the value."""

    @property
    def expected(self) -> str:
        """Healthy values: the typical range in words, with any remark.

        >>> Key("a", "", typical=(-inf, 0.1), expect="{}, rising").expected
        'below 0.1, rising'
        >>> Key("a", "", typical=(1, 3)).expected, Key("a", "", typical=(-0.02, 0.02)).expected
        ('1 to 3', 'within ±0.02')
        """
        if self.typical is None:
            return self.expect
        low, high = self.typical
        words = f"below {high:g}" if low == -inf else f"within ±{high:g}" if low == -high else f"{low:g} to {high:g}"
        return (self.expect or "{}").format(words)

    def matches(self, name: str) -> bool:
        pattern = re.sub(r"<\w+>", "[^/]+", self.name.replace("<k>", r"\d+"))
        return re.fullmatch(pattern, name) is not None


@lru_cache(4096)
def find(name: str) -> Key | None:
    """The key that a name of a run belongs to.

    >>> find("reward/exact_match/mean").what
    'values of one reward function, before its weight'
    """
    return min((key for key in KEYS if key.matches(name)), key=lambda key: key.name.count("<"), default=None)


HELD_OUT_SCORES = ("eval/accuracy", "eval/reward")
"""Keys of the held-out score, of which the first present counts; without a reward that decides what is right, the
second."""


def held_out_key(metrics: Collection[str]) -> str | None:
    """The key of the held-out score among these; None where nothing was evaluated.

    >>> held_out_key({"eval/reward": 0.5, "eval/accuracy": 0.25}), held_out_key({"reward/mean": 0.5})
    ('eval/accuracy', None)
    """
    return next((key for key in HELD_OUT_SCORES if key in metrics), None)


def held_out_name(key: str) -> str:
    """The held-out score in words.

    >>> held_out_name("eval/reward")
    'held-out reward'
    """
    return f"held-out {key.partition('/')[2]}"


TOKENS, KEPT, GROUPS = "live tokens, all updates", "kept tokens", "groups sampled"
SCORED, HELD_OUT = "sampled, without abstentions", "held-out prompts"
EPISODES, CALLS = "episodes played", "calls in the episodes played"

KEYS = (
    Key("reward/mean", "weighted sum of the reward functions, before penalties", SCORED, line="reward {:.3f}"),
    Key("reward/std", "its spread", SCORED),
    Key(
        "reward/correct_frac",
        "share of right answers, by the reward `correct_by` names and its threshold `correct_at`",
        "sampled and judged",
    ),
    Key("reward/<name>/mean", "values of one reward function, before its weight", SCORED),
    Key("reward/<name>/std", "their spread", SCORED),
    Key("reward/<name>/abstain_frac", "share for which the function gave None", "sampled"),
    Key(
        "reward/<name>/error_frac",
        "share for which it raised, gave NaN or died",
        "sampled",
        typical=(-inf, 0.05),
        alarm=(0.0, 0.05),
        remedy="fix the function; the first traceback is in events.jsonl, all of them in the completions of a step",
    ),
    Key("reward/<name>/timeout_frac", "share for which it was killed at its deadline", "sampled"),
    Key("reward/<name>/<metric>", "what the function itself logged with `log_metric`", "sampled"),
    Key(
        "reward/shaped_mean",
        "reward as the estimator compares it; with `overlong_cache`, `truncated_factor` or `kl_in_reward`",
        "kept",
    ),
    Key("reward/kl", "log-ratio of a completion to the reference, summed over its tokens; with `kl_in_reward`", "kept"),
    Key("reward/kl_coef", "coefficient of that log-ratio in this step", reduce="last"),
    Key("group/zero_std_frac", "share of groups whose rewards are all equal", GROUPS),
    Key(
        "group/dead_frac",
        "share of groups that teach nothing: all advantages are 0, or left out for having no signal",
        GROUPS,
        expect="{}; else most of the sampling is wasted",
        typical=(-inf, 0.8),
        line="signal {rest:.0%}",
    ),
    Key("group/all_right_frac", "share of groups whose answers are all right", GROUPS),
    Key("group/all_wrong_frac", "share of groups whose answers are all wrong", GROUPS),
    Key("completion/len_mean", "sampled tokens of a completion", "sampled", line="length {:.0f}"),
    Key("completion/len_p95", "length that 95 % of the completions do not exceed", "sampled"),
    Key(
        "completion/truncated_frac",
        "share that hit `max_new_tokens`",
        "sampled",
        typical=(-inf, 0.1),
        alarm=(0.0, 0.5),
        remedy="raise max_new_tokens, or reward shorter answers; if text goes on past its end, look at the end token",
    ),
    Key(
        "completion/empty_frac",
        "share whose text is blank",
        "sampled",
        expect="0",
        alarm=(0.0, 0.5),
        remedy="the model ends at once; check the prompt and the end token",
    ),
    Key(
        "rollout/entropy",
        "entropy of the sampling policy per token, at the sampling temperature: exact with the torch sampler, −mean "
        "log-prob (unbiased, noisier) with vLLM. `entropy_target` follows it",
        "sampled tokens",
        expect="falling slowly, well above 0",
        line="entropy {:.2f}",
    ),
    Key(
        "rollout/staleness",
        "updates that the weights have seen since the oldest completion of the step was sampled; with `max_staleness`",
        "sampled",
        expect="`max_staleness` times the updates of a step",
        reduce="max",
    ),
    Key(
        "rollout/dropped",
        "groups that had become older than `max_staleness` and were not trained on; with `streaming`",
        "step",
        expect="few",
        reduce="sum",
    ),
    Key(
        "turns/mean",
        "turns of the policy in an episode; this and the other `turns/` keys with an environment",
        EPISODES,
    ),
    Key("turns/max", "turns of the longest episode", EPISODES, reduce="max"),
    Key("turns/calls", "tool calls in an episode", EPISODES),
    Key("turns/call_error_frac", "share of calls that a tool answered with an error", CALLS),
    Key(
        "turns/unparsed_frac",
        "share of calls that could not be read",
        CALLS,
        expect="{}, falling",
        typical=(-inf, 0.2),
        alarm=(0.0, 0.2),
        remedy="read such calls in the completions: cut ones need a higher max_new_tokens; else show the model a call "
        "in the prompt, or start from a model that was trained on this chat template",
    ),
    Key(
        "turns/lost_frac",
        "share of episodes that were lost: the environment failed or did not answer in time. They have no reward",
        EPISODES,
        expect="0",
        alarm=(0.0, 0.05),
        remedy="fix the environment; error/environment in the completions has the traceback of each lost episode",
    ),
    Key(
        "turns/cut_frac",
        "share of episodes that were cut: at the limit of tokens, of turns, or by the model's context",
        EPISODES,
        typical=(-inf, 0.1),
        alarm=(0.0, 0.3),
        remedy="look at stop_reason in the completions: raise max_turns for turns, max_new_tokens for length; for "
        "context, let the environment answer with less text",
    ),
    Key("turns/given_tokens", "tokens of an episode that the policy did not write", EPISODES),
    Key("policy/loss", "the loss", "mean over updates"),
    Key(
        "policy/kl",
        "KL of the policy to the reference, a mean over tokens whatever the loss, before `beta`; with `beta`",
        "kept tokens, mean over updates",
        expect="{}, rising slowly",
        typical=(-inf, 0.1),
        alarm=(-1.0, 1.0),
        remedy="the policy is far from where it started; lower lr, raise beta, or move the reference with ref_every",
    ),
    Key(
        "policy/<term>",
        "its other terms before their coefficients: `policy` as the loss adds it up, `entropy`, `pull` and `nll` as "
        "means over tokens",
        "mean over updates",
    ),
    Key("policy/entropy_coef", "coefficient of the entropy bonus in this step; with `entropy_target`", reduce="last"),
    Key(
        "optim/grad_norm", "norm of the gradient before clipping", "updates with a finite gradient", line="grad {:.2g}"
    ),
    Key("optim/lr", "learning rate of the last update", reduce="last"),
    Key("optim/skipped", "updates whose gradient was not finite", "updates", expect="0", reduce="sum"),
    Key("live/frac", "share of live completions", "kept"),
    Key("live/rejected_frac", "share of tokens that the loss's weights leave out; for losses that can", TOKENS),
    Key(
        "live/policy_confidence",
        "geometric mean of the tokens' probabilities",
        TOKENS,
        r"$\exp(\operatorname{mean}\ell_t)$",
        "in (0, 1], rising slowly",
    ),
    Key(
        "live/mean_new_logp",
        "log-prob",
        TOKENS,
        r"$\operatorname{mean}\ell_t$",
        expect="{}, rising slowly",
        typical=(-inf, 0),
    ),
    Key(
        "live/mean_old_logp",
        "log-prob under the policy that sampled",
        TOKENS,
        r"$\operatorname{mean}\ell_t^{\text{old}}$",
        "close to `mean_new_logp`",
    ),
    Key("live/logp_diff_mean", "how far tokens moved", TOKENS, r"$\operatorname{mean}d_t$", typical=(-0.02, 0.02)),
    Key(
        "live/approx_kl",
        "KL of the policy that sampled and the policy now",
        TOKENS,
        r"$\operatorname{mean}(r_t-1-d_t)$",
        typical=(0, 0.01),
        alarm=(0.0, 1.0),
        remedy="the policy moves far within one batch; lower lr or epochs_per_batch",
    ),
    Key(
        "live/token_kl_max",
        "the same of the worst token",
        TOKENS,
        r"$\max(r_t-1-d_t)$",
        typical=(-inf, 1),
        reduce="max",
    ),
    Key("live/token_ratio_max", "largest ratio", TOKENS, r"$\max r_t$", typical=(1, 3), reduce="max"),
    Key(
        "live/entropy",
        "entropy of the policy now",
        TOKENS,
        r"$\operatorname{mean}H_t$, in nats",
        "falling slowly, well above 0",
    ),
    Key(
        "live/clip_ratio",
        "share clipped; for losses that clip",
        TOKENS,
        "low + high",
        typical=(0, 0.1),
        line="clip {:.1%}",
    ),
    Key(
        "live/clip_ratio_low",
        "share clipped from below",
        TOKENS,
        "share clipped below the band",
        "of the order of `clip_ratio_high`",
    ),
    Key(
        "live/clip_ratio_high",
        "share clipped from above",
        TOKENS,
        "share clipped above the band",
        "of the order of `clip_ratio_low`",
    ),
    Key(
        "live/top_k_kl",
        "the tokens that moved most, as records; with `top_k_kl`",
        TOKENS,
        "the K tokens with the largest $r_t-1-d_t$",
        "a list, only with `top_k_kl > 0`",
        reduce="max",
    ),
    Key(
        "sampler/logp_gap_mean",
        "distance of the trainer's log-probs from the sampler's",
        KEPT,
        r"mean $\lvert\ell^{\text{old}}-\ell^{\text{smp}}\rvert$",
        expect="{} in bf16, 1e-5 in float32",
        typical=(-inf, 0.03),
    ),
    Key(
        "sampler/logp_gap_max",
        "the same of the worst token",
        KEPT,
        r"largest $\lvert\ell^{\text{old}}-\ell^{\text{smp}}\rvert$",
        expect="{} in bf16, 1e-5 in float32",
        typical=(-inf, 0.5),
        alarm=(0.0, 1.0),
        remedy="sampler and trainer disagree; look for stale weights of the sampler, then set correction",
        reduce="max",
    ),
    Key("sampler/kl", "KL of sampler and trainer", KEPT, r"mean of $\rho-1-\log\rho$", typical=(-inf, 0.001)),
    Key("sampler/rho_mean", "mean ratio", KEPT, r"mean of $\rho$", "about 1 even when the tails are bad"),
    Key("sampler/rho_max", "largest ratio", KEPT, r"largest $\rho$", "near 1", reduce="max"),
    Key("sampler/rho_min", "smallest ratio", KEPT, r"smallest $\rho$", "near 1", reduce="min"),
    Key("sampler/rho_high_frac", "upper tail", KEPT, r"share of tokens with $\rho>2$ (`tail`)", typical=(-inf, 0.001)),
    Key("sampler/rho_low_frac", "lower tail", KEPT, r"share of tokens with $\rho<1/2$", typical=(-inf, 0.001)),
    Key("sampler/chi2", "spread of the ratio", KEPT, r"mean of $\rho^2$, minus 1", "near 0"),
    Key(
        "sampler/ess",
        "share of tokens that is left once all are weighed",
        KEPT,
        r"$(\sum\rho)^2/(N\sum\rho^2)$",
        "near 1",
    ),
    Key(
        "sampler/sequence_chi2",
        "`chi2` of each sequence's product of ratios",
        KEPT,
        r"the same of $\prod\rho$",
        "near 0; long sequences suffer first",
    ),
    Key(
        "sampler/sequence_ess",
        "`ess` of each sequence's product of ratios",
        KEPT,
        r"the same of $\prod\rho$",
        "near 1; long sequences suffer first",
    ),
    Key("sync/tensors", "tensors handed over to the sampler last", reduce="last"),
    Key("sync/bytes", "their size", reduce="last"),
    Key("sync/canary_gap", "distance of both sides' log-probs on fixed tokens", expect="as `sampler/logp_gap_mean`"),
    Key("sync/canary_moved", "how far those moved since the last hand-over", expect="above 0"),
    Key("dynamic/batches", "batches of prompts sampled by [dynamic sampling](advantages.md#dynamic-sampling)"),
    Key("dynamic/groups_sampled", "groups sampled for this step", reduce="sum"),
    Key("dynamic/groups_kept", "groups with signal that are trained on", GROUPS, reduce="sum"),
    Key("dynamic/groups_dropped", "groups without signal", GROUPS, reduce="sum"),
    Key("dynamic/groups_surplus", "groups with signal beyond the batch", GROUPS, reduce="sum"),
    Key("dynamic/prompts_retired", "prompts that retired as solved; with `retire_solved`", "all steps", reduce="last"),
    Key(
        "eval/accuracy",
        "share of held-out prompts whose greedy answer is right; where a reward decides what is right",
        HELD_OUT,
        line="held-out accuracy {:.3f}",
    ),
    Key("eval/accuracy_low", "lower end of Wilson's 95 % interval", HELD_OUT),
    Key("eval/accuracy_high", "upper end of Wilson's 95 % interval", HELD_OUT),
    Key(
        "eval/reward", "mean weighted sum of the rewards of the greedy answers", HELD_OUT, line="held-out reward {:.3f}"
    ),
    Key("eval/reward_low", "lower end of the mean's 95 % interval", HELD_OUT),
    Key("eval/reward_high", "upper end of the mean's 95 % interval", HELD_OUT),
    Key("eval/pass@<k>", "unbiased pass@k of sampled answers; with `eval_samples`", HELD_OUT),
    Key("eval/pass@<k>_low", "lower end of Wilson's interval for as many trials as prompts", HELD_OUT),
    Key("eval/pass@<k>_high", "upper end of that interval", HELD_OUT),
    Key("log/dropped", "records that could not be written so far, once there are any", "the run", reduce="last"),
)
