"""Settings of the reward service: the components of the reward, and the limits of each."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from services.config.base import Section

ComponentName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_-]{0,63}$")]
FunctionName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]
VerifierName = Literal["math", "choice", "json-schema", "tags", "code"]
_OF_FUNCTIONS = ("workers", "time_limit_s", "memory_mib", "network", "processes", "readable", "options")


class ModelScoring(Section):
    """A reward model behind an HTTP server that speaks vLLM's pooling API."""

    url: str = Field(pattern=r"^https?://", description="The server; /score or /classify is added")
    api: Literal["score", "classify"] = Field(
        default="score", description="score: pairs of prompt and answer; classify: one text of both"
    )
    model: str | None = Field(default=None, description="The model's name there; empty: its only one")
    text: str = Field(default="{prompt}{answer}", description="classify: how prompt and answer become one text")
    class_index: int = Field(default=0, ge=0, description="classify: the class whose value is the reward")
    activation: bool = Field(default=True, description="Whether the model's sigmoid or softmax is applied")
    key_file: Path | None = Field(default=None, description="The key that the server asks for")
    max_batch: int = Field(default=32, ge=1, le=4096, description="Samples a call")
    linger_ms: float = Field(default=5.0, ge=0.0, description="How long a sample waits for others to fill its batch")
    at_once: int = Field(default=4, ge=1, description="Calls in flight")

    @model_validator(mode="after")
    def _takes_both(self) -> ModelScoring:
        try:
            said = self.text.format(prompt="\x00", answer="\x01")
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            raise ValueError(f"text {self.text!r} names something else than {{prompt}} and {{answer}}") from error
        if "\x01" not in said:
            raise ValueError(f"text {self.text!r} leaves {{answer}} out")
        return self


class RewardComponent(Section):
    """One named part of the reward: a verifier of ours, a function of yours, or a reward model."""

    name: ComponentName
    weight: Finite = 1.0
    substitute: Finite | None = Field(
        default=None, description="Recorded instead where the component fails; empty: the reward fails with it"
    )
    deadline_s: float = Field(default=30.0, gt=0.0, description="Longest time a sample may take, waiting included")
    tasks: list[str] = Field(default=[], description="Names of the tasks that it judges; empty: all")
    clip: tuple[Finite, Finite] | None = Field(
        default=None, description="Least and largest value that counts; what is recorded is not clipped"
    )
    verifier: VerifierName | None = Field(default=None, description="One of `services.rewards.verifiers`")
    function: FunctionName | None = Field(default=None, description="module:function")
    model: ModelScoring | None = None
    options: dict[str, str | bool | int | Finite] = Field(
        default={}, description="verifier, function: parameters that a sample's metadata does not say"
    )
    workers: int = Field(default=1, ge=1, le=256, description="function: calls at once")
    time_limit_s: float = Field(default=5.0, gt=0.0, description="function: longest time a call may run")
    memory_mib: int = Field(default=1024, ge=64, description="function: address space of a call")
    network: bool = Field(default=False, description="function: it may open connections")
    processes: bool = Field(default=False, description="function: it may start processes, which end with its call")
    readable: list[Path] = Field(default=[], description="function: files and folders that a call may read, too")

    @model_validator(mode="after")
    def _one_kind(self) -> RewardComponent:
        if sum(each is not None for each in (self.verifier, self.function, self.model)) != 1:
            raise ValueError(f"component {self.name!r} needs exactly one of verifier, function and model")
        if self.clip is not None and self.clip[0] > self.clip[1]:
            raise ValueError(f"component {self.name!r}: clip = [{self.clip[0]:g}, {self.clip[1]:g}] holds no value")
        fields = type(self).model_fields
        idle = [name for name in _OF_FUNCTIONS if getattr(self, name) != fields[name].default]
        if self.model is not None and idle:
            raise ValueError(f"component {self.name!r} is a model: {', '.join(idle)} would have no effect")
        return self

    @property
    def called(self) -> str:
        """`module:function` of a verifier or a function."""
        if self.verifier is not None:
            return f"services.rewards.verifiers.{self.verifier.replace('-', '_')}:judge"
        assert self.function is not None
        return self.function

    @property
    def starts_processes(self) -> bool:
        """Whether its calls may start processes: code is run in one."""
        return self.processes or self.verifier == "code"


class RewardSettings(Section):
    """`rollmesh rewards`."""

    enabled: bool = Field(default=False, description="Whether `rollmesh up` starts the service")
    combine: Literal["sum", "product"] = Field(default="sum", description="Σ weight·component, or Π component^weight")
    components: list[RewardComponent] = Field(default=[], description="`[[rewards.components]]`, one each")
    not_confined: Literal["refuse", "warn"] = Field(
        default="refuse", description="What happens where this machine cannot enforce all limits of a function"
    )
    max_waiting: int = Field(default=1024, ge=1, description="Samples that may wait for a component")
    max_body_mib: int = Field(default=8, ge=1, description="Largest request body")

    @model_validator(mode="after")
    def _fits_together(self) -> RewardSettings:
        twice = [name for name, count in Counter(each.name for each in self.components).items() if count > 1]
        if twice:
            raise ValueError(f"two components are named {twice[0]!r}")
        if self.enabled and not self.components:
            raise ValueError("enabled without a component: add a section [[rewards.components]]")
        if self.combine == "product" and any(each.weight <= 0.0 for each in self.components):
            raise ValueError("combine = product takes weights above 0: they are exponents")
        return self
