"""Metric catalogue: name, kind, help, labels and buckets of every Prometheus metric, declared here and nowhere else.

A name is `rollmesh_<room>_<what>_<unit>`, counters with `_total` after it. Units are SI's base units (`seconds`, `bytes`),
a counted thing in the plural (`tokens`, `groups`), `ratio` (0 … 1) or `version`; `info` is always 1 and has labels.
Dashboards, alerts, docs and tests read this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]

_CALL_SECONDS = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_FLIP_SECONDS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Metric:
    """`labels`: their names, in the order in which values are given. `buckets`: upper bounds, of a histogram."""

    kind: MetricKind
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _counter(name: str, help: str, *labels: str) -> Metric:
    return Metric("counter", name, help, labels)


def _gauge(name: str, help: str, *labels: str) -> Metric:
    return Metric("gauge", name, help, labels)


def _histogram(name: str, help: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric("histogram", name, help, labels, buckets)


# Every service
SERVICE_BUILD = _gauge("rollmesh_service_build_info", "Which service this is", "service", "version")
SERVICE_NOT_READY = _gauge("rollmesh_service_not_ready_reasons", "Reasons that /readyz gives for not being ready")

# Rollout servers
ROLLOUT_VERSION = _gauge("rollmesh_rollout_policy_version", "Policy version that the next token is sampled with")
ROLLOUT_STAGED = _gauge("rollmesh_rollout_staged_version", "Policy version that lies staged; absent where none does")
ROLLOUT_SAMPLED = _counter("rollmesh_rollout_drawn_tokens_total", "Tokens sampled")
ROLLOUT_PREFILLED = _counter("rollmesh_rollout_prefilled_tokens_total", "Tokens prefilled, cached prefixes left out")
ROLLOUT_RUNNING = _gauge("rollmesh_rollout_running_samples", "Samples being generated")
ROLLOUT_WAITING = _gauge("rollmesh_rollout_waiting_requests", "Requests that wait for a place in the engine")
ROLLOUT_KV = _gauge(
    "rollmesh_rollout_kv_used_ratio",
    "Memory for keys and values that running samples hold; absent where it is not told",
)
ROLLOUT_PAUSED = _gauge("rollmesh_rollout_paused_engines", "1 while an operator has paused the engine")
ROLLOUT_COMMITS = _counter("rollmesh_rollout_committed_updates_total", "Weight updates that the engine has flipped to")
ROLLOUT_STALL = _gauge("rollmesh_rollout_commit_stall_seconds", "Longest gap between tokens at the last commit")
ROLLOUT_GROUPS = _gauge("rollmesh_rollout_open_groups", "Groups that this server holds open")
ROLLOUT_SESSIONS = _gauge("rollmesh_rollout_open_sessions", "Sessions that this server holds open")
ROLLOUT_ADMISSION = _gauge("rollmesh_rollout_admission_waiting_groups", "Groups that wait for admission at this server")
ROLLOUT_HTTP = _counter(
    "rollmesh_rollout_http_cpu_seconds_total", "CPU time of the thread that answers HTTP, since ready"
)

# Gateway
GATEWAY_SERVERS = _gauge(
    "rollmesh_gateway_known_servers", "Rollout servers that are alive, by announced state", "state"
)
GATEWAY_IN_FLIGHT = _gauge("rollmesh_gateway_in_flight_calls", "Calls that generate and are not answered yet", "server")
GATEWAY_RESENT = _counter("rollmesh_gateway_failed_tries_total", "Tries that failed, to be made elsewhere", "server")

# Weight bus
BUS_ENGINES = _gauge("rollmesh_bus_update_engines", "Live engines by where they are in the newest update", "state")
BUS_LATEST = _gauge("rollmesh_bus_latest_version", "Policy version that engines which join are brought to")
BUS_SERVED = _gauge("rollmesh_bus_served_version", "Policy version that an engine serves, as the bus knows", "engine")
BUS_ANNOUNCED = _counter("rollmesh_bus_announced_versions_total", "Policy versions announced to the bus")
BUS_SETTLED = _counter("rollmesh_bus_settled_updates_total", "Weight updates that came to an end, by end", "state")
BUS_FAILED = _counter("rollmesh_bus_failed_calls_total", "Calls to engines that failed, by what was asked", "phase")
BUS_LOST = _counter("rollmesh_bus_lost_engines_total", "Engines whose lease ran out")
BUS_STAGE = _histogram("rollmesh_bus_stage_seconds", "An engine's stage, manifest to prepared", _CALL_SECONDS)
BUS_FLIP = _histogram("rollmesh_bus_flip_seconds", "How long an engine stood between two decode steps", _FLIP_SECONDS)
BUS_COMMIT = _histogram("rollmesh_bus_commit_seconds", "From announcement to commit at every engine", _CALL_SECONDS)
BUS_READ = _counter("rollmesh_bus_staged_bytes_total", "Bytes that engines read to stage")

# Reward service
REWARDS_GIVEN = _counter("rollmesh_rewards_given_samples_total", "Samples that got a reward")
REWARDS_FAILED = _counter("rollmesh_rewards_failed_samples_total", "Samples that got none", "component", "cause")
REWARDS_SUBSTITUTED = _counter(
    "rollmesh_rewards_substituted_components_total", "Components whose value was replaced", "component", "cause"
)
REWARDS_REFUSED = _counter("rollmesh_rewards_refused_calls_total", "Calls answered 429")
REWARDS_SECONDS = _histogram(
    "rollmesh_rewards_component_seconds", "From a sample's coming to its component's end", _CALL_SECONDS, "component"
)
REWARDS_BATCH = _histogram("rollmesh_rewards_batch_samples", "Samples in a call to a reward model", _SIZES, "component")

# Trainer; totals are those of the run's metrics.jsonl, a restarted trainer goes on with them
TRAINER_VERSION = _gauge("rollmesh_trainer_policy_version", "Policy version that the last optimizer step made")
TRAINER_STEPS = _counter("rollmesh_trainer_optimizer_steps_total", "Optimizer steps")
TRAINER_SECONDS = _counter("rollmesh_trainer_thread_seconds_total", "Training thread, by what it did", "activity")
TRAINER_TOKENS = _counter(
    "rollmesh_trainer_trained_tokens_total", "Sampled tokens in the loss, by staleness", "staleness"
)
TRAINER_MASKED = _counter("rollmesh_trainer_masked_tokens_total", "Sampled tokens over K, left out of the loss")
TRAINER_DROPPED = _counter(
    "rollmesh_trainer_dropped_trajectories_total", "Trajectories never trained, by cause", "cause"
)
TRAINER_COMMITS = _counter("rollmesh_trainer_committed_updates_total", "Weight updates that engines have committed")
TRAINER_RATE = _gauge(
    "rollmesh_trainer_step_speed_tokens", "Sampled tokens a second of the last step, waiting included"
)
TRAINER_STALENESS = _gauge("rollmesh_trainer_mean_staleness_steps", "Mean staleness of the last step's tokens")
TRAINER_STALEST = _gauge("rollmesh_trainer_largest_staleness_steps", "Largest staleness of the last step's tokens")
TRAINER_ESS = _gauge("rollmesh_trainer_effective_samples_ratio", "Effective sample size of the last step's tokens")
TRAINER_REWARD = _gauge("rollmesh_trainer_mean_reward_units", "Mean reward of the last step's trajectories")
TRAINER_SUCCESS = _gauge("rollmesh_trainer_success_ratio", "Mean success of the last step's trajectories")
TRAINER_TASK_SUCCESS = _gauge(
    "rollmesh_trainer_task_success_ratio", "Mean success of the last step's trajectories of a task", "task"
)
TRAINER_TASK_REWARD = _gauge(
    "rollmesh_trainer_task_mean_reward_units", "Mean reward of the last step's trajectories of a task", "task"
)
TRAINER_TASK_LENGTH = _gauge(
    "rollmesh_trainer_task_response_tokens", "Mean sampled tokens of the last step's trajectories of a task", "task"
)
TRAINER_UNACCOUNTED = _gauge(
    "rollmesh_trainer_unaccounted_trajectories",
    "By how much Redis' account differs from step log and stream; groups too",
)
TRAINER_CORRECTED = _counter(
    "rollmesh_trainer_corrected_trajectories_total", "By how much Redis' account was corrected; groups too"
)
TRAINER_WAITING = _gauge("rollmesh_trainer_posted_wait_seconds", "Age of the wait that it has posted; 0: none")

CATALOG: tuple[Metric, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Metric))
