"""The shortest loop: sample, reward, advantage, forward_backward, step.

python examples/03_seed_loop.py            trains the embedded model for 40 steps
"""

import random

import torch

from gruppo.advantage import GRPOAdvantage
from gruppo.model import TransformersModel
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.task import carries_rows

torch.set_num_threads(1)

# Create components
actor = TransformersModel(model_id="builtin")
actor.set_optimizer("AdamW", lr=1e-4)
sampler = TorchSampler(actor)
advantage_fn = GRPOAdvantage(normalization="standard")


def reward_fn(answers, texts):
    return [float(text == answer) for answer, text in zip(answers, texts, strict=True)]


rows = carries_rows("train")
random.Random(0).shuffle(rows)
dataloader = [rows[i : i + 32] for i in range(0, 40 * 32, 32)]

# Training loop
for number, batch in enumerate(dataloader):
    # 1. Sample generation
    params = SamplingParams(max_new_tokens=4, seed=0, step=number)
    sample_response = sampler.sample([row["prompt"] for row in batch], num_samples=4, params=params)
    sequences = [seq for response in sample_response for seq in response.sequences]
    input_data = [seq.new_input_feature for seq in sequences]

    # 2. Rewards
    rewards = reward_fn([row["answer"] for row in batch for _ in range(4)], [seq.text for seq in sequences])

    # 3. Calculate advantages
    advantages = advantage_fn(rewards, num_generations=4)

    # 4. Policy optimization
    loss = actor.forward_backward(inputs=input_data, advantages=advantages)
    actor.clip_grad_and_step()
    if (number + 1) % 10 == 0:
        print(f"step {number + 1}: reward {sum(rewards) / len(rewards):.3f}, loss {loss.loss.item():+.4f}")
