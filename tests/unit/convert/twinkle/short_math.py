# ruff: noqa
"""Minibatches, options of a command line with defaults, no thinking, top-p, Megatron."""

from twinkle.cli import CLI

args = CLI.from_args()
MODEL_ID = args.model.model_id or "ms://Qwen/Qwen3.5-4B"
NUM_GENERATIONS = args.rl.num_generations or 8
MAX_STEPS = args.training.max_steps or 1000
BATCH_SIZE = args.training.batch_size or 8
MINI_BATCH_SIZE = args.training.mini_batch_size or 16
GRADIENT_ACCUMULATION_STEPS = args.training.gradient_accumulation_steps or 1
SAVE_STEPS = args.training.save_steps or 1000
SYSTEM_PROMPT = "Solve the problem and put your final answer within \\boxed{}."

model = MegatronModel(model_id=MODEL_ID, mixed_precision="bf16")
model.set_optimizer("default", lr=1e-5)
model.set_lr_scheduler("default", lr_decay_steps=MAX_STEPS, max_lr=1e-5)
model.set_loss("GRPOLoss", epsilon=0.2, epsilon_high=0.28, beta=0.01)
model.set_template("Template", model_id=MODEL_ID, enable_thinking=False)
sampler = vLLMSampler(model_id=MODEL_ID, engine_args={"gpu_memory_utilization": 0.8})
GLOBAL_BATCH_SIZE = BATCH_SIZE * GRADIENT_ACCUMULATION_STEPS
dataloader = DataLoader(dataset=None, batch_size=GLOBAL_BATCH_SIZE, min_batch_size=GLOBAL_BATCH_SIZE)
params = SamplingParams(max_tokens=4096, num_samples=1, logprobs=1, temperature=1.0, top_p=0.95)
reward = BrevityReward()
advantages = GRPOAdvantage()([], num_generations=NUM_GENERATIONS, scale="group")
