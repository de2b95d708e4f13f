"""On real weights and real text, every layout and the sampler give the log-probs and the gradient of plain
transformers."""

import random
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from gruppo.model import LoraSpec, TransformersModel
from gruppo.model.plan import Layout
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.task.carries import sums_rows
from gruppo.types import InputFeature

LAYOUTS = [layout for layout in get_args(Layout) if layout != "auto"]
ANSWERS = (
    "{a} + {b} = {c}.",
    "{c}",
    "To solve this, we need to add {a} to {b}. The answer is {c}.",
    "Sure! 加法: {a} plus {b} makes {c} 🙂",
)


@pytest.fixture(scope="module")
def texts(tokenizer: PreTrainedTokenizerBase) -> list[InputFeature]:
    """Three prompts with four answers each, one of them with tokens that do not count."""
    features = []
    for row in sums_rows("heldout")[:3]:
        prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)
        a, b = row["prompt"][0]["content"].split("What is ")[1].split("?")[0].split(" + ")
        for answer in ANSWERS:
            ids = tokenizer(answer.format(a=a, b=b, c=row["answer"]) + "<|im_end|>")["input_ids"]
            features.append(InputFeature(prompt_ids=tuple(prompt), completion_ids=tuple(ids)))
    last = features[-1]
    mask = tuple(int(i % 3 > 0) for i in range(len(last.completion_ids)))
    features[-1] = InputFeature(prompt_ids=last.prompt_ids, completion_ids=last.completion_ids, completion_mask=mask)
    return features


def plain_logps(model: Any, feature: InputFeature) -> Tensor:
    """Of a completion that counts, from the logits of one sequence by itself."""
    ids = torch.tensor([[*feature.prompt_ids, *feature.completion_ids]])
    logps = model(input_ids=ids).logits[0, :-1].log_softmax(-1)
    logps = logps.gather(1, ids[0, 1:, None])[len(feature.prompt_ids) - 1 :, 0]
    return logps if feature.completion_mask is None else logps[torch.tensor(feature.completion_mask, dtype=torch.bool)]


def plain_gradient(model: Any, features: Sequence[InputFeature], advantages: Sequence[float]) -> dict[str, Tensor]:
    """Of GRPO's loss where the policy is the one that sampled: minus the mean over sequences of the advantage times
    the mean log-prob, since the ratio is 1 and its gradient that of the log-prob."""
    model.zero_grad()
    for feature, advantage in zip(features, advantages, strict=True):
        (-advantage * plain_logps(model, feature).mean() / len(features)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def perturb(model: torch.nn.Module) -> None:
    """An adapter begins as nothing; move it."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))


@pytest.fixture(scope="module", params=["all weights", "adapter"])
def expected(
    request: pytest.FixtureRequest,
    smollm2_folder: str,
    texts: list[InputFeature],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[LoraSpec | None, list[float], list[Tensor], dict[str, Tensor]]]:
    """Log-probs and gradients by transformers and PEFT alone, one sequence at a time in float32."""
    rng = random.Random(1)
    advantages = [rng.uniform(-1, 1) for _ in texts]
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
    lora = None
    if request.param == "adapter":
        lora = LoraSpec(rank=4)
        ours = TransformersModel(smollm2_folder, lora=lora, dtype="float32", device="cpu")
        perturb(ours.model)
        path = tmp_path_factory.mktemp("adapter")
        ours.model.save_pretrained(path)
        model = PeftModel.from_pretrained(model, path, is_trainable=True)
    gradient = plain_gradient(model, texts, advantages)
    with torch.no_grad():
        logps = [plain_logps(model, feature) for feature in texts]
    yield lora, advantages, logps, gradient


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_log_probs_and_gradient_of_plain_transformers(
    layout: Layout, smollm2_folder: str, texts: list[InputFeature], expected: Any
) -> None:
    lora, advantages, logps, gradient = expected
    model = TransformersModel(
        smollm2_folder, lora=lora, dtype="float32", device="cpu", layout=layout, tokens_per_microbatch=700
    )
    perturb(model.model)
    found = model.forward_only(texts)["logps"]
    assert max(float((a - b).abs().max()) for a, b in zip(found, logps, strict=True)) < 2e-4
    model.forward_backward(texts, advantages=advantages)
    ours = {name: p.grad for name, p in model.model.named_parameters() if p.grad is not None}
    assert ours.keys() == gradient.keys()
    off = sum(float((ours[name] - g).square().sum()) for name, g in gradient.items())
    assert off**0.5 < 1e-4 * sum(float(g.square().sum()) for g in gradient.values()) ** 0.5


def test_in_bfloat16_no_layout_is_refused_and_none_is_further_from_float32(
    smollm2_folder: str, texts: list[InputFeature], plain: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.no_grad():
        exact = torch.cat([plain_logps(plain, feature) for feature in texts])
    mean = {}
    for layout in LAYOUTS:
        model = TransformersModel(smollm2_folder, dtype="bfloat16", device="cpu", layout=layout)
        off = (torch.cat(model.forward_only(texts)["logps"]) - exact).abs()
        mean[layout] = float(off.mean())
        print(f"{layout}: bfloat16 is {off.mean():.4f} from float32 on average, {off.max():.3f} at most")
    assert "the layout is padded" not in caplog.text
    assert mean["padded"] > 1e-3  # bfloat16 was on
    assert max(mean.values()) < 1.5 * mean["padded"]


def test_the_sampler_reports_the_log_probs_of_what_it_drew(
    smollm2_folder: str, plain: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompts = [
        tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
        for row in sums_rows("heldout")[:4]
    ]
    model = TransformersModel(smollm2_folder, dtype="float32", device="cpu")
    drawn = TorchSampler(model).sample(prompts, 4, SamplingParams(temperature=1.0, max_new_tokens=16, seed=5))
    sequences = [sequence for response in drawn for sequence in response.sequences]
    gaps = []
    for sequence in sequences:
        with torch.no_grad():
            feature = InputFeature(prompt_ids=sequence.prompt_ids, completion_ids=sequence.tokens)
            gaps.append(float((plain_logps(plain, feature) - torch.tensor(sequence.logps)).abs().max()))
    assert max(gaps) < 5e-4
    assert {sequence.prompt_ids for sequence in sequences} == {
        tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in prompts
    }
