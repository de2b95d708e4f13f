"""vLLMSampler against a stub of the server: answers that cannot be used, losses, restarts, several servers."""

import json
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stub_vllm import Answer, StubServer

from gruppo.errors import InputError, SamplerError
from gruppo.model import LoraSpec, TransformersModel
from gruppo.sampler import SamplingParams, TorchSampler, vLLMSampler
from gruppo.sampler.base import Samples
from gruppo.sampler.vllm.http import HttpEngine
from gruppo.sampler.vllm.placed import servers_of_launcher
from gruppo.sampler.vllm.server import _flags
from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.types import InputFeature, Prompt, SampleResponse
from gruppo.weights import WeightStore, store
from gruppo.weights.source import load_tokenizer

pytestmark = pytest.mark.slow  # starts servers

PROMPTS = ["47+85=", "12+9=", "99+1=", "5+5=", "30+31="]
PARAMS = SamplingParams(temperature=0.7, max_new_tokens=4, seed=3, step=2)
LORA = LoraSpec(rank=4)
VOCABULARY = 16  # of the embedded model
MakeStub = Callable[..., StubServer]
MakeSampler = Callable[..., vLLMSampler]


@pytest.fixture
def stubs() -> Iterator[MakeStub]:
    made: list[StubServer] = []

    def make(**options: Any) -> StubServer:
        made.append(StubServer(**options))
        return made[-1]

    yield make
    for stub in made:
        stub.close()


@pytest.fixture
def samplers() -> Iterator[MakeSampler]:
    made: list[vLLMSampler] = []

    def make(*stubs: StubServer, **options: Any) -> vLLMSampler:
        made.append(vLLMSampler("builtin", servers=[s.address for s in stubs], max_model_len=24, **options))
        return made[-1]

    yield make
    for sampler in made:
        sampler.close()


def trained(steps: int = 1, **options: Any) -> TransformersModel:
    """The embedded model after some large steps in an arbitrary direction."""
    model = TransformersModel("builtin", device="cpu", **options)
    model.set_optimizer("AdamW", lr=0.01)
    features = [
        InputFeature(prompt_ids=(4, 5), completion_ids=(6, 7)),
        InputFeature(prompt_ids=(8,), completion_ids=(9,)),
    ]
    for _ in range(steps):
        model.forward_backward(features, advantages=[1.0, -1.0])
        model.clip_grad_and_step()
    return model


def tokens(responses: list[SampleResponse]) -> list[list[tuple[int, ...]]]:
    return [[s.tokens for s in r.sequences] for r in responses]


def largest_gap(model: TransformersModel, responses: list[SampleResponse], temperature: float) -> float:
    sequences = [s for r in responses for s in r.sequences]
    logps = model.forward_only([s.new_input_feature for s in sequences], temperature=temperature)["logps"]
    return max(
        abs(a - b) for s, row in zip(sequences, logps, strict=True) for a, b in zip(s.logps, row.tolist(), strict=True)
    )


def assert_sampled_by(model: TransformersModel, responses: list[SampleResponse]) -> None:
    assert largest_gap(model, responses, PARAMS.temperature) < 1e-4  # 1.2e-5 was seen on a CPU without AVX
    base = TransformersModel("builtin", device="cpu")
    assert largest_gap(base, responses, PARAMS.temperature) > 0.01  # not a test that any model passes


# --- what goes out and what comes back ----------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_after_a_hand_over_samples_and_logps_are_those_of_the_trained_weights(
    lora: LoraSpec | None, stubs: MakeStub, samplers: MakeSampler
) -> None:
    sampler, model = samplers(stubs(lora=lora), lora=lora), trained(3, lora=lora)
    reported = sampler.sync(model)
    responses = sampler.sample(PROMPTS, 3, PARAMS)
    assert_sampled_by(model, responses)
    assert {s.policy_version for r in responses for s in r.sequences} == {3}
    weights = [p for p in model.model.parameters() if p.requires_grad]
    assert reported.keys() == {"sync/tensors", "sync/bytes", "sync/canary_gap"}
    assert reported["sync/bytes"] == 4 * sum(p.numel() for p in weights)
    assert reported["sync/tensors"] == len(weights)
    assert reported["sync/canary_gap"] < 1e-5
    assert sampler.sync(model) == {}  # they have them


def test_a_prompts_samples_depend_on_its_row_seed_and_step_and_on_nothing_else(
    stubs: MakeStub, samplers: MakeSampler
) -> None:
    sampler = samplers(stubs())
    prompts = [Prompt(token_ids=tuple(sampler.tokenizer(p)["input_ids"]), index=i) for i, p in enumerate(PROMPTS)]
    together = tokens(sampler.sample(prompts, 4, PARAMS))
    assert tokens(sampler.sample(prompts[::-1], 4, PARAMS)) == together[::-1]
    assert [tokens(sampler.sample([p], 4, PARAMS))[0] for p in prompts] == together
    assert tokens(sampler.sample(prompts, 3, PARAMS)) == [rows[:3] for rows in together]
    for other in (replace(PARAMS, step=3), replace(PARAMS, seed=4)):
        assert tokens(sampler.sample(prompts, 4, other)) != together


def test_no_prompts_ask_nothing(stubs: MakeStub, samplers: MakeSampler) -> None:
    stub = stubs()
    sampler = samplers(stub)
    before = stub.started
    assert sampler.sample([], 2, PARAMS) == []
    assert stub.started == before


@pytest.mark.parametrize("option", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_filters_are_refused_with_the_reason(option: dict[str, Any], stubs: MakeStub, samplers: MakeSampler) -> None:
    sampler = samplers(stubs())
    with pytest.raises(
        InputError, match=r"top_k, top_p and min_p are refused.*over the tokens that were kept.*sampler=torch"
    ):
        sampler.sample(PROMPTS, 2, SamplingParams(max_new_tokens=4, **option))


@pytest.mark.parametrize(
    ("prompts", "said"),
    [
        ([(4, 5), ()], "prompt 1 has no tokens"),
        (
            [tuple(range(4, 13)) * 3],
            r"prompt 0 has 27 tokens; with max_new_tokens=4 that is more than max_model_len=24",
        ),
    ],
)
def test_prompts_that_cannot_be_continued_are_named(
    prompts: list[tuple[int, ...]], said: str, stubs: MakeStub, samplers: MakeSampler
) -> None:
    with pytest.raises(InputError, match=said):
        samplers(stubs()).sample(prompts, 1, PARAMS)


class Pieces:
    """A tokenizer of 16 pieces of several characters for the ids of the embedded model."""

    TEXTS = ("", "", "", "", "ab", "bca", "cab", ".b", "acb", "b.c", "bc", "a", "cab.", "ba", ".", "bcb")

    def __init__(self) -> None:
        plain = load_tokenizer("builtin")
        self.eos_token_id, self.encode = plain.eos_token_id, plain

    def __call__(self, text: str, **options: Any) -> Any:
        return self.encode(text, **options)

    def decode(self, row: list[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(self.TEXTS[token] for token in row if token > 2)


def test_the_text_of_a_completion_is_what_its_tokens_spell_whatever_the_server_says(
    stubs: MakeStub, samplers: MakeSampler
) -> None:
    stub = stubs()
    sampler = samplers(stub)
    right = sampler.sample(PROMPTS, 3, PARAMS)
    stub.spoil = lambda answer: {"choices": [choice | {"text": "999"} for choice in answer["choices"]]}
    assert sampler.sample(PROMPTS, 3, PARAMS) == right
    stub.spoil = lambda answer: {"choices": [{k: v for k, v in c.items() if k != "text"} for c in answer["choices"]]}
    assert sampler.sample(PROMPTS, 3, PARAMS) == right
    characters = {i: text for text, i in sampler.tokenizer.get_vocab().items()}
    texts = ["".join(characters[t] for t in s.tokens if len(characters[t]) == 1) for r in right for s in r.sequences]
    assert [s.text for r in right for s in r.sequences] == texts
    assert len(set(texts)) > 5  # not all the same


@pytest.mark.parametrize("stop", [("c",), (".", "cb"), ("bca",), ("zz",)])
@pytest.mark.parametrize("honours", [True, False], ids=["stops", "goes on"])
def test_stop_texts_that_end_within_a_token_give_what_the_torch_sampler_gives(
    honours: bool, stop: tuple[str, ...], stubs: MakeStub, samplers: MakeSampler
) -> None:
    model, pieces = trained(), Pieces()
    model.tokenizer = pieces
    stub = stubs()
    stub.tokenizer = pieces if honours else None
    sampler = samplers(stub, tokenizer=pieces)
    sampler.sync(model)
    params = SamplingParams(temperature=0.0, max_new_tokens=8, stop=stop)
    prompts = [f"{a}+{b}=" for a, b in [(47, 85), (1, 3), (36, 58), (99, 99)]]
    ours, theirs = (
        [
            (s.tokens, s.text, s.stop_reason, len(s.logps or ()))
            for r in each.sample(prompts, 1, params)
            for s in r.sequences
        ]
        for each in (sampler, TorchSampler(model))
    )
    assert ours == theirs
    spelled = [pieces.decode(list(tokens), skip_special_tokens=True) for tokens, *_ in ours]
    cut = [whole for whole, (_, text, *_) in zip(spelled, ours, strict=True) if whole != text]
    assert bool(cut) == (stop != ("zz",))
    if stop == ("c",):
        assert any(not whole.endswith("c") for whole in cut)  # within a token


def run_of(stub: StubServer, output: Path, **options: Any) -> GRPOTrainer:
    """A run of two steps that samples from a stub."""
    small = {"prompts_per_step": 4, "group_size": 2, "max_new_tokens": 4, "steps": 2, "eval_prompts": 0}
    return GRPOTrainer(TrainConfig(**small, **options, sampler=f"vllm:{stub.address}", output=str(output)), quiet=True)


@pytest.mark.parametrize(
    ("shift", "said"),
    [
        (lambda x: x - 3.0, "sampler/logp_gap_mean is 3, above 0.1: sampler and trainer disagree about the log-probs"),
        (lambda x: 0.0, r"sampler/logp_gap_(mean|max) is [\d.]+, above"),
        (lambda x: x, None),
    ],
    ids=["3 nats off", "all 0", "right"],
)
def test_log_probs_beyond_the_doctors_bound_are_warned_of_once_at_the_first_step(
    shift: Callable[[float], float],
    said: str | None,
    stubs: MakeStub,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    stub = stubs()

    def spoil(answer: Answer) -> Answer:
        for choice in answer["choices"]:
            choice["logprobs"]["token_logprobs"] = [shift(x) for x in choice["logprobs"]["token_logprobs"]]
        return answer

    trainer = run_of(stub, tmp_path / "run")
    stub.spoil = spoil
    with caplog.at_level(logging.WARNING):
        trainer.train()
    events = [event for event in trainer.run.events() if event["event"] == "sampler_gap"]
    warnings = [record.getMessage() for record in caplog.records if "logp_gap" in record.getMessage()]
    if said is None:
        assert events == [] and warnings == []
        return
    assert [event["step"] for event in events] == [1]
    assert re.search(said, events[0]["text"]) and len(warnings) == 1 and re.search(said, warnings[0])


# --- answers that cannot be used ----------------------------------------------------------------------------------


def change(field: str, value: Any) -> Callable[[Answer], Answer]:
    """Set a field of the first choice; a function changes what is there."""

    def spoil(answer: Answer) -> Answer:
        choice = answer["choices"][0]
        choice[field] = value(choice[field]) if callable(value) else value
        return answer

    return spoil


def logprobs(value: Callable[[list[float]], list[Any]]) -> Callable[[Answer], Answer]:
    return change("logprobs", lambda old: {"token_logprobs": value(old["token_logprobs"])})


def cut_early(answer: Answer) -> Answer:
    choice = answer["choices"][0]
    choice |= {"token_ids": choice["token_ids"][:1], "finish_reason": "length"}
    choice["logprobs"] = {"token_logprobs": choice["logprobs"]["token_logprobs"][:1]}
    return answer


def too_long(answer: Answer) -> Answer:
    answer["choices"][0] |= {"token_ids": [4] * 5, "logprobs": {"token_logprobs": [-1.0] * 5}}
    return answer


UNUSABLE: dict[str, tuple[Callable[[Answer], Answer | None], str]] = {
    "too few": (lambda a: {"choices": a["choices"][1:]}, "gave 2 completions where 3 were asked for"),
    "too many": (lambda a: {"choices": a["choices"] * 2}, "gave 6 completions where 3 were asked for"),
    "foreign id": (change("token_ids", lambda t: [*t[:-1], VOCABULARY]), f"outside the vocabulary of {VOCABULARY}"),
    "negative id": (change("token_ids", lambda t: [-1, *t[1:]]), f"outside the vocabulary of {VOCABULARY}"),
    "id as text": (change("token_ids", lambda t: [str(x) for x in t]), "answered without what was asked for"),
    "no ids": (change("token_ids", None), "answered without what was asked for"),
    "no tokens": (change("token_ids", []), "it is empty, though the end token would be in it"),
    "no logprobs": (change("logprobs", None), "answered without what was asked for"),
    "a logprob too few": (logprobs(lambda x: x[:-1]), "it lacks log-probs"),
    "null": (logprobs(lambda x: [None, *x[1:]]), "answered without what was asked for"),
    "nan": (logprobs(lambda x: [float("nan"), *x[1:]]), "a log-prob is not finite, or above 0"),
    "-inf": (logprobs(lambda x: [float("-inf"), *x[1:]]), "a log-prob is not finite, or above 0"),
    "positive": (logprobs(lambda x: [0.5, *x[1:]]), "a log-prob is not finite, or above 0"),
    "a word": (logprobs(lambda x: ["abc", *x[1:]]), "answered without what was asked for"),
    "beyond floats": (logprobs(lambda x: [-(10**400), *x[1:]]), "answered without what was asked for"),
    "a truth as id": (change("token_ids", lambda t: [True, *t[1:]]), "answered without what was asked for.*True is no"),
    "a truth as logprob": (logprobs(lambda x: [False, *x[1:]]), "answered without what was asked for.*False is no"),
    "a number as text": (logprobs(lambda x: [str(x[0]), *x[1:]]), "answered without what was asked for.*is no number"),
    "one index": (
        lambda a: {"choices": [c | {"index": 0} for c in a["choices"]]},
        r"completions \[0, 0, 0\] \(index\)",
    ),
    "one choice": (lambda a: {"choices": a["choices"][:1] * 3}, r"completions \[2, 2, 2\] \(index\), not from 0 on"),
    "index from 1": (lambda a: {"choices": [c | {"index": c["index"] + 1} for c in a["choices"]]}, r"\[1, 2, 3\]"),
    "true as index": (change("index", True), "answered without what was asked for"),
    "too long": (too_long, "it is longer than max_new_tokens=4"),
    "cut early": (cut_early, "it was cut before max_new_tokens=4"),
    "another prompt": (change("prompt_token_ids", [4, 4, 4]), "continued another prompt than it was given"),
    "no choices": (lambda a: {}, "answered without what was asked for"),
    "not JSON": (lambda a: None, "answered without what was asked for"),
}


@pytest.mark.parametrize("name", UNUSABLE)
@pytest.mark.row("R-37", "answers of a wrong form from an HTTP server")
def test_an_answer_that_cannot_be_used_stops_the_run_and_says_why(
    name: str, stubs: MakeStub, samplers: MakeSampler
) -> None:
    stub = stubs()
    sampler = samplers(stub)
    before = stub.started
    stub.spoil, said = UNUSABLE[name]
    with pytest.raises(SamplerError, match=said):
        sampler.sample(PROMPTS[:1], 3, PARAMS)
    assert stub.started == before + 1  # asking again would hide it


# --- losses -------------------------------------------------------------------------------------------------------


@pytest.mark.row("R-37", "a server that never answers")
def test_a_server_that_never_answers_is_lost_four_times_and_then_the_run_stops(
    stubs: MakeStub, samplers: MakeSampler
) -> None:
    stub = stubs()
    sampler = samplers(stub, deadline_s=60.0)
    sampler.sync(trained())
    sampler.supervisors[0].engine.deadline_s, before = 0.8, stub.started
    stub.hangs = True
    waited = r"had not answered 2 requests after 0.8 s \(/v1/completions; sampler_deadline\)"
    with pytest.raises(SamplerError, match=rf"was lost 4 times in a row: .* {waited}"):
        sampler.sample(PROMPTS[:2], 2, PARAMS)
    assert stub.started - before == 4 * 2
    assert wait_for(lambda: stub.dropped == 8)  # none of them stays in the server


@pytest.mark.row("R-37", "a server that hangs once")
def test_a_server_that_hangs_once_is_asked_again_with_the_same_seeds(stubs: MakeStub, samplers: MakeSampler) -> None:
    stub = stubs()
    sampler, model = samplers(stub), trained()
    sampler.sync(model)
    undisturbed = sampler.sample(PROMPTS, 3, PARAMS)
    sampler.supervisors[0].engine.deadline_s = 1.0
    stub.hangs = True

    def recover() -> None:
        assert wait_for(lambda: stub.dropped > 0)
        sampler.supervisors[0].engine.deadline_s = 60.0  # all the answers may take more than a second
        stub.hangs = False

    threading.Thread(target=recover).start()
    assert sampler.sample(PROMPTS, 3, PARAMS) == undisturbed
    assert stub.dropped > 0
    assert_sampled_by(model, undisturbed)


@pytest.mark.row("R-36", "status 500 from an HTTP server")
def test_a_server_whose_engine_died_answers_500_and_is_brought_back(stubs: MakeStub, samplers: MakeSampler) -> None:
    stub = stubs()
    sampler, model = samplers(stub), trained()
    sampler.sync(model)
    undisturbed = sampler.sample(PROMPTS, 3, PARAMS)
    stub.failures = 1
    stub.restart()
    assert sampler.sample(PROMPTS, 3, PARAMS) == undisturbed
    assert stub.failures == 0


@pytest.mark.row("R-36", "status 429 from an HTTP server")
@pytest.mark.parametrize("times", [1, 12])
def test_a_server_that_has_too_much_to_do_is_asked_again(
    times: int,
    stubs: MakeStub,
    samplers: MakeSampler,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("gruppo.sampler.vllm.http.BUSY_S", (0.01, 0.02))
    stub = stubs()
    sampler, model = samplers(stub), trained()
    sampler.sync(model)
    undisturbed = sampler.sample(PROMPTS, 3, PARAMS)
    stub.failures, stub.failure, stub.seen = times, 429, []
    with caplog.at_level(logging.WARNING):
        assert sampler.sample(PROMPTS, 3, PARAMS) == undisturbed
    assert stub.failures == 0
    busy = "is too busy for /v1/completions (429); asking again until sampler_deadline"
    assert [busy in record.getMessage() for record in caplog.records] == [True]
    assert set(stub.seen) == {"/v1/completions"}  # it has its weights


@pytest.mark.row("R-36", "status 429 from an HTTP server, to the end")
def test_a_server_that_always_has_too_much_to_do_is_lost_at_the_deadline(
    stubs: MakeStub, samplers: MakeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gruppo.sampler.vllm.http.BUSY_S", (0.01, 0.02))
    stub = stubs()
    sampler = samplers(stub)
    sampler.supervisors[0].engine.deadline_s = 0.3
    stub.failures, stub.failure = 10**6, 429
    waited = r"had not answered 5 requests after 0.3 s \(/v1/completions; sampler_deadline\)"
    with pytest.raises(SamplerError, match=f"lost 4 times in a row: .*{waited}"):
        sampler.sample(PROMPTS, 3, PARAMS)
    left = [thread for thread in threading.enumerate() if "ThreadPoolExecutor" in thread.name]
    for thread in left:
        thread.join(5.0)
    assert not any(thread.is_alive() for thread in left)  # nobody asks on


@pytest.mark.row("R-37", "an answer that is cut off, from an HTTP server")
def test_an_answer_that_is_cut_off_once_is_asked_for_again(
    stubs: MakeStub, samplers: MakeSampler, caplog: pytest.LogCaptureFixture
) -> None:
    stub = stubs()
    sampler, model = samplers(stub), trained()
    sampler.sync(model)
    undisturbed = sampler.sample(PROMPTS, 3, PARAMS)
    left = [1]

    def cut(answer: Answer) -> Any:  # with the right Content-Length: a proxy has cut it
        return answer if not left else json.dumps(answer)[: 100 * left.pop()]

    stub.spoil = cut
    with caplog.at_level(logging.WARNING):
        assert sampler.sample(PROMPTS, 3, PARAMS) == undisturbed
    assert ["/v1/completions with broken or cut JSON" in record.message for record in caplog.records] == [True]


def test_answers_that_are_always_cut_off_stop_the_run_with_that_reason(stubs: MakeStub, samplers: MakeSampler) -> None:
    stub = stubs()
    sampler = samplers(stub)
    stub.spoil = lambda answer: json.dumps(answer)[:-2]  # type: ignore[assignment,return-value]
    with pytest.raises(SamplerError, match=r"lost 4 times in a row: .* with broken or cut JSON") as raised:
        sampler.sample(PROMPTS, 3, PARAMS)
    assert "0.11" not in str(raised.value)


def test_a_server_that_always_answers_500_stops_the_run_with_its_words(stubs: MakeStub, samplers: MakeSampler) -> None:
    stub = stubs()
    sampler = samplers(stub)
    stub.failures = 10**6
    with pytest.raises(SamplerError, match=r"lost 4 times in a row: .*with 500: .*EngineCore encountered an issue"):
        sampler.sample(PROMPTS, 3, PARAMS)


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.row("R-38", "a server restarted unnoticed")
def test_a_server_that_was_restarted_unnoticed_is_found_after_the_batch(
    lora: LoraSpec | None, stubs: MakeStub, samplers: MakeSampler, caplog: pytest.LogCaptureFixture
) -> None:
    stub = stubs(lora=lora)
    sampler, model = samplers(stub, lora=lora), trained(lora=lora)
    sampler.sync(model)
    undisturbed = sampler.sample(PROMPTS, 3, PARAMS)
    stub.restart()
    with caplog.at_level(logging.WARNING):
        assert sampler.sample(PROMPTS, 3, PARAMS) == undisturbed
    assert_sampled_by(model, undisturbed)
    said = "no longer has the weights it was given" if lora is None else "does not know the adapter it was given"
    assert [said in record.message for record in caplog.records] == [True]


@pytest.mark.row("R-36", "a server that goes and comes back")
def test_a_server_that_is_gone_is_waited_for_and_given_its_weights(stubs: MakeStub, samplers: MakeSampler) -> None:
    stub = stubs()
    sampler, model = samplers(stub), trained()
    sampler.sync(model)
    undisturbed = sampler.sample(PROMPTS, 3, PARAMS)
    port = stub.http.server_port
    stub.close()
    back: list[StubServer] = []
    threading.Timer(0.7, lambda: back.append(stubs(port=port))).start()
    assert sampler.sample(PROMPTS, 3, PARAMS) == undisturbed
    assert "/collective_rpc" in back[0].seen


@pytest.mark.row("R-36", "a server that stays away")
def test_a_server_that_does_not_come_back_stops_the_run(stubs: MakeStub, samplers: MakeSampler) -> None:
    stub = stubs()
    sampler = samplers(stub)
    stub.close()
    sampler.supervisors[0].engine.deadline_s = 0.6
    text = r"did not answer within 0.6 s; is `vllm serve` running there\?.*needs a longer sampler_deadline"
    with pytest.raises(SamplerError, match=text):
        sampler.sample(PROMPTS, 3, PARAMS)


def test_waiting_for_a_server_is_logged_with_its_address_and_the_time(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gruppo.sampler.vllm.http.FIRST_WORD_S", 0.2)
    with socket.socket() as taken:  # bound and not listening: nothing answers there
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        engine = HttpEngine(f"http://127.0.0.1:{port}")
        engine.deadline_s = 1.2
        with pytest.raises(SamplerError, match=r"did not answer within 1\.2 s"):
            engine.wait_until_ready()
    said = [re.sub(r"for \d+ s", "for N s", record.getMessage()) for record in caplog.records]
    assert set(said) == {f"waiting for vLLM at 127.0.0.1:{port}: no answer for N s of 1.2 s"}
    assert len(said) <= 3  # after 0.2 s, and each time the wait has doubled


class Stop(Exception):
    pass


def test_a_stop_leaves_at_once_and_drops_the_requests(stubs: MakeStub, samplers: MakeSampler) -> None:
    stubs_, before = [stubs(), stubs()], None

    def poll() -> None:
        if before is not None and sum(s.started for s in stubs_) - before == len(PROMPTS):  # all of them are there
            raise Stop

    sampler = samplers(*stubs_, poll=poll)
    before = sum(s.started for s in stubs_)
    for stub in stubs_:
        stub.hangs = True
    with pytest.raises(Stop):  # and not the deadline of ten minutes
        sampler.sample(PROMPTS, 2, PARAMS)
    assert sum(s.started for s in stubs_) - before == len(PROMPTS)
    assert wait_for(lambda: sum(s.dropped for s in stubs_) == len(PROMPTS))


def wait_for(is_true: Callable[[], bool], seconds: float = 30.0) -> bool:
    ends = time.monotonic() + seconds
    while not is_true() and time.monotonic() < ends:
        time.sleep(0.01)
    return is_true()


# --- futures ------------------------------------------------------------------------------------------------------


def submit(sampler: vLLMSampler, prompts: list[str]) -> list[Future[Samples]]:
    return sampler.submit(sampler.requests(prompts, 3, PARAMS), PARAMS)


def test_a_server_answers_while_another_one_still_works(stubs: MakeStub, samplers: MakeSampler) -> None:
    slow, fast = stubs(), stubs()
    sampler = samplers(slow, fast)
    expected = sampler.draw(PROMPTS[:4], 3, PARAMS)
    slow.hangs = True
    futures = submit(sampler, PROMPTS[:4])
    assert [futures[i].result(timeout=30) for i in (1, 3)] == [expected[1], expected[3]]
    assert not futures[0].done() and not futures[2].done()
    slow.hangs = False
    assert [future.result(timeout=30) for future in futures] == expected


def test_requests_are_answered_with_the_weights_that_were_loaded_when_they_were_submitted(
    stubs: MakeStub, samplers: MakeSampler, tmp_path: Path
) -> None:
    stub, first, second = stubs(), trained(1), trained(2)
    sampler = samplers(stub)
    weights = WeightStore(tmp_path, sampler.canary_rows)
    sampler.load(weights.publish(first))
    published = weights.publish(second)
    stub.hangs = True
    before = submit(sampler, PROMPTS[:2])
    loading = threading.Thread(target=sampler.load, args=(published,))
    loading.start()
    assert wait_for(sampler._lock.locked)
    later: list[Future[Samples]] = []
    submitting = threading.Thread(target=lambda: later.extend(submit(sampler, PROMPTS[:2])))
    submitting.start()
    stub.hangs = False
    for thread in (loading, submitting):
        thread.join(30)
    for model, futures in ((first, before), (second, later)):
        responses = [SampleResponse(sequences=future.result(timeout=30)) for future in futures]
        assert {s.policy_version for r in responses for s in r.sequences} == {model.version}
        assert_sampled_by(model, responses)
    assert largest_gap(second, [SampleResponse(sequences=f.result()) for f in before], PARAMS.temperature) > 0.01


def test_with_several_batches_at_once_weights_are_loaded_while_requests_run(
    stubs: MakeStub, samplers: MakeSampler, tmp_path: Path
) -> None:
    stub, first, second = stubs(), trained(1), trained(2)
    sampler = samplers(stub, at_once=4)
    weights = WeightStore(tmp_path, sampler.canary_rows)
    sampler.load(weights.publish(first))
    stub.hangs, started = True, stub.started
    futures = [submit(sampler, [prompt])[0] for prompt in PROMPTS[:3]]
    assert wait_for(lambda: stub.started == started + 3)  # none waits for another
    sampler.load(weights.publish(second))
    calls = [path for path in stub.seen if "completions" not in path][-4:]
    assert calls == [
        "/pause?mode=keep",
        "/collective_rpc",
        "/reset_prefix_cache?reset_running_requests=true",
        "/resume",
    ]
    futures[0].cancel()
    assert wait_for(lambda: stub.dropped == 1)
    assert not futures[1].done() and not futures[2].done()
    stub.hangs = False
    for future in futures[1:]:
        assert {trajectory.versions for trajectory in future.result(timeout=30)} == {(1, 2)}
    assert stub.dropped == 1  # its end cut no other connection


def test_batches_that_run_at_once_are_all_repeated_after_one_restart(stubs: MakeStub, samplers: MakeSampler) -> None:
    stub, model = stubs(), trained(1)
    sampler = samplers(stub, at_once=4)
    sampler.sync(model)
    expected = [sampler.draw([prompt], 3, PARAMS)[0] for prompt in PROMPTS[:4]]
    stub.hangs, started = True, stub.started
    futures = [submit(sampler, [prompt])[0] for prompt in PROMPTS[:4]]
    assert wait_for(lambda: stub.started == started + 4)
    stub.restart()  # unnoticed: the weights are those of the start
    stub.hangs = False
    assert [future.result(timeout=30) for future in futures] == expected
    assert stub.seen.count("/pause?mode=keep") == 2  # the first load, and one after the loss


def test_an_adapter_with_several_batches_at_once_is_refused(stubs: MakeStub, samplers: MakeSampler) -> None:
    with pytest.raises(InputError, match=r"at_once=4 \(streaming\) cannot go with an adapter"):
        samplers(stubs(lora=LORA), lora=LORA, at_once=4)


def test_requests_of_their_own_go_to_servers_in_turn(stubs: MakeStub, samplers: MakeSampler) -> None:
    two = stubs(), stubs()
    sampler, alone = samplers(*two, at_once=4), samplers(two[0])
    started = [stub.started for stub in two]
    futures = [submit(sampler, [prompt])[0] for prompt in PROMPTS[:4]]
    drawn = [future.result(timeout=30) for future in futures]
    assert [stub.started - before for stub, before in zip(two, started, strict=True)] == [2, 2]
    assert drawn == [alone.draw([prompt], 3, PARAMS)[0] for prompt in PROMPTS[:4]]


def test_cancelled_requests_leave_the_server_at_once(stubs: MakeStub, samplers: MakeSampler) -> None:
    stub = stubs()
    sampler = samplers(stub)
    expected, started = sampler.sample(PROMPTS, 3, PARAMS), stub.started
    stub.hangs = True
    futures, waiting = submit(sampler, PROMPTS), submit(sampler, PROMPTS)
    assert wait_for(lambda: stub.started == started + len(PROMPTS))
    for future in (*futures, *waiting):
        assert future.cancel()
    assert wait_for(lambda: stub.dropped == len(PROMPTS))
    assert wait(futures, timeout=30).not_done == wait(waiting, timeout=30).not_done == set()
    stub.hangs = False
    assert sampler.sample(PROMPTS, 3, PARAMS) == expected
    assert stub.started == started + 2 * len(PROMPTS)  # those that waited were never sent


def test_a_batch_with_one_cancelled_request_is_answered_for_the_others(stubs: MakeStub, samplers: MakeSampler) -> None:
    stub = stubs()
    sampler = samplers(stub)
    expected = sampler.draw(PROMPTS[:3], 3, PARAMS)
    stub.hangs = True
    futures = submit(sampler, PROMPTS[:3])
    futures[1].cancel()
    stub.hangs = False
    assert [futures[i].result(timeout=30) for i in (0, 2)] == [expected[0], expected[2]]
    assert stub.dropped == 0


def test_an_interrupt_in_the_waiting_thread_cancels_its_requests(
    stubs: MakeStub, samplers: MakeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = stubs()
    sampler, started = samplers(stub), stub.started

    def interrupted(futures: list[Future[Samples]]) -> None:
        assert wait_for(lambda: stub.started == started + len(PROMPTS))
        raise KeyboardInterrupt

    monkeypatch.setattr("gruppo.sampler.base.wait", interrupted)
    stub.hangs = True
    with pytest.raises(KeyboardInterrupt):
        sampler.sample(PROMPTS, 3, PARAMS)
    assert wait_for(lambda: stub.dropped == len(PROMPTS))


def test_closing_aborts_what_is_running_and_refuses_more(stubs: MakeStub, samplers: MakeSampler) -> None:
    stub = stubs()
    sampler, started = samplers(stub), stub.started
    stub.hangs = True
    futures = submit(sampler, PROMPTS)
    assert wait_for(lambda: stub.started == started + len(PROMPTS))
    sampler.close()
    for future in futures:
        with pytest.raises(SamplerError, match=r"vLLM at 127\.0\.0\.1:\d+ was closed"):
            future.result(timeout=0)
    assert wait_for(lambda: stub.dropped == len(PROMPTS))
    with pytest.raises(SamplerError, match="was closed"):
        sampler.sample(PROMPTS, 3, PARAMS)


def test_one_unusable_answer_fails_its_own_request(stubs: MakeStub, samplers: MakeSampler) -> None:
    stub = stubs()
    sampler = samplers(stub)
    expected = sampler.draw(PROMPTS[:3], 3, PARAMS)
    spoil = change("token_ids", [])
    stub.spoil = lambda answer: spoil(answer) if stub.prompts[-1] == expected[1][0].prompt_ids else answer
    futures = submit(sampler, PROMPTS[:3])
    with pytest.raises(SamplerError, match="it is empty"):
        futures[1].result(timeout=30)
    assert [futures[i].result(timeout=30) for i in (0, 2)] == [expected[0], expected[2]]


# --- several servers ----------------------------------------------------------------------------------------------


def test_several_servers_share_a_batch_and_give_what_one_gives(stubs: MakeStub, samplers: MakeSampler) -> None:
    model, many = trained(), [stubs() for _ in range(3)]
    one, three = samplers(stubs()), samplers(*many)
    one.sync(model)
    three.sync(model)
    for stub in many:
        stub.prompts.clear()
    assert three.sample(PROMPTS, 3, PARAMS) == one.sample(PROMPTS, 3, PARAMS)
    ids = [tuple(one.tokenizer(p)["input_ids"]) for p in PROMPTS]
    assert [sorted(stub.prompts) for stub in many] == [sorted(ids[i::3]) for i in range(3)]
    assert three.sample(PROMPTS[:1], 2, PARAMS) == one.sample(PROMPTS[:1], 2, PARAMS)  # fewer prompts than servers


def test_one_of_two_servers_is_restarted_and_the_batch_is_the_same(stubs: MakeStub, samplers: MakeSampler) -> None:
    model, two = trained(), [stubs(), stubs()]
    sampler = samplers(*two)
    sampler.sync(model)
    undisturbed = sampler.sample(PROMPTS, 3, PARAMS)
    two[1].restart()
    assert sampler.sample(PROMPTS, 3, PARAMS) == undisturbed


class Keeper:
    """An actor of Ray that keeps a server: the first of these until a new one is wanted, and then the next."""

    def __init__(self, places: list[StubServer]) -> None:
        self.places = places
        self.asked: list[tuple[dict[str, Any], bool]] = []
        self.serve = SimpleNamespace(remote=self._serve)
        self.check_alive = SimpleNamespace(remote=lambda: None)

    def _serve(self, arguments: dict[str, Any], anew: bool) -> tuple[str, str]:
        self.asked.append((arguments, anew))
        if anew:
            self.places.pop(0)
        return self.places[0].address, "key"


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ray as a sampler sees it; calls have their answers at once."""
    errors = SimpleNamespace(RayError=type("RayError", (Exception,), {}), RayTaskError=type("RayTaskError", (), {}))
    given = {"actors": {}, "wait": lambda calls, timeout: (calls, []), "get": lambda call: call, "exceptions": errors}
    made = SimpleNamespace(**given)
    made.get_actor = lambda name: made.actors[name]
    monkeypatch.setitem(sys.modules, "ray", made)
    monkeypatch.setitem(sys.modules, "ray.exceptions", errors)
    return made


@pytest.mark.row("R-36", "a server on Ray that comes back on another node")
def test_a_server_that_moves_to_another_node_is_followed_and_given_its_weights(
    stubs: MakeStub, monkeypatch: pytest.MonkeyPatch, ray: Any
) -> None:
    here, there = stubs(), stubs()
    keeper = ray.actors["first"] = Keeper([here, there])
    monkeypatch.setenv("GRUPPO_SERVERS", "first")
    options = {"gpu_memory_utilization": 0.6}
    with closing(vLLMSampler("builtin", servers=servers_of_launcher(), max_model_len=24, options=options)) as sampler:
        sampler.sync(trained())
        undisturbed = sampler.sample(PROMPTS, 3, PARAMS)
        here.close()
        assert sampler.sample(PROMPTS, 3, PARAMS) == undisturbed
    assert "/collective_rpc" in there.seen
    assert [anew for _, anew in keeper.asked] == [False, True]  # one that runs is not started again
    assert keeper.asked[0] == (keeper.asked[1][0], False) and keeper.asked[0][0]["gpu_memory_utilization"] == 0.6


def test_a_cluster_without_a_place_for_a_server_is_an_error_at_the_deadline(ray: Any) -> None:
    ray.actors["first"] = Keeper([])
    ray.actors["first"].serve = SimpleNamespace(remote=lambda *arguments: None)
    ray.wait = lambda calls, timeout: ([], calls)
    with pytest.raises(SamplerError, match=r"no place for first for 0\.1 s \(sampler_deadline\).*lower --samplers"):
        vLLMSampler("builtin", servers=["ray:first"], max_model_len=24, deadline_s=0.1)


# --- servers that were started with the wrong flags ---------------------------------------------------------------


def test_raw_logprobs_are_refused_at_the_start_with_the_flag(stubs: MakeStub, samplers: MakeSampler) -> None:
    stub = stubs()
    stub.raw_logprobs = True
    with pytest.raises(SamplerError, match="start it with --logprobs-mode processed_logprobs"):
        samplers(stub)


def test_full_weights_without_dev_mode_are_refused_with_the_setting(stubs: MakeStub, samplers: MakeSampler) -> None:
    stub = stubs()
    stub.has_dev_mode = False
    with pytest.raises(SamplerError, match="VLLM_SERVER_DEV_MODE=1"):
        samplers(stub).sync(trained())


def test_adapters_need_no_dev_mode(stubs: MakeStub, samplers: MakeSampler) -> None:
    stub, model = stubs(lora=LORA), trained(lora=LORA)
    stub.has_dev_mode = False
    sampler = samplers(stub, lora=LORA)
    sampler.sync(model)
    assert_sampled_by(model, sampler.sample(PROMPTS, 3, PARAMS))


# What vLLM 0.32 says with its worker in the engine's process, and with workers of their own.
@pytest.mark.parametrize("unknown", ["Method {!r} is not implemented.", "'CPUWorker' object has no attribute {!r}"])
def test_without_the_extension_the_canary_alone_is_the_proof(
    unknown: str, stubs: MakeStub, samplers: MakeSampler, caplog: pytest.LogCaptureFixture
) -> None:
    stub, model = stubs(), trained()
    stub.has_extension, stub.unknown = False, unknown
    sampler = samplers(stub)
    with caplog.at_level(logging.WARNING):
        sampler.sync(model)
    assert ["--worker-extension-cls" in r.message for r in caplog.records] == [True]
    assert_sampled_by(model, sampler.sample(PROMPTS, 3, PARAMS))


# --- weights published elsewhere ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_what_was_published_once_is_loaded_by_several_samplers(
    lora: LoraSpec | None, stubs: MakeStub, samplers: MakeSampler, tmp_path: Path
) -> None:
    model = trained(3, lora=lora)
    two = [samplers(stubs(lora=lora), lora=lora) for _ in range(2)]
    published = WeightStore(tmp_path, two[0].canary_rows).publish(model)
    for sampler in two:
        reported = sampler.load(published)
        assert reported["sync/bytes"] == 4 * sum(p.numel() for p in model.model.parameters() if p.requires_grad)
        assert sampler.version == 3
        assert_sampled_by(model, sampler.sample(PROMPTS, 3, PARAMS))
        assert sampler.sync(model) == {}  # it has them, wherever they came from


@pytest.mark.parametrize(
    ("own", "other", "said"),
    [(None, LORA, "made to load all weights, and version 1 is an adapter"),
     (LORA, None, "made to load an adapter, and version 1 is all weights")],
)  # fmt: skip
def test_weights_of_the_other_kind_are_refused_before_an_engine_sees_them(
    own: LoraSpec | None, other: LoraSpec | None, said: str, stubs: MakeStub, samplers: MakeSampler
) -> None:
    stub = stubs(lora=own)
    sampler = samplers(stub, lora=own)
    stub.seen.clear()
    with pytest.raises(InputError, match=rf"{said}; make it with .*lora=model\.lora"):
        sampler.sync(trained(lora=other))
    assert stub.seen == []


# --- hand-overs that go wrong -------------------------------------------------------------------------------------


def test_a_hand_over_that_fails_once_is_made_again(
    stubs: MakeStub, samplers: MakeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, model, old = samplers(stubs()), trained(), trained(0)
    write = store.write
    answers = iter([old, model])
    monkeypatch.setattr(store, "write", lambda _, folder: write(next(answers), folder))
    assert sampler.sync(model)["sync/canary_gap"] < 1e-5
    assert_sampled_by(model, sampler.sample(PROMPTS, 3, PARAMS))


@pytest.mark.row("R-38", "a stale file")
def test_a_stale_file_stops_the_run_with_the_names_of_its_tensors(
    stubs: MakeStub, samplers: MakeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler, model = samplers(stubs()), trained()
    sampler.sync(model)
    newer = trained()
    with torch.no_grad():
        newer.model.get_parameter("model.norm.weight").mul_(1.5)
    newer.version = 2
    write = store.write
    monkeypatch.setattr(store, "write", lambda _, folder: write(model, folder))
    with pytest.raises(
        SamplerError, match=r"version 2 did not reach .*differs from the model in \['model.norm.weight'\]"
    ):
        sampler.sync(newer)
    assert {s.policy_version for r in sampler.sample(PROMPTS, 1, PARAMS) for s in r.sequences} == {1}


@pytest.mark.row("R-38", "an engine that takes nothing")
def test_an_engine_that_takes_nothing_is_told_from_a_wrong_file(
    stubs: MakeStub, samplers: MakeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = stubs()
    sampler = samplers(stub)
    monkeypatch.setattr("stub_vllm._put", lambda model, tensors: None)
    with pytest.raises(SamplerError, match="the file holds the model's weights, so the engine did not take them"):
        sampler.sync(trained())


def test_a_server_that_reads_less_than_the_file_holds_is_at_fault(
    stubs: MakeStub, samplers: MakeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub, model = stubs(), trained()
    sampler = samplers(stub)
    command = stub.command

    def lose_one(method: str, arguments: dict[str, str]) -> tuple[int, Any]:
        status, answer = command(method, arguments)
        answer["results"][0]["tensors"] -= 1
        return status, answer

    monkeypatch.setattr(stub, "command", lose_one)
    count = len(list(model.model.parameters()))
    with pytest.raises(SamplerError, match=rf"read {count - 1} tensors and [\d,]+ bytes of {count} and"):
        sampler.sync(model)


def test_weights_that_one_of_two_servers_refuses_are_taken_back_from_the_other(
    stubs: MakeStub, samplers: MakeSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    two, model = [stubs(), stubs()], trained(1)
    sampler = samplers(*two)
    sampler.sync(model)
    undisturbed = sampler.sample(PROMPTS, 3, PARAMS)
    monkeypatch.setattr(two[1], "command", lambda method, arguments: (500, "out of memory"))
    with pytest.raises(SamplerError, match=r"version 2 did not reach .* with 500: out of memory"):
        sampler.sync(trained(2))
    monkeypatch.undo()
    assert sampler.version == 1
    assert sampler.sample(PROMPTS, 3, PARAMS) == undisturbed
    sampler.sync(trained(2))
    assert_sampled_by(trained(2), sampler.sample(PROMPTS, 3, PARAMS))


def test_folders_of_older_versions_and_of_a_killed_run_are_deleted(
    stubs: MakeStub, samplers: MakeSampler, tmp_path: Path
) -> None:
    folder = tmp_path / "sync"
    (folder / "version-77").mkdir(parents=True)
    sampler = samplers(stubs(), sync_folder=folder)
    sampler.sync(trained(1))
    assert [p.name for p in folder.iterdir()] == ["version-1"]
    sampler.sync(trained(2))
    assert [p.name for p in folder.iterdir()] == ["version-2"]
    sampler.close()
    assert not folder.exists()


def test_options_are_refused_for_a_server_that_runs_already(stubs: MakeStub, samplers: MakeSampler) -> None:
    stub = stubs()
    with pytest.raises(InputError, match=rf"options \['seed'\] are for an engine started here, not for {stub.address}"):
        samplers(stub, options={"seed": 1})


def test_an_adapter_to_start_from_is_refused_with_the_way_round(tmp_path: Path) -> None:
    trained(lora=LORA).save(tmp_path / "adapter")
    with pytest.raises(InputError, match=r"is an adapter, .*gruppo export .*/adapter FOLDER --merge"):
        vLLMSampler(str(tmp_path / "adapter"), servers=("http://127.0.0.1:9",))


def test_flags_of_a_server_are_written_as_its_command_line_takes_them() -> None:
    options = {"model": "m", "max-model-len": 32, "enable-lora": True, "no": False, "targets": ["q", "k"], "none": None}
    assert _flags(options) == ["--model", "m", "--max-model-len", "32", "--enable-lora", "--targets", "q", "k"]
