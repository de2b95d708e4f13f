"""Which parts go together, and what they make, in words. PolicyLoss asks here once, when it is made."""

import math
from typing import TYPE_CHECKING, Any

from gruppo.errors import InputError
from gruppo.loss.part import describe, fact

if TYPE_CHECKING:
    from gruppo.loss.policy import PolicyLoss


def check_composition(loss: "PolicyLoss") -> None:
    """Refuse what is no part or no number, and parts that contradict each other."""
    for name in ("level", "surrogate", "kl", "aggregate", "correction", "select"):
        part, is_optional = getattr(loss, name), name in ("correction", "select")
        if not callable(part) and not (is_optional and part is None):
            raise InputError(f"{name} must be a function or a part of gruppo.loss, got {part!r}")
    for name in ("beta", "entropy_coef", "pull", "nll_coef"):
        value, lowest = getattr(loss, name), -math.inf if name == "entropy_coef" else 0.0
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < lowest:
            raise InputError(f"{name} must be a finite number{' of at least 0' if lowest == 0 else ''}, got {value!r}")
    if loss.rejected not in ("counted", "left_out"):
        raise InputError(f"rejected must be 'counted' or 'left_out', got {loss.rejected!r}")
    if fact(loss.level, "divides_by_sampler") and fact(loss.correction, "weighs_by_rho"):
        raise InputError(
            f"the ratio of {_name(loss.level)} is over the sampler already, and the correction would weigh by "
            "rho = old / sampler once more; leave it out, or use a mask (KeepWithin, OffPolicySequenceMask)"
        )
    if loss.rejected == "left_out" and fact(loss.aggregate, "is_local"):
        raise InputError(
            f"rejected='left_out' counts what is left over the whole step, and {_name(loss.aggregate)} divides by "
            "the tokens of one call; use token_mean, or rejected='counted'"
        )


def formula(loss: "PolicyLoss") -> str:
    """What `repr` of a loss prints: the sum, then each part in words."""
    total = "select(surrogate_t)" if loss.select is not None else "surrogate_t"
    total += " * correction_t" if loss.correction else ""
    total += f" + {loss.beta:g} * kl_t" if loss.beta else ""
    total += f" - {loss.entropy_coef:g} * entropy_t" if loss.entropy_coef else ""
    total += f" + {loss.pull:g} * (log r_t)^2" if loss.pull else ""
    whole = f"loss = sum_t weight_t * ({total})"
    whole += f" + {loss.nll_coef:g} * mean of -logp over tokens with A > 0" if loss.nll_coef else ""
    lines = [f"{type(loss).__name__}: {whole}"]
    lines.append(f"  level       {describe(loss.level)}")
    lines.append(f"  surrogate   {describe(loss.surrogate)}")
    if loss.select is not None:
        lines.append(f"  select      {describe(loss.select)}")
    if loss.correction:
        lines.append(f"  correction  {describe(loss.correction)}")
    if loss.beta:
        lines.append(f"  kl          {describe(loss.kl)}, delta = logp - ref")
    lines.append(f"  weight      {describe(loss.aggregate)}")
    if loss.rejected == "left_out":
        lines.append("  rejected    left out of the means")
    return "\n".join(lines)


def _name(part: Any) -> str:
    return getattr(part, "__name__", repr(part))
