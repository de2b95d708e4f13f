"""Every golden case of the peers: results of the real Twinkle, Open Instruct and TRL code.

peers.json.xz holds inputs and results, numbers only. They were recorded by calling the peers' own functions on the CPU:
Twinkle (twinkle-kit 0.5.1), Open Instruct (commit e6c3044) and TRL (1.16.0), with torch 2.13.0 and numpy 2.4.6. A case
has the peer's function and keywords, in the peer's names; gradients are d loss / d logps of the recorded loss. What is
not finite is a string. Cases tagged `do_not_match`, `trap:*` or `peer_bug:*` are what gruppo deliberately does
otherwise; docs/comparison.md has a line on each tag, and `test_tagged_cases_are_documented` holds it to that.
"""

import json
import lzma
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from gruppo.advantage import GDPOAdvantage, GRPOAdvantage, RLOOAdvantage
from gruppo.batch import Totals, is_packed, pack
from gruppo.errors import InputError
from gruppo.kernel import logps_and_entropy
from gruppo.loss import (
    BNPOLoss,
    CISPOLoss,
    Clip,
    ClippedWeight,
    ConstantLength,
    DRGRPOLoss,
    GammaWeight,
    GRPOLoss,
    GSPOLoss,
    MaskedWeight,
    PolicyLoss,
    SAPOLoss,
    SoftGate,
    TruncatedWeight,
    k3,
    local_token_mean,
    ratio_k3,
    sequence_level,
    sequence_mean,
    sequence_mean_token_sum,
    sequence_sum_level,
    token_level,
    token_mean,
)
from gruppo.loss.inputs import align
from gruppo.loss.terms import KL_ESTIMATORS
from gruppo.loss.weights import log_rho
from gruppo.metric import CISPOMetric, GRPOMetric, GSPOMetric
from gruppo.types import InputFeature

ROOT = Path(__file__).parents[2]
NOT_MATCHED = ("do_not_match", "trap:", "peer_bug:")

DATA = json.loads(lzma.decompress((Path(__file__).parent / "peers.json.xz").read_bytes()))
CASES = DATA["cases"]


def is_tagged(case):
    return any(tag.startswith(NOT_MATCHED) for tag in case.get("tags", []))


def case_id(case):
    return f"{case['peer']}-{case['name']}-{case['dtype']}"


MATCHED = [c for c in CASES if not is_tagged(c)]


def numbers(value):
    """Nested lists with 'NaN' strings to floats; None stays."""
    if isinstance(value, list):
        return [numbers(v) for v in value]
    return float(value) if isinstance(value, str) else value


def tensor(case, name):
    value = case["inputs"].get(name)
    return None if value is None else torch.tensor(numbers(value), dtype=getattr(torch, case["dtype"]))


def check(case, name, got, expected):
    tolerance = DATA["tolerance"].get(case["dtype"], {"rtol": 1e-5, "atol": 1e-6})
    if "note:peer_computes_in_float32" in case.get("tags", []):
        tolerance = DATA["tolerance"]["float32"]
    if "note:peer_holds_sapo_temperature_in_float32_so_rtol_1e-6" in case.get("tags", []):
        tolerance = {"rtol": 1e-6, "atol": 1e-12}
    got = torch.as_tensor(got, dtype=torch.float64)
    expected = torch.tensor(numbers(expected), dtype=torch.float64)
    torch.testing.assert_close(got, expected, **tolerance, equal_nan=True, msg=lambda m: f"{name}: {m}")


def ragged(value, mask):
    """Per-token lists: the values of the scored tokens only."""
    return [[v for v, m in zip(row, keep, strict=True) if m] for row, keep in zip(value, mask, strict=True)]


def call_loss(case, loss, *, totals=None, advantages=None, sampler_logps=None, old=None, ref=None):
    inputs = case["inputs"]
    mask = torch.tensor(inputs["mask"]).bool()
    labels = torch.tensor(inputs["labels"]) if "labels" in inputs else torch.where(mask, 1, -100)
    logps = tensor(case, "logps").requires_grad_()
    outputs = {"logps": logps}
    entropies = tensor(case, "entropies")
    if entropies is not None and loss.entropy_coef:
        outputs["entropies"] = entropies.requires_grad_()
    result = loss(
        {"labels": labels},
        outputs,
        advantages=tensor(case, "advantages") if advantages is None else advantages,
        old_logps=tensor(case, "old_logps") if old is None else old,
        ref_logps=tensor(case, "ref_logps") if ref is None else ref,
        sampler_logps=sampler_logps,
        totals=totals,
    )
    result.loss.backward()
    return result, logps.grad, outputs.get("entropies")


# --- Twinkle -------------------------------------------------------------------------------------------------------

TWINKLE_LOSSES = {
    "GRPOLoss": GRPOLoss,
    "GSPOLoss": GSPOLoss,
    "SAPOLoss": SAPOLoss,
    "CISPOLoss": CISPOLoss,
    "BNPOLoss": BNPOLoss,
    "DRGRPOLoss": DRGRPOLoss,
}


def check_twinkle_loss(case):
    kwargs = dict(case["kwargs"])
    low = kwargs.pop("epsilon", 0.2)
    high = kwargs.pop("epsilon_high", None)
    options = {"clip_range": (low, low if high is None else high)}
    name = case["fn"].rsplit(".", 1)[1]
    taus = kwargs.pop("tau_pos", 1.0), kwargs.pop("tau_neg", 1.0)
    if name == "SAPOLoss":
        options["tau"] = taus
    call = kwargs.pop("call_kwargs", {})
    options |= {k: kwargs.pop(k) for k in ("beta", "entropy_coef", "max_completion_length") if k in kwargs}
    assert not kwargs, f"unread peer option {kwargs}"
    if "edge:kl_skipped_silently" in case.get("tags", []):
        # The peer trains without the KL it was asked for. Here that is an error; without beta the numbers agree.
        with pytest.raises(InputError, match="ref_logps"):
            call_loss(case, TWINKLE_LOSSES[name](**options))
        options["beta"] = 0.0
    totals = None
    if "num_items_in_batch" in call:
        totals = Totals(sequences=len(case["inputs"]["mask"]), tokens=call["num_items_in_batch"])
    lists = {}
    if "ragged_list" in case["name"]:
        mask = case["inputs"]["mask"]
        lists = {"advantages": case["inputs"]["advantages"], "old": case["inputs"]["old_logps"]}
        if len(lists["old"][0]) == len(mask[0]):
            lists["old"] = ragged(lists["old"], mask)
    result, grad, entropies = call_loss(case, TWINKLE_LOSSES[name](**options), totals=totals, **lists)
    check(case, "loss", result.loss.item(), case["expected"]["loss"])
    check(case, "grad_logps", grad, case["expected"]["grad_logps"])
    if "grad_entropies" in case["expected"]:
        check(case, "grad_entropies", entropies.grad, case["expected"]["grad_entropies"])


def check_twinkle_advantage(case):
    kwargs, rewards = case["kwargs"], tensor(case, "rewards")
    cls = GRPOAdvantage if "GRPO" in case["fn"] else RLOOAdvantage
    estimate = cls(normalization="standard")
    if "raises" in case["expected"]:
        with pytest.raises(ValueError):
            estimate(rewards, **kwargs)
        return
    if kwargs["num_generations"] == 1 and kwargs["scale"] == "group":
        # The peer returns the raw reward of a group of one; here that is refused.
        with pytest.raises(InputError, match='scale="batch"'):
            estimate(rewards, **kwargs)
        return
    check(case, "advantages", estimate(rewards, **kwargs), case["expected"]["advantages"])


def check_twinkle_metric(case):
    cls = {"GRPOMetric": GRPOMetric, "GSPOMetric": GSPOMetric, "CISPOMetric": CISPOMetric}[case["fn"].rsplit(".", 1)[1]]
    metric = cls(**case["kwargs"])
    inputs, expected = case["inputs"], dict(case["expected"])
    rows = len(inputs["labels"])
    split = inputs.get("microbatch_split") or rows
    for start in range(0, rows, split):
        part = slice(start, start + split)
        outputs = {"logps": tensor(case, "logps")[part]}
        if "entropies" in inputs:
            outputs["entropies"] = tensor(case, "entropies")[part]
        old = inputs.get("old_logps")
        if old is not None:
            is_full = all(len(row) == len(inputs["labels"][0]) for row in old)
            old = tensor(case, "old_logps")[part] if is_full else old[part]
        advantages = inputs.get("advantages")
        metric.accumulate(
            {"labels": torch.tensor(inputs["labels"][part])},
            outputs,
            old_logps=old,
            advantages=None if advantages is None else advantages[part],
        )
    results = metric.calculate()
    records = results.pop("train/top_k_kl", [])
    # The peer keeps K records per micro-batch; ours are the best K of all.
    peer_records = sorted(expected.pop("_high_kl_records", []), key=lambda r: -r["kl"])[: metric.top_k_kl]
    assert results.keys() == expected.keys()
    for key, value in expected.items():
        check(case, key, results[key], value)
    names = {"sequence": "gsi", "position": "pos", "token_id": "token_id", "kl": "kl", "ratio": "ratio"}
    names |= {"new_logp": "logp_new", "old_logp": "logp_old"}
    assert len(records) == len(peer_records)
    for ours, theirs in zip(records, peer_records, strict=True):
        for mine, peer in names.items():
            check(case, mine, ours[mine], theirs[peer])


def check_twinkle_is_packed(case):
    assert is_packed(torch.tensor(case["inputs"]["position_ids"])) == case["expected"]["is_packed"]


# --- Open Instruct -------------------------------------------------------------------------------------------------


def check_open_instruct_loss(case):
    kwargs, expected = case["kwargs"], case["expected"]
    low, high, beta = kwargs["clip_lower"], kwargs["clip_higher"], kwargs["beta"]
    surrogate = Clip(low, high) if kwargs["loss_fn"] == "dapo" else ClippedWeight(high)
    options = {"surrogate": surrogate, "beta": beta}
    if beta:
        options["kl"] = KL_ESTIMATORS[kwargs["kl_estimator"]]
    rho = tensor(case, "rho_weights")
    if rho is not None:
        options["correction"] = lambda inputs: rho.reshape(-1)
    sampler = tensor(case, "old_logps") if rho is not None else None
    advantages = tensor(case, "advantages_token")
    rows = len(case["inputs"]["mask"])
    routes = {
        "loss_masked_mean_axis1": (sequence_mean, None),
        "loss_token": (token_mean, "grad_logps_token"),
        "loss_const_64": (ConstantLength(int(kwargs["const_denominator"]) // rows), "grad_logps_const_64"),
    }
    for name, (aggregate, grad_name) in routes.items():
        loss = PolicyLoss(aggregate=aggregate, **options)
        result, grad, _ = call_loss(case, loss, advantages=advantages, sampler_logps=sampler)
        check(case, name, result.loss.item(), expected[name])
        if grad_name:
            check(case, grad_name, grad, expected[grad_name])
    if beta:
        check(case, "kl_avg", result_terms_token_mean(case, options, advantages, sampler), expected["kl_avg"])


def result_terms_token_mean(case, options, advantages, sampler):
    result, _, _ = call_loss(
        case, PolicyLoss(aggregate=token_mean, **options), advantages=advantages, sampler_logps=sampler
    )
    return result.terms["kl"].item()


def open_instruct_correction(kwargs):
    if not kwargs["use_rho_correction"]:
        return None
    if kwargs["rho_mask_upper_bound"]:
        level = "sequence" if kwargs["rho_mask_sequence_level"] else "token"
        return MaskedWeight(kwargs["rho_mask_lower_bound"], kwargs["rho_mask_upper_bound"], level)
    return TruncatedWeight(kwargs["rho_clamp_upper_bound"], kwargs["rho_clamp_lower_bound"])


def check_open_instruct_rho(case):
    mask = torch.tensor(case["inputs"]["mask"]).bool()
    old = tensor(case, "old_logps")
    aligned = align(
        {"labels": torch.where(mask, 1, -100)},
        {"logps": old},
        advantages=tensor(case, "advantages_token"),
        old_logps=old,
        sampler_logps=tensor(case, "sampler_logps"),
    )
    correction = open_instruct_correction(case["kwargs"])
    weights = torch.ones(mask.numel(), dtype=old.dtype) if correction is None else correction(aligned)
    expected = torch.tensor(numbers(case["expected"]["weights"]), dtype=old.dtype)
    check(case, "weights", weights[mask.reshape(-1)], expected[mask].tolist())
    means = case["expected"]["metric_means"]
    if not means:
        return
    scored = weights[mask.reshape(-1)].double()
    rho = log_rho(aligned).exp()[mask.reshape(-1)].double()
    if isinstance(correction, MaskedWeight):
        dropped = scored == 0
        judged = aligned.segments.spread(aligned.segments.mean(log_rho(aligned))).exp()[mask.reshape(-1)]
        judged = judged if correction.level == "sequence" else rho
        assert dropped.double().mean().item() == pytest.approx(means["val/rho_drop_frac"], abs=1e-6)
        low, high = (judged < correction.low).double().mean(), (judged > correction.high).double().mean()
        assert low.item() == pytest.approx(means["val/rho_drop_low_frac"], abs=1e-6)
        assert high.item() == pytest.approx(means["val/rho_drop_high_frac"], abs=1e-6)
    else:
        assert (scored != rho).double().mean().item() == pytest.approx(means["val/rho_clipfrac"], abs=1e-6)
    assert scored.mean().item() == pytest.approx(means["val/rho_weight"], rel=1e-5)


def check_open_instruct_loss_stats(case):
    kwargs, expected = case["kwargs"], case["expected"]["metrics"]
    mask = torch.tensor(case["inputs"]["mask"]).bool()
    advantages, sampler = tensor(case, "advantages_token"), tensor(case, "sampler_logps")
    close = lambda got, name: check({**case, "dtype": "float32"}, name, got, expected[name])  # noqa: E731
    for number in range(4):
        loss = PolicyLoss(aggregate=token_mean, beta=kwargs["beta"], kl=KL_ESTIMATORS[number])
        result, _, _ = call_loss(case, loss, advantages=advantages)
        close(result.terms["kl"].item(), f"objective/kl{number}_avg")
        if number == kwargs["kl_estimator"]:
            close(kwargs["beta"] * result.terms["kl"].item(), "loss/kl_avg")
    surrogate = Clip(kwargs["clip_lower"], kwargs["clip_higher"])
    corrected = PolicyLoss(surrogate=surrogate, aggregate=token_mean, correction=open_instruct_correction(kwargs))
    weight_mean = corrected.correction(
        align(
            {"labels": torch.where(mask, 1, -100)},
            {"logps": tensor(case, "logps")},
            advantages=advantages,
            old_logps=tensor(case, "old_logps"),
            sampler_logps=sampler,
        )
    )[mask.reshape(-1)].mean()
    close(weight_mean.item(), "val/rho_weight")
    metric = GRPOMetric(epsilon=kwargs["clip_lower"], epsilon_high=kwargs["clip_higher"])
    metric.accumulate(
        {"labels": torch.where(mask, 1, -100)},
        {"logps": tensor(case, "logps"), "entropies": tensor(case, "entropies")},
        old_logps=tensor(case, "old_logps"),
        advantages=advantages,
    )
    results = metric.calculate()
    close(results["train/clip_ratio"], "policy/clipfrac_avg")
    close(results["train/entropy"], "policy/entropy_avg")


def check_open_instruct_masked_mean(case):
    """Aggregation by a fixed denominator: the sum of the scored values over it."""
    values, mask = tensor(case, "values"), torch.tensor(case["inputs"]["mask"]).bool()
    total = Totals(sequences=1, tokens=case["kwargs"]["denominator"])
    loss = PolicyLoss(surrogate=lambda log_ratio, inputs: inputs.logps, aggregate=token_mean)
    result = loss({"labels": torch.where(mask, 1, -100)}, {"logps": values}, advantages=[0.0] * len(mask), totals=total)
    check(case, "result", result.loss.item(), case["expected"]["result"])


def check_open_instruct_token_counts(case):
    """The denominator of a step is the token count over its accumulation window."""
    mask = torch.tensor(case["inputs"]["mask"])
    steps = int(case["kwargs"]["accumulation_steps"])
    counts = case["expected"]["group_counts"]
    for start in range(0, len(mask), steps):
        parts = [Totals(sequences=1, tokens=int(row.sum())) for row in mask[start : start + steps]]
        assert Totals.over(parts).tokens == counts[str(start)]


def check_open_instruct_forward(case):
    ids, logits = torch.tensor(case["inputs"]["input_ids"]), tensor(case, "logits")
    logps, entropy = logps_and_entropy(logits[:, :-1], ids[:, 1:], case["kwargs"]["temperature"])
    check(case, "logps", logps, case["expected"]["logps"])
    check(case, "entropy", entropy, case["expected"]["entropy"])


def check_open_instruct_advantage(case):
    rewards, generations = tensor(case, "rewards"), case["kwargs"]["num_samples_per_prompt_rollout"]
    estimate = GRPOAdvantage(normalization=case["kwargs"]["advantage_normalization_type"], ddof=0)
    ids = torch.arange(len(rewards)) // generations  # ids, since a group of one is refused as num_generations=1
    check(case, "advantages", estimate(rewards, group_ids=ids), case["expected"]["advantages"])


def check_open_instruct_pass_at_k(case):
    from gruppo.metric import pass_at_k

    correct = case["inputs"]["correct"]
    for name, value in case["expected"]["metrics"].items():
        k = int(name.split("_")[2])
        if name.endswith("_unbiased"):
            mine = sum(pass_at_k(len(row), sum(row), k) for row in correct) / len(correct)
        elif k == 1:
            mine = sum(sum(row) / len(row) for row in correct) / len(correct)
        else:
            mine = sum(any(row) for row in correct) / len(correct)
        check(case, name, mine, value)


def check_open_instruct_pack(case):
    """Their rows keep every token and score a token at its own slot; ours drop the last slot and shift by one."""
    inputs, expected = case["inputs"], case["expected"]
    features = [
        InputFeature(
            prompt_ids=tuple(q),
            completion_ids=tuple(r),
            old_logps=tuple(p),
        )
        for q, r, p in zip(inputs["queries"], inputs["responses"], inputs["logprobs"], strict=True)
    ]
    batch = pack(features)
    bounds = batch.cu_seqlens.tolist()
    for i, (start, end) in enumerate(pairwise(bounds)):
        tokens = expected["query_responses"][i]
        assert batch.input_ids[start:end].tolist() == tokens[:-1]
        assert batch.position_ids[start:end].tolist() == expected["position_ids"][i][:-1]
        scored = [m != 0 for m in expected["response_masks"][i]]
        assert batch.labels[start:end].tolist() == [
            t if s else -100 for t, s in zip(tokens[1:], scored[1:], strict=True)
        ]
        mine = batch.old_logps[start:end][torch.tensor(scored[1:])]
        theirs = [float(x) for x in expected["sampler_logprobs"][i] if float(x) == float(x)]
        torch.testing.assert_close(mine, torch.tensor(theirs, dtype=torch.float32))


# --- TRL -----------------------------------------------------------------------------------------------------------


def check_trl_loss(case):
    kwargs, expected = case["kwargs"], case["expected"]
    low = kwargs["epsilon"]
    high = low if kwargs.get("epsilon_high") is None else kwargs["epsilon_high"]
    kind = kwargs["loss_type"]
    taus = kwargs["sapo_temperature_pos"], kwargs["sapo_temperature_neg"]
    surrogate = {
        "cispo": ClippedWeight(high - 1),  # their epsilon_high is the cap itself
        "sapo": SoftGate(*taus),
        "vespo": GammaWeight(
            (kwargs.get("vespo_k_pos"), kwargs.get("vespo_lambda_pos")),
            (kwargs.get("vespo_k_neg"), kwargs.get("vespo_lambda_neg")),
        ),
    }.get(kind, Clip(low, high))
    aggregate = {
        "grpo": sequence_mean,
        "sapo": sequence_mean,
        "bnpo": local_token_mean,
        "dr_grpo": ConstantLength(kwargs["max_completion_length"]),
        "luspo": sequence_mean_token_sum,
    }.get(kind, token_mean)
    level = {"token": token_level, "sequence": sequence_level}[kwargs["importance_sampling_level"]]
    loss = PolicyLoss(
        level=sequence_sum_level if kind == "vespo" else level,
        surrogate=surrogate,
        kl=ratio_k3 if kwargs["use_bias_correction_kl"] else k3,
        aggregate=aggregate,
        beta=kwargs["beta"],
    )
    mask = torch.tensor(case["inputs"]["mask"])
    totals = Totals(sequences=len(mask), tokens=case["inputs"]["num_items_in_batch"], local_tokens=int(mask.sum()))
    result, grad, _ = call_loss(case, loss, totals=totals)
    check(case, "loss", result.loss.item(), expected["loss"])
    check(case, "grad_logps", grad, expected["grad_logps"])
    check_trl_metrics(case, low, high)


def check_trl_metrics(case, low, high):
    expected = case["expected"]["metrics"]
    sequence = case["kwargs"]["importance_sampling_level"] == "sequence"
    metric = (GSPOMetric if sequence else GRPOMetric)(epsilon=low, epsilon_high=high)
    mask = torch.tensor(case["inputs"]["mask"]).bool()
    metric.accumulate(
        {"labels": torch.where(mask, 1, -100)},
        {"logps": tensor(case, "logps"), "entropies": tensor(case, "entropies")},
        old_logps=tensor(case, "old_logps"),
        advantages=tensor(case, "advantages"),
    )
    results = metric.calculate()
    names = {"entropy": "train/entropy"}
    names |= {f"clip_ratio/{end}_mean": f"train/clip_ratio_{end}" for end in ("low", "high")}
    names |= {"clip_ratio/region_mean": "train/clip_ratio"}
    for theirs, ours in names.items():
        if theirs in expected and ours in results:
            assert results[ours] == pytest.approx(float(expected[theirs]), rel=1e-5, abs=1e-6), theirs


def check_trl_advantage(case):
    """Their None (NaN in the file) abstains; several rewards are weighed, then summed before or after normalising."""
    kwargs = case["kwargs"]
    table = numbers(case["inputs"]["rewards_per_func"])
    table = [[None if v is None or v != v else v for v in row] for row in table]
    generations = kwargs["num_generations"]
    ids = [i // generations for i in range(len(table))]  # their group of one gives 0, ours by group_ids too
    estimate = GRPOAdvantage(normalization="standard", eps=1e-4)
    weights = kwargs["reward_weights"]
    as_tensor = lambda rows: rows if any(v is None for v in rows) else torch.tensor(rows, dtype=torch.float64)  # noqa: E731
    if kwargs["multi_objective_aggregation"] == "sum_then_normalize":
        weighed = [[None if v is None else v * w for v, w in zip(row, weights, strict=True)] for row in table]
        total = [None if all(v is None for v in row) else sum(v or 0.0 for v in row) for row in weighed]
        advantages = estimate(as_tensor(total), scale=kwargs["scale_rewards"], group_ids=ids)
    else:
        rows = table if any(v is None for row in table for v in row) else torch.tensor(table, dtype=torch.float64)
        advantages = GDPOAdvantage(weights=weights, eps=1e-4)(rows, group_ids=ids)
    # A list (needed for None) gives float32. Without None the results are float64 on both sides, but the peer's
    # n / (n - 1) inside its standard deviation is a float32 quotient, wrong by up to 6e-8: hence 1e-7 and not 1e-9.
    is_list = any(v is None for row in table for v in row) or case["dtype"] == "float32"
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if is_list else {"rtol": 1e-7, "atol": 1e-12}
    expected = torch.tensor(numbers(case["expected"]["advantages"]), dtype=torch.float64)
    torch.testing.assert_close(advantages.double(), expected, **tolerance)


CHECKS = {
    "twinkle.loss.": check_twinkle_loss,
    "twinkle.advantage.": check_twinkle_advantage,
    "twinkle.metric.": check_twinkle_metric,
    "twinkle.processor.": check_twinkle_is_packed,
    "open_instruct.grpo_utils.compute_grpo_loss": check_open_instruct_loss,
    "open_instruct.grpo_utils.compute_rho_correction": check_open_instruct_rho,
    "open_instruct.grpo_utils.compute_metrics_from_loss_stats": check_open_instruct_loss_stats,
    "open_instruct.rl_utils.masked_mean": check_open_instruct_masked_mean,
    "open_instruct.grpo_utils.calculate_token_counts": check_open_instruct_token_counts,
    "open_instruct.grpo_utils.forward_for_logprobs": check_open_instruct_forward,
    "open_instruct.data_loader advantage": check_open_instruct_advantage,
    "open_instruct.grpo_utils.compute_pass_at_k_metrics": check_open_instruct_pass_at_k,
    "open_instruct.rl_utils.pack_sequences": check_open_instruct_pack,
    "trl.GRPOTrainer._compute_loss": check_trl_loss,
    "trl.GRPOTrainer advantages": check_trl_advantage,
}


@pytest.mark.parametrize("case", MATCHED, ids=case_id)
def test_case_agrees_with_the_peer(case):
    (run,) = [f for prefix, f in CHECKS.items() if case["fn"].startswith(prefix)]
    run(case)


def test_count_per_peer(capsys):
    matched = Counter(c["peer"] for c in MATCHED)
    tagged = Counter(c["peer"] for c in CASES if is_tagged(c))
    with capsys.disabled():
        for peer in sorted(matched | tagged):
            print(f"\ngolden: {peer}: {matched[peer]} cases agree, {tagged[peer]} deliberately differ", end="")
    assert matched == {"twinkle": 143, "open-instruct": 68, "trl": 100}
    assert tagged == {"twinkle": 29, "trl": 14}


def test_tagged_cases_are_documented():
    text = (ROOT / "docs" / "comparison.md").read_text()
    tags = {t for c in CASES for t in c.get("tags", []) if t.startswith(("trap:", "peer_bug:"))}
    missing = sorted(t for t in tags if t not in text)
    assert not missing
