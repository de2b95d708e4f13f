"""A reward of the user's own, as the campaign scores with: it runs in worker processes."""


def short_and_right(completions: list[str], answer: list[str]) -> list[float]:
    """1 for the answer, less for each character of difference in length."""
    return [
        float(text == gold) - 0.1 * abs(len(text) - len(gold)) for text, gold in zip(completions, answer, strict=True)
    ]
