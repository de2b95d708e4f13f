"""The training loop of the specification's advantage page, literally, with the real engine."""

from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from gruppo.advantage import GRPOAdvantage
from gruppo.model import TransformersModel
from gruppo.sampler import SamplingParams, vLLMSampler
from gruppo.types import Prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("seeds") / "model"
    TransformersModel("builtin").save(path)
    return path


@pytest.fixture(scope="module")
def sampler(folder: Path) -> vLLMSampler:
    made = vLLMSampler(model_id=str(folder))
    yield made
    made.close()


def test_the_loop_of_the_page_runs_and_learns(folder: Path, sampler: vLLMSampler) -> None:
    rows = [{"prompt": "47+85=", "answer": "132"}, {"prompt": "68+29=", "answer": "097"}] * 2
    dataloader = DataLoader(rows * 40, batch_size=4, collate_fn=list)

    # Create components
    actor = TransformersModel(model_id=str(folder))
    advantage_fn = GRPOAdvantage()
    actor.set_optimizer("AdamW", lr=3e-4)

    earned = []
    # Training loop
    for batch in dataloader:
        # Sample generation
        sample_response = sampler.sample(batch, num_samples=4, params=SamplingParams(max_new_tokens=8))
        input_data = [seq.new_input_feature for response in sample_response for seq in response.sequences]
        answers = [row["answer"] for row in batch for _ in range(4)]
        texts = [seq.text for response in sample_response for seq in response.sequences]
        rewards = [float(text == answer) for text, answer in zip(texts, answers, strict=True)]

        # Calculate advantages
        advantages = advantage_fn(rewards, num_generations=4)

        # 4. Policy optimization
        actor.forward_backward(inputs=input_data, advantages=advantages)
        actor.clip_grad_and_step()
        sampler.sync(actor)  # the page leaves it out: without it the engine samples from the start
        earned.append(sum(rewards) / len(rewards))
    assert sum(earned[:3]) / 3 < 0.5 and sum(earned[-3:]) / 3 > 0.9


def test_calls_without_a_step_go_on_drawing(sampler: vLLMSampler) -> None:
    params = SamplingParams(max_new_tokens=4, temperature=2.0)  # the engine may have learned by now
    seen = [str(sampler.sample(["47+85="], num_samples=4, params=params)) for _ in range(4)]
    assert len(set(seen)) == 4


def test_copies_of_a_prompt_draw_what_one_prompt_with_more_samples_draws(sampler: vLLMSampler) -> None:
    prompt = Prompt(token_ids=(1, 8, 11, 14, 12, 9, 15), index=5)
    params = SamplingParams(max_new_tokens=4, temperature=2.0, step=0)
    together = [s.tokens for s in sampler.sample([prompt], 8, params)[0].sequences]
    assert [r.sequences[0].tokens for r in sampler.sample([prompt] * 8, 1, params)] == together
    assert len(set(together)) > 2
