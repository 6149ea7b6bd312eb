"""`rollmesh train` as a process, with a real Valkey, a real weight bus and an engine that really receives: killed, stopped,
restarted, and in the end the same bytes as a run that nobody disturbed."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from itertools import count
from pathlib import Path

import pytest
from redis.asyncio import Redis

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402

from services.config.algorithm import AdvantageSettings, CostSettings, LossSettings, RewardShaping  # noqa: E402
from services.config.load import dump_settings  # noqa: E402
from services.config.lora import LoraSettings  # noqa: E402
from services.config.optimizer import OptimizerSettings, ScheduleSettings  # noqa: E402
from services.config.settings import RolloutSettings, RunSettings, RunStoreSettings, TrainerSettings, WeightSettings  # noqa: E402
from services.config.teacher import TeacherSettings  # noqa: E402
from services.host.files import remove_shm_files  # noqa: E402
from services.run_store.client import connect  # noqa: E402
from services.run_store.keys import RunKeys  # noqa: E402
from services.run_store.ledger import Ledger  # noqa: E402
from services.run_store.publishing import TrajectoryWriter  # noqa: E402
from services.run_store.status import read_waits  # noqa: E402
from services.run_store.stream import DeadLetters  # noqa: E402
from services.wire.run_metrics import TrainerReport  # noqa: E402
from services.wire.trajectory import Trajectory  # noqa: E402
from tests.support.fragile_loss import BROKEN, NAME, NOT_FINITE, marked  # noqa: E402
from tests.support.teacher_stand_in import TeacherStandIn, taught  # noqa: E402
from tests.support.trajectories import a_rollout, a_segment, grouped, random_trajectories  # noqa: E402
from tests.support.until import until  # noqa: E402
from tests.weight_parts import PlainTarget, SmallEngine, eventually, served  # noqa: E402
from trainer.checkpoint.checkpoint import versions  # noqa: E402
from trainer.checkpoint.model_folder import load_policy  # noqa: E402
from trainer.checkpoint.recovery import LIVES  # noqa: E402
from trainer.data.packing import pack  # noqa: E402
from trainer.data.rows import rows_of  # noqa: E402
from trainer.metrics.files import read_metrics  # noqa: E402
from trainer.model.learner import Learner, named_weights  # noqa: E402
from trainer.model.roles import make_roles  # noqa: E402
from trainer.model.train_batch import train_batch  # noqa: E402
from trainer.sft.tiny_model import build_model, build_tokenizer  # noqa: E402
from weight_bus.client.bus_client import BusClient  # noqa: E402
from weight_bus.coordinator.app import build_app  # noqa: E402
from weight_bus.receiver.receiver import Receiver  # noqa: E402
from weight_bus.transports.shm import ShmReader  # noqa: E402

GROUPS, SIZE, STEPS = 2, 3, 6

SETTINGS = RunSettings(
    steps=STEPS,
    k=STEPS,
    rollout=RolloutSettings(groups_per_step=GROUPS, group_size=SIZE),
    trainer=TrainerSettings(checkpoint_every=2, batch_timeout_s=60.0),
    weights=WeightSettings(transport="shm"),
)


class Mesh:
    """What a trainer needs around it: Redis, a bus, and an engine that loaded the same model folder."""

    def __init__(self, run_id: str, redis: Redis, redis_url: str, run_dir: Path, model: Path) -> None:
        self.run_id, self.redis, self.redis_url = run_id, redis, redis_url
        self.run_dir, self.model = run_dir, model
        self.bus_url = ""
        self.engine: SmallEngine
        self.target: PlainTarget
        self.writer, self.ledger = TrajectoryWriter(redis, run_id), Ledger(redis, run_id)

    async def start(self, stack: AsyncExitStack) -> None:
        self.bus_url = await stack.enter_async_context(served(build_app(self.run_id, 5.0, lease_s=600.0)))
        self.target = PlainTarget(named_weights(load_policy(self.model)))
        self.engine = SmallEngine("e", Receiver(self.target, self.run_id, [ShmReader()]))
        stack.callback(self.engine.receiver.close)
        url = await stack.enter_async_context(served(self.engine.app()))
        bus = await stack.enter_async_context(BusClient(self.bus_url, self.run_id))
        await bus.register("e", url, 0)

    def trainer(self) -> subprocess.Popen[str]:
        files = [
            "--config",
            str(self.run_dir / "config.toml"),
            "--model",
            str(self.model),
            "--run-dir",
            str(self.run_dir),
        ]
        urls = ["--redis-url", self.redis_url, "--bus-url", self.bus_url]
        command = [sys.executable, "-m", "services", "train", "--run-id", self.run_id, *files, *urls]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    def steps_of_groups(self, steps: int) -> list[list[Trajectory]]:
        """What each of so many steps is trained on."""
        return [
            random_trajectories(step, groups=GROUPS, size=SIZE, run_id=self.run_id, first_ordinal=step * GROUPS)
            for step in range(steps)
        ]

    async def until(self, steps: int, trainer: subprocess.Popen[str]) -> None:
        """Wait until metrics.jsonl holds `steps` steps and the trainer waits for the batch of the next."""
        following = re.compile(rf"the batch of steps? {steps + 1}\b")
        async with asyncio.timeout(60):
            for _ in count():
                assert trainer.poll() is None, trainer.communicate()[1]
                waits_for = (await self.waits()).get("trainer", "")
                if len(read_metrics(self.run_dir / "metrics.jsonl")) >= steps and following.match(waits_for):
                    return
                await asyncio.sleep(0.02)

    async def waits(self) -> dict[str, str]:
        return {name: wait.waiting_for for name, wait in (await read_waits(self.redis, self.run_id)).items()}


@pytest.fixture
async def mesh(redis_url: str, run_id: str, tmp_path: Path, tiny_policy: Path) -> AsyncIterator[Mesh]:
    redis = connect(redis_url)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(dump_settings(SETTINGS))
    async with AsyncExitStack() as stack:
        # What a trainer that was killed leaves in shared memory is the supervisor's to remove; there is none here.
        stack.callback(remove_shm_files, run_id)
        stack.push_async_callback(redis.aclose)
        mesh = Mesh(run_id, redis, redis_url, run_dir, tiny_policy)
        await mesh.start(stack)
        yield mesh


def undisturbed(model: Path, batches: Sequence[Sequence[Sequence[Trajectory]]]) -> dict[str, torch.Tensor]:
    """The weights after these batches, each of parts that are a step, trained in one go in this process."""
    learner = Learner(load_policy(model), SETTINGS.trainer)
    for batch in batches:
        judged = [rows_of(grouped(part), learner.version + step, SETTINGS.k) for step, part in enumerate(batch)]
        packed = [
            pack(rows, tally, SETTINGS.trainer.micro_batch_tokens, stem_width=learner.stem_width)
            for rows, tally in judged
        ]
        assert len(list(learner.steps(packed))) == len(batch)
    return learner.weights()


async def ended(trainer: subprocess.Popen[str]) -> tuple[int, str]:
    _, errors = await asyncio.to_thread(trainer.communicate, timeout=60)
    return trainer.returncode, errors


async def test_killed_stopped_and_restarted_a_run_ends_with_the_same_bytes(mesh: Mesh) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    batches = mesh.steps_of_groups(STEPS)
    # The last sibling of a group never comes: its step, which is repeated after the kill, goes without it again.
    batches[2].pop()
    for batch in batches[:3]:
        await mesh.writer.publish(batch)
    first = mesh.trainer()
    await mesh.until(3, first)
    assert (await mesh.waits())["trainer"] == f"the batch of step 4: {GROUPS} of {GROUPS} groups"
    first.send_signal(signal.SIGKILL)
    await ended(first)
    (mesh.run_dir / "metrics.jsonl").open("ab").write(b'{"torn')

    await mesh.writer.publish(batches[3])
    second = mesh.trainer()
    await mesh.until(4, second)
    second.send_signal(signal.SIGTERM)
    code, errors = await ended(second)
    assert code == 128 + signal.SIGTERM, errors
    assert (mesh.run_dir / "checkpoints" / "step-00000004" / "meta.json").exists()

    for batch in batches[4:]:
        await mesh.writer.publish(batch)
    future = a_segment([5], [6], [-1.0], [STEPS + 1])
    await mesh.writer.publish([a_rollout([future], 1.0, run_id=mesh.run_id, group="future", ordinal=98)])
    await mesh.writer.publish(random_trajectories(99, groups=1, size=SIZE, run_id=mesh.run_id, first_ordinal=99))
    third = mesh.trainer()
    code, errors = await ended(third)
    assert code == 0, errors

    expected = undisturbed(mesh.model, [[batch] for batch in batches])
    trained = named_weights(load_policy(mesh.run_dir / "checkpoints" / "final"))
    assert trained.keys() == expected.keys()
    assert all(torch.equal(trained[name], weight) for name, weight in expected.items())
    torch.set_num_threads(threads)

    report = json.loads((mesh.run_dir / "trainer_report.json").read_text())
    assert report.keys() == set(TrainerReport.__struct_fields__)
    assert (report["steps"], report["final_version"], report["weights_digest_match"]) == (STEPS, STEPS, True)
    assert report["max_staleness"] == STEPS - 1
    assert mesh.engine.receiver.version == STEPS
    assert [line.step for line in read_metrics(mesh.run_dir / "metrics.jsonl")] == [*range(1, STEPS + 1)]
    assert (mesh.run_dir / "curves.png").stat().st_size > 0
    samples = [json.loads(line) for line in (mesh.run_dir / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {*range(1, STEPS + 1)}

    accounts = await mesh.ledger.accounts()
    assert accounts.trained == STEPS * GROUPS * SIZE - 1
    assert (report["lost_siblings"], report["dropped"]) == (1, accounts.dropped)
    assert (report["lengths_trained"]["episodes"], report["lengths_generated"]["episodes"]) == (
        accounts.trained,
        accounts.published,
    )
    assert accounts.dropped == {"run_concluded": SIZE, "future_version": 1}
    assert accounts.published == accounts.trained + accounts.dropped_total()
    assert (accounts.concluded, accounts.final_version) == (True, STEPS)


async def test_a_teacher_is_waited_for_by_name_and_asked_again_by_a_restart(mesh: Mesh) -> None:
    """It is away at the start and dies for good in the middle: an error by name, and in the end the bytes of a run that
    heard it always."""
    threads, steps = torch.get_num_threads(), 4
    torch.set_num_threads(1)
    teacher = TeacherStandIn(build_model(seed=9, hidden_size=32, layers=1).eval(), build_tokenizer())
    batches = mesh.steps_of_groups(steps)
    async with served(teacher.app()) as url:
        trainer = SETTINGS.trainer.model_copy(
            update={
                "checkpoint_every": 20,
                "advantage": AdvantageSettings(estimator="opd"),
                "teacher": TeacherSettings(url=url, timeout_s=2.0, at_once=2),
            }
        )
        settings = SETTINGS.model_copy(update={"steps": steps, "trainer": trainer})
        (mesh.run_dir / "config.toml").write_text(dump_settings(settings))
        for batch in batches[:2]:
            await mesh.writer.publish(batch)
        teacher.down = True
        first = mesh.trainer()
        await waiting_for(mesh, f"the teacher at {url} to answer")
        teacher.down = False
        await mesh.until(2, first)
        teacher.down = True
        await mesh.writer.publish(batches[2])
        await waiting_for(mesh, f"the teacher's logprobs of step 3: {GROUPS * SIZE} of {GROUPS * SIZE} trajectories")
        code, errors = await ended(first)
        assert code == 3, errors
        assert f"the teacher at {url} did not answer within 2 s" in errors
        assert len(read_metrics(mesh.run_dir / "metrics.jsonl")) == 2

        teacher.down = False
        asked = len(teacher.prompts)
        await mesh.writer.publish(batches[3])
        code, errors = await ended(mesh.trainer())
        assert code == 0, errors
    # Those of the two steps that are repeated, too, and the probe.
    assert len(teacher.prompts) - asked == steps * GROUPS * SIZE + 1
    lines = read_metrics(mesh.run_dir / "metrics.jsonl")
    assert [line.step for line in lines] == [*range(1, steps + 1)]
    roles = make_roles(lambda: load_policy(mesh.model), settings, 0, lambda batch: taught(teacher.model, batch))
    made = [train_batch(roles, settings, grouped(batch), 1)[0] for batch in batches]
    trained = named_weights(load_policy(mesh.run_dir / "checkpoints" / "final"))
    assert all(torch.equal(trained[name], weight) for name, weight in roles.learner.weights().items())
    assert [line.teacher_kl for line in lines] == [step.statistics.teacher_kl for step in made]
    torch.set_num_threads(threads)


async def waiting_for(mesh: Mesh, what: str) -> None:
    async with asyncio.timeout(60):
        for _ in count():
            if (await mesh.waits()).get("trainer") == what:
                return
            await asyncio.sleep(0.02)


def nudge(checkpoint: Path) -> None:
    """Have the steps that are repeated from a checkpoint come to other bytes, as the kernels of a GPU may."""
    path = checkpoint / "model.safetensors"
    nudged = {name: weight + 1e-6 for name, weight in load_file(path).items()}
    save_file(nudged, path, metadata={"format": "pt"})


async def test_a_restart_that_comes_to_other_bytes_goes_on_under_a_version_above(mesh: Mesh) -> None:
    batches = mesh.steps_of_groups(STEPS)
    for batch in batches[:3]:
        await mesh.writer.publish(batch)
    first = mesh.trainer()
    await mesh.until(3, first)
    await eventually(lambda: mesh.engine.receiver.version == 3, deadline_s=30)
    first.send_signal(signal.SIGKILL)
    await ended(first)
    nudge(mesh.run_dir / "checkpoints" / "step-00000002")
    for batch in batches[3:]:
        await mesh.writer.publish(batch)
    code, errors = await ended(mesh.trainer())
    assert code == 0, errors
    assert "conflict" not in errors.lower()
    (warning,) = [line for line in errors.splitlines() if "going on under another version" in line]
    assert "from_version=3" in warning and "to_version=4" in warning

    report = json.loads((mesh.run_dir / "trainer_report.json").read_text())
    assert (report["steps"], report["final_version"], report["weights_digest_match"]) == (STEPS, STEPS + 1, True)
    assert report["max_staleness"] <= SETTINGS.k
    assert mesh.engine.receiver.version == STEPS + 1
    lines = read_metrics(mesh.run_dir / "metrics.jsonl")
    assert [(line.step, line.version) for line in lines] == [(1, 1), (2, 2), (3, 3), (4, 5), (5, 6), (6, 7)]
    accounts = await mesh.ledger.accounts()
    assert (accounts.trained, accounts.skipped_groups) == (STEPS * GROUPS * SIZE, GROUPS)
    assert (accounts.concluded, accounts.final_version) == (True, STEPS + 1)


@pytest.mark.slow
async def test_several_steps_a_batch_are_made_again_and_published_once(mesh: Mesh) -> None:
    """Batches of two steps and a last one of one; killed between them, a run ends with the bytes of one in one go."""
    threads, steps = torch.get_num_threads(), 5
    torch.set_num_threads(1)
    trainer = SETTINGS.trainer.model_copy(update={"minibatches_per_batch": 2, "checkpoint_every": 3})
    settings = SETTINGS.model_copy(update={"steps": steps, "trainer": trainer})
    (mesh.run_dir / "config.toml").write_text(dump_settings(settings))
    parts = mesh.steps_of_groups(steps)
    for part in parts[:3]:
        await mesh.writer.publish(part)
    first = mesh.trainer()
    await mesh.until(2, first)
    assert (await mesh.waits())["trainer"] == f"the batch of steps 3 to 4: {GROUPS} of {2 * GROUPS} groups"
    await eventually(lambda: mesh.engine.receiver.version == 2, deadline_s=30)
    first.send_signal(signal.SIGKILL)
    await ended(first)
    for part in parts[3:]:
        await mesh.writer.publish(part)
    code, errors = await ended(mesh.trainer())
    assert code == 0, errors

    expected = undisturbed(mesh.model, [parts[:2], parts[2:4], parts[4:]])
    trained = named_weights(load_policy(mesh.run_dir / "checkpoints" / "final"))
    assert all(torch.equal(trained[name], weight) for name, weight in expected.items())
    torch.set_num_threads(threads)
    lines = read_metrics(mesh.run_dir / "metrics.jsonl")
    assert [line.step for line in lines] == [*range(1, steps + 1)]
    assert [line.groups for line in lines] == [GROUPS] * steps
    assert [line.staleness_max for line in lines] == [*range(steps)]
    assert [line.publish_ms > 0.0 for line in lines[2:]] == [False, True, True]
    assert (mesh.run_dir / "checkpoints" / "step-00000004" / "meta.json").exists(), "the first end of a batch after 3"
    assert mesh.engine.receiver.version == steps
    assert (await mesh.ledger.accounts()).trained == steps * GROUPS * SIZE


@pytest.mark.slow
async def test_epochs_of_muon_on_a_schedule_are_made_again_and_each_trajectory_counts_once(mesh: Mesh) -> None:
    """Two minibatches, two epochs: four steps a batch. Killed after the first, of which no checkpoint holds a step."""
    threads, steps = torch.get_num_threads(), 8
    torch.set_num_threads(1)
    trainer = SETTINGS.trainer.model_copy(
        update={
            "minibatches_per_batch": 2,
            "epochs_per_batch": 2,
            "checkpoint_every": 20,
            "optimizer": OptimizerSettings(kind="muon"),
            "schedule": ScheduleSettings(kind="cosine", floor=0.1),
        }
    )
    settings = SETTINGS.model_copy(update={"steps": steps, "k": steps, "trainer": trainer})
    (mesh.run_dir / "config.toml").write_text(dump_settings(settings))
    parts = mesh.steps_of_groups(4)
    for part in parts[:2]:
        await mesh.writer.publish(part)
    first = mesh.trainer()
    await mesh.until(4, first)
    assert (await mesh.waits())["trainer"] == f"the batch of steps 5 to 8: {2 * GROUPS} of {2 * GROUPS} groups"
    await eventually(lambda: mesh.engine.receiver.version == 4, deadline_s=30)
    first.send_signal(signal.SIGKILL)
    await ended(first)
    for part in parts[2:]:
        await mesh.writer.publish(part)
    code, errors = await ended(mesh.trainer())
    assert code == 0, errors

    roles = make_roles(lambda: load_policy(mesh.model), settings, 0)
    made = [train_batch(roles, settings, grouped(parts[at] + parts[at + 1]), 4) for at in (0, 2)]
    trained = named_weights(load_policy(mesh.run_dir / "checkpoints" / "final"))
    assert all(torch.equal(trained[name], weight) for name, weight in roles.learner.weights().items())
    torch.set_num_threads(threads)
    lines = read_metrics(mesh.run_dir / "metrics.jsonl")
    assert [(line.step, line.epoch) for line in lines] == [*zip(range(1, 9), [1, 1, 2, 2] * 2, strict=True)]
    assert [line.staleness_max for line in lines] == [*range(steps)]
    assert [line.learning_rate for line in lines] == [step.learning_rate for batch in made for step in batch]
    report = json.loads((mesh.run_dir / "trainer_report.json").read_text())
    accounts = await mesh.ledger.accounts()
    assert accounts.trained == report["trajectories_trained"] == report["lengths_trained"]["episodes"]
    assert accounts.trained == 4 * GROUPS * SIZE


@pytest.mark.slow
async def test_a_critic_a_price_and_moments_of_rewards_are_brought_back_too(mesh: Mesh) -> None:
    """Killed after a step that no checkpoint holds: it is made again, from the critic, price and moments there were."""
    threads, steps = torch.get_num_threads(), 5
    torch.set_num_threads(1)
    advantage = AdvantageSettings(
        estimator="gae",
        kl=0.05,
        keep="best_random",
        cost=CostSettings(component="success", limit=0.2),
        reward=RewardShaping(normalise=True),
    )
    trainer = SETTINGS.trainer.model_copy(update={"advantage": advantage})
    settings = SETTINGS.model_copy(update={"steps": steps, "trainer": trainer})
    (mesh.run_dir / "config.toml").write_text(dump_settings(settings))
    batches = mesh.steps_of_groups(steps)
    for batch in batches[:3]:
        await mesh.writer.publish(batch)
    first = mesh.trainer()
    await mesh.until(3, first)
    first.send_signal(signal.SIGKILL)
    await ended(first)
    for batch in batches[3:]:
        await mesh.writer.publish(batch)
    code, errors = await ended(mesh.trainer())
    assert code == 0, errors

    roles = make_roles(lambda: load_policy(mesh.model), settings, 0)
    expected = [train_batch(roles, settings, grouped(batch), 1)[0] for batch in batches]
    trained = named_weights(load_policy(mesh.run_dir / "checkpoints" / "final"))
    assert all(torch.equal(trained[name], weight) for name, weight in roles.learner.weights().items())
    torch.set_num_threads(threads)
    lines = read_metrics(mesh.run_dir / "metrics.jsonl")
    for line, step in zip(lines, expected, strict=True):
        told = (line.value_loss, line.cost_price, line.kl_in_reward, line.left_out)
        valued, credited = step.valued, step.credited
        assert told == (valued.value_loss, credited.cost_price, credited.kl_in_reward, credited.left_out)
    assert len({line.cost_price for line in lines}) == steps and lines[-1].left_out == GROUPS


@pytest.mark.slow
async def test_adapters_are_brought_back_too_and_engines_get_merged_weights(mesh: Mesh) -> None:
    """Killed after steps of which no checkpoint holds the last; in the end both exports hold what engines serve."""
    threads, steps = torch.get_num_threads(), 5
    torch.set_num_threads(1)
    trainer = SETTINGS.trainer.model_copy(update={"lora": LoraSettings(rank=4), "loss": LossSettings(kl=0.1)})
    settings = SETTINGS.model_copy(update={"steps": steps, "trainer": trainer})
    (mesh.run_dir / "config.toml").write_text(dump_settings(settings))
    batches = mesh.steps_of_groups(steps)
    for batch in batches[:3]:
        await mesh.writer.publish(batch)
    first = mesh.trainer()
    await mesh.until(3, first)
    first.send_signal(signal.SIGKILL)
    await ended(first)
    for batch in batches[3:]:
        await mesh.writer.publish(batch)
    code, errors = await ended(mesh.trainer())
    assert code == 0, errors

    roles = make_roles(lambda: load_policy(mesh.model), settings, 0)
    for batch in batches:
        train_batch(roles, settings, grouped(batch), 1)
    expected, checkpoints = roles.learner.weights(), mesh.run_dir / "checkpoints"
    trained = named_weights(load_policy(checkpoints / "final"))
    assert list(trained) == list(expected)
    assert all(torch.equal(trained[name], weight) for name, weight in expected.items())
    torch.set_num_threads(threads)
    assert all(torch.equal(mesh.target.live()[name], weight) for name, weight in expected.items())
    assert mesh.engine.receiver.version == steps
    assert json.loads((mesh.run_dir / "trainer_report.json").read_text())["weights_digest_match"]
    whole = (checkpoints / "final" / "model.safetensors").stat().st_size
    assert (checkpoints / "step-00000004" / "model.safetensors").stat().st_size < whole / 3
    assert (checkpoints / "final-adapter" / "adapter_model.safetensors").stat().st_size < whole / 3


@pytest.mark.slow
async def test_a_batch_that_is_not_finite_reaches_no_engine_and_no_checkpoint_and_can_be_left_out(mesh: Mesh) -> None:
    threads, steps = torch.get_num_threads(), 4
    torch.set_num_threads(1)
    trainer = SETTINGS.trainer.model_copy(update={"loss": LossSettings(policy=NAME), "checkpoint_every": 1})
    settings = SETTINGS.model_copy(update={"steps": steps, "trainer": trainer})
    (mesh.run_dir / "config.toml").write_text(dump_settings(settings))
    batches = mesh.steps_of_groups(steps + 1)
    batches[2] = marked(batches[2], NOT_FINITE)
    for batch in batches:
        await mesh.writer.publish(batch)
    code, errors = await ended(mesh.trainer())
    assert code == 2 and "step 3 is not made: the loss of the policy is nan" in errors.splitlines()[-1], errors
    assert (mesh.run_dir / "anomalies" / "version-00000002-anomaly" / "batch.msgpack").exists()
    assert mesh.engine.receiver.version <= 2
    assert max(versions(mesh.run_dir / "checkpoints")) == 2
    lines = read_metrics(mesh.run_dir / "metrics.jsonl")
    assert [(line.step, line.packed_ahead) for line in lines] == [(1, False), (2, True)], "all batches were there"

    trainer = trainer.model_copy(update={"on_anomaly": "skip", "learning_rate": 1e-4})
    changed = settings.model_copy(update={"trainer": trainer})
    (mesh.run_dir / "config.toml").write_text(dump_settings(changed))
    code, errors = await ended(mesh.trainer())
    assert code == 0, errors
    assert mesh.engine.receiver.version == steps
    roles = make_roles(lambda: load_policy(mesh.model), settings, 0)
    for index, batch in enumerate(batches):
        if index != 2:
            train_batch(roles, settings if index < 2 else changed, grouped(batch), 1)
    trained = named_weights(load_policy(mesh.run_dir / "checkpoints" / "final"))
    assert all(torch.equal(trained[name], weight) for name, weight in roles.learner.weights().items())
    torch.set_num_threads(threads)
    accounts = await mesh.ledger.accounts()
    assert (accounts.trained, accounts.dropped) == (steps * GROUPS * SIZE, {"anomaly": GROUPS * SIZE})
    assert (accounts.published, accounts.dropped_groups) == (accounts.trained + accounts.dropped_total(), GROUPS)
    assert sum(line.dropped.get("anomaly", 0) for line in read_metrics(mesh.run_dir / "metrics.jsonl")) == GROUPS * SIZE


@pytest.mark.slow
async def test_a_batch_that_ends_the_trainer_each_time_is_left_out_after_three_lives(mesh: Mesh) -> None:
    steps = 2
    trainer = SETTINGS.trainer.model_copy(update={"loss": LossSettings(policy=NAME)})
    settings = SETTINGS.model_copy(update={"steps": steps, "trainer": trainer})
    (mesh.run_dir / "config.toml").write_text(dump_settings(settings))
    batches = mesh.steps_of_groups(steps + 1)
    batches[1] = marked(batches[1], BROKEN)
    for batch in batches:
        await mesh.writer.publish(batch)
    for _ in range(LIVES):
        code, errors = await ended(mesh.trainer())
        assert code == 1 and "no kernel for this batch" in errors, errors
    code, errors = await ended(mesh.trainer())
    assert code == 0, errors
    accounts = await mesh.ledger.accounts()
    assert (accounts.trained, accounts.dropped) == (steps * GROUPS * SIZE, {"untrainable": GROUPS * SIZE})
    assert (accounts.published, accounts.dropped_groups) == (accounts.trained + accounts.dropped_total(), GROUPS)
    letters = await DeadLetters(mesh.redis, mesh.run_id).newest(1)
    assert "ended the trainer 3 times (RuntimeError: no kernel for this batch)" in letters[0].why
    report = json.loads((mesh.run_dir / "trainer_report.json").read_text())
    assert (report["final_version"], report["weights_digest_match"]) == (steps, True)


async def test_a_trainer_frees_a_redis_that_fills_long_before_a_checkpoint_is_due(mesh: Mesh) -> None:
    trainer = SETTINGS.trainer.model_copy(update={"checkpoint_every": 1000})
    settings = SETTINGS.model_copy(update={"trainer": trainer, "run_store": RunStoreSettings(max_bytes=1 << 20)})
    (mesh.run_dir / "config.toml").write_text(dump_settings(settings))
    process, published = mesh.trainer(), 0
    for step, batch in enumerate(mesh.steps_of_groups(4), start=1):
        await mesh.writer.publish(batch)
        published += len(batch)
        await mesh.until(step, process)

    async def trimmed() -> bool:
        return await mesh.redis.xlen(RunKeys(mesh.run_id).stream) < published

    await until(trimmed, 30.0)
    process.send_signal(signal.SIGKILL)
    await ended(process)


async def test_a_trainer_that_still_waits_for_its_model_stops_at_once(mesh: Mesh) -> None:
    mesh.model = mesh.run_dir / "never made"
    trainer = mesh.trainer()
    log = mesh.run_dir / "checkpoints" / "steps.jsonl"
    await eventually(log.exists, deadline_s=60)
    trainer.send_signal(signal.SIGTERM)
    code, errors = await asyncio.wait_for(ended(trainer), timeout=10)
    assert code == 128 + signal.SIGTERM, errors
    assert "Traceback" not in errors


async def test_a_refused_loss_is_one_line_and_needs_no_mesh(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[trainer.loss.correction]\nweight = "token"\n')
    flags = ["--run-id", "r", "--config", str(config), "--redis-url", "redis://127.0.0.1:1", "--bus-url", "http://x"]
    command = [sys.executable, "-m", "services", "train", *flags, "--model", "m", "--run-dir", str(tmp_path)]
    answer = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 2
    assert "correct twice" in answer.stderr and len(answer.stderr.strip().splitlines()) == 1
