python open_instruct/grpo_fast.py --dataset_mixer_list hamishivi/rlenv-math 500 --model_name_or_path Qwen/Qwen3-4B \
    --loss_fn dppo --dppo_divergence_type kl --dppo_divergence_threshold 0.05 --use_vllm_logprobs True \
    --truncated_importance_sampling_ratio_cap 0.0 --beta 0.0 --num_unique_prompts_rollout 16 \
    --num_samples_per_prompt_rollout 4 --response_length 16384 --temperature 0.7 --learning_rate 3e-7 \
    --total_episodes 640 --vllm_top_p 0.9 --tool_parser_type vllm_hermes --env_max_steps 50 --loss_denominator token
