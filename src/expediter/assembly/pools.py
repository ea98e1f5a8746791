"""The pools of a cluster: replicas that are alike and do the same part of the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from expediter.control.fleet import ROLES, Role
from expediter.core.errors import ConfigurationError
from expediter.core.ports import StepTimeModel
from expediter.perfmodel.parallelism import Parallelism

_FIELDS: Final = {
    "replicas": "replicas",
    "tp": "tensor_parallel",
    "pp": "pipeline_parallel",
    "ep": "expert_parallel",
    "gpu": "gpu",
    "blocks": "num_blocks",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Some replicas of a cluster.

    Args:
        role: "prefill" computes prompts and hands them off, "decode" yields their tokens, "mixed" does both.
        replicas: number of them.
        tensor_parallel, pipeline_parallel, expert_parallel: how each replica's GPUs share the model.
        gpu: name of a GPU or a .toml file; None for the simulation's.
        num_blocks: KV blocks per replica; None for the simulation's, or for what the GPUs hold.
        step_time: a step-time model of one's own; None for the simulation's, or for that of model and GPU.
    Raises:
        ConfigurationError: the role does not exist, or a number is below 1.
    """

    role: Role = "mixed"
    replicas: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    gpu: str | None = None
    num_blocks: int | None = None
    step_time: StepTimeModel | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigurationError(f"no role {self.role!r} of a pool; there are: {', '.join(ROLES)}")
        for name in ("replicas", "tensor_parallel", "pipeline_parallel", "expert_parallel", "num_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"pool {self.role}: {name} must be at least 1, not {value}")

    @property
    def num_gpus(self) -> int:
        """Of all its replicas."""
        return self.replicas * self.num_gpus_per_replica

    @property
    def num_gpus_per_replica(self) -> int:
        split = Parallelism(tensor=self.tensor_parallel, pipeline=self.pipeline_parallel, expert=self.expert_parallel)
        return split.num_gpus

    def overrides(self, config: Any) -> dict[str, Any]:  # noqa: ANN401 - a SimulationConfig, which is defined above this
        """Return the fields of a simulation that are other than in `config` for this pool's replicas."""
        return {
            "replicas": self.replicas,
            "tensor_parallel": self.tensor_parallel,
            "pipeline_parallel": self.pipeline_parallel,
            "expert_parallel": self.expert_parallel,
            "gpu": self.gpu or config.gpu,
            "num_blocks": self.num_blocks or config.num_blocks,
            "step_time": self.step_time or config.step_time,
        }


def parse_pool(text: str) -> PoolConfig:
    """Return the pool of `ROLE` or `ROLE:NAME=VALUE,...`, such as `prefill:replicas=2,tp=2,gpu=h100`.

    Raises:
        ConfigurationError: it is not of that form; the message lists the names.
    """
    role, _, rest = text.partition(":")
    values: dict[str, str | int] = {}
    for part in filter(None, rest.split(",")):
        name, _, value = part.partition("=")
        if name not in _FIELDS or not value:
            raise ConfigurationError(
                f"pool {text!r}: {part!r} is not NAME=VALUE with one of the names {', '.join(_FIELDS)}"
            )
        try:
            values[_FIELDS[name]] = value if name == "gpu" else int(value)
        except ValueError:
            raise ConfigurationError(f"pool {text!r}: {name} must be a whole number, not {value!r}") from None
    return PoolConfig(role=role, **values)  # type: ignore[arg-type] # the values are checked on construction


def check_pools(pools: Sequence[PoolConfig]) -> None:
    """Verify that requests can run from their prompt to their end.

    Raises:
        ConfigurationError: nobody computes prompts, or nobody decodes.
    """
    roles = {pool.role for pool in pools}
    if roles and not roles & {"prefill", "mixed"}:
        raise ConfigurationError("no pool computes prompts: one must be prefill or mixed")
    if roles and not roles & {"decode", "mixed"}:
        raise ConfigurationError("no pool decodes: one must be decode or mixed")
