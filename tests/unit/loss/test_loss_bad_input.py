"""Bad input is refused by name: what was expected, what came, where, and what to do about it."""

import pytest
import torch
from loss_batch import SEVEN, seven_losses

from gruppo.errors import InputError
from gruppo.loss import (
    ClippedWeight,
    ConstantLength,
    DRGRPOLoss,
    DualClip,
    GRPOLoss,
    MaskedWeight,
    PolicyLoss,
    SAPOLoss,
    SoftGate,
    TruncatedWeight,
)

LABELS = torch.tensor([[-100, 7, 8], [-100, 9, -100]])
NAN, INF = float("nan"), float("inf")


def call(loss=None, labels=LABELS, logps=None, advantages=(1.0, -1.0), extra=None, outputs=None, **keywords):
    logps = torch.zeros(labels.shape) if logps is None else logps
    outputs = {"logps": logps} if outputs is None else outputs
    return (loss or GRPOLoss())({"labels": labels, **(extra or {})}, outputs, advantages=advantages, **keywords)


def refusal(function, *parts, error=ValueError):
    """The message of the error that `function` raises; each of `parts` must be in it."""
    with pytest.raises(error) as caught:
        function()
    message = str(caught.value)
    assert [part for part in parts if part not in message] == [], message
    return caught.value


# --- construction ---------------------------------------------------------------------------------------------------


@seven_losses
def test_unknown_keyword_is_a_type_error_that_lists_the_known(name):
    refusal(
        lambda: SEVEN[name](clip_rang=0.2),
        *(f"{name}Loss() got an unexpected keyword argument 'clip_rang'", "clip_range", "beta", "kl_estimator"),
        error=TypeError,
    )


@pytest.mark.parametrize(
    ("keyword", "hint"),
    [
        ("epsilon", "clip_range"),
        ("epsilon_high", "clip_range=(low, high)"),
        ("tau_pos", "tau=(positive, negative)"),
        ("tau_neg", "tau=(positive, negative)"),
    ],
)
def test_a_peers_keyword_is_translated(keyword, hint):
    refusal(lambda: SAPOLoss(**{keyword: 0.2}), f"unexpected keyword argument {keyword!r}", hint, error=TypeError)


@seven_losses
def test_losses_take_keywords_only(name):
    refusal(lambda: SEVEN[name](0.2), "positional", error=TypeError)


@pytest.mark.parametrize("clip_range", [0, -0.2, 0.0, (0.0, 0.2), (0.2, -0.1), NAN, INF, (0.2, INF)])
@seven_losses
def test_clip_range_must_be_positive(name, clip_range):
    refusal(lambda: SEVEN[name](clip_range=clip_range), "clip_range must be positive", repr(clip_range), "[0.8, 1.2]")


@seven_losses
def test_reversed_clip_range_is_refused_with_the_right_order(name):
    if name == "CISPO":  # its lower side does nothing
        assert SEVEN[name](clip_range=(1.0, 0.28)).surrogate.high == 0.28
        return
    refusal(lambda: SEVEN[name](clip_range=(0.3, 0.2)), "(low, high)", "got (0.3, 0.2)", "did you mean (0.2, 0.3)")


@pytest.mark.parametrize("clip_range", ["0.2", (0.1, 0.2, 0.3), (0.1,), None, True])
def test_clip_range_must_be_a_number_or_a_pair(clip_range):
    refusal(lambda: GRPOLoss(clip_range=clip_range), "a number or (low, high)", repr(clip_range))


@pytest.mark.parametrize("estimator", [4, -1, "k4", True, 2.0])
def test_unknown_kl_estimator_is_refused(estimator):
    refusal(lambda: GRPOLoss(kl_estimator=estimator), "0 (k1), 1 (k2), 2 (k3), 3 (ratio*k1)", f"got {estimator!r}")


@pytest.mark.parametrize("beta", [-0.1, NAN])
def test_negative_beta_is_refused(beta):
    refusal(lambda: GRPOLoss(beta=beta), "beta must be a finite number of at least 0", f"got {beta!r}")


@pytest.mark.parametrize("tau", [0.0, -1.0, (1.0, 0.0), NAN])
def test_tau_must_be_positive(tau):
    refusal(lambda: SAPOLoss(tau=tau), "tau must be positive", "got (")


def test_max_completion_length_must_be_positive():
    refusal(lambda: DRGRPOLoss(max_completion_length=0), "max_completion_length must be at least 1", "got 0")
    refusal(lambda: ConstantLength(-3), "max_completion_length must be at least 1", "got -3")


def test_dual_clip_cap_must_exceed_the_clip():
    refusal(lambda: DualClip(0.2, 0.3, cap=1.2), "cap must exceed 1 + high = 1.3", "got 1.2", "3 is usual")


@pytest.mark.parametrize("part", [TruncatedWeight, MaskedWeight])
def test_correction_bounds_must_be_ordered(part):
    refusal(lambda: part(low=3.0, high=2.0), "0 <= low < high", "low=3, high=2")


def test_correction_level_is_token_or_sequence():
    refusal(lambda: MaskedWeight(level="batch"), "'token' or 'sequence'", "got 'batch'")


@pytest.mark.parametrize("part", ["level", "surrogate", "kl", "aggregate"])
def test_a_part_must_be_callable(part):
    refusal(lambda: PolicyLoss(**{part: "token"}), f"{part} must be a function or a part of gruppo.loss", "got 'token'")


def test_a_soft_gate_is_refused_at_construction_not_at_the_first_step():
    refusal(lambda: SoftGate(1.0, -1.0), "tau must be positive", "(1, -1)")


def test_a_part_is_frozen():
    with pytest.raises(AttributeError):
        ClippedWeight(0.2).high = 0.3


# --- missing inputs -------------------------------------------------------------------------------------------------


@seven_losses
def test_beta_without_ref_logps_is_an_error_and_not_a_skip(name):
    loss = SEVEN[name](beta=0.1)
    refusal(lambda: call(loss), f"{name}Loss(beta=0.1", "needs ref_logps", "got None", "or set beta=0")


@seven_losses
def test_entropy_bonus_without_entropies_is_an_error(name):
    loss = SEVEN[name](entropy_coef=0.1)
    refusal(lambda: call(loss), f"{name}Loss(", "entropy_coef=0.1", "needs entropies", "or set entropy_coef=0")


@seven_losses
def test_correction_without_sampler_logps_is_an_error(name):
    loss = SEVEN[name](correction=TruncatedWeight())
    refusal(lambda: call(loss), f"{name}Loss(", "needs sampler_logps", "or leave out the correction")


def test_inputs_without_labels_say_what_is_there():
    refusal(
        lambda: GRPOLoss()({"input_ids": LABELS}, {"logps": LABELS}, advantages=[1.0]),
        *("inputs has no 'labels'", "['input_ids']"),
    )


def test_outputs_without_log_probs_say_what_is_there():
    refusal(lambda: call(outputs={"hidden": 1}), "needs 'logps' or 'logits'", "['hidden']")


def test_advantages_are_a_required_keyword():
    refusal(lambda: GRPOLoss()({"labels": LABELS}, {"logps": torch.zeros(2, 3)}), "advantages", error=TypeError)


# --- per-token inputs -----------------------------------------------------------------------------------------------

PER_TOKEN = {
    "old_logps": GRPOLoss(),
    "ref_logps": GRPOLoss(beta=0.1),
    "sampler_logps": GRPOLoss(correction=TruncatedWeight()),
}
per_token_inputs = pytest.mark.parametrize("name", PER_TOKEN)


@per_token_inputs
def test_a_list_of_the_wrong_length_names_the_sequence_and_both_counts(name):
    wrong = {name: [[-1.0, -1.0], [-1.0, -1.0, -1.0]]}
    refusal(
        lambda: call(PER_TOKEN[name], **wrong),
        *(f"{name} of sequence 1", "3 entries", "1 scored token", "exactly one value per token"),
    )


def test_entropy_and_advantage_lists_of_the_wrong_length_name_the_sequence_too():
    outputs = {"logps": torch.zeros(2, 3), "entropies": [[0.1], [0.1]]}
    refusal(
        lambda: call(GRPOLoss(entropy_coef=0.1), outputs=outputs),
        *("entropies of sequence 0", "1 entries", "2 scored tokens"),
    )
    refusal(lambda: call(advantages=[[1.0, 1.0], []]), "advantages of sequence 1", "0 entries", "1 scored token")


@per_token_inputs
def test_the_wrong_number_of_lists_names_both_counts(name):
    refusal(
        lambda: call(PER_TOKEN[name], **{name: [[-1.0, -1.0]]}),
        *(f"{name} has 1 lists for 2 sequences", "one per sequence"),
    )


@per_token_inputs
def test_a_tensor_of_another_shape_names_both_shapes(name):
    refusal(
        lambda: call(PER_TOKEN[name], **{name: torch.zeros(2, 2)}),
        *(f"{name} has shape (2, 2)", "labels (2, 3)", "aligned slot by slot"),
    )


@per_token_inputs
def test_integer_values_are_refused(name):
    wrong = {name: torch.zeros(2, 3, dtype=torch.int64)}
    refusal(lambda: call(PER_TOKEN[name], **wrong), f"{name} must be floating point", "torch.int64")


@per_token_inputs
def test_a_flat_list_is_refused(name):
    refusal(lambda: call(PER_TOKEN[name], **{name: [-1.0, -2.0]}), f"{name}[0]", "one number per scored token", "float")


@per_token_inputs
@pytest.mark.parametrize("item", [None, "a", [-1.0]])
def test_a_list_of_something_else_than_numbers_is_refused(name, item):
    wrong = {name: [[-1.0, -1.0], [item, -1.0]]}
    refusal(lambda: call(PER_TOKEN[name], **wrong), f"{name}[1] must be a list of numbers", repr([item, -1.0]))


@per_token_inputs
def test_something_else_is_refused(name):
    refusal(
        lambda: call(PER_TOKEN[name], **{name: "logps"}), f"{name} must be a tensor", "one list per sequence", "str"
    )


@seven_losses
def test_integer_logps_are_refused(name):
    wrong = torch.zeros(2, 3, dtype=torch.int64)
    refusal(lambda: call(SEVEN[name](), logps=wrong), "logps must be floating point", "got torch.int64", "token ids")


@seven_losses
def test_labels_and_logps_of_different_shape_name_both(name):
    refusal(
        lambda: call(SEVEN[name](), logps=torch.zeros(2, 4)),
        *("logps has shape (2, 4)", "labels (2, 3)", "aligned slot by slot"),
    )


def test_logps_with_as_many_values_in_another_arrangement_are_refused():
    refusal(lambda: call(logps=torch.zeros(3, 2)), "(3, 2)", "(2, 3)")


def test_logits_of_another_length_say_whose_the_shift_is():
    outputs = {"logits": torch.zeros(2, 4, 11)}
    refusal(lambda: call(outputs=outputs), "(2, 4, 11)", "labels (2, 3)", "the shift by one is the caller's")


def test_logps_must_be_a_tensor():
    refusal(lambda: call(outputs={"logps": [[0.0]]}), "logps must be a tensor of the labels' shape", "got list")


# --- advantages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "text"), [(NAN, "nan"), (INF, "inf"), (-INF, "-inf")])
@seven_losses
def test_non_finite_advantages_are_refused_with_their_place(name, value, text):
    refusal(
        lambda: call(SEVEN[name](), advantages=[1.0, value]),
        *(f"advantages[1] is {text}", "must be finite", "drop the sequence or fix its reward"),
    )


@pytest.mark.parametrize("form", ["tensor", "lists"])
def test_non_finite_advantages_per_token_are_refused(form):
    advantages = torch.tensor([[0.0, 1.0, NAN], [0.0, 1.0, 0.0]]) if form == "tensor" else [[1.0, NAN], [1.0]]
    refusal(lambda: call(advantages=advantages), "advantages[2] is nan", "must be finite")


def test_a_wrong_number_of_advantages_names_what_is_expected():
    refusal(
        lambda: call(advantages=[1.0, 2.0, 3.0]),
        *("advantages has shape (3,)", "one value per sequence (2,)", "one per label (2, 3)", "position_ids or cu"),
    )


def test_advantages_that_are_no_numbers_are_refused():
    refusal(lambda: call(advantages=torch.tensor([True, False])), "advantages must be numbers", "torch.bool")


def test_one_advantage_for_two_packed_sequences_is_refused():
    extra = {"cu_seqlens": torch.tensor([0, 2, 3])}
    refusal(
        lambda: call(labels=torch.tensor([1, 2, 3]), extra=extra, advantages=[1.0]),
        *("shape (1,)", "one value per sequence (2,)"),
    )


# --- layout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [LABELS.float(), LABELS.bool(), LABELS[None], torch.tensor(3)])
def test_labels_must_be_token_ids_of_one_or_two_axes(labels):
    refusal(lambda: call(labels=labels), "token ids of shape [B, L], [1, T] or [T]", str(labels.dtype))


def test_flat_labels_need_positions_or_offsets():
    refusal(lambda: call(labels=torch.tensor([1, 2])), "labels of shape [T] are packed", "position_ids or cu_seqlens")


def test_offsets_do_not_go_with_padded_rows():
    extra = {"cu_seqlens": torch.tensor([0, 6])}
    refusal(lambda: call(extra=extra), "cu_seqlens goes with packed labels [T] or [1, T]", "(2, 3)")


@pytest.mark.parametrize("ends", [[0, 2], [1, 3], [0, 2, 1, 3], [0, 4], []])
def test_offsets_must_rise_from_zero_to_the_number_of_slots(ends):
    extra = {"cu_seqlens": torch.tensor(ends, dtype=torch.int64)}
    refusal(
        lambda: call(labels=torch.tensor([1, 2, 3]), extra=extra, advantages=[1.0]),
        *("must rise from 0 to the number of slots (3)", f"got {ends}"),
    )


def test_positions_without_a_start_are_refused():
    extra = {"position_ids": torch.tensor([1, 2, 3])}
    refusal(
        lambda: call(labels=torch.tensor([1, 2, 3]), extra=extra, advantages=[1.0]),
        *("no sequence start", "positions must restart at 0"),
    )


@pytest.mark.parametrize("name", ["position_ids", "attention_mask"])
def test_positions_and_mask_of_another_shape_are_refused(name):
    extra = {"position_ids": torch.tensor([0, 1, 2]), name: torch.tensor([0, 1])}
    refusal(
        lambda: call(labels=torch.tensor([1, 2, 3]), extra=extra, advantages=[1.0]),
        *(f"{name} has shape (2,)", "labels (3,)"),
    )


def test_every_refusal_is_an_input_error_and_a_value_error():
    error = refusal(lambda: call(advantages=[1.0]))
    assert isinstance(error, InputError) and isinstance(error, ValueError)


def test_a_surrogate_that_gives_one_number_is_named() -> None:
    def summed(log_ratio_T, inputs):
        return (log_ratio_T.exp() * inputs.advantages).sum()

    with pytest.raises(InputError, match=r"surrogate 'summed' must give a loss per token, shape \(6,\), got \(\)"):
        call(PolicyLoss(surrogate=summed))
