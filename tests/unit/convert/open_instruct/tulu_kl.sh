# Standard normalisation, a moving reference, two minibatches, and the estimator by its older name.
python open_instruct/grpo_fast.py \
    --dataset_mixer_list allenai/RLVR-MATH 1.0 allenai/RLVR-GSM 0.5 \
    --model_name_or_path allenai/Llama-3.1-Tulu-3-8B-DPO \
    --beta 0.01 --kl_estimator kl3 \
    --ref_policy_update_freq 50 --alpha 0.5 \
    --advantage_normalization_type standard \
    --clip_lower 0.2 --clip_higher 0.2 \
    --num_unique_prompts_rollout 48 --num_samples_per_prompt_rollout 16 \
    --num_mini_batches 2 --num_epochs 1 \
    --learning_rate 5e-7 --lr_scheduler_type linear --warmup_ratio 0.1 \
    --total_episodes 76800 \
    --response_length 2048 --max_prompt_token_length 2048 --pack_length 4096 \
    --stop_strings "</answer>" \
    --verification_reward 1.0 \
    --non_stop_penalty True --non_stop_penalty_value 0.0 \
    --filter_zero_std_samples false \
    --truncated_importance_sampling_ratio_cap 0 \
    --vllm_tensor_parallel_size 2 \
    --seed 3
