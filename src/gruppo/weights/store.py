"""WeightStore: the trainer's side of a hand-over. It publishes weights as folders, one per version (docs/vllm.md)."""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from safetensors import safe_open

from gruppo.errors import InputError, SamplerError
from gruppo.weights.canary import Canary, Rows, TrainedModel
from gruppo.weights.files import read_header, set_usual_mode

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class NotTaken(SamplerError):
    """Weights did not arrive at a sampler; publishing and loading them once more may help."""


class WrongWeights(NotTaken):
    """A sampler has loaded weights and scores the canary with others."""


Contents = dict[str, tuple[tuple[int, ...], int]]
"""The tensors of a folder, by name: shape and bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """Weights of one version in a folder, with what a sampler needs to load and to prove them."""

    version: int
    """Optimizer steps that the weights have seen."""
    folder: Path
    contents: Contents
    is_adapter: bool
    """The folder holds a LoRA adapter rather than all weights."""
    canary: Canary

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.contents.values())


class Loads(Protocol):
    """A sampler as the store uses it."""

    @property
    def loaded(self) -> Published | None: ...

    def load(self, published: Published) -> dict[str, float]: ...


class WeightStore:
    """Published weights in a folder.

    Args:
        folder: where versions are written; samplers must see it under the same path. None: a temporary folder.
        rows: tokens of the canary.
    """

    def __init__(self, folder: str | Path | None, rows: Rows) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="gruppo-sync-") if folder is None else None
        self.folder = Path(folder if self._temporary is None else self._temporary.name)  # type: ignore[arg-type]
        self.rows = rows
        self._newer: list[Published] = []
        """Published after the version in use."""
        self._in_use: Published | None = None

    def publish(self, model: TrainedModel) -> Published:
        """Write all weights, or with LoRA the adapter, and score the canary. Raises NotTaken if the files are wrong."""
        quantized = getattr(model, "quantized", None)
        if quantized:
            raise InputError(
                f"quantize={quantized['quantize']!r}: another process would put the adapter on the base in full "
                "precision, which is another policy than the one that trains; use sampler=torch"
            )
        canary = Canary.score(self.rows, model)
        folder, is_adapter = self.folder / f"version-{model.version}", model.lora is not None
        write(model, folder)
        problem = compare(model, folder)
        if problem is not None:
            raise NotTaken(problem)
        written = contents(folder)
        self._newer.append(
            Published(version=model.version, folder=folder, contents=written, is_adapter=is_adapter, canary=canary)
        )
        return self._newer[-1]

    def hand_over(self, model: TrainedModel, sampler: Loads) -> dict[str, float]:
        """Publish a model's weights and load them, unless the sampler has them; returns what the sampler reports.

        Weights that are not taken are published and loaded once more, then SamplerError gives the reason.
        """
        if sampler.loaded is not None and sampler.loaded.version == model.version:
            return {}
        fault, folder = "", self.folder / f"version-{model.version}"
        for _ in range(2):
            try:
                published = self.publish(model)
                reported = sampler.load(published)
            except NotTaken as error:
                fault = str(error)
                if isinstance(error, WrongWeights):
                    differ = differing(model, folder)
                    fault += (
                        f"; the file differs from the model in {few(differ)}"
                        if differ
                        else "; the file holds the model's weights, so the engine did not take them"
                    )
                logger.warning("hand-over of version %d failed: %s", model.version, fault)
            else:
                self.release(published)
                return reported
        raise SamplerError(
            f"the weights of version {model.version} did not reach the sampler, tried twice: {fault}. Nothing was "
            f"sampled from them; the files are in {folder}"
        )

    def release(self, in_use: Published) -> None:
        """Delete what a version in use makes obsolete: older versions, and leftovers of a killed run."""
        self._in_use = in_use
        self._newer = [p for p in self._newer if p.version > in_use.version]
        needed = {in_use.folder, *(p.folder for p in self._newer)}
        for folder in self.folder.glob("version-*"):
            if folder not in needed:
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Delete the version in use, and the folder if nothing else is in it."""
        if self._in_use is not None:
            shutil.rmtree(self._in_use.folder, ignore_errors=True)
        with suppress(OSError):  # it holds a version that was not taken, or other files
            self.folder.rmdir()
        if self._temporary is not None:
            self._temporary.cleanup()


# --- folders ------------------------------------------------------------------------------------------------------


def write(model: TrainedModel, folder: Path) -> None:
    """Write all weights, or with LoRA the adapter, under the names that transformers and PEFT give them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.write_weights(folder)
    set_usual_mode(folder)  # a server may run as another user


def contents(folder: Path) -> Contents:
    """Names, shapes and sizes of the tensors in a folder's safetensors files, by their headers."""
    tensors: Contents = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            header, start = read_header(file)
            found = {n: (tuple(e["shape"]), e["data_offsets"][1] - e["data_offsets"][0]) for n, e in header.items()}
            if file.stat().st_size != start + sum(size for _, size in found.values()):
                raise ValueError("it is cut short")
        except (OSError, ValueError) as error:
            raise SamplerError(f"{file} is not a safetensors file: {error}") from error
        tensors |= found
    return tensors


def compare(model: TrainedModel, folder: Path) -> str | None:
    """Difference in names or shapes between a folder and the model; None if there is none."""
    wanted, found = _weights(model), contents(folder)
    missing, unknown = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    lacks_numbers = sum(prod(shape) for shape, _ in found.values()) != sum(t.numel() for t in wanted.values())
    # Some families are saved under other names than they have in memory; then the numbers must agree.
    if (missing or unknown) and (model.lora is not None or lacks_numbers):
        return f"the file lacks {few(missing)} and has unknown {few(unknown)}"
    shapes = [n for n in wanted.keys() & found.keys() if tuple(wanted[n].shape) != found[n][0]]
    return f"the file has other shapes for {few(sorted(shapes))}" if shapes else None


def differing(model: TrainedModel, folder: Path) -> list[str]:
    """Names of the tensors whose values in the folder are not the model's. Reads everything: for a diagnosis.

    Of a sharded model the first rank compares its own rows, which are the first ones.
    """
    wanted, differ = _weights(model), []
    for name, tensor in tensors_in(folder):
        own = wanted.get(name)
        if own is None:
            continue
        if hasattr(own, "to_local"):
            own = own.to_local().to(tensor.dtype)  # type: ignore[operator]  # a DTensor's
            tensor = tensor[: len(own)]
        if not (own.shape == tensor.shape and bool((own.cpu() == tensor).all())):
            differ.append(name)
    return differ


def tensors_in(folder: Path) -> Iterator[tuple[str, "Tensor"]]:
    """The tensors in a folder's safetensors files, by name."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  it is not a dict
                yield name, opened.get_tensor(name)


def _weights(model: TrainedModel) -> "dict[str, Tensor]":
    """The tensors that a folder should hold. Tensors that share memory are written once, under the first name."""
    if model.lora is not None or hasattr(model.model, "disable_adapter"):
        from peft import get_peft_model_state_dict

        return dict(get_peft_model_state_dict(model.model, save_embedding_layers=False))
    first: dict[int, tuple[str, Tensor]] = {}
    if hasattr(model.model, "reshard"):  # sharded: a rank may have no number of a tensor, and so no place of it
        own = model.model.state_dict()
        tensors = [*model.model.named_parameters(), *model.model.named_buffers()]
        return {name: tensor for name, tensor in tensors if name in own}
    for name, tensor in model.model.state_dict().items():
        first.setdefault(tensor.data_ptr(), (name, tensor))
    return dict(first.values())


def few(names: list[str]) -> str:
    """The first three names, and how many more there are."""
    return f"{names[:3]}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
