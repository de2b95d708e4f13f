uv run python open_instruct/grpo_fast.py --dataset_mixer_list data/train.jsonl 1.0 --model_name_or_path Qwen/Qwen3-1.7B \
    --loss_fn cispo --clip_higher 4.0 --beta 0.0 --load_ref_policy False \
    --num_unique_prompts_rollout 64 --num_samples_per_prompt_rollout 8 --response_length 4096 --pack_length 6144 \
    --learning_rate 1e-6 --lr_scheduler_type constant --total_episodes 51200 --mask_truncated_completions True \
    --rho_clamp_upper_bound 5.0 --seed 42 --apply_r1_style_format_reward --r1_style_format_reward 0.5
