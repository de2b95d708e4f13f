"""Open Instruct: flags of grpo_fast.py."""

from typing import Any

from gruppo.convert.conversion import SCHEDULES, Conversion, as_list, hub_data
from gruppo.trainer.elsewhere import ELSEWHERE, Reason

REFILLS = 10
"""Batches per step with active sampling, which has no bound there."""


def from_open_instruct(options: dict[str, Any]) -> Conversion:
    """A run for the flags of grpo_fast.py. Defaults that change the maths are written out."""
    made = Conversion("Open Instruct", options, ELSEWHERE)
    _data(made)
    _rewards(made)
    _batch(made)
    _loss(made)
    _advantage(made)
    _run(made)
    return made.finish()


def _data(made: Conversion) -> None:
    sources = (
        ("data", "dataset_mixer_list", "dataset_mixer_list_splits", "train"),
        ("eval_data", "dataset_mixer_eval_list", "dataset_mixer_eval_list_splits", "test"),
    )
    for own, theirs, splits, split in sources:
        mixed = as_list(made.take(theirs, []))
        split = str(as_list(made.take(splits, split))[0])
        if not mixed:
            continue
        source = hub_data(str(mixed[0]), None, split)
        if len(mixed) > 2 or (len(mixed) == 2 and mixed[1] != 1):
            made.near(
                f"{theirs}={' '.join(map(str, mixed))}",
                Reason("one data set, all of its rows", "data_weights mixture datasets"),
                **{own: source},
            )
        else:
            made.same(f"{theirs}={mixed[0]}", **{own: source})
    made.same("rows with messages and ground_truth", prompt_column="messages", answer_column="ground_truth")
    longest = made.take("max_prompt_token_length", 256)
    made.same(made.shown("max_prompt_token_length", longest), max_prompt_tokens=longest)


def _rewards(made: Conversion) -> None:
    rewards, weights = [], []
    if made.take("apply_verifiable_reward", True):
        value = made.take("verification_reward", 10.0)
        why = Reason(
            "the verifier of a row is named by its column `dataset` there; here one reward judges all rows",
            "verifier_column reward_column",
        )
        made.near(made.shown("verification_reward", value), why)
        rewards.append("math_match")
        weights.append(float(value))
    if made.take("apply_r1_style_format_reward", False):
        value = made.take("r1_style_format_reward", 1.0)
        made.near("apply_r1_style_format_reward=True", "think_format asks for a thought with an answer after it")
        rewards.append("think_format")
        weights.append(float(value))
    made.take("additive_format_reward")
    if rewards:
        made.values |= {"rewards": rewards, "reward_weights": weights}
    penalty, value = made.take("non_stop_penalty", False), made.take("non_stop_penalty_value", 0.0)
    if penalty and value == 0:
        made.same("non_stop_penalty=True, non_stop_penalty_value=0", truncated_factor=0.0)
    elif penalty:
        why = f"a completion without an end gets {value} there; here its reward is multiplied with 0"
        made.near("non_stop_penalty=True", why, truncated_factor=0.0)


def _batch(made: Conversion) -> None:
    prompts, samples = made.take("num_unique_prompts_rollout", 16), made.take("num_samples_per_prompt_rollout", 4)
    made.same(made.shown("num_unique_prompts_rollout", prompts), prompts_per_step=prompts)
    made.same(made.shown("num_samples_per_prompt_rollout", samples), group_size=samples)
    limit = made.take("response_length", 256)
    made.same(made.shown("response_length", limit), max_new_tokens=limit)
    per_device, packed = made.take("per_device_train_batch_size", 1), made.take("pack_length")
    if packed is not None:
        made.same(f"pack_length={packed} x {per_device} (memory only)", tokens_per_microbatch=packed * per_device)
    episodes = made.take("total_episodes", 100_000)
    steps = made.whole("total_episodes", episodes / (prompts * samples))
    made.same(f"{made.shown('total_episodes', episodes)} / {prompts * samples} per step", steps=steps)
    minibatches = made.take("num_mini_batches", 1)
    if prompts % minibatches:
        made.near(f"num_mini_batches={minibatches}", "they must divide the prompts of a step", minibatches=1)
    elif minibatches > 1:
        made.same(f"num_mini_batches={minibatches}", minibatches=minibatches)
    ratio = made.take("warmup_ratio", 0)
    if ratio:
        made.same(f"warmup_ratio={ratio}", warmup_steps=round(ratio * steps * made.values.get("minibatches", 1)))
    schedule = made.take("lr_scheduler_type", "linear")
    named = str(schedule).partition("_")[0]
    if named in SCHEDULES:
        made.same(made.shown("lr_scheduler_type", schedule), lr_schedule=named)
    else:
        made.near(f"lr_scheduler_type={schedule}", "the nearest schedule; it falls to 0", lr_schedule="cosine")
    if "learning_rate" in made.given:
        rate = made.take("learning_rate")
        made.same(f"learning_rate={rate}", lr=rate)
    else:
        made.ask("lr", "learning_rate is not in the source, and its default differs between versions")
    active, filters = made.take("active_sampling", False), made.take("filter_zero_std_samples", True)
    if made.take("no_filter_zero_std_samples", False):
        filters = False
    if active:
        made.near("active_sampling=True", f"as there, within {REFILLS} batches per step", dynamic_sampling=REFILLS)
    elif filters:
        made.same(f"filter_zero_std_samples={filters}: groups without signal are left out", dynamic_sampling=1)
    if (rate := made.take("no_resampling_pass_rate")) is not None:
        made.near(f"no_resampling_pass_rate={rate}", "solved prompts retire after this many visits", retire_solved=1)


def _loss(made: Conversion) -> None:
    kind, low, high = made.take("loss_fn", "dapo"), made.take("clip_lower", 0.2), made.take("clip_higher", 0.272)
    denominator = made.take("loss_denominator", "token")
    shown, bounds = made.shown("loss_fn", kind), f"clip_lower={low}, clip_higher={high}"
    region, by = made.take("dppo_divergence_threshold", 0.1), made.take("dppo_divergence_type", "tv")
    if kind == "cispo":
        made.same(f"{shown}, {bounds}: the cap is 1 + clip_higher", loss="cispo", clip_range=high)
    elif kind == "dppo":
        own = {"region": region, "anchor": "sampler"}
        made.same(f"{shown}, dppo_divergence_type={by}", loss=f"dppo_{by}", loss_options=own)
    else:
        if kind != "dapo":
            made.unknown(shown, "no loss of that name; `gruppo losses` lists them")
        if denominator != "token":
            why = f"the sum is divided by {denominator} there, here by sequences x max_new_tokens"
            made.near(f"loss_denominator={denominator}", why, loss="drgrpo", clip_range=[low, high])
        else:
            made.same(f"{shown}, {bounds}", loss="dapo", clip_range=[low, high])
    beta, has_reference = made.take("beta", 0.05), made.take("load_ref_policy", True)
    if beta and not has_reference:
        made.same(f"beta={beta}, load_ref_policy=False: no penalty", beta=0.0)
    else:
        made.same(made.shown("beta", beta), beta=beta)
    beta = made.values["beta"]
    estimator = made.take("kl_estimator", "kl3")
    estimator = {"kl1": 0, "kl2": 1, "kl3": 2, "kl4": 3}.get(estimator, estimator)  # names of older versions
    if beta:
        made.same(made.shown("kl_estimator", estimator), kl_estimator=estimator)
    every, mix = made.take("ref_policy_update_freq"), made.take("alpha", 0.6)
    if every and beta:
        made.same(f"ref_policy_update_freq={every}, alpha={mix}", ref_every=every, ref_mix=mix)
    _correction(made, kind)


def _correction(made: Conversion, kind: str) -> None:
    old = made.take("truncated_importance_sampling_ratio_cap")
    cap = made.take("rho_clamp_upper_bound", 2.0 if old is None else old)
    _sampler(made)
    if made.take("use_vllm_logprobs", False):
        if kind != "dppo":
            why = "the old log-probs are the sampler's there; here they are the trainer's, corrected for the sampler"
            made.near("use_vllm_logprobs=True", why)
    elif cap == 0:
        made.same("no cap on the ratio of trainer and sampler", correction="none")
    elif cap == 2:
        made.same(f"the ratio of trainer and sampler is capped at {cap:g}", correction="truncate")
    else:
        made.near(
            f"the ratio of trainer and sampler is capped at {cap:g}",
            Reason("truncate caps at 2", "correction_cap correction_options"),
            correction="truncate",
        )


def _sampler(made: Conversion) -> None:
    """One engine in the trainer's process, or servers beside it for rollouts ahead."""
    behind, streams = made.take("async_steps", 0), made.take("inflight_updates", False)
    engines, parallel = made.take("vllm_num_engines", 1), made.take("vllm_tensor_parallel_size", 1)
    share, learners = made.take("vllm_gpu_memory_utilization"), as_list(made.take("num_learners_per_node", []))
    if behind or streams:
        made.same("rollouts from vLLM, beside the training", sampler="vllm:start")
    else:
        made.same("rollouts from vLLM", sampler="vllm")
    if streams:
        why = "steps take what is complete, as there; no token is older than max_staleness steps"
        made.near(f"inflight_updates=True, async_steps={behind}", why, max_staleness=behind or 1, streaming=True)
    elif behind:
        why = "rollouts are up to as many steps old there; here each is exactly so old"
        made.near(f"async_steps={behind}", why, max_staleness=behind)
    options = {"gpu_memory_utilization": share} if share is not None else {}
    if parallel != 1:
        options["tensor_parallel_size"] = parallel
    if options:
        made.same(", ".join(f"vllm_{name}={value}" for name, value in options.items()), vllm_options=options)
    if engines != 1:
        made.ask("sampler", f"vllm_num_engines={engines}: as many servers, sampler: vllm:http://one:8000,http://...")
    if (ranks := sum(learners)) > 1:
        why = f"start it with `torchrun --nproc-per-node {learners[0]} -m gruppo train`, and vLLM as a server"
        made.near(f"num_learners_per_node={' '.join(map(str, learners))}: {ranks} ranks", why)


def _advantage(made: Conversion) -> None:
    kind = made.take("advantage_normalization_type", "centered")
    shown = made.shown("advantage_normalization_type", kind)
    if kind == "standard":
        made.same(f"{shown}: the standard deviation of a population", advantage_options={"ddof": 0})
    else:
        made.same(shown, normalization="centered")


def _run(made: Conversion) -> None:
    made.filters({"vllm_top_p": (1,), "top_p": (1,)})
    if (top := made.take("eval_top_p", 1)) != 1:
        why = "the evaluation is greedy, and pass@k draws from the whole vocabulary"
        made.none(f"eval_top_p={top}", Reason(why, "eval_top_p top_p eval_temperature"))
    if stop := made.take("stop_strings"):
        made.same(f"stop_strings={stop}", stop=as_list(stop))
    every = made.take("local_eval_every", 100)
    made.same(made.shown("local_eval_every", every), eval_every=max(int(every), 0))
    kept = made.take("keep_last_n_checkpoints", 0)
    if kept >= 1:
        made.same(f"keep_last_n_checkpoints={kept}", keep_checkpoints=kept)
    elif kept:
        made.near(f"keep_last_n_checkpoints={kept}", "all of them there; here a number is kept", keep_checkpoints=100)
    number = made.take("eval_pass_at_k", 1)
    if number > 1:
        made.same(f"eval_pass_at_k={number}", eval_samples=number)
    if "max_grad_norm" not in made.given:
        made.near("no max_grad_norm", "newer versions then leave the gradient as it is; here its norm is bounded by 1")
    if made.take("mask_truncated_completions", False):
        made.same("mask_truncated_completions=True", mask_truncated=True)
