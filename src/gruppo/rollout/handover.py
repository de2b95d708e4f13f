"""Hand-over: how the weights of the trainer reach its sampler.

A sampler in the trainer's process uses the trainer's own model (`HandOver`). One that samples while the model trains
has a copy of it (`CopiedModel`), and one in another process reads the weights from a folder (`PublishedWeights`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gruppo.errors import SamplerError
from gruppo.rollout.driver import Stopwatch
from gruppo.sampler import Sampler
from gruppo.weights.store import NotTaken, Published, WeightStore

if TYPE_CHECKING:
    from torch import Tensor

    from gruppo.model import TransformersModel
    from gruppo.model.ranked import Actor


class HandOver:
    """The sampler of a run, and the weights on their way to it: none here, since it uses the trainer's own model."""

    def __init__(self, model: "Actor", sampler: Sampler) -> None:
        self.model, self.sampler = model, sampler
        self.reported: dict[str, float] = {}
        """Metrics of the last hand-over."""

    def publish(self) -> Any:
        """The trainer's weights as they are now, to be loaded later; called between updates."""

    def load(self, published: Any) -> None:
        """Sample from published weights; may be called by another thread."""

    def bring(self, watch: Stopwatch) -> None:
        """Publish the trainer's weights and load them, unless the sampler has them."""

    def release(self, published: Any) -> None:
        """Forget what is older than these weights."""

    def close(self) -> None:
        """End the sampler, and remove what was published."""
        self.sampler.close()


class CopiedModel(HandOver):
    """A copy of the model in this process. What does not train is shared."""

    def __init__(self, model: "Actor", make: Callable[["TransformersModel"], Sampler]) -> None:
        self.twin = model.twin()
        super().__init__(model, make(self.twin))

    def publish(self) -> "tuple[int, dict[str, Tensor]]":
        return self.model.version, self.model.trained()

    def load(self, published: "tuple[int, dict[str, Tensor]]") -> None:
        self.twin.version, trained = published
        own = dict(self.twin.model.named_parameters())
        with torch.no_grad():
            for name, value in trained.items():
                own[name].copy_(value)

    def bring(self, watch: Stopwatch) -> None:
        with watch("sync"):
            if self.twin.version != self.model.version:
                self.load(self.publish())


class PublishedWeights(HandOver):
    """Weights in a folder per version, for a sampler in another process."""

    def __init__(self, model: "Actor", sampler: Sampler, store: WeightStore) -> None:
        super().__init__(model, sampler)
        self.store = store
        self._last: Published | None = None

    def publish(self) -> Published:
        if self._last is None or self._last.version != self.model.version:
            self._last = self.store.publish(self.model)
        return self._last

    def load(self, published: Published) -> None:
        loaded, fault = self.sampler.loaded, ""
        if loaded is not None and loaded.version == published.version:
            return
        for _ in range(2):
            try:
                self.reported = self.sampler.load(published)
                return
            except NotTaken as error:
                fault = str(error)
        raise SamplerError(
            f"the weights of version {published.version} did not reach the sampler, tried twice: {fault}. Nothing was "
            f"sampled from them; the files are in {published.folder}"
        )

    def bring(self, watch: Stopwatch) -> None:
        with watch("sync"):
            self.reported = self.store.hand_over(self.model, self.sampler) or self.reported

    def release(self, published: Published) -> None:
        self.store.release(published)

    def close(self) -> None:
        super().close()
        self.store.close()
