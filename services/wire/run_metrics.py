"""Training metrics in a run's folder: a line of metrics.jsonl, a sample of its rollouts, trainer_report.json,
evaluation.json and progress.json.

Written by the trainer and the environment runner; read by the trainer's /metrics, the live view, the summary,
`rollmesh runs`, `compare` and `samples`, and the benchmarks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

SKIPPED = "curriculum_skipped"
"""Recorded beside rewards: the share of a task's problems that its curriculum leaves out of the pass."""


@dataclass(frozen=True, kw_only=True)
class TaskOutcome:
    """What the environment of one task said of a batch."""

    groups: int
    trajectories: int
    reward: float
    success: float
    response_length: float
    skipped: float | None = None
    """Share of its problems that its curriculum leaves out; None without one."""


@dataclass(frozen=True, kw_only=True)
class BatchOutcome:
    """What the environments said of a batch."""

    groups: int
    trajectories: int
    reward: float
    success: float
    """Mean of the reward component `success`; of `reward > 0` where an environment has none."""
    response_length: float
    """Mean number of sampled tokens a trajectory."""
    response_lengths: dict[str, int]
    """How many trajectories sampled so many tokens, by bucket (`services.policies.length_stats`)."""
    lost_siblings: int
    """Trajectories that its groups are trained without: they expired, were aborted, or their agents failed."""
    mixed_segments: int
    """Segments in which a weight commit fell between two sampled tokens of one answer or of two turns."""
    first_opened_at: float
    """Unix seconds: when the first of its groups was opened."""
    reward_spread: float = 0.0
    """Standard deviation over trajectories."""
    components: dict[str, float] = field(default_factory=dict)
    """Mean of each reward component, over the trajectories that have it."""
    equal_groups: float = 0.0
    """Share of the groups in which all rewards are equal."""
    truncated: float = 0.0
    """Share of the trajectories that ended at the token limit."""
    entropy: float | None = None
    """Nats a token: the mean of −logprob over sampled tokens, as engines sampled them; None without one."""
    unknown_tokens: int = 0
    """Tokens of prompts that stand for text that the vocabulary has not."""
    unrendered_tools: int = 0
    """Trajectories that were offered tools that the chat template leaves out."""
    tasks: dict[str, TaskOutcome] = field(default_factory=dict)
    """Each task by itself."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Milliseconds. The first four are the training thread's, and make up nearly all of `step_ms`."""

    wait_ms: float
    """For a batch."""
    pack_ms: float
    train_ms: float
    publish_ms: float
    """Cast, hash, and waiting for an arena to be free."""
    step_ms: float
    stream_ms: float
    """Background: reading, decoding and settling entries since the line before."""
    http_ms: float
    """Background: what the trainer's last call to the weight bus took beyond the update itself."""
    commit_ms: float
    """From publish to commit at every engine, of the update that settled last; 0 where it was superseded."""
    stage_ms: float
    """Of the slowest engine, same update."""
    flip_ms: float


@dataclass(frozen=True, kw_only=True)
class DeviceUse:
    """Of the trainer's process and its device in one optimizer step."""

    memory_bytes: int = 0
    """On a GPU the most that tensors took in the step; on a CPU what the process holds behind it."""
    mfu: float | None = None
    """Share of the device's arithmetic that `train_ms` used (`services.policies.training.flops`); None where its peak is
    not known."""


@dataclass(frozen=True, kw_only=True)
class TokenStatistics:
    """Of one optimizer step. `gap` is |engine − trainer| of a sampled token's logprob, `ratio` π / π_behaviour.

    "Current" tokens were sampled by the policy that the step starts from (`trainer.data.staleness.Ages`): there the gap is
    purely numeric; over all tokens it also holds the distance that training has put between the policies. NaN is never
    written: a mean over no token is None.
    """

    loss: float | None
    """None, as `grad_norm`, on a line of a step where it was not finite."""
    grad_norm: float | None
    logprob_gap_mean: float | None
    logprob_gap_max: float | None
    gap_tokens: int
    """Current tokens that the gap was measured on: those of rows that were trained."""
    logprob_gap_mean_all: float | None
    logprob_gap_max_all: float | None
    ratio_mean: float | None
    ratio_max: float | None
    clip_fraction: float | None
    """Tokens of rows that were trained whose gradient a bound of the loss took away."""
    masked_by_correction: float | None
    """Tokens of rows that were trained which the correction's mask or veto left out."""
    correction_weight: float | None
    """Mean weight of the correction; None without one."""
    effective_samples: float | None
    """(Σ ratio)² / (n · Σ ratio²), 0 … 1: how evenly tokens count once weighed to the current policy (Kish 1965)."""
    kl: float | None
    """k3 estimate of KL(π_behaviour ‖ π) a token: r − 1 − log r (Schulman 2020, "Approximating KL divergence")."""
    teacher_kl: float | None = None
    """log π_behaviour − log π_teacher, the mean over tokens of rows that were trained; None without a teacher."""
    routing_replayed: float | None = None
    """Sampled tokens of rows that were trained for which the trainer chose the experts that the engine had chosen for the
    token before; None where it did for none."""
    figures: dict[str, float | None] = field(default_factory=dict)
    """Of a loss of the user's own, by its names: means over tokens of rows that were trained."""


@dataclass(frozen=True, kw_only=True)
class CreditStatistics:
    """Of one batch. None: not asked for."""

    kl_in_reward: float | None = None
    """Mean divergence from the run's first policy that the reward was lessened by, a token, before β."""
    cost_mean: float | None = None
    cost_price: float | None = None
    """The multiplier that this batch's costs were charged with."""
    left_out: int = 0
    """Trajectories that were only compared with: greedy baselines, and those that PF-PPO filtered."""


@dataclass(frozen=True, kw_only=True)
class ValueStatistics:
    """Of one step of the critic; None without a critic, or without a token."""

    value_loss: float | None = None
    value_explained: float | None = None
    """1 − var(return − value) / var(return), of values before the batch: 0 for a critic that knows nothing, 1 at best."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics(TokenStatistics, CreditStatistics, ValueStatistics, BatchOutcome, StepTimes, DeviceUse):
    """`step` counts from 1; `version` is the policy version that it made. It consumed tokens for `version − 1`.

    `epoch`: the pass over its batch, from 1; from the second on its trajectories are in the lines of the first, too.
    `packed_ahead`: its batch was packed while the one before it trained, so that `pack_ms` is nothing.

    Since the line before, `arrived` trajectories fit to be trained came of the stream, with `arrived_length` sampled tokens
    in the mean (0 where none came), and `dropped` ones will never be trained, by cause.

    `tokens`: fresh sampled tokens, the loss's denominator; `masked_tokens`: those over K. `rows_trained`: segments that
    gave a gradient. `update_version`, `update_state`: the weight update that settled last before this line. `commits`:
    updates that engines have committed so far, the first version not counted.
    """

    step: int
    version: int
    time: float
    """Unix seconds, at the end of the step."""
    rows_trained: int
    tokens: int
    tokens_per_s: float
    """Sampled tokens of the batch over the whole step, waiting included."""
    staleness_mean: float
    staleness_max: int
    staleness_histogram: dict[str, int]
    masked_tokens: int
    masked_fraction: float
    arrived: int
    arrived_length: float
    dropped: dict[str, int]
    learning_rate: float
    commits: int
    update_version: int | None
    update_state: str | None
    staleness_generation: float = 0.0
    """Of `staleness_mean`: while trajectories were still sampled. The three sum up to it."""
    staleness_queue: float = 0.0
    """From a trajectory's last token until the trainer took its batch."""
    staleness_training: float = 0.0
    """By the steps on the batch itself: minibatches and epochs before."""
    epoch: int = 1
    packed_ahead: bool = False
    warnings: dict[str, str] = field(default_factory=dict)
    """Signs that the run cannot learn (`services.policies.training.health`), by kind, in words."""


_lines = msgspec.json.Decoder(StepMetrics)


def decode_step_metrics(line: bytes) -> StepMetrics | None:
    """A line of metrics.jsonl; None for one that cannot be read.

    What was not finite is `null`, which older runs wrote also where a figure must be: no reader ends at such a line.
    """
    try:
        return _lines.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class LengthReport(msgspec.Struct, frozen=True):
    """A distribution of sampled tokens an episode; `buckets` are named by their least length."""

    episodes: int
    mean: float | None
    buckets: dict[str, int]


class TrainerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Times are Unix seconds, at the end of a step. Staleness is over tokens that entered a loss.

    `tokens_trained` counts a token in each epoch that it entered the loss in; trajectories and lengths are counted once.
    """

    run_id: str
    formula: str
    steps: int
    final_version: int
    first_group_opened_at: float | None
    first_step_at: float | None
    last_step_at: float | None
    tokens_trained: int
    trajectories_trained: int
    max_staleness: int
    mean_staleness: float
    masked_fraction: float
    logprob_gap_mean: float | None
    """Mean |engine − trainer| over tokens of the current version, weighed by tokens (`trainer.model.token_stats`)."""
    logprob_gap_max: float | None
    weights_digest_match: bool
    root_digest: str | None
    mixed_segments: int
    """Segments whose sampled tokens were sampled by more than one policy version."""
    commits: int
    """Weight updates that engines committed, the first version not counted."""
    reward_first: float | None
    reward_last: float | None
    success_first: float | None
    success_last: float | None
    length_first: float | None
    length_last: float | None
    lengths_generated: LengthReport
    """Of all sessions that were published or given up: what a session that expired had sampled by then counts."""
    lengths_trained: LengthReport
    length_distance: float | None
    """Between the two (`services.policies.length_stats.distance`): 0 where what is trained is what was sampled."""
    lost_siblings: int
    """Trajectories that groups were trained without."""
    dropped: dict[str, int]
    """Published trajectories that were never trained, by cause."""
    warnings: dict[str, int] = {}
    """Steps with a sign that the run cannot learn, by kind."""


class WorkProgress(msgspec.Struct, frozen=True, kw_only=True):
    """`progress.json`: how far the warm start, or an evaluation before or after training, is. `what`: which."""

    what: str
    done: int
    total: int


WARM_START, BEFORE, AFTER = "warm start", "evaluation before training", "evaluation after training"


class EvaluationBefore(msgspec.Struct, frozen=True):
    """What of `evaluation_before.json`, the environment's, others read. `solved`: right answers to each problem. `lost`:
    episodes that were lost, and why the first of them was."""

    solved: list[int] = []
    samples: int = 1
    """Answers to each problem."""
    lost: int = 0
    lost_why: str = ""
    different: int | None = None
    """Problems, those that ask the same counted once; None where that is not known."""


class TaskReport(msgspec.Struct, frozen=True):
    """Of `EvaluationReport`, one task's."""

    mean_length_before: float
    mean_length_after: float
    solved_before: list[int]
    solved_after: list[int]


class EvaluationReport(msgspec.Struct, frozen=True):
    """`evaluation.json`: held-out problems before and after training. Lengths in sampled tokens an episode."""

    success_before: float
    success_after: float
    mean_length_before: float
    mean_length_after: float
    problems: int
    solved_before: list[int] = []
    solved_after: list[int] = []
    """Right answers to each problem; empty in reports of before they were written down."""
    samples: int = 1
    """Answers to each problem."""
    different: int | None = None
    """Problems, those that ask the same counted once; None where that is not known."""
    tasks: dict[str, TaskReport] = {}
    """Of a run of several tasks, each by itself; all else is of all their problems together."""


class TaskSuccess(msgspec.Struct, frozen=True, kw_only=True):
    """Success on a task's held-out problems, within `low` and `high`."""

    problems: int
    success: float
    low: float
    high: float
    mean_length: float


class EvaluationPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Success on held-out problems, within `low` and `high`, of the versions served meanwhile. `at`: Unix seconds."""

    due: int
    first_version: int
    last_version: int
    at: float
    problems: int
    success: float
    low: float
    high: float
    mean_length: float
    tasks: dict[str, TaskSuccess] = {}
    """Of a run of several tasks, each by itself."""


class SampledSpan(msgspec.Struct, frozen=True):
    """Text that one policy version sampled."""

    version: int
    text: str


class SampledSegment(msgspec.Struct, frozen=True):
    """`text`: all of it, special tokens included. `spans`: the parts the policy sampled."""

    text: str
    spans: list[SampledSpan]
    break_reason: str | None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded rollout, as `rollmesh samples --json` prints it."""

    step: int
    group: str
    ordinal: int
    member: int
    task: str
    server: str
    reward: float
    versions: list[int]
    segments: list[SampledSegment]
    tokens: int | None = None
    """Sampled ones; None in old files of before they were written down."""
    components: dict[str, float] = {}
    """Recorded beside the reward."""
