"""What a killed trainer holds beside the policy is brought back: a teacher's answers, a critic, a price, adapters."""

from __future__ import annotations

import json
import signal

import pytest

torch = pytest.importorskip("torch")

from services.config.load import dump_settings  # noqa: E402
from services.config.training.algorithm import AdvantageSettings, CostSettings, LossSettings, RewardShaping  # noqa: E402
from services.config.training.lora import LoraSettings  # noqa: E402
from services.config.training.teacher import TeacherSettings  # noqa: E402
from tests.support.teacher_stand_in import TeacherStandIn, taught  # noqa: E402
from tests.support.trainer_process import GROUPS, SETTINGS, SIZE, TrainerMesh, ended, waiting_for  # noqa: E402
from tests.support.trajectories import grouped  # noqa: E402
from tests.weight_parts import served  # noqa: E402
from trainer.checkpoint.model_folder import load_policy  # noqa: E402
from trainer.metrics.files import read_metrics  # noqa: E402
from trainer.model.learner import named_weights  # noqa: E402
from trainer.model.roles import make_roles  # noqa: E402
from trainer.model.train_batch import train_batch  # noqa: E402
from trainer.sft.tiny_model import build_model, build_tokenizer  # noqa: E402


async def test_a_teacher_is_waited_for_by_name_and_asked_again_by_a_restart(
    mesh: TrainerMesh, one_thread: None
) -> None:
    """It is away at the start and dies for good in the middle: an error by name, and in the end the bytes of a run that
    heard it always."""
    steps = 4
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


@pytest.mark.slow
async def test_a_critic_a_price_and_moments_of_rewards_are_brought_back_too(
    mesh: TrainerMesh, one_thread: None
) -> None:
    """Killed after a step that no checkpoint holds: it is made again, from the critic, price and moments there were."""
    steps = 5
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
    lines = read_metrics(mesh.run_dir / "metrics.jsonl")
    for line, step in zip(lines, expected, strict=True):
        told = (line.value_loss, line.cost_price, line.kl_in_reward, line.left_out)
        valued, credited = step.valued, step.credited
        assert told == (valued.value_loss, credited.cost_price, credited.kl_in_reward, credited.left_out)
    assert len({line.cost_price for line in lines}) == steps and lines[-1].left_out == GROUPS


@pytest.mark.slow
async def test_adapters_are_brought_back_too_and_engines_get_merged_weights(
    mesh: TrainerMesh, one_thread: None
) -> None:
    """Killed after steps of which no checkpoint holds the last; in the end both exports hold what engines serve."""
    steps = 5
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
    assert all(torch.equal(mesh.target.live()[name], weight) for name, weight in expected.items())
    assert mesh.engine.receiver.version == steps
    assert json.loads((mesh.run_dir / "trainer_report.json").read_text())["weights_digest_match"]
    whole = (checkpoints / "final" / "model.safetensors").stat().st_size
    assert (checkpoints / "step-00000004" / "model.safetensors").stat().st_size < whole / 3
    assert (checkpoints / "final-adapter" / "adapter_model.safetensors").stat().st_size < whole / 3
