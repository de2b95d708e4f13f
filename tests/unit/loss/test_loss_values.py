"""A loss is a value: it does not change, says what it rejects, and knows what it clips."""

import copy
import math
import pickle

import pytest
import torch

from gruppo.errors import InputError
from gruppo.loss import (
    LOSSES,
    CovariancePenalty,
    DPPOKLLoss,
    DPPOTVLoss,
    GRPOLoss,
    KeepWithin,
    KLCovLoss,
    MaskedWeight,
    Normalized,
    OffPolicySequenceMask,
    PolicyGradient,
    PolicyLoss,
    Term,
    TopEntropy,
    TruncatedWeight,
    VESPOLoss,
    part,
    token_mean,
)
from gruppo.loss.weights import CorrectedSum
from gruppo.metric import metric_for

LABELS = torch.tensor([[1, 2, 3]])


@pytest.mark.parametrize("name", LOSSES)
def test_no_attribute_of_a_loss_can_be_set(name: str) -> None:
    loss = LOSSES[name]()
    for attribute in ("beta", "correction", "entropy_coef", "anything"):
        with pytest.raises(AttributeError, match="a loss does not change once it is made"):
            setattr(loss, attribute, 0.5)


@pytest.mark.parametrize("name", LOSSES)
def test_replace_makes_the_loss_that_was_never_otherwise(name: str) -> None:
    loss = LOSSES[name]()
    changed = loss.replace(entropy_coef=0.25, beta=0.5)
    assert changed == LOSSES[name](entropy_coef=0.25, beta=0.5) != loss
    assert repr(changed) == repr(LOSSES[name](entropy_coef=0.25, beta=0.5))
    assert (loss.entropy_coef, loss.beta) == (0.0, 0.0)
    assert changed.needs == loss.needs | {"entropies", "ref_logps"}


def test_replace_takes_coefficients_alone_and_checks_them() -> None:
    with pytest.raises(InputError, match="replace takes beta, entropy_coef, pull, nll_coef, got 'correction'"):
        GRPOLoss().replace(correction=TruncatedWeight())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="beta must be a finite number of at least 0, got -1"):
        GRPOLoss().replace(beta=-1)


def test_losses_of_the_same_parts_are_equal_and_hash_alike() -> None:
    for name, make in LOSSES.items():
        assert make() == make() and hash(make()) == hash(make()), name
        assert copy.deepcopy(make()) == make() == pickle.loads(pickle.dumps(make())), name
    assert len({make() for make in LOSSES.values()} | {make() for make in LOSSES.values()}) == len(LOSSES)
    for other in (
        GRPOLoss(clip_range=0.3),
        GRPOLoss(beta=0.1),
        GRPOLoss(kl_estimator=1),
        GRPOLoss(rejected="left_out"),
    ):
        assert other != GRPOLoss()
    assert GRPOLoss() != PolicyLoss()  # it has a name


def test_correction_and_select_are_weights() -> None:
    one = PolicyLoss(select=TopEntropy(), correction=(TruncatedWeight(), KeepWithin()))
    assert one == PolicyLoss(weights=(TopEntropy(), TruncatedWeight(), KeepWithin()))
    assert one.weights == (TopEntropy(), TruncatedWeight(), KeepWithin())
    assert (one.select, one.correction) == (TopEntropy(), (TruncatedWeight(), KeepWithin()))


def one_token_each(loss: PolicyLoss, **more) -> tuple[float, list[float]]:
    """Loss and gradient for two tokens of logp -1 and -2 with ratios 2 and 1, A = 3 and -5, rho = 4 and 1."""
    logps = torch.tensor([[-1.0], [-2.0]], dtype=torch.float64, requires_grad=True)
    old = logps.detach() - torch.tensor([[2.0], [1.0]], dtype=torch.float64).log()
    sampler = old - torch.tensor([[4.0], [1.0]], dtype=torch.float64).log()
    call = {"advantages": [3.0, -5.0], "old_logps": old, "sampler_logps": sampler} | more
    result = loss({"labels": torch.tensor([[1], [2]])}, {"logps": logps}, **call)
    (grad,) = torch.autograd.grad(result.loss, logps)
    return result.loss.item(), grad.flatten().tolist()


def test_weights_multiply_the_policy_term() -> None:
    # -r A = -6 and 5. A root of rho, 2 and 1, and a mask of the second token: (-6 * 2 * 1 + 5 * 1 * 0) / 2
    def root(inputs, power=0.5):
        return (power * (inputs.old_logps - inputs.sampler_logps)).exp()

    def rises(inputs, log_ratio_T):
        return log_ratio_T.detach() > 0.5

    loss = PolicyLoss(surrogate=PolicyGradient(), weights=(root, rises))
    assert one_token_each(loss) == (pytest.approx(-6.0), pytest.approx([-6.0, 0.0]))
    assert (loss.correction, loss.select) == (root, rises)
    assert (loss.is_per_token, loss.needs) == (False, {"sampler_logps"})  # the safe answers


def test_a_term_is_added_beside_the_weights_and_a_covariance_penalty_within() -> None:
    # Weights rho <= 2 are 2 and 1: policy (-6 * 2 + 5) / 2 = -3.5. The term adds 0.5 * mean of logp^2 = 0.5 * 2.5.
    def squared(inputs, log_ratio_T):
        return inputs.logps.square()

    plain = PolicyLoss(surrogate=PolicyGradient(), correction=TruncatedWeight())
    assert one_token_each(plain)[0] == pytest.approx(-3.5)
    mine = PolicyLoss(surrogate=PolicyGradient(), correction=TruncatedWeight(), terms=(Term("mine", 0.5, squared),))
    assert one_token_each(mine) == (pytest.approx(-3.5 + 1.25), pytest.approx([-6 + 0.5 * -1.0, 2.5 + 0.5 * -2.0]))
    # The penalty on all tokens is 0.5 * |log r| = 0.5 * log 2 on the first, times its weight 2: log 2 / 2 in the mean.
    within = PolicyLoss(
        surrogate=PolicyGradient(), correction=TruncatedWeight(), terms=(CovariancePenalty(share=1.0, coef=0.5),)
    )
    assert one_token_each(within)[0] == pytest.approx(-3.5 + math.log(2) / 2)
    logps = torch.full((1, 3), -1.0, dtype=torch.float64)
    call = {"advantages": [1.0], "old_logps": logps - 1, "sampler_logps": logps - 1}
    assert list(within({"labels": LABELS}, {"logps": logps}, **call).terms) == ["policy"]
    assert list(mine({"labels": LABELS}, {"logps": logps}, **call).terms) == ["policy", "mine"]


def test_left_out_of_a_loss_without_weights_leaves_nothing_out() -> None:
    counted, left_out = (one_token_each(GRPOLoss(rejected=rejected)) for rejected in ("counted", "left_out"))
    assert counted == left_out == (pytest.approx((-3.6 + 5) / 2), pytest.approx([0.0, 2.5]))


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"select": CovariancePenalty()}, "select takes token weights, got .*a Term goes into terms"),
        ({"weights": (lambda inputs, gap: gap,)}, r"weights must take \(inputs\) or \(inputs, log_ratio_T\)"),
        ({"correction": "truncate"}, "correction must be a function or a part of gruppo.loss, got 'truncate'"),
        ({"terms": (TopEntropy(),)}, r"terms must hold Term\(name, coef, value\), got TopEntropy"),
        ({"terms": (Term("policy", 1.0, abs),)}, "a term named 'policy' already"),
        ({"terms": (Term("kl", 1.0, abs),), "beta": 0.1}, "a term named 'kl' already"),
        ({"weights": (TopEntropy(0.1), TopEntropy(0.5))}, "two of TopEntropy would share the numbers"),
        ({"surrogate": part(needs={"rewards"})(lambda log_ratio_T, inputs: log_ratio_T)}, "a part needs 'rewards'"),
    ],
)
def test_parts_that_cannot_be_used_are_refused(parts: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        PolicyLoss(**parts)


def test_a_trait_that_does_not_exist_is_refused() -> None:
    with pytest.raises(TypeError, match="unexpected trait 'is_per_token'; there are per_token, "):
        part(is_per_token=True)


def test_a_normalized_selection_is_refused() -> None:
    with pytest.raises(InputError, match="Normalized takes weights of the inputs alone"):
        Normalized(TopEntropy())


def test_vespo_in_a_run_has_its_correction_inside_the_product() -> None:
    from gruppo.trainer import TrainConfig
    from gruppo.trainer.build import build_loss

    for config in (TrainConfig(loss="vespo", sampler="vllm"), TrainConfig(loss="vespo", correction="truncate")):
        loss = build_loss(config)
        assert loss.level == CorrectedSum(TruncatedWeight()) and loss.correction is None
        assert repr(loss) == repr(VESPOLoss(correction=TruncatedWeight()))
        # new = old, sampler = old - log 1.5, three tokens, A = 1: w = 1.5^3, phi = e^l w^k e^(-l w) with k, l = 2, 3
        logps = torch.full((1, 3), -1.0, dtype=torch.float64, requires_grad=True)
        sampler = logps.detach() - math.log(1.5)
        loss({"labels": LABELS}, {"logps": logps}, advantages=[1.0], sampler_logps=sampler).loss.backward()
        w = 1.5**3
        expected = -math.exp(3) * w**2 * math.exp(-3 * w) / 3
        assert expected == pytest.approx(-0.00306, abs=5e-6)
        assert logps.grad is not None and logps.grad.flatten().tolist() == pytest.approx([expected] * 3, rel=1e-9)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("correction", ["auto", "none", "truncate", "mask"])
def test_a_built_loss_is_the_constructed_one(name: str, correction: str) -> None:
    from gruppo.loss import CORRECTIONS
    from gruppo.trainer import TrainConfig
    from gruppo.trainer.build import build_loss

    plain = LOSSES[name](**({"max_completion_length": 256} if name == "drgrpo" else {}))
    config = TrainConfig(loss=name, sampler="vllm", correction=correction)
    if correction not in ("auto", "none") and (plain.correction is not None or name in ("prime", "ipo")):
        with pytest.raises(InputError, match=r"has a correction of its own|is over the sampler already"):
            build_loss(config)
        return
    part = None if correction == "none" else CORRECTIONS["truncate" if correction == "auto" else correction]
    own = correction == "auto" and plain.reads_sampler
    options = {"max_completion_length": 256} if name == "drgrpo" else {}
    expected = plain if part is None or own else LOSSES[name](correction=part, **options)
    assert build_loss(config) == expected


def test_dppo_over_the_sampler_is_the_authors_form() -> None:
    # Tokens of probability 0.5 and 0.2 now; the sampler had 0.2 and 0.5, the trainer's old policy 0.5 and 0.2.
    # A = 1, -1: both moved by 0.3 the way their advantage pushes, seen from the sampler, and not at all seen from old.
    labels = torch.tensor([[1], [2]])
    logps = torch.tensor([[0.5], [0.2]], dtype=torch.float64).log().requires_grad_()
    sampler = torch.tensor([[0.2], [0.5]], dtype=torch.float64).log()
    call = {"advantages": [1.0, -1.0], "old_logps": logps.detach(), "sampler_logps": sampler}
    for make, region in ((DPPOTVLoss, 0.2), (DPPOKLLoss, 0.05)):
        out = make(region=region, anchor="sampler")({"labels": labels}, {"logps": logps}, **call)
        assert out.rejected is not None and out.rejected.item() == 2
        (grad,) = torch.autograd.grad(out.loss, logps)
        assert grad.flatten().tolist() == [0.0, 0.0]
        out = make(region=region)({"labels": labels}, {"logps": logps}, **call)
        assert out.rejected is not None and out.rejected.item() == 0
        # Wide regions keep both: the gradient is -ratio * A / 2 with ratios 2.5 and 0.4 over the sampler, 1 over old.
        for anchor, ratios in (("sampler", (2.5, 0.4)), ("old", (1.0, 1.0))):
            out = make(region=9.0, anchor=anchor)({"labels": labels}, {"logps": logps}, **call)
            (grad,) = torch.autograd.grad(out.loss, logps)
            assert grad.flatten().tolist() == pytest.approx([-ratios[0] / 2, ratios[1] / 2])
    with pytest.raises(InputError, match="base must be 'old' or 'sampler', got 'ref'"):
        DPPOTVLoss(anchor="ref")  # type: ignore[arg-type]


def test_dppo_over_the_sampler_gets_no_second_weight_in_a_run() -> None:
    from gruppo.trainer import TrainConfig
    from gruppo.trainer.build import build_loss

    loss = build_loss(TrainConfig(loss="dppo_tv", sampler="vllm", loss_options={"anchor": "sampler"}))
    assert loss.correction is None and "sampler_logps" in loss.needs


def test_kl_cov_is_plain_policy_gradient_where_the_ratio_is_1() -> None:
    # Three tokens, A = 2: d/dlogp of -r A / 3 is -2/3; of 50 |log r| / 3 it is 0 at r = 1 and 50/3 at r = e^0.1.
    loss = KLCovLoss(share=1.0, coef=50.0)
    logps = torch.tensor([[-1.0, -2.0, -0.5]], dtype=torch.float64, requires_grad=True)
    for move, expected in ((0.0, -2 / 3), (0.1, (50 - 2 * math.exp(0.1)) / 3)):
        call = {"advantages": [2.0], "old_logps": logps.detach() - move}
        (grad,) = torch.autograd.grad(loss({"labels": LABELS}, {"logps": logps}, **call).loss, logps)
        assert grad.flatten().tolist() == pytest.approx([expected] * 3, rel=1e-9)


def test_logits_give_entropies_only_where_there_are_no_logps() -> None:
    logits = torch.zeros(1, 3, 4, dtype=torch.float64)  # four tokens, all as likely: entropy log 4
    loss = GRPOLoss(entropy_coef=0.5)
    out = loss({"labels": LABELS}, {"logits": logits}, advantages=[1.0])
    assert out.terms["entropy"].item() == pytest.approx(math.log(4), rel=1e-12)
    with pytest.raises(InputError, match="needs entropies, got None"):
        loss({"labels": LABELS}, {"logits": logits, "logps": -torch.ones(1, 3)}, advantages=[1.0])


def test_verls_bounds_on_k1_are_those_of_one_over_rho() -> None:
    # verl keeps log low <= -log rho <= log high. Between 0.5 and 4: rho from 0.25 to 2.
    low, high, rho = 0.5, 4.0, torch.tensor([[0.2, 0.3, 1.0, 1.9, 3.0]], dtype=torch.float64)
    labels, logps = torch.ones(1, 5, dtype=torch.int64), torch.full((1, 5), -1.0, dtype=torch.float64)
    call = {"advantages": [1.0], "sampler_logps": logps - rho.log()}
    verls = [math.log(low) <= -math.log(r) <= math.log(high) for r in rho.flatten().tolist()]
    for bounds, kept in (((1 / high, 1 / low), verls), ((low, high), [False, False, True, True, True])):
        policy = logps.clone().requires_grad_()
        loss = PolicyLoss(aggregate=token_mean, correction=KeepWithin(*bounds))
        loss({"labels": labels}, {"logps": policy}, **call).loss.backward()
        assert policy.grad is not None and (policy.grad != 0).flatten().tolist() == kept
    assert verls == [False, True, True, True, False]


def test_rejected_counts_the_tokens_that_masks_leave_out() -> None:
    # rho = 1, 9, 1 with IcePop up to 5, and a sequence of advantage 0 whose tokens nobody counts
    labels = torch.tensor([[1, 2, 3], [4, 5, -100]])
    logps = torch.full((2, 3), -1.0)
    sampler = logps - torch.tensor([[1.0, 9.0, 1.0], [9.0, 9.0, 9.0]]).log()
    call = {"advantages": [1.0, 0.0], "sampler_logps": sampler}
    for rejected in ("counted", "left_out"):
        loss = PolicyLoss(correction=MaskedWeight(), rejected=rejected)
        out = loss({"labels": labels}, {"logps": logps}, **call)
        assert out.rejected is not None and out.rejected.item() == 1
    mask = PolicyLoss(correction=OffPolicySequenceMask(threshold=0.1))
    out = mask({"labels": labels}, {"logps": logps}, advantages=[-1.0, -1.0], sampler_logps=logps + 0.5)
    assert out.rejected is not None and out.rejected.item() == 5
    assert GRPOLoss()({"labels": labels}, {"logps": logps}, advantages=[1.0, 1.0]).rejected is None


@pytest.mark.parametrize("name", ["reinforce", "gpg", "dro", "m2po", "kl_cov", "prime", "ipo", "vespo"])
def test_a_loss_that_clips_nothing_has_no_clip_rates(name: str) -> None:
    loss = LOSSES[name]()
    metric = metric_for(loss)
    old = torch.log(torch.tensor([[0.1, 0.5, 0.9]]))
    metric.accumulate({"labels": LABELS}, {"logps": torch.zeros(1, 3)}, old_logps=old, advantages=[1.0])
    found = metric.calculate()
    assert loss.clip_range is None
    assert found["train/token_ratio_max"] == pytest.approx(10.0)
    assert not [key for key in found if "clip" in key]
