"""The configuration tree: one typed place for every setting of a run.

A run's configuration is a TOML file of these names plus dotted overrides (`trainer.learning_rate=1e-4`); the resolved
tree is written to the run folder as `config.toml` and handed to every process of the mesh.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from services.config.base import Section
from services.config.engines.placement import PlacementSettings
from services.config.engines.vllm import VllmSettings
from services.config.rewards import RewardSettings
from services.config.samples import SampleSettings
from services.config.tasks import CurriculumSettings, TaskList, TaskSettings, TaskText
from services.config.traces import TraceSettings
from services.config.tracking import TrackingSettings
from services.config.training.algorithm import AdvantageSettings, LossSettings
from services.config.training.lora import LoraSettings
from services.config.training.optimizer import OptimizerSettings, ScheduleSettings
from services.config.training.parallel import ParallelSettings
from services.config.training.teacher import TeacherSettings
from services.config.transports import NcclSettings, NixlSettings
from services.policies.admission import LOOKAHEAD, AdmissionRules
from services.policies.training.batch_shape import BatchShape
from services.policies.training.threads import threads_left
from services.wire.sampling import KvPolicy
from services.wire.weights_api import FleetPolicyName

EngineName = Literal["auto", "torch", "vllm"]
ShadowPlace = Literal["device", "pinned", "sparse"]
PackedWeights = Literal["auto", "alone", "beside", "off"]
TransportName = Literal["auto", "nixl", "shm", "nccl", "file"]


def _byte_bound(value: object) -> object:
    if value in ("auto", "off") or (isinstance(value, int) and value >= 1 << 20):
        return value
    raise ValueError("write auto, off, or bytes (1048576 at the least)")


ByteBound = Annotated[int | Literal["auto", "off"], BeforeValidator(_byte_bound)]


class ModelSettings(Section):
    path: Path | None = Field(
        default=None,
        description="Hugging Face folder, or a name (`rollmesh models`); empty: a tiny model is warm-started",
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Serving dtype")
    wait_timeout_s: float = Field(
        default=3600.0,
        gt=0.0,
        description="How long engines and trainer wait for a folder that is still being made: a warm start, a copy",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run code that a model folder carries (`auto_map`), in trainer and engines"
    )


class WarmStartSettings(Section):
    """Supervised warm start of the tiny model (`rollmesh sft`)."""

    cache_dir: Path | None = Field(
        default=None, description="Where warm starts are kept; empty: the user's cache folder"
    )
    threads: int = Field(default=1, ge=1, description="Torch threads; more do not help a model this small")


class RolloutSettings(Section):
    groups_per_step: int = Field(default=16, ge=1, description="`batch`: groups that one optimizer step consumes")
    group_size: int = Field(default=8, ge=2, description="Answers to each prompt")
    min_group_size: int = Field(
        default=2, ge=2, description="A group that lost siblings is trained with those that finished, if so many did"
    )
    temperature: float = Field(default=1.0, ge=0.01, le=2.0, description="What calls may ask for, but 0")
    max_tokens: int = Field(default=24, ge=1, description="Longest answer, in tokens, a turn")
    lookahead: int = Field(
        default=LOOKAHEAD, ge=1, description="How far the run may pass its oldest open group, in (k + 1) · batch groups"
    )
    group_timeout_s: float = Field(default=120.0, gt=0.0, description="A group idle for longer is dropped")
    runner_lease_s: float = Field(
        default=10.0, ge=1.0, description="The groups of an environment runner that is silent for longer are given up"
    )
    episode_timeout_s: float = Field(default=600.0, gt=0.0, description="Longest time an episode may take")
    threads: int = Field(default=1, ge=1, description="Torch threads of an engine on CPU")
    tensor_parallel: int = Field(
        default=1, ge=1, description="Ranks that engine vllm splits the model over, a GPU (or a process on CPU) each"
    )
    start_timeout_s: float = Field(
        default=1800.0, gt=0.0, description="How long an engine may take to start: to load its model, to compile it"
    )
    max_running: int = Field(default=256, ge=1, description="Requests an engine decodes at once")
    kv_policy: KvPolicy = Field(
        default="salt", description="What a weight update does to an engine's keys and values (docs/the-loop.md)"
    )
    renderer: str = Field(default="auto", description="Chat renderer, by its name in the `renderers` library")
    tool_parser: Literal["auto", "hermes", "xml"] = Field(
        default="auto", description="How tool calls are read where the vocabulary has no tokens for their tags"
    )
    unrendered_tools: Literal["refuse", "warn"] = Field(
        default="refuse", description="What becomes of a call whose tools the chat template does not render"
    )
    retry_patience_s: float = Field(
        default=5.0, ge=0.0, description="How long an answer goes on after its client hung up, for a retry to join it"
    )
    draft_every_tokens: int = Field(
        default=128, ge=1, description="A long answer is written down after so many tokens, for another server to go on"
    )
    max_body_mib: int = Field(default=32, ge=1, description="Largest request body")
    sampling_masks: bool = Field(
        default=True,
        description="Which tokens top_p, top_k and min_p left is kept with each answer, so that it can be trained",
    )
    routing_replay: bool = Field(
        default=False,
        description="Which experts a mixture chose for each token is kept with each answer; the trainer chooses the same",
    )
    blob_mib: int = Field(
        default=64, ge=1, le=500, description="Most that is kept of an engine's choices beside a trajectory"
    )
    vllm: VllmSettings = VllmSettings()


class GatewaySettings(Section):
    """The one address in front of the rollout servers (`rollmesh gateway`)."""

    enabled: Literal["auto", "always", "never"] = Field(
        default="auto", description="Whether `rollmesh up` starts one; auto: in front of more than one server"
    )
    poll_s: float = Field(default=0.25, gt=0.0, le=5.0, description="How often it looks which servers are alive")
    failover_timeout_s: float = Field(
        default=60.0, gt=0.0, description="How long a call that no server takes is sent again before it fails"
    )
    prefix_slack: int = Field(
        default=8, ge=0, description="Calls above its share that a server may hold and still get those of its prefixes"
    )
    remembered: int = Field(
        default=200_000, ge=1, description="Sessions, groups and prefixes of which it remembers the server"
    )
    shutdown_s: int = Field(default=30, ge=0, description="How long it answers what is in flight once told to end")


class DashboardSettings(Section):
    """The page that shows a run (`rollmesh dashboard`)."""

    enabled: bool = Field(
        default=True, description="Whether `rollmesh up` and `serve` offer one; it starts when it is opened"
    )
    port: int = Field(
        default=0, ge=0, le=65535, description="Where it listens on this machine; 0: any port that is free"
    )


class LearnerSettings(Section):
    """What any training of a model reads: by trajectories, or by examples (`rollmesh sft`)."""

    learning_rate: float = Field(default=5e-4, gt=0.0)
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = Field(default=0.0, ge=0.0)
    warmup_steps: int = Field(default=5, ge=0)
    clip_grad_norm: float = Field(default=1.0, gt=0.0)
    micro_batch_tokens: int = Field(
        default=4096, ge=1, description="Tokens of a forward/backward pass; a longer row has one for itself"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Of forward and backward passes; auto: bfloat16 on a GPU that has it, else float32. Weights and sums "
        "are float32",
    )
    activation_checkpointing: Literal["none", "selective", "full"] = Field(
        default="none",
        description="Layers that keep their input alone and are computed once more in the backward pass: none, every "
        "second, all",
    )
    activation_offload: bool = Field(
        default=False, description="On a GPU, what checkpointed layers keep is held in the host's memory"
    )
    compile: bool = Field(
        default=False, description="Layers are compiled by torch.compile; bytes are others than without"
    )
    tf32: bool = Field(default=False, description="On a GPU, products of float32 with 10 bits of mantissa")
    optimizer: OptimizerSettings = OptimizerSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    lora: LoraSettings = LoraSettings()
    threads: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="Torch threads on a CPU; auto: one for a tiny policy, else what engines leave",
    )
    deterministic: bool = Field(
        default=False,
        description="Kernels that repeat a step byte for byte; a restart that comes to other bytes than were announced is "
        "an error, in place of going on under another version",
    )

    @property
    def thread_count(self) -> int:
        """Raises ValueError while `threads` is auto (`RunSettings.with_threads`)."""
        if self.threads == "auto":
            raise ValueError("trainer.threads is not resolved yet")
        return self.threads


class TrainerSettings(LearnerSettings):
    offload_idle: bool = Field(
        default=False,
        description="On a GPU, weights of reference and critic are in the host's memory while they are not used",
    )
    parallel: ParallelSettings = ParallelSettings()
    loss: LossSettings = LossSettings()
    advantage: AdvantageSettings = AdvantageSettings()
    teacher: TeacherSettings = TeacherSettings()
    checkpoint_every: int = Field(default=20, ge=1, description="Optimizer steps between checkpoints")
    minibatches_per_batch: int = Field(
        default=1, ge=1, description="Parts of a batch, an optimizer step each; only the last is published"
    )
    epochs_per_batch: int = Field(
        default=1, ge=1, description="How often a batch's minibatches are trained on, in turn"
    )
    batch_timeout_s: float = Field(
        default=120.0,
        gt=0.0,
        description="Longest wait for a batch before the run fails, where no wait before took more than a quarter of it",
    )
    stop_timeout_s: float = Field(
        default=60.0,
        gt=0.0,
        description="How long `rollmesh up` lets a trainer end its step and write a checkpoint, besides what both take by "
        "the steps so far and the checkpoint's bytes",
    )
    on_anomaly: Literal["stop", "skip"] = Field(
        default="stop",
        description="A step whose loss or gradient is not finite is not made; stop: the run ends; skip: it goes on without "
        "the batch",
    )

    @property
    def shape(self) -> BatchShape:
        """How a batch becomes optimizer steps."""
        return BatchShape(self.minibatches_per_batch, self.epochs_per_batch)

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps of a batch: minibatches times epochs."""
        return self.shape.updates


class WeightSettings(Section):
    policy: FleetPolicyName = Field(
        default="barrier",
        description="When engines flip to a new version: all together, a share of them first, or one after the other",
    )
    quorum: float = Field(default=0.5, gt=0.0, le=1.0, description="Share of the live engines, for policy quorum")
    rolling_at_once: int = Field(default=1, ge=1, description="Engines that flip at the same time, for policy rolling")
    transport: TransportName = Field(
        default="auto",
        description="auto: nixl where it is installed, else shm; nccl: broadcast (gloo without a GPU); file: snapshots",
    )
    publish: Literal["merged", "adapter"] = Field(
        default="merged",
        description="With trainer.lora: merged: engines get a model's weights, adapters merged; adapter: A and B alone, "
        "which they apply to the model folder's weights",
    )
    broadcast_host: str = Field(
        default="127.0.0.1",
        description="For transport nccl: the trainer's address that broadcasts are offered at; one that is not loopback "
        "needs a weights key",
    )
    nixl: NixlSettings = NixlSettings()
    nccl: NcclSettings = NcclSettings()
    file_root: Path | None = Field(
        default=None, description="Folder of snapshots; the only one that engines read weight files from"
    )
    file_keep: int = Field(default=2, ge=1, description="Snapshots kept, for transport file")
    bucket_mib: int = Field(default=16, ge=1, le=1024)
    delta: Literal["auto", "off"] = Field(
        default="auto", description="auto: sparse changes are offered as a delta beside the dense bytes (nixl, shm)"
    )
    delta_max_ratio: float = Field(
        default=0.25, gt=0.0, le=1.0, description="Largest share of the dense bytes that a delta may take"
    )
    arenas: int = Field(
        default=2,
        ge=1,
        le=2,
        description="Versions that the trainer's ranks hold their part of for engines to read; 1: half the memory, a step "
        "waits until the version before has settled, and there are no deltas",
    )
    stage_timeout_s: float = Field(
        default=30.0, gt=0.0, description="How long an engine may take to read a version, at the least: 10 s a GB"
    )
    shadow: ShadowPlace = Field(
        default="device",
        description="Where engine vllm stages a version: device: a second set of weights there; pinned: in the host's "
        "memory; sparse: likewise, and of a version that changed few words those alone are copied",
    )
    packed: PackedWeights = Field(
        default="auto",
        description="How engine vllm holds the matrices that it multiplies by on a CPU: alone: packed alone, least memory; "
        "beside: packed copies beside them, two sets more, a little faster; off: not packed, slowest; auto: alone from "
        "32 MiB on",
    )

    @model_validator(mode="after")
    def _has_a_base(self) -> WeightSettings:
        if self.arenas == 1 and self.delta != "off":
            raise ValueError(
                "weights.arenas=1 keeps no version that a delta could be to: set weights.delta=off with it"
            )
        return self


class RunStoreSettings(Section):
    """Redis, which holds a run's state between its processes."""

    max_bytes: ByteBound = Field(
        default="auto",
        description="Bytes that Redis may hold, of all runs, before no group is admitted; auto: 60 % of its maxmemory",
    )


class TelemetrySettings(TraceSettings):
    """Where traces go, and the address of the trainer's probes and `/metrics`."""

    trainer_host: str = Field(default="127.0.0.1", description="Address that the trainer's probes listen on (loopback)")
    trainer_port: int = Field(
        default=0, ge=0, le=65535, description="Their port; 0: a free one, `rollmesh status` says it"
    )


class EvaluationSettings(Section):
    """Held-out problems, answered before and after training, and beside it every so many versions."""

    problems: int = Field(default=256, ge=1, description="Held-out problems")
    temperature: float = Field(default=0.0, ge=0.0, le=2.0, description="Of those answers; 0: greedily")
    samples: int = Field(default=1, ge=1, le=64, description="Answers to each problem, for pass@k")
    every: int = Field(
        default=0, ge=0, description="Policy versions between evaluations beside training; 0: before and after alone"
    )
    stop_at: float | None = Field(
        default=None, gt=0.0, le=1.0, description="The run ends once an evaluation beside training finds this success"
    )
    keep_best: bool = Field(
        default=True, description="The checkpoint of the best evaluation is kept, whatever comes after it"
    )

    @model_validator(mode="after")
    def _reachable(self) -> EvaluationSettings:
        if self.stop_at is not None and not self.every:
            raise ValueError("evaluation.stop_at needs evaluation.every: nothing would measure it")
        if self.samples > 1 and self.temperature == 0.0:
            raise ValueError("several greedy answers are all the same: give evaluation.temperature with samples")
        return self


class RunSettings(Section):
    seed: int = Field(default=1, ge=0)
    task: TaskText = Field(default="running-sums", description="A name as `services.wire.tasks.name` describes it")
    tasks: TaskList = Field(default=[], description="Several tasks in place of `task`: `[[tasks]]`, one section each")
    engine: EngineName = "auto"
    servers: int = Field(default=1, ge=1, le=64)
    steps: int = Field(default=60, ge=1)
    k: int = Field(default=2, ge=0, description="Largest staleness, in optimizer steps, of a token in the loss")
    run_dir: Path | None = Field(default=None, description="Run folder; empty: runs/<task>-<time>")
    redis_url: str | None = Field(default=None, description="Empty: an embedded Valkey")
    notify: str | None = Field(
        default=None,
        description="Command that `rollmesh up` runs when the run has ended, well or not (docs/the-loop.md)",
    )
    run_store: RunStoreSettings = RunStoreSettings()
    placement: PlacementSettings = PlacementSettings()
    model: ModelSettings = ModelSettings()
    warm_start: WarmStartSettings = WarmStartSettings()
    curriculum: CurriculumSettings = CurriculumSettings()
    rollout: RolloutSettings = RolloutSettings()
    gateway: GatewaySettings = GatewaySettings()
    dashboard: DashboardSettings = DashboardSettings()
    rewards: RewardSettings = RewardSettings()
    trainer: TrainerSettings = TrainerSettings()
    weights: WeightSettings = WeightSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    tracking: TrackingSettings = TrackingSettings()
    samples: SampleSettings = SampleSettings()

    @property
    def played(self) -> list[TaskSettings]:
        """The tasks of the run, in order."""
        return self.tasks or [TaskSettings(task=self.task)]

    @property
    def task_in_words(self) -> str:
        """What is played, for people: names of several with their shares."""
        if not self.tasks:
            return self.task
        whole = sum(each.weight for each in self.tasks)
        return ", ".join(f"{each.called or each.task} ({each.weight / whole:.0%})" for each in self.tasks)

    def with_threads(self, cores: int, *, tiny: bool) -> RunSettings:
        """With a number in place of `trainer.threads = auto`, of each rank, on a machine of so many cores. `tiny`: the
        policy."""
        if self.trainer.threads != "auto":
            return self
        beside = self.servers * self.rollout.threads
        threads = max(1, threads_left(cores, beside, tiny=tiny) // self.trainer.parallel.least_ranks)
        return self.model_copy(update={"trainer": self.trainer.model_copy(update={"threads": threads})})

    def admission_rules(self, base_version: int) -> AdmissionRules:
        """What groups are admitted by, in a run that began at `base_version`."""
        rollout = self.rollout
        return AdmissionRules(
            base_version=base_version,
            k=self.k,
            batch=rollout.groups_per_step,
            lookahead=rollout.lookahead,
            shape=self.trainer.shape,
        )
