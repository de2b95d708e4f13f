"""TRL: GRPOConfig and the arguments of its scripts."""

from math import ceil
from typing import Any

from gruppo.convert.conversion import SCHEDULES, Conversion, as_list, hub_data
from gruppo.convert.read import read_text
from gruppo.convert.script import Script
from gruppo.errors import InputError
from gruppo.output import shell_word
from gruppo.trainer.elsewhere import ABSENT, DROPOUT, ELSEWHERE, Reason

LOSSES = {"grpo": "grpo", "dapo": "dapo", "bnpo": "bnpo", "dr_grpo": "drgrpo", "cispo": "cispo", "sapo": "sapo",
          "luspo": "luspo", "vespo": "vespo"}  # fmt: skip
REWARDS = {"accuracy_reward": "math_match", "think_format_reward": "think_format"}
_CONFIGS = ("GRPOConfig", "RLOOConfig")
_ADAPTER = {"r": "lora_r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout",
            "target_modules": "lora_target_modules"}  # fmt: skip
"""Arguments of PEFT's LoraConfig by the names of TRL's options, whose defaults are others."""
_UNSLOTH = ("model_name", "load_in_4bit", "load_in_8bit", "max_seq_length", "fast_inference", "gpu_memory_utilization")
CORRECTIONS = {"token_truncate": "truncate", "token_mask": "mask", "sequence_truncate": "truncate_product"}


def from_trl(options: dict[str, Any]) -> Conversion:
    """A run for the options of a TRL script. Where TRL's default is another than here, the default is written out."""
    made = Conversion("TRL", options, ELSEWHERE)
    _model(made)
    _data(made)
    _batch(made)
    _loss(made)
    _advantage(made)
    _sampler(made)
    _run(made)
    return made.finish()


def script_options(path: str, flags: dict[str, Any]) -> dict[str, Any]:
    """Options that a Python script gives GRPOConfig and its adapter, and flags, which win. It is parsed, not run."""
    text = read_text(path)
    script = Script(text)
    if script.find(*_CONFIGS) is None:
        if flags:
            return flags
        raise InputError(
            f"{path} has no call of GRPOConfig to read; give what starts it: gruppo convert trl --name value"
        )
    options = script.keywords(*_CONFIGS)
    computed = [name for function, name in script.computed if function in _CONFIGS]
    trainer = script.find("GRPOTrainer", "RLOOTrainer")
    given = {} if trainer is None else trainer[2]
    is_unsloth = "FastLanguageModel" in text
    if is_unsloth:
        own = {"r": 16, "lora_alpha": 16, "lora_dropout": 0.0}
        adapter = own | script.keywords("get_peft_model") if script.find("get_peft_model") else {}
        loaded = script.keywords("from_pretrained")
        options |= {name: loaded[name] for name in _UNSLOTH if name in loaded}
        if "model_name" in options:
            options["model_name_or_path"] = options.pop("model_name")
    else:
        adapter = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0} | script.keywords("LoraConfig")
        found = script.find("from_pretrained")
        model = given.get("model") or (found[1][0] if found and found[1] else None)
        options |= {"model_name_or_path": model} if isinstance(model, str) else {}
    if (trainer and (trainer[0], "peft_config") in script.computed) or (is_unsloth and adapter):
        options["use_peft"] = True
        options |= {_ADAPTER[name]: value for name, value in adapter.items() if name in _ADAPTER}
        makers = ("LoraConfig", "get_peft_model")
        computed += [_ADAPTER[name] for function, name in script.computed if function in makers and name in _ADAPTER]
    missing = [name for name in dict.fromkeys(computed) if name not in flags and name not in ABSENT]
    if missing:
        raise InputError(
            f"{path} computes {', '.join(missing)}, and is not run; give each value after the file: "
            f"gruppo convert trl {shell_word(path)} --{missing[0]} ..."
        )
    return options | flags


def _model(made: Conversion) -> None:
    lora = made.take("use_peft", False)
    names = {"lora_r": 16, "lora_alpha": 32, "lora_target_modules": None, "lora_dropout": 0.05}
    own = {
        name: (made.shown(name, made.given.get(name, default)), made.take(name, default))
        for name, default in names.items()
    }
    if lora:
        made.same("use_peft=True", lora=True)
        made.same(own["lora_r"][0], lora_rank=own["lora_r"][1])
        made.same(own["lora_alpha"][0], lora_alpha=own["lora_alpha"][1])
        targets = own["lora_target_modules"][1]
        if targets not in (None, "all-linear", ["all-linear"]):
            _targets(made, own["lora_target_modules"][0], as_list(targets))
        if own["lora_dropout"][1]:
            made.none(own["lora_dropout"][0], DROPOUT)
    if made.take("load_in_4bit"):
        if lora:
            made.same("load_in_4bit=True", quantize="nf4")
        else:
            made.near("load_in_4bit=True", "only a base under an adapter is quantised")
    dtype = made.take("dtype") or made.take("torch_dtype")
    has_bf16, has_fp16 = made.take("bf16"), made.take("fp16")
    if has_bf16 or dtype == "bfloat16":
        made.same("bf16=True" if has_bf16 else f"dtype={dtype}", dtype="bfloat16")
    elif dtype == "float32":
        made.same("dtype=float32", dtype="float32")
    elif has_fp16 or dtype == "float16":
        made.none("fp16", ABSENT["fp16"])
    checkpoints = made.take("gradient_checkpointing", True)
    made.same(made.shown("gradient_checkpointing", checkpoints), gradient_checkpointing=bool(checkpoints))


def _targets(made: Conversion, shown: str, targets: list[str]) -> None:
    """Names of layers; a comma that a shell has left at one, as in TRL's own examples, is not part of the name."""
    names = [str(name).rstrip(",") for name in targets]
    if names == targets:
        made.same(shown, lora_targets=names)
    else:
        made.near(shown, "without the commas, with which PEFT finds no such layers", lora_targets=names)


def _data(made: Conversion) -> None:
    name, config = made.take("dataset_name"), made.take("dataset_config")
    split, test = made.take("dataset_train_split"), made.take("dataset_test_split", "test")
    if name:
        made.same(f"dataset_name={name}", data=hub_data(name, config, split))
    evaluates = made.take("eval_strategy", made.take("evaluation_strategy", "no"))
    if evaluates not in ("no", False):
        if name:
            made.same(f"eval_strategy={evaluates}", eval_data=hub_data(name, config, test))
    else:
        made.near("no evaluation", "a part of the data is held out and scored; eval_prompts: 0 trains on all of it")
        made.take("eval_steps")
    rewards = [str(reward) for reward in as_list(made.take("reward_funcs", []))]
    for reward in rewards:
        short = reward.rpartition(".")[2]
        if short in REWARDS and reward in (short, f"trl.rewards.{short}"):
            why = f"the built-in of that kind; TRL's own runs here too: trl.rewards:{short}"
            made.near(f"reward_funcs={reward}", why, rewards=[*made.values.get("rewards", []), REWARDS[short]])
        elif "soft_overlong" in short:
            made.near(f"reward_funcs={reward}", "set overlong_cache: the penalty is part of the advantage")
        elif "." in reward and "/" not in reward:
            module, _, function = reward.rpartition(".")
            made.same(f"reward_funcs={reward}", rewards=[*made.values.get("rewards", []), f"{module}:{function}"])
        else:
            made.ask("rewards", f"{reward}: name it module:function; a reward model is called inside a function")


def _batch(made: Conversion) -> None:
    per_device, accumulate = made.take("per_device_train_batch_size", 8), made.take("gradient_accumulation_steps", 1)
    if "num_processes" not in made.given:
        made.ask("prompts_per_step", "the number of processes is not in the source, 1 is assumed: --num_processes N")
    processes = made.take("num_processes", 1)
    generations = made.take("num_generations", 8)
    batch, per_generation = made.take("generation_batch_size"), made.take("steps_per_generation", accumulate)
    if batch is not None:
        per_generation = batch / (per_device * processes)
    completions = per_device * processes * per_generation
    text = f"{per_device} per device x {processes} process(es) x {per_generation:g} steps per generation"
    prompts = made.whole(text, completions / generations)
    made.same(made.shown("num_generations", generations), group_size=generations)
    made.same(f"{text} / {generations} generations", prompts_per_step=prompts)
    minibatches = made.whole("steps_per_generation / gradient_accumulation_steps", per_generation / accumulate)
    if prompts % minibatches:
        made.near(
            f"{minibatches} optimizer steps per generation", "they must divide the prompts of a step", minibatches=1
        )
        minibatches = 1
    elif minibatches > 1:
        made.same(f"steps_per_generation={per_generation:g} / {accumulate}", minibatches=minibatches)
    iterations = made.take("num_iterations", 1)
    if iterations > 1:
        made.same(f"num_iterations={iterations}", epochs_per_batch=iterations)
    longest, limit = made.take("max_prompt_length"), made.take("max_completion_length", 256)
    made.same(made.shown("max_completion_length", limit), max_new_tokens=limit)
    if longest is not None:
        made.near(
            f"max_prompt_length={longest}", "longer prompts are left out; TRL cuts them", max_prompt_tokens=longest
        )
    tokens = per_device * ((longest or 512) + limit)
    made.same(f"{per_device} sequences in a forward (memory only)", tokens_per_microbatch=tokens)
    _steps(made, minibatches * iterations)


def _steps(made: Conversion, updates: int) -> None:
    """Numbers of optimizer steps; a step here has `updates` of them."""
    steps, epochs = made.take("max_steps", -1), made.take("num_train_epochs", 3)
    note = f" / {updates} per rollout batch" if updates > 1 else ""
    if steps > 0:
        made.same(f"max_steps={steps}{note}", steps=made.whole("max_steps", steps / updates))
    else:
        made.same(made.shown("num_train_epochs", epochs), epochs=epochs)
    ratio = made.take("warmup_ratio", 0)
    if ratio and steps > 0:
        made.same(f"warmup_ratio={ratio}", warmup_steps=ceil(ratio * steps))
    elif ratio:
        made.ask("warmup_steps", f"warmup_ratio={ratio} of {updates} x steps")
    schedule = made.take("lr_scheduler_type", "linear")
    if schedule in (*SCHEDULES, "constant_with_warmup"):
        made.same(made.shown("lr_scheduler_type", schedule), lr_schedule=schedule.partition("_")[0])
    else:
        made.near(f"lr_scheduler_type={schedule}", "the nearest schedule; it falls to 0", lr_schedule="cosine")
    made.take("lr_scheduler_kwargs")
    rate = made.take("learning_rate", 1e-6)
    made.same(made.shown("learning_rate", rate), lr=rate)
    saves = made.take("save_strategy", "steps")
    every = made.take("save_steps", 500)
    if saves == "steps" and every >= 1:
        made.every(made.shown("save_steps", every) + note, every / updates, "save_every")
    elif saves != "steps":
        made.ask("save_every", f"save_strategy={saves} there; here every N steps, and at the end")
    if (every := made.take("eval_steps")) is not None:
        made.every(f"eval_steps={every}{note}", every / updates, "eval_every")


def _loss(made: Conversion) -> None:
    kind, level = made.take("loss_type", "dapo"), made.take("importance_sampling_level", "token")
    low, high = made.take("epsilon", 0.2), made.take("epsilon_high")
    shown = made.shown("loss_type", kind)
    loss = LOSSES.get(kind)
    if loss is None:
        made.unknown(shown, "no loss of that name; `gruppo losses` lists them")
        loss = "grpo"
    if level.startswith("sequence") and kind != "luspo":
        named = "gspo" if level == "sequence" else "gspo_token"
        if kind == "grpo":
            made.same(f"{shown}, importance_sampling_level={level}", loss=named)
        else:
            why = "the ratio of a sequence, as there; the mean is over sequences of means over their tokens"
            made.near(f"{shown}, importance_sampling_level={level}", why, loss=named)
        loss = named
    elif kind == "bnpo":
        why = "a token mean over the whole update here, over each micro-batch of a device there"
        made.near(shown, why, loss=loss)
    elif kind in LOSSES:
        made.same(shown, loss=loss)
    delta, share = made.take("delta"), made.take("top_entropy_quantile", 1.0)
    if delta is not None:
        loss = _special(made, f"delta={delta}", "two_sided", {"delta": delta}, kind)
    elif share < 1:
        loss = _special(made, f"top_entropy_quantile={share}", "top_entropy", {"share": share}, kind)
    positive, negative = made.take("sapo_temperature_pos", 1.0), made.take("sapo_temperature_neg", 1.05)
    if loss == "sapo":
        made.same(f"sapo_temperature_pos={positive}, sapo_temperature_neg={negative}", tau=[positive, negative])
    elif loss == "cispo":
        cap = low if high is None else high
        if cap > 1:
            made.same(f"epsilon_high={cap} is the cap itself, here 1 + clip_range", clip_range=round(cap - 1, 12))
        else:
            made.near(f"epsilon_high={cap}", "the cap of TRL lies below 1; here it is 1 + clip_range, so 1.2 or more")
    elif loss != "vespo":
        pair = low if high in (None, low) else [low, high]
        made.same(made.shown("epsilon", low) + ("" if high is None else f", epsilon_high={high}"), clip_range=pair)
    _penalty(made)


def _special(made: Conversion, shown: str, loss: str, options: dict[str, Any], kind: str) -> str:
    if kind == "dapo":
        made.same(shown, loss=loss, loss_options=options)
    else:
        made.near(shown, f"the mean is over all tokens, not that of {kind}", loss=loss, loss_options=options)
    return loss


def _penalty(made: Conversion) -> None:
    beta, corrected = made.take("beta", 0.0), made.take("use_bias_correction_kl")
    made.same(made.shown("beta", beta), beta=beta)
    if beta and corrected is None:
        why = "k3; newer TRL multiplies it with the ratio by default, which is kl_estimator: ratio_k3"
        made.near("use_bias_correction_kl", why, kl_estimator=2)
    elif beta:
        made.same(f"use_bias_correction_kl={corrected}", kl_estimator="ratio_k3" if corrected else 2)
    moves = made.take("sync_ref_model", False)
    every, mix = made.take("ref_model_sync_steps", 512), made.take("ref_model_mixup_alpha", 0.6)
    if moves and not beta:
        made.near("sync_ref_model=True", "nothing uses the reference: beta is 0")
    elif moves:
        updates = made.values.get("minibatches", 1) * made.values.get("epochs_per_batch", 1)
        made.every(f"ref_model_sync_steps={every}", every / updates, "ref_every")
        if made.values.get("lora"):
            made.near(f"ref_model_mixup_alpha={mix}", "a mixture of adapters is none of models: copied", ref_mix=1.0)
        else:
            made.same(f"ref_model_mixup_alpha={mix}", ref_mix=mix)


def _advantage(made: Conversion) -> None:
    scale = made.take("scale_rewards", "group")
    shown = made.shown("scale_rewards", scale)
    if made.take("multi_objective_aggregation", "sum_then_normalize") == "normalize_then_sum":
        made.same("multi_objective_aggregation=normalize_then_sum", advantage="gdpo", advantage_options={"eps": 1e-4})
    elif scale in (False, "none"):
        made.same(shown, normalization="centered")
    elif scale == "mean":
        made.near(shown, "the same formula without TRL's eps", advantage="maxrl")
    else:
        made.same(f"{shown}, with eps 1e-4", advantage_options={"eps": 1e-4})
        if scale == "batch":
            made.same(shown, scale="batch")


def _sampler(made: Conversion) -> None:
    made.filters({"top_p": (1,), "top_k": (0, -1), "min_p": (0,)})
    mode, address = made.take("vllm_mode", "colocate"), made.take("vllm_server_base_url")
    host, port = made.take("vllm_server_host", "0.0.0.0"), made.take("vllm_server_port", 8000)
    share, parallel = made.take("vllm_gpu_memory_utilization"), made.take("vllm_tensor_parallel_size", 1)
    corrects, by = (
        made.take("vllm_importance_sampling_correction", True),
        made.take("vllm_importance_sampling_mode", "sequence_mask"),
    )
    cap = made.take("vllm_importance_sampling_clip_max", made.take("vllm_importance_sampling_cap", 3.0))
    penalty = made.take("repetition_penalty", 1)
    if penalty != 1:
        made.given["repetition_penalty"] = penalty
    if not made.take("use_vllm", False):
        return
    if mode == "colocate":
        made.same("use_vllm=True, vllm_mode=colocate", sampler="vllm")
        own = ({} if share is None else {"gpu_memory_utilization": share}) | (
            {} if parallel == 1 else {"tensor_parallel_size": parallel}
        )
        if own:
            made.same("vllm_gpu_memory_utilization, vllm_tensor_parallel_size", vllm_options=own)
    else:
        url = address or f"http://{'localhost' if host == '0.0.0.0' else host}:{port}"
        why = "a plain `vllm serve` with gruppo's worker (docs/vllm.md), not `trl vllm-serve`"
        made.near("use_vllm=True, vllm_mode=server", why, sampler=f"vllm:{url}")
    if not corrects:
        made.same("vllm_importance_sampling_correction=False", correction="none")
    elif by in CORRECTIONS:
        bounds = {"truncate": "at 2", "mask": "outside 0.5 to 5", "truncate_product": "at 2"}
        name = CORRECTIONS[by]
        why = Reason(f"{name} acts {bounds[name]}, there at {cap}", "correction_cap correction_options")
        made.near(f"vllm_importance_sampling_mode={by}", why, correction=name)
    else:
        why = "whole sequences are masked by the product of their ratios there; here each token's is capped at 2"
        made.near(f"vllm_importance_sampling_mode={by}", why, correction="truncate")


def _run(made: Conversion) -> None:
    seed = made.take("seed", 42)
    made.same(made.shown("seed", seed), seed=seed)
    boards = as_list(made.take("report_to", []))
    if boards:
        known = {name: name in boards for name in ("tensorboard", "wandb", "trackio")}
        made.same(
            f"report_to={', '.join(map(str, boards))}", **{k: v for k, v in known.items() if v or k == "tensorboard"}
        )
        for name in boards:
            if name not in (*known, "none", "all"):
                made.none(
                    f"report_to={name}", Reason("there are tensorboard, wandb and trackio", "comet mlflow swanlab")
                )
    optimizer = made.take("optim", "adamw_torch")
    if not str(optimizer).startswith("adamw_torch"):
        made.none(f"optim={optimizer}", ABSENT["optim"])
