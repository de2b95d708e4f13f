"""Model ids: the folder or hub repository behind one, its tokenizer and config, and which are refused.

A model id is a local folder, a run directory, `hf://org/name`, `ms://org/name`, a bare hub id `org/name`, or `builtin`.
Code from a model repository is never run and pickled weights are never read: both can do anything to the machine.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gruppo.errors import CheckpointError, InputError, require
from gruppo.weights.files import MANIFEST, digest_tensors, read_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BUILTIN = "builtin"
ADAPTER = "adapter_config.json"
_TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")
"""Files that hold a tokenizer, of all families."""

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def resolve(model_id: str) -> str:
    """A model id as something transformers can open: a checked local folder, or a hub id."""
    if model_id in (BUILTIN, f"{BUILTIN}:carries"):
        from gruppo.task.builtin import builtin_model_path

        return str(builtin_model_path())
    if model_id.startswith("hf://"):
        return model_id.removeprefix("hf://")
    if model_id.startswith("ms://"):
        try:
            from modelscope import snapshot_download  # pyright: ignore[reportMissingImports]  # optional
        except ImportError:
            raise require("modelscope", "modelscope", f"model {model_id!r}") from None
        return snapshot_download(model_id.removeprefix("ms://"))
    folder = Path(model_id).expanduser()
    if folder.is_dir():
        if (folder / "config.yaml").is_file() and not (folder / "config.json").is_file():  # a run directory
            if not (folder / "model").is_dir():
                raise InputError(
                    f"run {folder} has no model yet, which its end saves; `gruppo resume {folder}` goes on"
                )
            folder /= "model"
        check_folder(folder)
        return str(folder)
    if folder.exists() or model_id.startswith((".", "/", "~")) or model_id.count("/") != 1:
        raise InputError(
            f"model {model_id!r} is neither a folder nor a hub id; give a folder with config.json and "
            "*.safetensors, a hub id like org/name, or 'builtin'"
        )
    return model_id


def holds_adapter(model_id: str) -> bool:
    """Whether a model id is a folder with an adapter rather than a whole model."""
    return (Path(resolve(model_id)) / ADAPTER).is_file()


def base_of(model_id: str) -> str:
    """The model that an adapter's folder was trained on; any other model id itself."""
    if not holds_adapter(model_id):
        return model_id
    config = Path(resolve(model_id)) / ADAPTER
    base = json.loads(config.read_text()).get("base_model_name_or_path")
    if not base:
        raise InputError(f"{config} does not name its base model (base_model_name_or_path)")
    return base


def quantization_of(model_id: str) -> dict[str, str]:
    """How the base of an adapter's folder was quantised while it trained, and from which dtype; {}: not at all."""
    file = Path(resolve(model_id)) / MANIFEST
    noted = json.loads(file.read_text()) if holds_adapter(model_id) and file.is_file() else {}
    return {name: noted[name] for name in ("quantize", "dtype")} if "quantize" in noted else {}


def weights_digest(model_id: str, revision: str | None = None) -> str | None:
    """Digest of the weights behind a model id, of an adapter's folder also of its base; None if they are not here."""
    from huggingface_hub import try_to_load_from_cache

    path = resolve(model_id)
    base = None
    if holds_adapter(path):
        base = weights_digest(base_of(path))
    elif not Path(path).is_dir():
        file = try_to_load_from_cache(path, "config.json", revision=revision)
        if not isinstance(file, str):
            return None
        path = str(Path(file).parent)
    try:
        own = digest_tensors(Path(path))
    except (OSError, ValueError, LookupError, TypeError):  # whoever opens it gives the reason
        return None
    return own if base is None else f"{own} on {base}"


def _check_base(folder: str) -> None:
    """Refuse an adapter whose manifest names other weights than its base holds."""
    file = Path(folder) / MANIFEST
    trained_on = json.loads(file.read_text()).get("base") if file.is_file() else None
    base = base_of(folder)
    found = weights_digest(base)
    if None not in (trained_on, found) and trained_on != found:
        raise InputError(
            f"adapter folder {folder} was trained on other weights than those of {base!r} (digest {trained_on}, found "
            f"{found}), and on these it is another policy. Put the weights back, or name the folder that has them in "
            f"{ADAPTER} (base_model_name_or_path)"
        )


def _check_whole(folder: Path) -> None:
    """Refuse weights that are not those of the folder's manifest, if it has one."""
    if (folder / MANIFEST).is_file():
        try:
            read_manifest(folder, files="*.safetensors")
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. Copy the folder again; if you have changed the weights yourself, delete {MANIFEST}"
            ) from error


def check_folder(folder: Path) -> None:
    """Refuse a folder that lacks a model, would run its own code, or holds its weights as pickles."""
    if (folder / ADAPTER).is_file():
        if not (folder / "adapter_model.safetensors").is_file():
            raise InputError(f"adapter folder {folder} has no adapter_model.safetensors; gruppo reads no pickles")
        return
    config = folder / "config.json"
    if not config.is_file():
        raise InputError(f"model folder {folder} has no config.json; is it the folder that save() wrote?")
    try:
        values = json.loads(config.read_text())
    except ValueError as error:
        raise InputError(f"{config} is not JSON: {error}") from None
    if "auto_map" in values:
        raise InputError(
            f"{config} asks to run code from the model folder (auto_map); gruppo never does. Use a model that "
            "transformers supports, or convert it"
        )
    if not any(folder.glob("*.safetensors")):
        pickles = ", ".join(sorted(p.name for pattern in _PICKLES for p in folder.glob(pattern)))
        found = f"only pickled weights ({pickles}), which can run code when loaded" if pickles else "no weights"
        raise InputError(f"model folder {folder} holds {found}; gruppo reads *.safetensors only")


def load_model(
    model_id: str,
    *,
    dtype: Any,
    attn_implementation: str | None = None,
    revision: str | None = None,
    quantize: str | None = None,
    device: Any = "cpu",
    head: Literal["CausalLM", "SequenceClassification"] = "CausalLM",
) -> "PreTrainedModel":
    """The language model of `model_id`, on the CPU; for an adapter's folder its base with the adapter on it.

    Args:
        quantize: "nf4" for linear layers in 4 bits. None: as they are; for an adapter as they were while it trained.
        device: of 4-bit weights, which are made there.
    """
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()  # a bar per load would run across gruppo's own
    path = resolve(model_id)
    _check_whole(Path(path))
    options: dict[str, Any] = {"dtype": dtype}
    given = {"attn_implementation": attn_implementation, "revision": revision}
    options |= {name: value for name, value in given.items() if value is not None}
    if holds_adapter(path):
        options.pop("revision", None)
        # Other weights come out of 4 bits if they were rounded otherwise before.
        options |= {"quantize": quantize, "device": device} | quantization_of(path)
        return _with_adapter(load_model(base_of(path), head=head, **options), path)
    if quantize is not None:
        options |= _quantization(model_id, quantize, dtype) | {"device_map": {"": device}}
    with _refusing(model_id):
        auto = getattr(transformers, f"AutoModelFor{head}")
        loaded: Any = auto.from_pretrained(
            path, output_loading_info=True, trust_remote_code=False, use_safetensors=True, **options
        )
    model, report = loaded
    if report["missing_keys"]:  # transformers would fill them with random numbers
        missing = sorted(report["missing_keys"])
        raise InputError(f"the weights of {model_id!r} lack {len(missing)} tensors: {', '.join(missing[:3])}")
    return model


def load_dequantized(folder: str, *, dtype: Any) -> "PreTrainedModel":
    """The adapter of a folder on its base, whose weights are what its 4-bit numbers stand for, if it has such."""
    options: dict[str, Any] = {"dtype": dtype} | quantization_of(folder)
    base = load_model(base_of(folder), **options)
    if getattr(base, "is_quantized", False):
        with _refusing(base_of(folder)):
            base = base.dequantize()
    return _with_adapter(base.to(dtype), folder)


def _quantization(model_id: str, quantize: str, dtype: Any) -> dict[str, Any]:
    """Options of transformers for a model in 4 bits, as in QLoRA (arXiv:2305.14314), which computes in `dtype`."""
    if find_spec("bitsandbytes") is None:
        raise require("qlora", "bitsandbytes", f"quantize={quantize!r}")
    if getattr(load_config(model_id), "quantization_config", None) is not None:
        raise InputError(f"quantize={quantize!r}: the weights of {model_id!r} are quantised already; leave it out")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantize,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"quantization_config": config}


def _with_adapter(base: "PreTrainedModel", folder: str) -> Any:
    """A base with the adapter of a folder on it."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    _check_base(folder)
    with _refusing(folder):
        model = PeftModel.from_pretrained(base, folder, is_trainable=True)
    own = get_peft_model_state_dict(model, save_embedding_layers=False).keys()
    with safe_open(Path(folder) / "adapter_model.safetensors", framework="pt") as file:
        names = set(file.keys())
    missing, unknown = sorted(own - names), sorted(name for name in names - own if ".lora_" in name)
    if missing:  # PEFT leaves them at zero with a warning: the adapter that was trained would be gone
        raise InputError(f"adapter folder {folder} lacks {len(missing)} of its tensors: {', '.join(missing[:3])}")
    if unknown:  # PEFT leaves them out: part of the adapter would be gone
        raise InputError(
            f"adapter folder {folder} is for another base than {base_of(folder)!r}, which has no place for "
            f"{len(unknown)} of its tensors: {', '.join(unknown[:3])}. Name its own in {ADAPTER} "
            "(base_model_name_or_path)"
        )
    return model


@contextmanager
def _refusing(model_id: str) -> Iterator[None]:
    """Turns errors of transformers, PEFT and safetensors on opening a model into an InputError that names the model."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise InputError(f"model {model_id!r} cannot be opened: {error}") from error


def load_tokenizer(model_id: str, revision: str | None = None) -> "PreTrainedTokenizerBase":
    """The tokenizer of `model_id`; of an adapter's folder without one that of its base."""
    from transformers import AutoTokenizer

    options = {} if revision is None else {"revision": revision}
    path = resolve(model_id)
    if not (Path(path) / "tokenizer_config.json").is_file():
        path = resolve(base_of(path))
    # transformers makes an empty tokenizer of a folder without one, and every prompt would have no tokens.
    if Path(path).is_dir() and not any(next(Path(path).glob(name), None) for name in _TOKENIZERS):
        raise InputError(
            f"model folder {path} has no tokenizer (tokenizer.json and tokenizer_config.json); copy the files from the "
            "model that it was made from"
        )
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False, **options)
    except (OSError, ValueError) as error:
        raise InputError(f"model {model_id!r} has no usable tokenizer: {error}") from error


def load_config(model_id: str) -> Any:
    """The config of `model_id`; of an adapter's folder that of its base."""
    from transformers import AutoConfig

    path = resolve(model_id)
    if holds_adapter(path):
        return load_config(base_of(path))
    with _refusing(model_id):
        return AutoConfig.from_pretrained(path, trust_remote_code=False)


def context_length(model: Any) -> int | None:
    """Longest context of a model, by its id or the object, in tokens; None if its config does not give it."""
    config = load_config(model) if isinstance(model, str) else model.config
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def longest_prompt(model: Any, max_new_tokens: int, max_prompt_tokens: int | None = None) -> int | None:
    """Most tokens that a prompt may have: what its completion leaves of the context, and no more than the limit.

    None if there is no limit and the config of the model does not give its context.
    """
    context = context_length(model)
    if context is None:
        return max_prompt_tokens
    room = context - max_new_tokens
    if room < 1:
        raise InputError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt in the model's context of {context} tokens; "
            "lower it"
        )
    return room if max_prompt_tokens is None else min(max_prompt_tokens, room)


def end_tokens(model_id: str, tokenizer: Any) -> frozenset[int]:
    """Every token that ends a completion, by the generation config, the config or the tokenizer."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(resolve(model_id))
    except OSError:  # it has none
        generation = None
    return end_tokens_of(generation, load_config(model_id), tokenizer)


def end_tokens_of(*sources: Any) -> frozenset[int]:
    """The end tokens that any of these names."""
    named = [getattr(source, "eos_token_id", None) for source in sources]
    lists = [ids if isinstance(ids, list) else [ids] for ids in named]
    return frozenset(int(i) for ids in lists for i in ids if i is not None)


def linear_layers(model: Any) -> tuple[str, ...]:
    """Last names of all linear layers except the head, by a model's id or the object: the targets of "all-linear"."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    if isinstance(model, str):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(load_config(model), trust_remote_code=False)
    head = model.get_output_embeddings()
    return tuple(sorted({
        name.rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
    }))  # fmt: skip
