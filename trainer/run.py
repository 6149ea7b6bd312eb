"""One trainer process from start to end: load the model, resume, train, conclude the run, write its report.

settings ─► ranks: those that are not rank 0 follow it (`trainer.follower`)
model folder ─► learner ─► come back ─► publish the first version ─► loop ─► conclude ─► verify ─► report
                           │                                         │
                           │                         interrupt ──────┴─► checkpoint, exit 128 + signal
                           └─ checkpoint ─► replay ─► the bytes that were announced? ─► no: skip above all versions
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from functools import partial

import structlog
import torch

from services.config.checks import layout_in_force
from services.host.files import writing
from services.host.process import collect_seldom
from services.host.run_folder import take_format, wait_for_model_blocking
from services.policies.length_stats import Lengths
from services.policies.training.layout import Layout
from services.policies.versions import UNKNOWN, Announced, highest, version_to_publish
from services.run_store.client import START_WITHIN_S, check_store
from services.wire.run_metrics import StepMetrics
from services.wire.weights_api import VerifyView
from trainer.algorithms.describe import describe
from trainer.assembly import CALL_DEADLINE_S, Assembly, TrainerArguments
from trainer.checkpoint import checkpoint
from trainer.checkpoint.attempts import drops_of
from trainer.checkpoint.environment import present_environment, repeat_exactly
from trainer.checkpoint.model_folder import save_final
from trainer.checkpoint.recovery import Replay, diverged, fingerprint, groups_of, restore, terms_of
from trainer.checkpoint.step_log import StepLog
from trainer.follower import follow
from trainer.io_loop import Background, Interrupt
from trainer.loop import Identity, TrainingLoop
from trainer.metrics.files import make_report, plot_curves, read_metrics, write_report
from trainer.parallel.orders import Restore, Stop, tell
from trainer.parallel.ranks import COLLECTIVE_S, Ranks, joined
from trainer.parallel.start import ranks_started

_log = structlog.get_logger()


def train(arguments: TrainerArguments) -> int:
    """Train a run to its end; returns the exit code: 0, or 128 + the signal that stopped it.

    Raises UsageError for what the user can mend (no Redis, a full disk, the folder of another run), other RollmeshErrors
    when the run cannot go on.
    """
    layout = layout_of_run(arguments)
    settings = arguments.settings
    # Each loads its part of the model before the first collective, and one may have a slow disk.
    collective_s = max(COLLECTIVE_S, settings.rollout.start_timeout_s)
    with joined(layout, arguments.started, collective_s) as ranks:
        if not ranks.leads:
            follow(arguments, ranks, arguments.settings.model.wait_timeout_s)
            return 0
        torch.set_num_threads(arguments.settings.trainer.thread_count)
        if arguments.settings.trainer.deterministic:
            repeat_exactly()
        interrupt = Interrupt()
        interrupt.install()
        with closing(Background()) as background, ExitStack() as stack:
            reaching = check_store(arguments.redis_url, within_s=START_WITHIN_S)
            background.call(reaching, "reaching Redis", START_WITHIN_S + CALL_DEADLINE_S)
            code = _live(arguments, background, stack, interrupt, ranks)
            tell(ranks, Stop())
    if code:
        # Here, where nothing of it runs any more: the last line of its log.
        _log.info("stopped")
    return code


def layout_of_run(arguments: TrainerArguments) -> Layout:
    """Of the ranks that were started. Raises UsageError where the settings ask for others, or do not go with several."""
    started = (ranks_started() or 1) if arguments.started is None else 1 + len(arguments.started.others)
    return layout_in_force(arguments.settings, started)


def _live(
    arguments: TrainerArguments, background: Background, stack: ExitStack, interrupt: Interrupt, ranks: Ranks
) -> int:
    identity = Identity(arguments.run_id, fingerprint(arguments.settings))
    assembly = Assembly(arguments, background, stack, ranks)
    with writing(assembly.folder.root):
        assembly.folder.checkpoints.mkdir(parents=True, exist_ok=True)
    take_format(assembly.folder)
    log = stack.enter_context(
        closing(StepLog(assembly.folder.checkpoints / "steps.jsonl", identity.run_id, terms_of(arguments.settings)))
    )
    wait_for_model_blocking(arguments.model, arguments.settings.model.wait_timeout_s)
    # It is a server that loads a model, as engines are.
    engines_within_s = arguments.settings.rollout.start_timeout_s
    assembly.begin_meeting_teacher(engines_within_s)
    roles = assembly.roles()
    learner = roles.learner
    environment = present_environment(arguments.settings, arguments.model, learner.model.device, ranks.layout)
    log.check_model(environment)
    _log.info("loss in force", formula=describe(arguments.settings.trainer))
    chosen = arguments.settings.trainer
    _log.info("optimizer in force", optimizer=chosen.optimizer.kind, schedule=chosen.schedule.kind)
    _log.info("rows are packed", kept_apart=learner.separation)
    background.insist(lambda: assembly.ledger.begin(learner.version), "opening the ledger")
    assembly.meet_teacher(engines_within_s)
    loop = assembly.loop(identity, roles, log, interrupt)
    come_back(loop, environment.changes(log.environment))
    log.take_environment(environment)
    if learner.skipped:
        skipped = loop.settings.trainer.shape.finished(learner.skipped) * loop.settings.rollout.groups_per_step
        background.insist(lambda: assembly.ledger.skip_groups(skipped), "telling admission of skipped versions")
    trained, dropped = log.trained_entries(), {k: v for outcome in log.drops for k, v in drops_of(outcome).items()}
    loop.sign.post(f"engines to serve version {learner.version}")
    loop.updates.publish_first(learner.version, learner.published(), loop.settings.rollout.start_timeout_s)
    loop.sign.clear()
    minibatches = loop.settings.trainer.shape.finished(learner.steps_made)
    groups = minibatches * loop.settings.rollout.groups_per_step
    reading = background.spawn(loop.intake.run(trained, dropped, groups), "intake")
    collect_seldom()
    with interrupt.graceful():
        finished = loop.run()
    if not finished:
        loop.sign.post(f"the checkpoint of version {learner.version} to be written")
        _log.info("waiting", waiting_for="the last checkpoint to be written", to=learner.version)
        loop.checkpoint().result()
        loop.sign.clear()
        loop.files.submit(loop.records.flush).result()
        lines, generated = _so_far(assembly)
        plot_curves(lines, generated, assembly.folder.curves, loop.evaluations())
        structlog.contextvars.bind_contextvars(version=learner.version)
        return interrupt.exit_code
    reading.cancel()
    _conclude(loop, assembly)
    return 0


def come_back(loop: TrainingLoop, changes: Sequence[str]) -> None:
    """Bring the learner to the version that it had reached; where its bytes are others now, above all that were announced.

    A run without a past asks nobody: what engines serve under its id is another's, and its first version a conflict.
    `changes`: of libraries and device since the life before, in words. Raises DivergedError where the settings promise the
    same bytes, what `restore` and `repeat` raise, and DeadlineError where the bus does not answer.
    """
    log, learner, attempts = loop.log, loop.learner, loop.attempts
    restored = restore(loop.checkpoints, loop.roles, loop.identity.run_id)
    if restored is not None:
        tell(loop.roles.ranks, Restore(restored))
    attempts.follow_skips()
    replay = Replay.since(learner.version, log.records)
    if restored is None and not log.records and log.announced is None:
        return
    _log.info("coming back", checkpoint=restored, steps_to_repeat=len(replay.records), changed=changes)
    _check_deterministic(loop, changes)
    for record in replay.records:
        fetched = loop.background.insist(partial(loop.reader.fetch, record.entries), "fetching a batch again")
        loop.repeat(record, groups_of(record, fetched))
        attempts.follow_skips()
        _check_deterministic(loop, changes)
    heard = loop.background.call(loop.updates.known_to_bus(), "asking the bus for versions", CALL_DEADLINE_S)
    newest = highest(log.announced, heard)
    digest = loop.updates.digest(learner.version, learner.published()) if _is(newest, learner.version) else UNKNOWN
    version, updates = learner.version, loop.settings.trainer.updates_per_batch
    to = version_to_publish(version, digest, newest, updates)
    if to == version:
        return
    if loop.settings.trainer.deterministic:
        raise diverged(version, changes)
    _log.warning(
        "the repeated steps may have given other bytes than were announced: going on under another version",
        from_version=version,
        to_version=to,
        changed=changes,
    )
    attempts.skip_to(to)


def _check_deterministic(loop: TrainingLoop, changes: Sequence[str]) -> None:
    """Compare with what the step log says was announced, where the learner has come to that version."""
    announced, learner = loop.log.announced, loop.learner
    if announced is None or not loop.settings.trainer.deterministic or not _is(announced, learner.version):
        return
    if loop.updates.digest(learner.version, learner.published()) != announced.digest:
        raise diverged(learner.version, changes)


def _is(announced: Announced | None, version: int) -> bool:
    return announced is not None and announced.version == version


def _conclude(loop: TrainingLoop, assembly: Assembly) -> None:
    """Last commit → concluded → stream drained → engines verified → report, checkpoint, curves."""
    background, version = loop.background, loop.learner.version
    loop.sign.post(f"engines to serve the last version, {version}")
    loop.updates.finish(version, loop.settings.rollout.start_timeout_s)
    background.insist(lambda: assembly.ledger.conclude(version), "concluding the run")
    loop.finish_acknowledging()
    dropped = background.insist(loop.intake.drain, "draining the stream")
    loop.sign.clear()
    verified = background.call(loop.updates.verify(), "verifying the engines' weights", loop.updates.verified_within)
    _log.info("concluded", version=version, dropped_at_the_end=dropped, weights_match=verified.match)
    loop.files.submit(loop.records.flush).result()
    if loop.settings.evaluation.every:
        loop.saving.heed_last(background.insist(assembly.evaluations.read, "reading the evaluations"))
    _report(loop, assembly, verified)
    background.check()


def _so_far(assembly: Assembly) -> tuple[list[StepMetrics], Lengths]:
    generated = assembly.background.insist(assembly.ledger.lengths, "reading the lengths of answers")
    return read_metrics(assembly.folder.metrics), generated


def _report(loop: TrainingLoop, assembly: Assembly, verified: VerifyView) -> None:
    lines, generated = _so_far(assembly)
    accounts = loop.background.insist(assembly.ledger.accounts, "reading the run's accounts")
    report = make_report(
        lines,
        run_id=loop.identity.run_id,
        formula=describe(loop.settings.trainer),
        final_version=loop.learner.version,
        digest_match=verified.match and verified.version == loop.learner.version,
        root_digest=verified.root_digest,
        commits=loop.updates.committed,
        generated=generated,
        dropped=accounts.dropped,
    )
    with writing(loop.checkpoints):
        learner = loop.learner
        gathered = checkpoint.gather_policy(loop.roles)
        save_final(loop.checkpoints, learner.model, assembly.arguments.model, learner.adapters, gathered)
    write_report(assembly.folder.trainer_report, report)
    plot_curves(lines, generated, assembly.folder.curves, loop.evaluations())
