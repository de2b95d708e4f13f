# ruff: noqa
"""A script of Twinkle's shape: constants with defaults from the environment, an adapter, vLLM, cosine schedule."""

import os

from peft import LoraConfig
from twinkle.advantage import GRPOAdvantage
from twinkle.data_format import SamplingParams
from twinkle.dataloader import DataLoader
from twinkle.dataset import Dataset, DatasetMeta
from twinkle.model import TransformersModel
from twinkle.preprocessor.llm import GSM8KProcessor
from twinkle.reward import GSM8KAccuracyReward, GSM8KFormatReward
from twinkle.sampler import vLLMSampler

MODEL_ID = os.environ.get("MODEL_ID", "ms://Qwen/Qwen2.5-3B-Instruct")
NUM_GENERATIONS = int(os.environ.get("NUM_GENERATIONS", 8))
LEARNING_RATE = float(os.environ.get("LR", 1e-5))
MAX_STEPS = int(os.environ.get("MAX_STEPS", 200))
BATCH_SIZE = int(os.environ.get("BATCH_SIZE", 4))
LORA_RANK = 32


def make_dataset():
    dataset = Dataset(DatasetMeta("ms://modelscope/gsm8k", subset_name="main", split="train"))
    dataset.set_template("Template", model_id=MODEL_ID, max_length=2048)
    dataset.map(GSM8KProcessor())
    return dataset


lora_config = LoraConfig(target_modules="all-linear", r=LORA_RANK, lora_alpha=LORA_RANK * 2, lora_dropout=0.05)
model = TransformersModel(model_id=MODEL_ID, remote_group="model")
model.add_adapter_to_model("default", lora_config)
model.set_optimizer("AdamW", lr=LEARNING_RATE)
model.set_lr_scheduler("CosineAnnealingLR", T_max=MAX_STEPS, eta_min=0)
model.set_loss("GRPOLoss", epsilon=0.2)
sampler = vLLMSampler(model_id=MODEL_ID, engine_args={"gpu_memory_utilization": 0.8, "max_model_len": 4096})
dataloader = DataLoader(dataset=make_dataset, batch_size=BATCH_SIZE)
advantage_fn = GRPOAdvantage()
params = SamplingParams(max_tokens=4096)
for batch in dataloader:
    responses = sampler.sample(batch * NUM_GENERATIONS, params, num_samples=1)
    rewards = [a + b for a, b in zip(GSM8KAccuracyReward()(responses), GSM8KFormatReward()(responses))]
    advantages = advantage_fn(rewards, num_generations=NUM_GENERATIONS, scale="group")
    model.forward_backward(inputs=responses, advantages=advantages)
    model.clip_grad_and_step()
