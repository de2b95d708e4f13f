"""One of every part by name, and which of them go together."""

from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

from gruppo import loss as gl
from gruppo.errors import InputError

_TRUNCATED = gl.TruncatedWeight()

PARTS: dict[str, dict[str, Any]] = {
    "level": {
        "token_level": gl.token_level,
        "sampler_level": gl.sampler_level,
        "sequence_level": gl.sequence_level,
        "sequence_token_level": gl.sequence_token_level,
        "sequence_sum_level": gl.sequence_sum_level,
        "CorrectedSum": gl.CorrectedSum(_TRUNCATED),
        "ClippedMean": gl.ClippedMean(),
    },
    "surrogate": {
        "Clip": gl.Clip(),
        "DualClip": gl.DualClip(),
        "ClippedWeight": gl.ClippedWeight(),
        "SoftGate": gl.SoftGate(),
        "PolicyGradient": gl.PolicyGradient(),
        "LogProb": gl.LogProb(),
        "GammaWeight": gl.GammaWeight(),
    },
    "kl": {name: estimator for name, estimator in gl.KL_NAMES.items() if name != "absolute"},  # abs_kl once more
    "aggregate": {
        "sequence_mean": gl.sequence_mean,
        "token_mean": gl.token_mean,
        "local_token_mean": gl.local_token_mean,
        "sequence_mean_token_sum": gl.sequence_mean_token_sum,
        "token_sum": gl.token_sum,
        "ConstantLength": gl.ConstantLength(),
    },
    "correction": {
        "none": None,
        "TruncatedWeight": _TRUNCATED,
        "TruncatedWeight sequence_sum": gl.TruncatedWeight(level="sequence_sum"),
        "MaskedWeight": gl.MaskedWeight(),
        "MaskedWeight sequence": gl.MaskedWeight(level="sequence"),
        "MaskedWeight sequence_sum": gl.MaskedWeight(level="sequence_sum"),
        "KeepWithin": gl.KeepWithin(),
        "OffPolicySequenceMask": gl.OffPolicySequenceMask(),
        "two": (_TRUNCATED, gl.KeepWithin(0.9, 1.1, "sequence")),
        "Normalized": gl.Normalized(_TRUNCATED),
    },
    "select": {
        "none": None,
        "TopEntropy": gl.TopEntropy(),
        "ClipCovariance": gl.ClipCovariance(),
        "SecondMoment": gl.SecondMoment(),
        "VariationBudget": gl.VariationBudget(),
        "TVRegion": gl.TVRegion(),
        "KLRegion": gl.KLRegion(),
        "ProbabilityBand": gl.ProbabilityBand(),
    },
    "terms": {"none": (), "CovariancePenalty": (gl.CovariancePenalty(),)},
    "rejected": {"counted": "counted", "left_out": "left_out"},
}


def refusal(**names: str) -> str | None:
    """Why these parts (kind=name) do not go together; None when they do."""
    try:
        gl.PolicyLoss(**{kind: PARTS[kind][name] for kind, name in names.items()})
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
