"""HTTP bodies of the rollout API that a rollout server offers to environments.

One group is one life: `POST /groups` opens it and its sessions, `POST /groups/{id}/turns` lets the policy speak in any
of its sessions (all of them in one call, so that a group costs three calls and not three a session), and
`POST /groups/{id}/finish` writes its trajectories, with rewards, to the stream exactly once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

NO_OTHER_FIELDS = ConfigDict(extra="forbid")


class Body(BaseModel):
    """A request or response body. Unknown fields are refused: a misspelt one must not be silently ignored."""

    model_config = NO_OTHER_FIELDS


Purpose = Literal["train", "evaluate"]
"""`evaluate` passes no admission and is never published."""
TokenId = Annotated[int, Field(ge=0, lt=1 << 31), msgspec.Meta(ge=0, lt=1 << 31)]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
RunnerId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}/[A-Za-z0-9]{8,64}$")]
"""An environment runner: `name/incarnation` (`Runner` below)."""


class SamplingBody(Body):
    """`services.wire.sampling.SamplingParams` as a body."""

    max_tokens: int = Field(ge=1, le=1 << 20)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=-1, ge=-1, lt=1 << 31)
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100.0)
    min_tokens: int = Field(default=0, ge=0, le=1 << 20)
    seed: Seed | None = None
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=256)
    ignore_eos: bool = False


class SamplingFields(BaseModel):
    """How tokens are sampled, as far as somebody decides it: None leaves it to others. Names and meanings are vLLM's."""

    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=-1, lt=1 << 31)
    min_p: float | None = Field(default=None, ge=0.0, le=1.0)
    presence_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    frequency_penalty: float | None = Field(default=None, ge=-2.0, le=2.0)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=100.0)
    min_tokens: int | None = Field(default=None, ge=0, le=1 << 20)
    seed: Seed | None = None
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=256)
    ignore_eos: bool | None = None


class SamplingLimits(SamplingFields, Body):
    """The sampling of a session where its opener decides it: what is None is left to the calls."""

    max_tokens: int | None = Field(default=None, ge=1, le=1 << 20)


TURN_LEAST_S = 120.0
"""For a client to wait for a turn, where its answers are short; above it the server is taken for lost."""
LARGEST_MIXTURE = 1000
"""Parts of all tasks together: in so many groups they stand in exact proportion."""


class MixedTask(Body):
    """One of the tasks of a mixture. `parts`: of the mixture's groups, so many of all parts are of this task."""

    task: str = Field(min_length=1, max_length=200)
    parts: int = Field(ge=1, le=LARGEST_MIXTURE)
    sampling: SamplingBody


class Mixture(Body):
    """Several tasks. Which one a group plays follows from `seed` and its ordinal (`services.policies.training.mixture`)."""

    seed: int = Field(ge=0, lt=1 << 63)
    tasks: list[MixedTask] = Field(min_length=1, max_length=100)

    @property
    def parts(self) -> tuple[int, ...]:
        return tuple(each.parts for each in self.tasks)

    @model_validator(mode="after")
    def _not_too_many(self) -> Mixture:
        if sum(self.parts) > LARGEST_MIXTURE:
            raise ValueError(f"the tasks have {sum(self.parts)} parts together, {LARGEST_MIXTURE} is the most")
        return self


class OpenGroup(Body):
    """Open a group of `group_size` sessions: of a task, or of one of a mixture's."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"oneOf": [{"required": ["task", "sampling"]}, {"required": ["mixture"]}]}
    )

    task: str | None = Field(default=None, min_length=1, max_length=200)
    group_size: int = Field(ge=1, le=1024)
    sampling: SamplingBody | None = None
    mixture: Mixture | None = None
    """In place of `task` and `sampling`, for `train` alone."""
    purpose: Purpose = "train"
    wait_s: float = Field(default=0.0, ge=0.0, le=60.0)
    """How long the server may hold the call until admission opens, before it answers 429."""
    greedy_baseline: bool = False
    """The first session is sampled greedily, whatever its calls say: the baseline that the others are compared with."""
    runner: RunnerId | None = None
    """Who plays it: the group is given up when this runner's lease ends. Left out: it lasts for its idle time."""

    @model_validator(mode="after")
    def _one_task(self) -> OpenGroup:
        if self.mixture is None and (self.task is None or self.sampling is None):
            raise ValueError("give task and sampling, or a mixture")
        if self.mixture is not None and (self.task is not None or self.sampling is not None):
            raise ValueError("give either task and sampling, or a mixture")
        if self.mixture is not None and self.purpose != "train":
            raise ValueError("a mixture is drawn from by ordinal, which groups of evaluations have not")
        return self


# What is asked of a group beyond its opening is a struct, what is answered a dataclass: there is one of each for every
# turn, and to read, make and write a model of pydantic costs ten times as much.


@dataclass(slots=True, kw_only=True)
class GroupOpened:
    group_id: str
    ordinal: int
    """For `train`: place in the run's order of opening, from 0. For `evaluate`: −1."""
    session_ids: list[str]
    api_keys: list[str]
    """Each session's own key: with it an OpenAI client speaks in that session (`/sessions/{id}/v1`)."""
    policy_version: int
    turn_within_s: float = TURN_LEAST_S
    """How long a client waits for a turn at the most: longer where an answer may have more tokens."""


class PlainBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request body that msgspec reads. Unknown fields are refused, as in a `Body`."""


class Turn(PlainBody):
    """Extend one session by `text` (encoded without special tokens) or `token_ids`, then let the policy speak.

    Raises ValueError unless exactly one of them is given.
    """

    session_id: str
    text: str | None = None
    token_ids: list[TokenId] | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.token_ids is None):
            raise ValueError("give exactly one of text and token_ids")


class TakeTurns(PlainBody):
    turns: Annotated[list[Turn], msgspec.Meta(min_length=1)]
    sampling: SamplingBody | None = None
    """Overrides the group's sampling for these turns."""
    return_token_ids: bool = False


@dataclass(slots=True, kw_only=True)
class TurnTaken:
    session_id: str
    text: str
    """The sampled tokens decoded, special tokens left out."""
    token_ids: list[int] | None = None
    finish_reason: Literal["stop", "length", "abort"]
    policy_version: int
    """The newest version among the turn's tokens."""


@dataclass(slots=True, kw_only=True)
class TurnsTaken:
    results: list[TurnTaken]


class SessionReward(PlainBody):
    """Raises ValueError for a reward, or a component, that is no finite number."""

    session_id: str
    reward: float
    components: dict[str, float] = {}

    def __post_init__(self) -> None:
        if not (math.isfinite(self.reward) and all(map(math.isfinite, self.components.values()))):
            raise ValueError(f"the reward of session {self.session_id}, or a component, is no finite number")


class FinishGroup(PlainBody):
    rewards: list[SessionReward]


@dataclass(slots=True, kw_only=True)
class GroupFinished:
    stream_ids: dict[str, str]
    """Session id → id of its entry in the trajectory stream. Empty for `evaluate` groups."""


class RunState(Body):
    """`GET /run`: what an environment runner needs to know of the run."""

    run_id: str
    policy_version: int
    concluded: bool
    final_version: int | None
    """Set once the run has concluded: the version whose weights the trainer ended with."""


class EngineReport(Body):
    """`GET /engine`: a moment's view of a server's engine. Milliseconds where the name says so."""

    server_id: str
    name: str
    """The engine: `torch` or `vllm`."""
    policy_version: int
    running: int
    waiting: int
    paused: bool
    tokens_generated: int
    prefill_tokens: int
    """Tokens whose keys and values were computed other than by generating them; those of cached prefixes not counted."""
    commits: int
    stalls_ms: list[float]
    """For each commit of which enough was seen: the longest gap between tokens around it less the median one."""
    open_groups: int
    admission_waiting: int
    """Groups that wait for admission at this server."""
    http_cpu_s: float
    """CPU seconds of the thread that answers HTTP, since the server was ready."""
    kv_use: float | None = None
    """Share of the memory for keys and values that running requests hold; None where the engine does not tell."""


class ErrorDetail(BaseModel):
    """OpenAI's fields, so that its clients understand every service's errors."""

    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str


class ErrorBody(BaseModel):
    """Every error answer of every service."""

    error: ErrorDetail


# Leases of environment runners: who plays the groups that name a runner, and whether it lives.
#
#     POST /runners ──► POST /runners/heartbeat, several times a lease ──► POST /runners/leave
#
# A runner has a name, unique in the run, and an incarnation, new in each process. Its groups are given up when it leaves,
# when it falls silent for a lease, and when another incarnation joins under its name.


class Runner(Body):
    """What each call says: who it is from."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    incarnation: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9]{8,64}$")]

    @property
    def runner_id(self) -> str:
        """How groups name it."""
        return f"{self.name}/{self.incarnation}"


class RunnerLease(Body):
    """The answer to joining and to heartbeats."""

    lease_s: float
    """Seconds for which the runner may be silent."""


# Evaluations beside training. Whoever plays a run's task measures the policy and tells the run, at any of its servers.


class TaskAnswers(Body):
    """Of `EvaluationAnswers`, one task's."""

    task: str = Field(min_length=1, max_length=200)
    solved: list[Annotated[int, Field(ge=0)]] = Field(min_length=1, max_length=1_000_000)
    mean_length: float = Field(ge=0.0)


LONGEST_WHY = 500
"""Characters of a reason."""
MOST_NAMES = 64
"""Of components in an evaluation."""


LONGEST_SHOWN = 2000
"""Characters of a text that is shown of an evaluation."""


class ShownAnswer(Body):
    """The last turn of a held-out episode: texts, their first LONGEST_SHOWN characters.

    `between`: an agent's calls of tools since it was asked, and what they gave."""

    asked: str = Field(max_length=LONGEST_SHOWN)
    answer: str = Field(max_length=LONGEST_SHOWN)
    between: str = Field(default="", max_length=LONGEST_SHOWN)
    reward: float
    success: bool


class CommonestAnswer(Body):
    """The last answer of an episode that most episodes have. A policy that gives it to nearly all problems solves as many
    as that answer is right for."""

    answer: str = Field(max_length=LONGEST_SHOWN)
    share: float = Field(ge=0.0, le=1.0)
    """Of the episodes."""
    different: int = Field(ge=1)
    """How many different answers there were."""


class EvaluationAnswers(Body):
    """Held-out problems, answered by one version, or by those that were served meanwhile. Lengths in sampled tokens."""

    due: int = Field(ge=0)
    """The version that it was to be of."""
    first_version: int = Field(ge=0)
    last_version: int = Field(ge=0)
    """What servers served from its first call to its last answer. One version answered all where both are the same."""
    task: str = Field(min_length=1, max_length=200)
    samples: int = Field(default=1, ge=1, le=1024)
    """Answers to each problem."""
    solved: list[Annotated[int, Field(ge=0)]] = Field(min_length=1, max_length=1_000_000)
    """For each problem, how many of them were right."""
    temperature: float = Field(ge=0.0, le=2.0)
    mean_length: float = Field(ge=0.0)
    seconds: float = Field(ge=0.0)
    at: float
    """Unix seconds, at its end."""
    cut_off: int | None = Field(default=None, ge=0)
    """Episodes whose last answer ended at the limit of tokens; None where that is not known of all."""
    equal_rewards: int | None = Field(default=None, ge=0)
    """Problems whose answers all got the same reward; None with one answer a problem."""
    lost: int = Field(default=0, ge=0)
    """Episodes that were lost, and count as not solved."""
    lost_why: str = Field(default="", max_length=LONGEST_WHY)
    """Of the first of them."""
    different: int | None = Field(default=None, ge=1)
    """Problems, those that ask the same counted once; None where that is not known."""
    mean_reward: float | None = None
    """Of an episode."""
    components: dict[str, Annotated[float, Field(allow_inf_nan=False)]] = Field(
        default_factory=dict, max_length=MOST_NAMES
    )
    """Mean of each that answers had beside their reward, over the answers that had it."""
    commonest: CommonestAnswer | None = None
    """None where answers are no texts, and of several tasks."""
    shown: list[ShownAnswer] = Field(default_factory=list, max_length=100)
    """Answers to some of the problems, where nothing is trained and the environment asks in texts."""
    tasks: list[TaskAnswers] = Field(default_factory=list, max_length=100)
    """Where several were played, each by itself; `solved` has all of their problems, in this order."""

    @model_validator(mode="after")
    def _all_of_all_tasks(self) -> EvaluationAnswers:
        if self.tasks and [right for each in self.tasks for right in each.solved] != self.solved:
            raise ValueError("solved is not what the tasks say, one behind the other")
        return self

    @model_validator(mode="after")
    def _no_more_than_all(self) -> EvaluationAnswers:
        if max(self.solved) > self.samples:
            raise ValueError(f"a problem with {max(self.solved)} right answers of {self.samples}")
        return self


class TaskEvaluation(Body):
    """Of `Evaluation`, one task's."""

    problems: int
    success: float
    low: float
    high: float
    pass_at: dict[int, float]
    mean_length: float


class Evaluation(Body):
    """What was found, of `EvaluationAnswers`. `success`: pass@1, which lies between `low` and `high` at 95 %."""

    due: int
    first_version: int
    last_version: int
    task: str
    problems: int
    samples: int
    temperature: float
    success: float
    low: float
    high: float
    pass_at: dict[int, float]
    """k → share of problems that k answers solve."""
    mean_length: float
    cut_off: int | None = None
    equal_rewards: int | None = None
    lost: int = 0
    lost_why: str = ""
    different: int | None = None
    mean_reward: float | None = None
    components: dict[str, float] = Field(default_factory=dict)
    commonest: CommonestAnswer | None = None
    shown: list[ShownAnswer] = Field(default_factory=list)
    seconds: float
    at: float
    tasks: dict[str, TaskEvaluation] = Field(default_factory=dict)
    """Where several were played, each by itself; all else is of all their problems together."""


class Evaluations(Body):
    """`GET /evaluations`: those of the run, in the order of their versions."""

    evaluations: list[Evaluation]
