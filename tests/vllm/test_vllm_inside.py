"""vLLM in this process: whose log-probs these are, and that nothing of a broken batch or engine stays."""

from collections.abc import Iterator
from typing import Any

import pytest
from small_runs import PROMPTS, largest_gap, update

from gruppo.errors import InputError
from gruppo.model import LoraSpec, TransformersModel
from gruppo.sampler import SamplingParams, TorchSampler, vLLMSampler
from gruppo.sampler.vllm.engine import EngineLost, Request
from gruppo.sampler.vllm.inprocess import InProcessEngine
from gruppo.types import Prompt

PARAMS = SamplingParams(temperature=0.7, max_new_tokens=4, seed=3, step=2)
SPECS = {"full": None, "lora": LoraSpec(rank=4)}


class Pair:
    """A trained model and a sampler that has its weights."""

    def __init__(self, lora: LoraSpec | None) -> None:
        self.model = TransformersModel("builtin", device="cpu", lora=lora)
        self.sampler = vLLMSampler("builtin", lora=lora, max_model_len=24)

    @property
    def engine(self) -> InProcessEngine:
        engine = self.sampler.supervisors[0].engine
        assert isinstance(engine, InProcessEngine)
        return engine

    @property
    def unfinished(self) -> tuple[bool, int]:
        """What vLLM still has to do: for its core, and for its front."""
        inner = self.engine.llm.llm_engine
        return inner.has_unfinished_requests(), len(inner.output_processor.request_states)


@pytest.fixture(scope="module", params=list(SPECS))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(SPECS[request.param])
    yield made
    made.sampler.close()


def test_reported_logps_are_those_of_transformers_before_and_after_ten_updates(pair: Pair) -> None:
    for _ in range(2):
        pair.sampler.sync(pair.model)
        for temperature in (0.7, 1.0):
            params = SamplingParams(temperature=temperature, max_new_tokens=4, seed=1)
            responses = pair.sampler.sample(PROMPTS, 8, params)
            assert largest_gap(pair.model.model, responses, temperature) < 1e-4
            assert largest_gap(pair.model.model, responses, 1.7 - temperature) > 1e-2  # the other one is not right
            assert {s.policy_version for r in responses for s in r.sequences} == {pair.model.version}
        update(pair.model, 10)
    pair.sampler.sync(pair.model)
    assert pair.model.version == pair.sampler.version == 20


def test_greedy_sequences_texts_and_stop_reasons_are_the_torch_samplers(pair: Pair) -> None:
    pair.sampler.sync(pair.model)
    for params in (
        SamplingParams(temperature=0.0, max_new_tokens=8),
        SamplingParams(temperature=0.0, max_new_tokens=2),
        SamplingParams(temperature=0.0, max_new_tokens=8, stop=("1", "22")),
    ):
        ours = pair.sampler.sample(PROMPTS, 2, params)
        theirs = TorchSampler(pair.model).sample(PROMPTS, 2, params)
        assert [(s.tokens, s.text, s.stop_reason) for r in ours for s in r.sequences] == [
            (s.tokens, s.text, s.stop_reason) for r in theirs for s in r.sequences
        ]


def test_a_prompts_samples_do_not_depend_on_its_batch(pair: Pair) -> None:
    ids = [tuple(pair.sampler.tokenizer(p)["input_ids"]) for p in PROMPTS]
    together = pair.engine.generate(requests(ids, 4), PARAMS)
    assert [pair.engine.generate([r], PARAMS)[0] for r in requests(ids, 4)] == together
    assert pair.engine.generate(requests(ids, 2)[::-1], PARAMS)[::-1] == [rows[:2] for rows in together]


def requests(ids: list[tuple[int, ...]], num_samples: int) -> list[Request]:
    return [Request(prompt=Prompt(token_ids=row), num_samples=num_samples, seed=100 * i) for i, row in enumerate(ids)]


class Stop(Exception):
    pass


def test_a_stop_in_the_middle_leaves_no_request_in_the_engine(pair: Pair) -> None:
    pair.sampler.sync(pair.model)
    undisturbed = pair.sampler.sample(PROMPTS, 4, PARAMS)
    polls = 0

    def stop_at_the_third_token() -> None:
        nonlocal polls
        polls += 1
        if polls == 3:
            assert pair.unfinished > (True, 10)  # of 24, some of which have ended
            raise Stop

    pair.engine.poll = stop_at_the_third_token
    with pytest.raises(Stop):
        pair.sampler.sample(PROMPTS, 4, PARAMS)
    pair.engine.poll = lambda: None
    assert pair.unfinished == (False, 0)
    assert pair.sampler.sample(PROMPTS, 4, PARAMS) == undisturbed


@pytest.mark.row("R-37", "a deadline of vLLM that passes")
def test_a_deadline_that_passes_is_a_loss_and_leaves_no_request_in_the_engine(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair.engine, "deadline_s", 0.0)
    with pytest.raises(EngineLost, match=r"had not finished 2 requests after 0 s"):
        pair.engine.generate(requests([(4, 5), (6, 7)], 3), PARAMS)
    assert pair.unfinished == (False, 0)


@pytest.mark.row("R-36", "an engine that fails inside the process")
def test_an_engine_that_fails_is_rebuilt_given_its_weights_and_asked_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    update(pair.model)
    pair.sampler.sync(pair.model)
    undisturbed = pair.sampler.sample(PROMPTS, 4, PARAMS)
    dead = pair.engine.llm
    steps = 0

    def fail_at_the_second() -> Any:
        nonlocal steps
        steps += 1
        if steps == 2:
            raise RuntimeError("out of memory")
        return type(dead.llm_engine).step(dead.llm_engine)

    monkeypatch.setattr(dead.llm_engine, "step", fail_at_the_second)
    assert pair.sampler.sample(PROMPTS, 4, PARAMS) == undisturbed
    assert pair.engine.llm is not dead
    assert steps == 2
    assert largest_gap(pair.model.model, undisturbed, 0.7) < 1e-4


@pytest.mark.parametrize("option", [{"top_p": 0.9}, {"top_k": 5}])
@pytest.mark.row("R-34", "filters of vLLM")
def test_filters_are_refused_with_the_reason(option: dict[str, Any], pair: Pair) -> None:
    with pytest.raises(InputError, match="top_k, top_p and min_p are refused with vLLM: its log-probs are then over"):
        pair.sampler.sample(PROMPTS, 2, SamplingParams(max_new_tokens=4, **option))
