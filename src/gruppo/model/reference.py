"""Reference policy of the KL penalty: the model as it was at the start.

Without an adapter it is a frozen copy, taken when it is first asked for, which must be before the first step. With an
adapter it is the same model with the adapter of the start in it; one that starts at zero is switched off, which costs
nothing. `refresh` moves the reference; a run that does so keeps it in its checkpoints.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gruppo.errors import CheckpointError, InputError
from gruppo.model.logp_model import LogpModel


class Reference:
    """Scores under the reference policy."""

    def __init__(self, policy: LogpModel) -> None:
        self.policy = policy
        self.is_adapter = hasattr(policy.model, "disable_adapter")
        self.frozen: LogpModel | None = None
        self._adapter: dict[str, Tensor] = {}
        """Weights of the reference's adapter; none: the adapter is switched off."""
        if not self.is_adapter:
            self.frozen = frozen_copy(policy)
        elif not _adds_nothing(policy.model):
            self._adapter = self._policy_adapter()

    def refresh(self, mix: float = 1.0) -> None:
        """Move the reference towards the policy as it is now: `reference = mix * policy + (1 - mix) * reference`.

        1 copies, as after each stage of DeepSeekMath (arXiv:2402.03300); less is the soft update of TR-DPO
        (arXiv:2404.09656) and needs full weights: a mixture of two adapters' factors is not a mixture of the models.
        """
        if not 0 < mix <= 1:
            raise InputError(f"mix must be above 0 and at most 1, got {mix!r}")
        if self.is_adapter and mix < 1:
            raise InputError(f"mix={mix!r} needs full weights; with LoRA the reference can only be copied (mix=1)")
        if self.is_adapter:
            self._adapter = self._policy_adapter()
        elif mix == 1:
            self.frozen = frozen_copy(self.policy)
        else:
            own = self._parameters()
            with torch.no_grad():
                for name, parameter in self.policy.model.named_parameters():
                    own[name].lerp_(parameter, mix)

    @contextmanager
    def logp_model(self) -> Iterator[LogpModel]:
        if self.frozen is not None:
            yield self.frozen
        elif not self._adapter:
            with self.policy.model.disable_adapter():  # type: ignore[operator]  # PEFT's
                yield self.policy
        else:
            # In place: what shards a parameter over ranks gathers it from the memory that it had then.
            own = {name: p for name, p in self.policy.model.named_parameters() if name in self._adapter}
            trained = self._policy_adapter()
            try:
                _copy_into(own, self._adapter)
                yield self.policy
            finally:
                _copy_into(own, trained)

    def state(self) -> dict[str, Tensor]:
        """Weights of the reference by name, on the CPU; none when it is a model without its adapter."""
        weights = self._adapter if self.is_adapter else self._parameters()
        return {name: p.detach().to("cpu").contiguous() for name, p in weights.items()}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Read back what `state` gave."""
        own = self._policy_adapter() if self.is_adapter else self._parameters()
        if self.is_adapter and not weights:
            self._adapter = {}
            return
        if {n: p.shape for n, p in own.items()} != {n: w.shape for n, w in weights.items()}:
            raise CheckpointError("the weights of the reference do not fit the model")
        if not all(w.is_floating_point() and w.isfinite().all() for w in weights.values()):
            raise CheckpointError("the weights of the reference hold other than finite numbers")
        _copy_into(own, weights)
        if self.is_adapter:
            self._adapter = dict(own)

    def shard(self, cut: Callable[[Tensor, nn.Parameter], Tensor]) -> None:
        """Keep of the reference's adapter what `cut` gives: the part that this rank has of the policy's parameter."""
        own = dict(self.policy.model.named_parameters())
        self._adapter = {name: cut(weight, own[name]) for name, weight in self._adapter.items()}

    def _policy_adapter(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.policy.model.named_parameters() if p.requires_grad}

    def _parameters(self) -> dict[str, nn.Parameter]:
        assert self.frozen is not None
        return dict(self.frozen.model.named_parameters())


@torch.no_grad()
def _copy_into(parameters: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])


def frozen_copy(policy: LogpModel, shared: Iterable[nn.Parameter] = ()) -> LogpModel:
    """A LogpModel of a copy of the model that does not train; parameters that are `shared` are not copied."""
    model = copy.deepcopy(policy.model, {id(parameter): parameter for parameter in shared})
    model.requires_grad_(False).eval()
    for parameter in model.parameters():
        parameter.grad = None
    return LogpModel(model, temperature=policy.temperature, head=policy.choice)


def _adds_nothing(model: nn.Module) -> bool:
    """Whether an adapter leaves its base as it is: plain LoRA whose second factors are all zero, and modules that
    train whole as they were."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, parameter in parameters.items():
        if not parameter.requires_grad or ".lora_A." in name:
            continue
        if ".lora_B." in name:
            if bool(parameter.any()):
                return False
        else:
            path, _, own = name.partition(".modules_to_save.")
            before = parameters.get(f"{path}.original_module.{own.partition('.')[2]}")
            if before is None or not torch.equal(parameter, before.to(parameter.dtype)):
                return False
    return True
