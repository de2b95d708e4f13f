#!/bin/bash
MODEL=${MODEL:-Qwen/Qwen3-8B}
OUT="runs/gspo"
accelerate launch --config_file fsdp2.yaml --num_processes 4 examples/grpo.py \
    --model_name_or_path $MODEL \
    --dataset_name trl-lib/DeepMath-103K \
    --reward_funcs my.rewards.solved \
    --importance_sampling_level sequence \
    --loss_type grpo \
    --epsilon 3e-4 --epsilon_high 4e-4 \
    --beta 0.0 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 1 \
    --steps_per_generation 4 \
    --num_generations 16 \
    --max_completion_length 1024 \
    --max_steps 400 \
    --learning_rate 1e-6 \
    --lr_scheduler_type constant \
    --use_vllm --vllm_mode server --vllm_server_host 10.0.0.7 \
    --vllm_importance_sampling_mode token_truncate \
    --output_dir "$OUT"
