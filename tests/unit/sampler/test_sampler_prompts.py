"""The forms in which `sample` takes prompts, what decides a draw, and what is refused in our own words."""

from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import actor
from transformers import AutoModelForCausalLM

from gruppo.errors import InputError
from gruppo.model import TransformersModel
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.task.builtin import builtin_model_path
from gruppo.types import Prompt
from gruppo.weights.source import load_tokenizer

IDS = (3, 9, 4)
PARAMS = SamplingParams(max_new_tokens=8, seed=1, step=0)


@pytest.fixture(scope="module")
def builtin() -> TorchSampler:
    return TorchSampler("builtin")


@pytest.fixture(scope="module")
def tiny() -> TorchSampler:
    return TorchSampler(actor("llama"))


def tokens(responses: Any) -> list[list[tuple[int, ...]]]:
    return [[s.tokens for s in r.sequences] for r in responses]


def flat(responses: Any) -> list[tuple[int, ...]]:
    return [s.tokens for r in responses for s in r.sequences]


# --- draws ------------------------------------------------------------------------------------------------------------


def test_calls_without_a_step_go_on_drawing(tiny: TorchSampler) -> None:
    sampler = TorchSampler(tiny.model)
    seen = [tokens(sampler.sample([IDS], 4, SamplingParams(max_new_tokens=8))) for _ in range(5)]
    assert len({str(x) for x in seen}) == 5
    # Another sampler makes the same calls to the same end, and a call is what its number as a step says.
    again = TorchSampler(tiny.model)
    assert [tokens(again.sample([IDS], 4, SamplingParams(max_new_tokens=8))) for _ in range(5)] == seen
    assert tokens(again.sample([IDS], 4, SamplingParams(max_new_tokens=8, step=3))) == seen[3]
    # A call with a step does not count.
    assert tokens(again.sample([IDS], 4, SamplingParams(max_new_tokens=8))) not in seen
    assert (sampler.calls, again.calls) == (5, 6)


def test_the_literal_loop_of_the_seed_does_not_repeat_a_batch_without_signal(builtin: TorchSampler) -> None:
    """47+85= is answered wrongly nine times in ten: drawing the same 4 for ever would never find the right answer."""
    sampler = TorchSampler(builtin.model)
    texts = {s.text for _ in range(60) for r in sampler.sample(["47+85="], num_samples=4) for s in r.sequences}
    assert {"022", "132"} <= texts


@pytest.mark.parametrize("copies", [2, 8])
def test_copies_of_a_prompt_draw_what_one_prompt_with_more_samples_draws(tiny: TorchSampler, copies: int) -> None:
    prompt = Prompt(token_ids=IDS, index=5)
    together = flat(tiny.sample([prompt], copies, PARAMS))
    assert len(set(together)) == copies
    assert flat(tiny.sample([prompt] * copies, 1, PARAMS)) == together
    mixed = tiny.sample([prompt, Prompt(token_ids=IDS, index=6), prompt], copies // 2, PARAMS)
    assert flat([mixed[0], mixed[2]]) == together


def test_prompts_of_one_number_do_not_share_their_draws(tiny: TorchSampler) -> None:
    same = tiny.sample([Prompt(token_ids=IDS), Prompt(token_ids=IDS)], 3, PARAMS)
    assert len(set(flat(same))) == 6


# --- forms ------------------------------------------------------------------------------------------------------------

TEXT = "12+34="


def with_template(sampler: TorchSampler) -> TorchSampler:
    import copy

    other = copy.copy(sampler)
    other.tokenizer = copy.deepcopy(sampler.tokenizer)
    assert other.tokenizer is not None
    other.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return other


@pytest.mark.parametrize(
    "form",
    [
        pytest.param(lambda ids: TEXT, id="text"),
        pytest.param(lambda ids: ids, id="ids"),
        pytest.param(lambda ids: list(ids), id="list of ids"),
        pytest.param(lambda ids: torch.tensor(ids), id="tensor"),
        pytest.param(lambda ids: np.array(ids), id="array"),
        pytest.param(lambda ids: {"prompt": TEXT, "answer": "046"}, id="row"),
        pytest.param(lambda ids: {"input_ids": ids}, id="input_ids"),
        pytest.param(lambda ids: {"input_ids": torch.tensor(ids), "labels": None}, id="tensor in a row"),
    ],
)
def test_every_form_of_a_prompt_gives_the_same_completions(builtin: TorchSampler, form: Any) -> None:
    assert builtin.tokenizer is not None
    ids = tuple(builtin.tokenizer(TEXT)["input_ids"])
    params = SamplingParams(max_new_tokens=4, step=0)
    expected, found = (builtin.sample([prompt, prompt], 2, params) for prompt in (ids, form(ids)))
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(one.sequences, other.sequences, strict=True):
            assert (a.prompt_ids, a.tokens, a.logps, a.text) == (b.prompt_ids, b.tokens, b.logps, b.text)
            assert a.prompt_ids == ids


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: {"prompt": m}, lambda m: {"messages": m}])
def test_chat_messages_go_through_the_template(builtin: TorchSampler, wrap: Any) -> None:
    sampler = with_template(builtin)
    messages = [{"role": "user", "content": "12+"}, {"role": "user", "content": "34="}]
    (response,) = sampler.sample([wrap(messages)], 1, SamplingParams(max_new_tokens=4, step=0))
    # The template writes the texts alone, without the start token that plain prompts get.
    assert builtin.tokenizer is not None
    expected = tuple(builtin.tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    assert response.sequences[0].prompt_ids == expected


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        ("1+1=", ["list of prompts", "got str '1+1='", "sample([prompt])"]),
        (Prompt(token_ids=IDS), ["list of prompts", "got Prompt"]),
        ({"prompt": "1+1="}, ["list of prompts", "got dict"]),
        (7, ["list of prompts", "got int"]),
        ([{"question": "1+1="}], ["prompt 0 is a row without 'prompt', 'messages' or 'input_ids'", "'question'"]),
        (["1+1=", 3.5], ["prompt 1 must be", "got float '3.5'"]),
        ([["a", "b"]], ["prompt 0 must be", "got list"]),
        ([[1, True]], ["prompt 0 must be"]),
        ([{"input_ids": []}], ["prompt 0 has no tokens"]),
        ([None], ["prompt 0 must be", "NoneType"]),
        ([[{"role": "user", "content": "1+1="}]], ["chat template"]),
    ],
)
def test_what_is_no_prompt_is_refused_in_our_own_words(builtin: TorchSampler, batch: Any, parts: list[str]) -> None:
    with pytest.raises(InputError) as error:
        builtin.sample(batch, 2)
    assert [p for p in parts if p not in str(error.value)] == [], str(error.value)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ((SamplingParams(),), "num_samples must be a whole number, got SamplingParams; pass them as params=..."),
        ((2.0,), "num_samples must be a whole number of at least 1, got 2.0"),
        ((True,), "num_samples must be a whole number of at least 1, got True"),
        ((1, {"temperature": 1.0}), "params must be SamplingParams, got dict"),
    ],
)
def test_arguments_in_the_wrong_place_are_named(builtin: TorchSampler, call: tuple[Any, ...], text: str) -> None:
    with pytest.raises(InputError) as error:
        builtin.sample(["1+1="], *call)
    assert str(error.value) == text


def test_text_for_a_model_without_a_tokenizer(tiny: TorchSampler) -> None:
    with pytest.raises(InputError, match="prompt 0 is text, and this model has no tokenizer; give token ids"):
        tiny.sample(["1+1="])


# --- entropies --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_the_entropy_at_each_token_is_that_of_the_policy(tiny: TorchSampler, temperature: float) -> None:
    params = SamplingParams(max_new_tokens=6, temperature=temperature, step=0)
    for response in tiny.sample([IDS, (7, 8)], 3, params):
        for s in response.sequences:
            ids = torch.tensor([[*s.prompt_ids, *s.tokens]])
            with torch.no_grad():
                logits = tiny.model.model(input_ids=ids).logits[0].double() / temperature
            log_p = logits.log_softmax(-1)[len(s.prompt_ids) - 1 : -1]
            expected = -(log_p.exp() * log_p).sum(-1)
            assert s.entropies == pytest.approx(expected.tolist(), abs=1e-5)


def test_greedy_completions_have_no_entropy(tiny: TorchSampler) -> None:
    ((sequence,),) = [r.sequences for r in tiny.sample([IDS], 1, SamplingParams(temperature=0.0, max_new_tokens=3))]
    assert sequence.entropies is None


def test_filters_do_not_change_the_reported_entropy(tiny: TorchSampler) -> None:
    plain = SamplingParams(max_new_tokens=1, step=0)
    filtered = SamplingParams(max_new_tokens=1, step=0, top_k=2, top_p=0.5)
    first, second = (tiny.sample([IDS], 1, p)[0].sequences[0] for p in (plain, filtered))
    assert first.entropies == second.entropies


@pytest.mark.parametrize("foreign", [16, -1, 10**9])
def test_token_ids_that_the_model_has_no_embedding_for_are_named(foreign: int, builtin: TorchSampler) -> None:
    with pytest.raises(InputError, match=rf"prompt 1 has token {foreign}.*and the model has embeddings for 16 tokens"):
        builtin.sample([(4, 5), (4, foreign)], 1, PARAMS)
    with pytest.raises(InputError, match=rf"prompt 7 has token {foreign}"):
        builtin.sample([Prompt(token_ids=(foreign,), index=7)], 1, PARAMS)


def test_tokens_of_a_tokenizer_object_beyond_the_embedding_are_named() -> None:
    tokenizer = load_tokenizer("builtin")
    tokenizer.add_tokens(["Z"])
    model = TransformersModel("builtin", tokenizer=tokenizer, device="cpu")
    with pytest.raises(InputError, match=r"prompt 0 has token 16 \('Z'\)"):
        TorchSampler(model).sample(["1Z="], 1, PARAMS)
    larger = AutoModelForCausalLM.from_pretrained(builtin_model_path())
    larger.resize_token_embeddings(20)  # rows to spare, as many models have
    sampler = TorchSampler(TransformersModel(larger, tokenizer=tokenizer, device="cpu"))
    assert sampler.sample(["1Z="], 1, PARAMS)[0].sequences[0].prompt_ids == (1, 5, 16, 15)
