"""Extension of vLLM's worker: loading weights with a receipt.

vLLM's own `reload_weights` does not report what it read: a tensor that is absent from the file keeps its old values or
none, without an error. These methods read the same files and count. They run inside vLLM, in this process or in a
server started with `--worker-extension-cls gruppo.sampler.vllm.worker.SyncWorker`.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

EXTENSION = "gruppo.sampler.vllm.worker.SyncWorker"


class SyncWorker:
    """Mixed into vLLM's worker class."""

    def gruppo_load_weights(self, folder: str) -> dict[str, int]:
        counted = {"tensors": 0, "bytes": 0}

        def count() -> Iterator[tuple[str, Any]]:
            embedding = None
            names = set()
            for name, tensor in _tensors(folder):
                counted["tensors"] += 1
                counted["bytes"] += tensor.numel() * tensor.element_size()
                names.add(name)
                if name.endswith(("embed_tokens.weight", "wte.weight")):
                    embedding = tensor
                yield name, tensor
            # A tied head is not in the file, and vLLM's reload leaves it without values unless it is given.
            if embedding is not None and "lm_head.weight" not in names:
                yield "lm_head.weight", embedding

        self.reload_weights(weights_iterator=count())  # type: ignore[attr-defined]  # the worker's
        return counted

    def gruppo_count(self, folder: str) -> dict[str, int]:
        """Tensors and bytes in the files of a folder, as this worker sees them."""
        sizes = [tensor.numel() * tensor.element_size() for _, tensor in _tensors(folder)]
        return {"tensors": len(sizes), "bytes": sum(sizes)}


def _tensors(folder: str) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  it is not a dict
                yield name, opened.get_tensor(name)
