"""One of every part by name, and which of them go together: what `gruppo losses --grid` prints and the tests walk."""

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

from gruppo.errors import InputError
from gruppo.loss import aggregate, correction, kl, level, select, surrogate, trust_region
from gruppo.loss.policy import PolicyLoss

_TRUNCATED = correction.TruncatedWeight()

PARTS: dict[str, dict[str, Any]] = {
    "level": {
        "token_level": level.token_level,
        "sampler_level": level.sampler_level,
        "sequence_level": level.sequence_level,
        "sequence_token_level": level.sequence_token_level,
        "sequence_sum_level": level.sequence_sum_level,
        "CorrectedSum": level.CorrectedSum(_TRUNCATED),
        "ClippedMean": level.ClippedMean(),
    },
    "surrogate": {
        "Clip": surrogate.Clip(),
        "DualClip": surrogate.DualClip(),
        "ClippedWeight": surrogate.ClippedWeight(),
        "SoftGate": surrogate.SoftGate(),
        "PolicyGradient": surrogate.PolicyGradient(),
        "LogProb": surrogate.LogProb(),
        "GammaWeight": surrogate.GammaWeight(),
    },
    "kl": dict(kl.KL_NAMES),
    "aggregate": {
        "sequence_mean": aggregate.sequence_mean,
        "token_mean": aggregate.token_mean,
        "local_token_mean": aggregate.local_token_mean,
        "sequence_mean_token_sum": aggregate.sequence_mean_token_sum,
        "token_sum": aggregate.token_sum,
        "ConstantLength": aggregate.ConstantLength(),
    },
    "correction": {
        "none": None,
        "TruncatedWeight": _TRUNCATED,
        "TruncatedWeight sequence_sum": correction.TruncatedWeight(level="sequence_sum"),
        "MaskedWeight": correction.MaskedWeight(),
        "MaskedWeight sequence": correction.MaskedWeight(level="sequence"),
        "MaskedWeight sequence_sum": correction.MaskedWeight(level="sequence_sum"),
        "KeepWithin": correction.KeepWithin(),
        "OffPolicySequenceMask": correction.OffPolicySequenceMask(),
        "Product": correction.Product((_TRUNCATED, correction.KeepWithin(0.9, 1.1, "sequence"))),
        "Normalized": correction.Normalized(_TRUNCATED),
    },
    "select": {
        "none": None,
        "TopEntropy": select.TopEntropy(),
        "ClipCovariance": select.ClipCovariance(),
        "CovariancePenalty": select.CovariancePenalty(),
        "SecondMoment": select.SecondMoment(),
        "VariationBudget": select.VariationBudget(),
        "TVRegion": trust_region.TVRegion(),
        "KLRegion": trust_region.KLRegion(),
        "ProbabilityBand": trust_region.ProbabilityBand(),
    },
    "rejected": {"counted": "counted", "left_out": "left_out"},
}


def refusal(**names: str) -> str | None:
    """Why these parts (kind=name) do not go together; None when they do."""
    try:
        PolicyLoss(**{kind: PARTS[kind][name] for kind, name in names.items()})
    except InputError as error:
        return str(error)
    return None


def refused_pairs() -> Iterator[tuple[str, str, str]]:
    """Every two parts that do not go together, and why. No other composition is refused."""
    for one, other in combinations(PARTS, 2):
        for first, second in product(PARTS[one], PARTS[other]):
            reason = refusal(**{one: first, other: second})
            if reason is not None:
                yield f"{one}={first}", f"{other}={second}", reason
