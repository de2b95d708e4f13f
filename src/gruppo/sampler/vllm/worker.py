"""Extension of vLLM's worker: loading weights with a receipt, the number of tensors and bytes that were read."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gruppo.weights.store import tensors_in

EXTENSION = "gruppo.sampler.vllm.worker.SyncWorker"


class SyncWorker:
    """Mixin for vLLM's worker class, in this process or in a server started with EXTENSION."""

    def gruppo_load_weights(self, folder: str) -> dict[str, int]:
        counted = {"tensors": 0, "bytes": 0}

        def count() -> Iterator[tuple[str, Any]]:
            embedding = None
            names = set()
            for name, tensor in tensors_in(Path(folder)):
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
        sizes = [tensor.numel() * tensor.element_size() for _, tensor in tensors_in(Path(folder))]
        return {"tensors": len(sizes), "bytes": sum(sizes)}
