"""Models without their weights: on the meta device, with the file that holds each tensor, for ranks that read rows."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from gruppo.errors import GruppoError
from gruppo.process.streams import printable
from gruppo.weights.files import read_header
from gruppo.weights.folder import check_floating, check_whole, cut, read_object
from gruppo.weights.source import holds_adapter, load_config, name_source, pin, resolve


class NotByRows(GruppoError):
    """The weights of a model cannot be read row by row from its files."""


def load_on_meta(
    model_id: str, *, dtype: Any, attn_implementation: str | None = None, revision: str | None = None
) -> tuple[PreTrainedModel, dict[str, Path]]:
    """The language model of `model_id` with its weights on the meta device, and the file that holds each of them.

    Buffers that no file holds are there. Raises NotByRows where transformers has to load the weights: it renames or
    converts them on the way, or the files do not hold exactly them.
    """
    model_id, revision = pin(model_id, revision)
    pinned = model_id if revision is None else f"{model_id}@{revision}"
    path = Path(resolve(pinned, weights=True))
    check_whole(path)
    if holds_adapter(str(path)):
        raise NotByRows("its folder holds an adapter")
    config = load_config(pinned)
    if getattr(config, "quantization_config", None) is not None:
        raise NotByRows("its weights are quantised")
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False, **options)
        files, shapes = _tensors_by_file(path)
        _check_plain(model, shapes)
        check_floating(path, set(shapes))
        _fill_buffers(model)
        if (path / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(path)
    except NotByRows:
        raise
    except Exception as error:  # whatever it is, loading it whole gives the model or the right error
        raise NotByRows(f"{type(error).__name__}: {printable(cut(str(error)))}") from error
    name_source(model, model_id, revision)
    return model.eval(), files


def _tensors_by_file(folder: Path) -> tuple[dict[str, Path], dict[str, list[int]]]:
    """The file and the shape of each tensor of a model's folder."""
    index = folder / "model.safetensors.index.json"
    names = sorted(set(read_object(index)["weight_map"].values())) if index.is_file() else ["model.safetensors"]
    files, shapes = {}, {}
    for file in (folder / name for name in names):
        header, _ = read_header(file)
        files |= dict.fromkeys(header, file)
        shapes |= {name: entry["shape"] for name, entry in header.items()}
    return files, shapes


def _check_plain(model: Any, shapes: dict[str, list[int]]) -> None:
    """Refuse files that hold other tensors than the model has in memory, by name and shape."""
    # A tied weight has several names and is in the files under the first.
    own = dict(model.named_parameters())
    kept = model.state_dict()
    own |= {name: buffer for name, buffer in model.named_buffers() if name in kept}
    for name, tensor in own.items():
        if shapes.get(name) != list(tensor.shape):
            raise NotByRows(f"its files have {shapes.get(name, 'nothing')} for {name}, {list(tensor.shape)} in memory")
    twice = sorted((shapes.keys() & kept.keys()) - own.keys())
    if twice:
        raise NotByRows(f"its files hold {twice[0]}, which is tied to another weight")
    for transform in get_model_conversion_mapping(model):
        changed = next((name for name in shapes if transform.rename_source_key(name)[1] is not None), None)
        if changed is not None:
            raise NotByRows(f"transformers converts {printable(cut(changed))} while it loads")


def _fill_buffers(model: Any) -> None:
    """Compute the buffers that no file holds, such as rotary frequencies, by transformers' own rules."""
    kept = model.state_dict()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = True  # transformers then leaves it as it is
    made = {}
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            full = f"{path}.{name}".removeprefix(".")
            if buffer is None or full in kept:
                continue
            if not buffer.is_floating_point():
                raise NotByRows(f"its buffer {full} is in no file")
            made[full] = module._buffers[name] = torch.full_like(buffer, torch.nan, device="cpu")
    model.initialize_weights()
    unknown = next((name for name, buffer in made.items() if not bool(buffer.isfinite().all())), None)
    if unknown is not None:
        raise NotByRows(f"its buffer {unknown} is in no file")
