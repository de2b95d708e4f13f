# ruff: noqa
"""RLOO with CISPO on data of the Hugging Face hub, sampled in the process."""

dataset = Dataset(DatasetMeta("hf://openai/gsm8k/main", split="test"))
model = TransformersModel(model_id="Qwen/Qwen3-0.6B")
model.set_optimizer("AdamW", lr=3e-6)
model.set_lr_scheduler("CosineWarmupScheduler", num_warmup_steps=10, num_training_steps=300)
model.set_loss("CISPOLoss", epsilon=3.0, epsilon_high=5.0)
sampler = TorchSampler(model)
loader = DataLoader(dataset=dataset, batch_size=16)
params = SamplingParams(max_tokens=512, temperature=0.9, stop="</answer>")
MAX_STEPS = 300
advantages = RLOOAdvantage()(rewards, num_generations=6, scale="none")
model.clip_grad_norm(0.5)
