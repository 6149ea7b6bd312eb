"""Environments of verifiers (0.4, `verifiers.v1`): `verifiers:my-taskset?harness=null`.

Taskset, harness, tools and rewards are the library's; its model calls go to the session's endpoint and are captured there.
Its pins differ from ours: install `rollmesh` without its heavy extras beside it, in an environment of its own, and run
`rollmesh run-environment` there.

| option    | meaning                                                                                           |
|-----------|---------------------------------------------------------------------------------------------------|
| `env`     | a reusable environment that is paired with the taskset, such as `best-of-n`                       |
| `harness` | the agent's program; left out: the one that comes with the taskset, else `null`, a plain chat loop |
| `runtime` | where programs run: `subprocess` (default, this machine), `docker`, …                             |
| `tasks`   | how many tasks of the taskset are used, from its beginning (default 10000)                        |
| others    | the taskset's own settings                                                                        |

Every role plays with the policy that is trained, in one session. The reward is the mean of the traces' rewards; named
rewards and metrics are recorded beside it; `success` is a reward of 1 or more.

Held out: tasks. Each belongs to one split for good, by a hash of its content without its place in the taskset.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from clients.environments.adapters.options import values
from clients.environments.base import AgentEndpoint, Ended, Problem, Split, place_in_pass, split_of
from services.wire.errors import RollmeshError, UsageError

TASKS = 10_000
_SUCCESS = 1.0 - 1e-6
_SPLITS: tuple[Split, Split] = ("train", "held_out")


class VerifiersEpisodeError(RollmeshError):
    """An episode of verifiers ended with an error instead of a reward."""

    code = "verifiers_episode"


class VerifiersEnvironment:
    """An AgentEnvironment. Enter it before playing: what its tasks share is served until it is left."""

    def __init__(self, name: str, env: Any, tasks: Sequence[Any]) -> None:
        self.name = name
        self._env = env
        self._tasks = {split: [task for task in tasks if _split(task) == split] for split in _SPLITS}
        self._serving = AsyncExitStack()

    @classmethod
    def make(cls, taskset: str, options: Mapping[str, str]) -> VerifiersEnvironment:
        """Raises UsageError for what verifiers does not know or take, ModuleNotFoundError where it is not installed."""
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import load_environment

        name = f"verifiers:{taskset}"
        settings = values(options)
        limit = settings.pop("tasks", TASKS)
        if not isinstance(limit, int) or limit < 1:
            raise UsageError(f"{name}: tasks = {limit!r} cannot be", "give a whole number above 0")
        try:
            env = load_environment(_config(vf, taskset, settings))
            return cls(name, env, list(env.taskset.take(limit)))
        except Exception as error:
            said = " ".join(str(error).split())[:400]
            raise UsageError(
                f"{name} cannot be made ({type(error).__name__}: {said})", "correct its options"
            ) from error

    async def __aenter__(self) -> VerifiersEnvironment:
        await self._serving.enter_async_context(self._env.serving())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._serving.aclose()

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        """All tasks of the split in an order of the seed's, then all of them in another. Raises UsageError without any."""
        tasks = self._tasks[split]
        if not tasks:
            raise UsageError(
                f"{self.name} has no task for the split {split}", "one in eight is held out: use more tasks"
            )
        return _problem(split, index, tasks[place_in_pass(self.name, split, index, seed, len(tasks))])

    def count(self, split: Split) -> int:
        return len(self._tasks[split])

    def numbered(self, split: Split, number: int) -> Problem:
        return _problem(split, number, self._tasks[split][number])

    async def play(self, problem: Problem, endpoint: AgentEndpoint) -> Ended:
        import verifiers.v1 as vf

        # verifiers takes keys from the environment alone; a name with API_KEY in it is kept from the programs it starts.
        variable = f"ROLLMESH_API_KEY_{endpoint.session_id}"
        os.environ[variable] = endpoint.api_key
        try:
            context = vf.ModelContext(
                model="policy",
                client=vf.EvalClientConfig(base_url=endpoint.base_url, api_key_var=variable),
                sampling=vf.SamplingConfig(temperature=endpoint.temperature, max_tokens=endpoint.max_tokens),
            )
            (slot,) = self._env.slots(problem.details)
            return _ended(await self._env.run_slot(slot, context))
        finally:
            del os.environ[variable]


def _problem(split: Split, index: int, task: Any) -> Problem:
    return Problem(split, index, prompt=task.data.prompt_text, details=task)


def _config(vf: Any, taskset: str, settings: dict[str, Any]) -> Any:
    """The configuration of the taskset's own environment, or of the one that `env` names, every role on this machine."""
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import default_harness_id, environment_class

    paired = str(settings.pop("env", ""))
    runtime = settings.pop("runtime", "subprocess")
    harness = settings.pop("harness", None)
    if harness is None and default_harness_id(taskset) != taskset:
        # verifiers' own choice would run the policy's shell commands on this machine.
        harness = "null"
    kind = concrete_type(environment_class(taskset, paired), vf.EnvConfig, origin=vf.Env) or vf.EnvConfig
    role = {"runtime": {"type": runtime}} | ({} if harness is None else {"harness": {"id": harness}})
    roles = {name: role for name, field in kind.model_fields.items() if isinstance(field.default, vf.AgentConfig)}
    return kind.model_validate({"id": paired, "taskset": {"id": taskset, **settings}, **roles})


def _split(task: Any) -> Split:
    return split_of(task.data.model_dump_json(exclude={"idx"}, exclude_none=True))


def _ended(episode: Any) -> Ended:
    if not episode.ok or not episode.traces:
        failed = [episode, *episode.traces]
        error = next((one.last_error for one in failed if one.last_error is not None), None)
        raise VerifiersEpisodeError("no episode" if error is None else f"{error.type}: {error.message[:300]}")
    reward = sum(trace.reward for trace in episode.traces) / len(episode.traces)
    components: dict[str, float] = {}
    for trace in episode.traces:
        prefix = "" if len(episode.traces) == 1 else f"{trace.agent.name}."
        components |= {f"{prefix}{name}": one.value for name, one in trace.rewards.items() if one is not None}
        components |= {f"{prefix}{name}": float(one) for name, one in trace.metrics.items() if one is not None}
    return Ended(reward=reward, success=reward >= _SUCCESS, components=components)
