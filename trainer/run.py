"""One trainer process from start to end: load the model, resume, train, conclude the run, write its report.

model folder ─► learner ─► restore + replay ─► publish the first version ─► loop ─► conclude ─► verify ─► report
                                                                             │
                                                             interrupt ──────┴─► checkpoint, exit 128 + signal
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial

import structlog
import torch

from services.host.files import writing
from services.host.process import collect_seldom
from services.host.run_folder import wait_for_model_blocking
from services.run_store.client import START_WITHIN_S, check_store
from services.wire.weights_api import VerifyView
from trainer.algorithms.describe import describe
from trainer.assembly import BASE_VERSION, CALL_DEADLINE_S, Assembly, TrainerArguments
from trainer.checkpoint import checkpoint
from trainer.checkpoint.attempts import drops_of
from trainer.checkpoint.recovery import Replay, fingerprint, groups_of, restore, terms_of
from trainer.checkpoint.step_log import StepLog
from trainer.io_loop import Background, Interrupt
from trainer.loop import Identity, TrainingLoop
from trainer.metrics.files import make_report, plot_curves, read_metrics, write_report

MODEL_DEADLINE_S = 600.0
ENGINES_DEADLINE_S = 300.0
VERIFY_DEADLINE_S = 120.0

_log = structlog.get_logger()


def train(arguments: TrainerArguments) -> int:
    """Train a run to its end; returns the exit code: 0, or 128 + the signal that stopped it.

    Raises UsageError for what the user can mend (no Redis, a full disk, the folder of another run), other RollmeshErrors
    when the run cannot go on.
    """
    torch.set_num_threads(arguments.settings.trainer.threads)
    interrupt = Interrupt()
    interrupt.install()
    with closing(Background()) as background, ExitStack() as stack:
        reaching = check_store(arguments.redis_url, within_s=START_WITHIN_S)
        background.call(reaching, "reaching Redis", START_WITHIN_S + CALL_DEADLINE_S)
        code = _live(arguments, background, stack, interrupt)
    if code:
        # Here, where nothing of it runs any more: the last line of its log.
        _log.info("stopped")
    return code


def _live(arguments: TrainerArguments, background: Background, stack: ExitStack, interrupt: Interrupt) -> int:
    identity = Identity(arguments.run_id, fingerprint(arguments.settings))
    assembly = Assembly(arguments, background, stack)
    with writing(assembly.folder.root):
        assembly.folder.checkpoints.mkdir(parents=True, exist_ok=True)
    log = stack.enter_context(
        closing(StepLog(assembly.folder.checkpoints / "steps.jsonl", identity.run_id, terms_of(arguments.settings)))
    )
    wait_for_model_blocking(arguments.model, MODEL_DEADLINE_S)
    roles = assembly.roles()
    learner = roles.learner
    _log.info("loss in force", formula=describe(arguments.settings.trainer))
    _log.info("rows are packed", kept_apart=learner.separation)
    background.insist(lambda: assembly.ledger.begin(learner.version), "opening the ledger")
    loop = assembly.loop(identity, roles, log, interrupt)
    _come_back(loop)
    trained, dropped = log.trained_entries(), {k: v for outcome in log.drops for k, v in drops_of(outcome).items()}
    loop.sign.post(f"engines to serve version {learner.version}")
    loop.updates.publish_first(learner.version, learner.published(), ENGINES_DEADLINE_S)
    loop.sign.clear()
    groups = (learner.version - BASE_VERSION) * loop.settings.rollout.groups_per_step
    reading = background.spawn(loop.intake.run(trained, dropped, groups), "intake")
    collect_seldom()
    with interrupt.graceful():
        finished = loop.run()
    if not finished:
        loop.checkpoint().result()
        structlog.contextvars.bind_contextvars(version=learner.version)
        return interrupt.exit_code
    reading.cancel()
    _conclude(loop, assembly)
    return 0


def _come_back(loop: TrainingLoop) -> None:
    """Bring the learner to the newest version that may ever have been announced."""
    restored = restore(loop.checkpoints, loop.roles, loop.identity.run_id)
    replay = Replay.since(loop.learner.version, loop.log.records)
    if restored is not None or replay.records:
        _log.info("coming back", checkpoint=restored, steps_to_repeat=len(replay.records))
    for record in replay.records:
        fetched = loop.background.insist(partial(loop.reader.fetch, record.entries), "fetching a batch again")
        loop.repeat(record, groups_of(record, fetched))


def _conclude(loop: TrainingLoop, assembly: Assembly) -> None:
    """Last commit → concluded → stream drained → engines verified → report, checkpoint, curves."""
    background, version = loop.background, loop.learner.version
    loop.sign.post(f"engines to serve the last version, {version}")
    loop.updates.finish(version, ENGINES_DEADLINE_S)
    background.insist(lambda: assembly.ledger.conclude(version), "concluding the run")
    loop.finish_acknowledging()
    dropped = background.insist(loop.intake.drain, "draining the stream")
    loop.sign.clear()
    verified = background.call(loop.updates.verify(), "verifying the engines' weights", VERIFY_DEADLINE_S)
    _log.info("concluded", version=version, dropped_at_the_end=dropped, weights_match=verified.match)
    loop.files.submit(loop.records.flush).result()
    _report(loop, assembly, verified)
    background.check()


def _report(loop: TrainingLoop, assembly: Assembly, verified: VerifyView) -> None:
    lines = read_metrics(assembly.folder.metrics)
    generated = loop.background.insist(assembly.ledger.lengths, "reading the lengths of answers")
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
        checkpoint.save_final(loop.checkpoints, learner.model, assembly.arguments.model, learner.adapters)
    write_report(assembly.folder.trainer_report, report)
    plot_curves(lines, generated, assembly.folder.curves)
