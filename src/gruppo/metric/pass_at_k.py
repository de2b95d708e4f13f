"""pass@k without bias."""

from math import comb

from gruppo.errors import InputError


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Probability that at least one of k samples drawn without replacement is correct.

        1 - C(n - c, k) / C(n, k)

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 1 <= k <= num_samples or not 0 <= num_correct <= num_samples:
        raise InputError(f"pass@k needs 1 <= k <= n and 0 <= c <= n, got n={num_samples}, c={num_correct}, k={k}")
    return 1 - comb(num_samples - num_correct, k) / comb(num_samples, k)
