"""Which tokens are drawn: repeatable, independent of the company, distributed as the model says, within the filters."""

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import EOS, VOCABULARY, actor, tiny_model

from gruppo.errors import InputError
from gruppo.model import TransformersModel
from gruppo.random import row_keys, row_uniforms
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.sampler.torch_sampler import draw, filtered
from gruppo.types import Prompt, SampleResponse

IDS = [(5, 9, 4), (17, 30, 6, 8, 21, 3, 11), (12,), (7, 7, 25, 14, 9)]
PROMPTS = [Prompt(token_ids=ids, index=10 * i) for i, ids in enumerate(IDS)]


@pytest.fixture(scope="module")
def sampler() -> TorchSampler:
    return TorchSampler(actor("qwen3"))


def tokens(responses: list[SampleResponse]) -> list[list[tuple[int, ...]]]:
    return [[s.tokens for s in r.sequences] for r in responses]


# --- repeatable ---------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_tokens(sampler: TorchSampler) -> None:
    params = SamplingParams(max_new_tokens=10, seed=5, step=3)
    assert sampler.sample(PROMPTS, 4, params) == sampler.sample(PROMPTS, 4, params)


@pytest.mark.parametrize("change", [{"seed": 6}, {"step": 4}])
def test_another_seed_or_step_gives_other_tokens(sampler: TorchSampler, change: dict[str, int]) -> None:
    params = {"max_new_tokens": 10, "seed": 5, "step": 3}
    first = tokens(sampler.sample(PROMPTS, 4, SamplingParams(**params)))
    other = tokens(sampler.sample(PROMPTS, 4, SamplingParams(**(params | change))))
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_the_samples_of_a_group_differ(sampler: TorchSampler) -> None:
    for group in tokens(sampler.sample(PROMPTS, 6, SamplingParams(max_new_tokens=10))):
        assert len(set(group)) == 6


def test_a_prompt_alone_gets_the_tokens_it_gets_in_a_batch(sampler: TorchSampler) -> None:
    params = SamplingParams(max_new_tokens=10, seed=1, step=0)
    together = tokens(sampler.sample(PROMPTS, 3, params))
    alone = [tokens(sampler.sample([p], 3, params))[0] for p in PROMPTS]
    assert together == alone


def test_the_order_of_the_prompts_does_not_matter(sampler: TorchSampler) -> None:
    params = SamplingParams(max_new_tokens=10, seed=1, step=0)
    assert tokens(sampler.sample(PROMPTS[::-1], 3, params)) == tokens(sampler.sample(PROMPTS, 3, params))[::-1]


def test_fewer_samples_are_the_first_of_more(sampler: TorchSampler) -> None:
    params = SamplingParams(max_new_tokens=10, seed=1, step=0)
    few, many = (tokens(sampler.sample(PROMPTS, n, params)) for n in (2, 5))
    assert few == [group[:2] for group in many]


def test_prompts_without_an_index_are_told_apart_by_their_place(sampler: TorchSampler) -> None:
    first, second = tokens(sampler.sample([IDS[0], IDS[0]], 2, SamplingParams(max_new_tokens=10)))
    assert first != second


def test_rows_that_finish_early_do_not_change_the_others() -> None:
    """One token in four ends a row here, so that the cache is cut down several times; and then never."""
    cutting = TorchSampler(actor("mistral"))
    cutting.stop_ids = frozenset(range(2, VOCABULARY, 4))
    params = SamplingParams(max_new_tokens=14, seed=2)
    cut = [s for r in cutting.sample(PROMPTS, 5, params) for s in r.sequences]
    lengths = Counter(len(s.tokens) for s in cut)
    assert len(lengths) > 4
    whole = TorchSampler(cutting.model)
    whole.stop_ids = frozenset()
    free = [s for r in whole.sample(PROMPTS, 5, params) for s in r.sequences]
    assert {len(s.tokens) for s in free} == {14}
    for short, long in zip(cut, free, strict=True):
        assert short.tokens == long.tokens[: len(short.tokens)]
        assert short.logps == pytest.approx(long.logps[: len(short.logps)], abs=1e-5)


def one_by_one(
    model: TransformersModel, prompt: Prompt, sample: int, params: SamplingParams, stop_ids: frozenset[int]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """A sample without cache, batch, padding or sharing: the whole sequence through the model for every token."""
    ids, logps = list(prompt.token_ids), []
    key = row_keys(params.seed, params.step, np.array([prompt.index]), np.array([sample]))
    for position in range(params.max_new_tokens):
        with torch.no_grad():
            logits = model.model(input_ids=torch.tensor([ids])).logits[0, -1]
        log_p = (logits / params.temperature).log_softmax(-1)
        kept = filtered(log_p[None], params)[0].double().exp()
        below = (kept.cumsum(0) <= row_uniforms(key, position)[0] * kept.sum()).sum().item()
        ids.append(int(below))
        logps.append(log_p[below].item())
        if below in stop_ids:
            break
    return tuple(ids[len(prompt.token_ids) :]), tuple(logps)


@pytest.mark.parametrize("temperature", [0.15, 0.4, 1.0])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_tokens_are_those_of_each_sample_drawn_alone(family: str, temperature: float) -> None:
    """At low temperatures most samples of a group are equal for a while, so that they share work and then part. One
    token in eight ends a row, so that rows leave at all times."""
    sampler = TorchSampler(actor(family, temperature=temperature))
    sampler.stop_ids = frozenset(range(2, VOCABULARY, 8))
    params = SamplingParams(temperature=temperature, max_new_tokens=10, seed=3, step=7, top_k=20)
    responses = sampler.sample(PROMPTS, 8, params)
    for prompt, response in zip(PROMPTS, responses, strict=True):
        for sample, sequence in enumerate(response.sequences):
            expected, logps = one_by_one(sampler.model, prompt, sample, params, sampler.stop_ids)
            assert sequence.tokens == expected
            assert sequence.logps == pytest.approx(logps, abs=1e-5)
    if temperature < 0.2:
        assert any(len({s.tokens for s in r.sequences}) < 8 for r in responses)  # some are equal to the end
    assert any(len({s.tokens for s in r.sequences}) > 1 for r in responses)  # and some part


# --- the distribution ---------------------------------------------------------------------------------------------


@pytest.mark.row("R-34", "draws against the softmax at a temperature")
def test_frequencies_are_the_softmax() -> None:
    """Pearson's statistic over the first token, and over the second given the first. With 31 degrees of freedom its
    mean is 31, its deviation 7.9; a sampler off by one token or without temperature gives thousands."""
    model = actor("llama", temperature=0.7)
    num = 4096
    params = SamplingParams(temperature=0.7, max_new_tokens=2, seed=9)
    sampler = TorchSampler(model)
    sampler.stop_ids = frozenset()
    (response,) = sampler.sample([Prompt(token_ids=(5, 9, 4))], num, params)
    pairs = [s.tokens for s in response.sequences]

    def statistic(context: tuple[int, ...], counts: Counter[int]) -> float:
        with torch.no_grad():
            logits = model.model(input_ids=torch.tensor([context])).logits[0, -1]
        expected = (logits.double() / 0.7).softmax(-1) * counts.total()
        return sum((counts[t] - e) ** 2 / e for t, e in enumerate(expected.tolist()))

    assert statistic((5, 9, 4), Counter(a for a, _ in pairs)) < 31 + 4 * 7.9
    likeliest, _ = Counter(a for a, _ in pairs).most_common(1)[0]
    assert statistic((5, 9, 4, likeliest), Counter(b for a, b in pairs if a == likeliest)) < 31 + 4 * 7.9


def test_greedy_takes_the_most_likely_token_each_time(sampler: TorchSampler) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=7)
    for prompt, group in zip(IDS, tokens(sampler.sample(PROMPTS, 2, params)), strict=True):
        ids = list(prompt)
        for _ in range(7):
            with torch.no_grad():
                ids.append(sampler.model.model(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item())
            if ids[-1] == EOS:
                break
        assert group == [tuple(ids[len(prompt) :])] * 2


def test_greedy_agrees_with_transformers_generate() -> None:
    model = tiny_model("gpt2")
    ids = torch.tensor([IDS[1]])
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=9)[
        0, ids.shape[1] :
    ]
    ours = TorchSampler(TransformersModel(model, device="cpu"))
    (response,) = ours.sample([IDS[1]], 1, SamplingParams(temperature=0.0, max_new_tokens=9))
    assert response.sequences[0].tokens == tuple(theirs.tolist())


P = [0.4, 0.25, 0.2, 0.1, 0.05]


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.39}, {0}),
        ({"top_p": 0.41}, {0, 1}),  # 0.4 is not enough, 0.65 is
        ({"top_p": 0.86}, {0, 1, 2, 3}),
        ({"min_p": 0.3}, {0, 1, 2}),  # at least 0.12
        ({"min_p": 0.9}, {0}),
        ({"top_k": 4, "min_p": 0.3}, {0, 1, 2}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # of the two that are left the first has 0.615
    ],
)
def test_filters_keep_the_tokens_they_should(params: dict[str, Any], kept: set[int]) -> None:
    order = [3, 0, 4, 1, 2]  # the likeliest is not the first
    log_p = torch.tensor(P).log()[torch.tensor(order)][None]
    survivors = filtered(log_p, SamplingParams(**params))[0] > -math.inf
    assert {order[i] for i in range(5) if survivors[i]} == kept


def test_ties_at_the_edge_of_top_k_stay_in() -> None:
    log_p = torch.tensor([[0.4, 0.3, 0.3]]).log()
    assert (filtered(log_p, SamplingParams(top_k=2)) > -math.inf).all()


def test_only_what_the_filters_keep_is_drawn(sampler: TorchSampler) -> None:
    (response,) = sampler.sample([PROMPTS[0]], 300, SamplingParams(max_new_tokens=1, top_k=3))
    with torch.no_grad():
        logits = sampler.model.model(input_ids=torch.tensor([IDS[0]])).logits[0, -1]
    assert {s.tokens[0] for s in response.sequences} == set(logits.topk(3).indices.tolist())


def test_draw_inverts_the_cumulative_probability() -> None:
    p = torch.tensor([[0.5, 0.0, 0.3, 0.2]]).repeat(6, 1)
    u = torch.tensor([0.0, 0.4999, 0.5, 0.7999, 0.8001, 0.999999], dtype=torch.float64)
    assert draw(p, u).tolist() == [0, 0, 2, 2, 3, 3]


def test_draw_needs_no_normalised_probabilities() -> None:
    p = torch.tensor([[5.0, 0.0, 3.0, 2.0]]).repeat(3, 1)
    assert draw(p, torch.tensor([0.1, 0.6, 0.9], dtype=torch.float64)).tolist() == [0, 2, 3]


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_draw_never_takes_a_token_of_probability_zero(u: float) -> None:
    p = torch.tensor([[0.0, 0.3, 0.7, 0.0]])
    assert draw(p, torch.tensor([u], dtype=torch.float64)).item() in (1, 2)


# --- the numbers behind the draws ---------------------------------------------------------------------------------


def keys(num: int, **changes: int) -> np.ndarray:
    at = {"seed": 0, "step": 0} | changes
    return row_keys(at["seed"], at["step"], np.arange(num), np.zeros(num, dtype=np.int64))


def splitmix(x: int) -> int:
    """SplitMix64's finaliser in Python integers, as published (Steele, Lea and Flood 2014)."""
    mask = 2**64 - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_uniforms_are_the_function_written_out_in_python() -> None:
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    for seed, step, prompt, sample, position in [(0, 0, 0, 0, 0), (7, 3, 11, 2, 5), (2**31, 10**6, 123456, 63, 4095)]:
        key = splitmix(seed)
        for part in (step, prompt, sample):
            key = splitmix(key ^ splitmix((part + golden) & mask))
        expected = (splitmix((key + (position + 1) * golden) & mask) >> 11) * 2.0**-53
        (found,) = row_uniforms(row_keys(seed, step, np.array([prompt]), np.array([sample])), position)
        assert found == expected


def test_uniforms_are_these_numbers_on_every_machine() -> None:
    # Pinned: a change would make every stored run unrepeatable.
    found = row_uniforms(row_keys(7, 3, np.array([0, 1]), np.array([0, 2])), 5)
    assert found.tolist() == [0.1136781078341147, 0.6493395234131384]


def test_uniforms_have_the_moments_of_the_uniform_distribution() -> None:
    u = row_uniforms(keys(200_000), 0)
    # standard errors: 0.29 / sqrt(n) = 6.5e-4 for the mean, 0.0745 / sqrt(n) = 1.7e-4 for the variance
    assert u.min() >= 0.0 and u.max() < 1.0
    assert u.mean() == pytest.approx(0.5, abs=4 * 6.5e-4)
    assert u.var() == pytest.approx(1 / 12, abs=4 * 1.7e-4)


@pytest.mark.parametrize("what", ["position", "step", "seed", "prompt"])
def test_neighbouring_uniforms_are_uncorrelated(what: str) -> None:
    num = 50_000
    series = {
        "position": lambda: [row_uniforms(keys(num), p) for p in range(3)],
        "step": lambda: [row_uniforms(keys(num, step=s), 0) for s in range(3)],
        "seed": lambda: [row_uniforms(keys(num, seed=s), 0) for s in range(3)],
        "prompt": lambda: [np.roll(row_uniforms(keys(num), 0), s) for s in range(3)],
    }[what]()
    for a, b in pairwise(series):
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / math.sqrt(num)


# --- ends ---------------------------------------------------------------------------------------------------------


def test_a_row_ends_with_the_end_token_or_at_the_limit(sampler: TorchSampler) -> None:
    responses = sampler.sample(PROMPTS, 40, SamplingParams(max_new_tokens=12))
    sequences = [s for r in responses for s in r.sequences]
    assert {s.stop_reason for s in sequences} == {"stop", "length"}
    for sequence in sequences:
        assert EOS not in sequence.tokens[:-1]
        assert (sequence.tokens[-1] == EOS) == (sequence.stop_reason == "stop")
        assert sequence.is_truncated == (sequence.stop_reason == "length")
        assert len(sequence.tokens) == 12 or sequence.stop_reason == "stop"


def test_an_end_token_at_the_limit_is_a_stop() -> None:
    sampler = TorchSampler(actor("qwen3"))
    sampler.stop_ids = frozenset(range(VOCABULARY))
    (response,) = sampler.sample([PROMPTS[0]], 1, SamplingParams(max_new_tokens=1))
    assert (response.sequences[0].stop_reason, len(response.sequences[0].tokens)) == ("stop", 1)


def test_end_tokens_come_from_generation_config_config_and_tokenizer() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [2, 7]
    model.config.eos_token_id = 9
    assert TorchSampler(TransformersModel(model, device="cpu")).stop_ids == {2, 7, 9}
    assert TorchSampler("builtin", device="cpu").stop_ids == {2}


@pytest.fixture(scope="module")
def builtin() -> TorchSampler:
    return TorchSampler("builtin", device="cpu")


def test_text_is_without_the_end_token_which_stays_in_the_tokens(builtin: TorchSampler) -> None:
    (response,) = builtin.sample(["12+34="], 1, SamplingParams(temperature=0.0, max_new_tokens=8))
    (sequence,) = response.sequences
    assert (sequence.text, sequence.stop_reason) == ("046", "stop")  # no carry: the base knows this one
    assert sequence.tokens == (4, 8, 10, 2)
    assert sequence.prompt_ids == (1, 5, 6, 14, 7, 8, 15)


def test_a_stop_string_ends_the_completion_and_is_cut_from_its_text(builtin: TorchSampler) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=8, stop=("4",))
    (response,) = builtin.sample(["12+34="], 1, params)
    (sequence,) = response.sequences
    assert (sequence.text, sequence.tokens, sequence.stop_reason) == ("0", (4, 8), "stop")
    assert len(sequence.logps) == 2


def test_a_stop_string_over_several_tokens_is_found(builtin: TorchSampler) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=8, stop=("99", "46"))
    (response,) = builtin.sample(["12+34="], 1, params)
    assert (response.sequences[0].text, response.sequences[0].tokens) == ("0", (4, 8, 10))


def test_the_earliest_of_several_stop_strings_cuts(builtin: TorchSampler) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=8, stop=("6", "46"))
    (response,) = builtin.sample(["12+34="], 1, params)
    assert response.sequences[0].text == "0"


def test_a_stop_string_of_one_row_does_not_stop_another(builtin: TorchSampler) -> None:
    params = SamplingParams(temperature=0.0, max_new_tokens=8, stop=("4",))
    first, second = builtin.sample(["12+34=", "11+12="], 1, params)
    assert [r.sequences[0].text for r in (first, second)] == ["0", "023"]


@pytest.mark.row("R-24", "an end token drawn first")
def test_an_empty_completion_is_one_end_token() -> None:
    sampler = TorchSampler("builtin", device="cpu")
    with torch.no_grad():
        sampler.model.model.lm_head.weight.zero_()
        sampler.model.model.lm_head.weight[EOS] = 1.0
        sampler.model.model.model.norm.weight.fill_(1.0)
    # Whatever the hidden state, either EOS is the likeliest or all the others tie; take a prompt where it is.
    found = [
        r.sequences[0]
        for r in sampler.sample(
            ["12+34=", "11+12=", "90+01=", "33+44="], 1, SamplingParams(temperature=0.0, max_new_tokens=3)
        )
    ]
    empty = [s for s in found if s.tokens == (EOS,)]
    assert empty
    assert {(s.text, s.stop_reason, len(s.logps)) for s in empty} == {("", "stop", 1)}


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -0.1}, "temperature must be 0 .greedy. or more, got -0.1"),
        ({"temperature": math.nan}, "temperature must be"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ({"top_k": -1}, "top_k must be 0 .off. or more, got -1"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
        ({"top_p": 1.1}, "top_p must be in"),
        ({"min_p": 1.0}, r"min_p must be in \[0, 1\), got 1.0"),
    ],
)
def test_parameters_out_of_range_are_refused_by_name(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SamplingParams(**params)


@pytest.mark.row("R-25", "an empty prompt")
def test_an_empty_prompt_is_refused(sampler: TorchSampler) -> None:
    with pytest.raises(InputError, match="prompt 1 has no tokens"):
        sampler.sample([IDS[0], ()], 1)


def test_no_samples_are_refused(sampler: TorchSampler) -> None:
    with pytest.raises(InputError, match="num_samples must be a whole number of at least 1, got 0"):
        sampler.sample(IDS, 0)


def test_no_prompts_give_no_responses(sampler: TorchSampler) -> None:
    assert sampler.sample([], 3) == []


def test_options_beside_a_model_are_refused() -> None:
    with pytest.raises(InputError, match=r"options \['temperature'\] go with a model id"):
        TorchSampler(actor("llama"), temperature=0.7)


def test_the_hook_is_called_before_each_further_token(sampler: TorchSampler) -> None:
    calls: list[int] = []
    counting = TorchSampler(sampler.model, poll=lambda: calls.append(1))
    counting.stop_ids = frozenset()
    counting.sample(PROMPTS, 2, SamplingParams(max_new_tokens=5))
    assert len(calls) == 4  # five tokens; the first comes from the prompts' own forward
