"""Any split of the data over `accumulate` calls reports equal dictionaries: `==`, not approximately."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppo.metric import CISPOMetric, GRPOMetric, GSPOMetric

every_metric = pytest.mark.parametrize("cls", [GRPOMetric, GSPOMetric, CISPOMetric])

SLOTS = [6, 1, 9, 4, 9, 2, 7, 3]


def step(seed=0, ties=False):
    """Padded rows in float32; with `ties` the log-probs are coarse, so that many tokens have the same KL."""
    draw = torch.Generator().manual_seed(seed)
    shape = len(SLOTS), max(SLOTS)
    normal = lambda: torch.randn(shape, generator=draw)  # noqa: E731
    logps = normal() - 2
    old = logps + 0.4 * normal()
    if ties:
        logps, old = (x.mul(2).round() / 2 for x in (logps, old))
    scored = torch.arange(shape[1]) < torch.tensor(SLOTS)[:, None]
    scored &= torch.rand(shape, generator=draw) < 0.8
    return {
        "labels": torch.where(scored, torch.randint(0, 99, shape, generator=draw), -100),
        "logps": logps,
        "old": old,
        "entropies": normal().abs(),
        "advantages": torch.randn(shape[0], generator=draw),
    }


def accumulate(metric, data, part):
    rows = {name: value[part] for name, value in data.items()}
    metric.accumulate(
        {"labels": rows["labels"]},
        {"logps": rows["logps"], "entropies": rows["entropies"]},
        old_logps=rows["old"],
        advantages=rows["advantages"],
    )


def accumulate_packed(metric, data, part):
    """The same rows, packed without their padding."""
    rows = list(range(len(SLOTS)))[part]
    flat = {n: torch.cat([data[n][i, : SLOTS[i]] for i in rows]) for n in ("labels", "logps", "old", "entropies")}
    ends = torch.tensor([0, *(SLOTS[i] for i in rows)]).cumsum(0)
    metric.accumulate(
        {"labels": flat["labels"], "cu_seqlens": ends},
        {"logps": flat["logps"], "entropies": flat["entropies"]},
        old_logps=flat["old"],
        advantages=data["advantages"][part],
    )


def whole(cls, data, **options):
    metric = cls(**options)
    accumulate(metric, data, slice(None))
    return metric.calculate()


cuts = st.lists(st.integers(0, len(SLOTS)), max_size=7).map(sorted)


@every_metric
@given(cuts=cuts, seed=st.integers(0, 1000), ties=st.booleans(), temperature=st.sampled_from([1.0, 0.7]))
@settings(max_examples=25)
def test_any_split_reports_equal_numbers(cls, cuts, seed, ties, temperature):
    data, options = step(seed, ties), {"top_k_kl": 5, "temperature": temperature}
    metric = cls(**options)
    for a, b in zip([0, *cuts], [*cuts, len(SLOTS)], strict=True):
        accumulate(metric, data, slice(a, b))
    assert metric.calculate() == whole(cls, data, **options)


@every_metric
@given(cuts=cuts, seed=st.integers(0, 1000))
@settings(max_examples=15)
def test_packed_micro_batches_report_the_numbers_of_padded_ones(cls, cuts, seed):
    data = step(seed)
    metric = cls(top_k_kl=5)
    for a, b in zip([0, *cuts], [*cuts, len(SLOTS)], strict=True):
        if a < b:
            accumulate_packed(metric, data, slice(a, b))
    assert metric.calculate() == whole(cls, data, top_k_kl=5)


@every_metric
@given(order=st.permutations(range(len(SLOTS))))
@settings(max_examples=10)
def test_order_of_sequences_does_not_matter(cls, order):
    data = step(3)
    shuffled = {name: value[list(order)] for name, value in data.items()}
    assert whole(cls, shuffled) == whole(cls, data)


def test_top_k_is_global_and_sorted():
    # Against a plain sort of all scored tokens by (-kl, place).
    data = step(5, ties=True)
    metric = GRPOMetric(top_k_kl=12)
    for i in range(len(SLOTS)):
        accumulate(metric, data, slice(i, i + 1))
    gap = (data["logps"] - data["old"]).double()
    kl = gap.exp() - 1 - gap
    places = [(i, j) for i in range(len(SLOTS)) for j in range(max(SLOTS)) if data["labels"][i, j] != -100]
    expected = sorted(places, key=lambda place: (-round(kl[place].item(), 6), place))[:12]
    records = metric.calculate()["train/top_k_kl"]
    assert [(r["sequence"], r["position"]) for r in records] == expected


def test_top_k_of_float64_does_not_depend_on_the_split():
    # The second token's KL is larger by 1e-10, less than the ranking resolves: a tie, however the data is split.
    new = torch.full((2, 1), -1.0, dtype=torch.float64)
    old = torch.tensor([[-1.5], [-1.5 - 1e-10]], dtype=torch.float64)
    labels = torch.tensor([[5], [6]])
    together, apart = GRPOMetric(top_k_kl=1), GRPOMetric(top_k_kl=1)
    together.accumulate({"labels": labels}, {"logps": new}, old_logps=old)
    for i in range(2):
        apart.accumulate({"labels": labels[[i]]}, {"logps": new[[i]]}, old_logps=old[[i]])
    assert apart.calculate()["train/top_k_kl"] == together.calculate()["train/top_k_kl"]


@given(cuts=cuts, order=st.permutations(range(len(SLOTS))), seed=st.integers(0, 1000))
@settings(max_examples=20)
def test_sums_of_float64_do_not_depend_on_the_order_of_additions(cuts, order, seed):
    # Values of very different size with all 53 bits in use: plain sums of them differ in the last digits.
    draw = torch.Generator().manual_seed(seed)
    shape = len(SLOTS), max(SLOTS)
    data = step(seed)
    scale = 10 ** (6 * torch.rand(shape, generator=draw, dtype=torch.float64) - 4)
    data |= {name: -torch.rand(shape, generator=draw, dtype=torch.float64) * scale for name in ("logps", "entropies")}
    data["old"] = data["logps"] + torch.randn(shape, generator=draw, dtype=torch.float64)
    metric = GRPOMetric()
    shuffled = {name: value[list(order)] for name, value in data.items()}
    for a, b in zip([0, *cuts], [*cuts, len(SLOTS)], strict=True):
        accumulate(metric, shuffled, slice(a, b))
    assert metric.calculate() == whole(GRPOMetric, data)


def test_sums_are_right_to_a_billionth_beside_a_large_value():
    values = torch.tensor([[-0.1] * 999 + [-5e5]], dtype=torch.float64)
    metric = GRPOMetric()
    metric.accumulate({"labels": torch.ones_like(values, dtype=torch.int64)}, {"logps": values})
    assert metric.calculate()["train/mean_new_logp"] == pytest.approx(-(99.9 + 5e5) / 1000, abs=1e-9)
