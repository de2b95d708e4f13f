# ruff: noqa
"""Dr. GRPO: a constant length, rewards scaled over the batch, an entropy bonus, three layers with an adapter."""

STEPS_PER_EPOCH = 50
MAX_STEPS = 2 * STEPS_PER_EPOCH
model = TransformersModel(model_id="hf://Qwen/Qwen3-1.7B")
model.add_adapter_to_model("a", LoraConfig(r=16, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj"]))
model.set_optimizer("AdamW", lr=2e-5)
model.set_lr_scheduler("LinearLR", total_iters=MAX_STEPS)
model.set_loss("DRGRPOLoss", epsilon=0.1, entropy_coef=0.001, max_completion_length=1024)
dataloader = DataLoader(dataset="x", batch_size=2 * 16)
params = SamplingParams(max_tokens=1024, temperature=0.6, top_k=-1)
advantages = GRPOAdvantage()(rewards, num_generations=12, scale="batch")
