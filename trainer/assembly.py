"""Assembly of a trainer process: opens its parts in order, closes them in the opposite order."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import structlog
from redis.asyncio import Redis
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from services.config.settings import RunSettings
from services.host.run_folder import RunFolder
from services.observability.tracing import NO_TRACING, Tracing
from services.policies.admission import StoreUse, store_use
from services.policies.batching import GroupFilter
from services.policies.training.deadlines import settled_within
from services.run_store.client import connect
from services.run_store.ledger import Ledger
from services.run_store.status import EvaluationStore, WaitBoard
from services.run_store.stream import TrajectoryReader
from services.security.permissions import Keys
from services.security.tls import PLAIN, Tls
from services.wire.errors import UsageError
from services.wire.trajectory import vocabulary_digest
from trainer.algorithms.advantages.compute import Taught
from trainer.checkpoint.attempts import Attempts
from trainer.checkpoint.checkpoint import save
from trainer.checkpoint.model_folder import load_policy
from trainer.checkpoint.saving import Save, Saving
from trainer.checkpoint.shared_folder import SharedFolder
from trainer.checkpoint.step_log import StepLog
from trainer.data.stream_reader import Intake
from trainer.data.teacher import Teacher
from trainer.data.teacher_client import TeacherClient, TeacherServer
from trainer.data.validation import Validator
from trainer.io_loop import Background, Interrupt, WaitSign
from trainer.loop import Identity, TrainingLoop
from trainer.memory.options import machine_of
from trainer.metrics.exporter import open_telemetry
from trainer.metrics.files import RunRecords, read_metrics
from trainer.metrics.rollouts import RolloutRecorder, open_recorder
from trainer.model.learner import Learner
from trainer.model.precision import use_tf32
from trainer.model.roles import Roles, make_roles
from trainer.parallel.publishing import LeadingPublisher
from trainer.parallel.ranks import Ranks
from trainer.parallel.start import Started
from trainer.planning.refusal import estimate_of, refuse_what_cannot_fit
from trainer.weights import WeightUpdates
from weight_bus.client.bus_client import BusClient
from weight_bus.manifest.adapter import base_digest
from weight_bus.manifest.manifest import Adapter
from weight_bus.manifest.published import check_folder
from weight_bus.publisher.contiguous import lay_contiguous
from weight_bus.publisher.publisher import Publisher
from weight_bus.publisher.ranks import Ranks as PublishingRanks
from weight_bus.transports.device_choice import publishing_memory
from weight_bus.transports.select import make_exporter

BASE_VERSION = 0
CALL_DEADLINE_S = 30.0
SIBLINGS_LAG_S = 1.0
"""After so long the ledger is asked whether more of an incomplete group may come. It knows: a wrong guess costs a call."""


_log = structlog.get_logger()


@dataclass(frozen=True)
class TrainerArguments:
    """`model`: a Hugging Face folder, which may still be made; `run_dir`: the run folder.

    `weights_key` signs manifests, `bus_key` opens the weight bus, and `metrics_key`, as it, this process's `/metrics`; None
    where the mesh runs without keys, on loopback. `tls`: what its probes show, and whose certificate the bus may.
    `teacher`: None where no logprobs of one are read. `save`: writes a checkpoint. `started`: ranks beside this one that
    this process started.
    """

    run_id: str
    settings: RunSettings
    redis_url: str
    bus_url: str
    model: Path
    run_dir: Path
    weights_key: str | None = None
    bus_key: str | None = None
    metrics_key: str | None = None
    tls: Tls = PLAIN
    tracing: Tracing = NO_TRACING
    teacher: TeacherServer | None = None
    save: Save = save
    started: Started | None = None


def load_roles(arguments: TrainerArguments, teacher: Taught | None, ranks: Ranks) -> Roles:
    """What is trained, from the run's first policy: the model folder has it also when the trainer is restarted. For every
    rank. Raises UsageError, before weights are loaded where they cannot fit."""
    settings = arguments.settings
    refuse_what_cannot_fit(arguments.model, settings, machine_of(ranks.device, ranks.layout.ranks))
    code, fill = settings.model.trust_remote_code, None

    def load() -> PreTrainedModel:
        return load_policy(arguments.model, trust_remote_code=code)

    if ranks.several:
        shared = SharedFolder(arguments.model, trust_remote_code=code)
        if shared.why_whole is None:
            load, fill = shared.empty, shared.fill
        else:
            _log.warning("each rank loads all weights first", why=shared.why_whole)
    roles = make_roles(load, settings, BASE_VERSION, teacher, ranks, fill=fill)
    roles.learner.publishes_adapters = settings.weights.publish == "adapter"
    roles.learner.keeps_logprobs = settings.samples.share > 0.0
    use_tf32(settings.trainer.tf32, roles.learner.model.device)
    return roles


def make_publisher(arguments: TrainerArguments, learner: Learner, ranks: Ranks, stack: ExitStack) -> Publisher:
    """The publisher of this rank's part of the weights, for every rank; what it needs is closed by `stack`. Raises
    UsageError."""
    weights, device = arguments.settings.weights, learner.model.device
    exporter = make_exporter(
        weights.transport,
        arguments.run_id,
        host=weights.broadcast_host,
        file_root=weights.file_root,
        file_keep=weights.file_keep,
        key=arguments.weights_key,
        model_folder=arguments.model,
        device=publishing_memory(
            weights.transport,
            device,
            estimate_of(arguments.model, arguments.settings, machine_of(device, ranks.layout.ranks)),
        ),
    )
    if learner.adapters is None and not ranks.several:
        # Weights that lie as the arenas do are published by one copy.
        lay_contiguous(learner.model.state_dict(keep_vars=True))
    published, publishing, adapter = learner.published(), None, None
    if learner.publishes_adapters:
        # What the other ranks draw up is announced by nobody.
        digest, lora = base_digest(arguments.model) if ranks.leads else "0" * 64, arguments.settings.trainer.lora
        adapter = Adapter(base_digest=digest, rank=lora.rank, alpha=lora.alpha)
    else:
        check_folder(arguments.model, published, f"{learner.model.base_model_prefix}.")
    if ranks.several:
        publishing = PublishingRanks(settled_within(weights.stage_timeout_s))
        stack.callback(publishing.close)
    publisher = (LeadingPublisher if ranks.several and ranks.leads else Publisher)(
        arguments.run_id,
        published,
        arguments.settings.model.dtype,
        exporter,
        weights.bucket_mib << 20,
        key=arguments.weights_key,
        wait_s=settled_within(weights.stage_timeout_s),
        delta_max_ratio=weights.delta_max_ratio if weights.delta == "auto" else 0.0,
        buffers=weights.arenas,
        ranks=publishing,
        adapter=adapter,
    )
    if isinstance(publisher, LeadingPublisher):
        publisher.leads = ranks
    return publisher


class Assembly:
    """Makes parts that are closed when `stack` is. `background` is closed by the caller, after everything else."""

    def __init__(
        self, arguments: TrainerArguments, background: Background, stack: ExitStack, ranks: Ranks | None = None
    ) -> None:
        self.arguments, self.background = arguments, background
        self.ranks = Ranks.alone() if ranks is None else ranks
        self.folder = RunFolder(arguments.run_dir)
        self._stack = stack
        self.redis: Redis = connect(arguments.redis_url)
        self._close_later(self.redis.aclose, "closing Redis")
        told = (arguments.run_id, arguments.bus_url, self.folder.metrics, arguments.settings)
        asked = Keys(peer=arguments.bus_key, metrics=arguments.metrics_key)
        self.telemetry = open_telemetry(self.redis, *told, background, stack, asked, arguments.tls)
        self.ledger = Ledger(self.redis, arguments.run_id)
        self.evaluations = EvaluationStore(self.redis, arguments.run_id)
        self.reader = self._open_reader()
        self.sign = WaitSign(WaitBoard(self.redis, arguments.run_id, "trainer"), background)
        self._client: TeacherClient | None = None
        self._meeting: Future[None] | None = None
        self._teacher = self._make_teacher()

    def roles(self) -> Roles:
        return load_roles(self.arguments, None if self._teacher is None else self._teacher.of, self.ranks)

    def _make_teacher(self) -> Teacher | None:
        if self.arguments.teacher is None:
            return None
        self._client = TeacherClient(self.arguments.teacher)
        teacher = Teacher(self._client, self.arguments.settings.trainer.teacher, self.background)
        self._close_later(teacher.close, "closing the teacher's client")
        return teacher

    def begin_meeting_teacher(self, deadline_s: float) -> None:
        """Begin to wait until the teacher answers, where there is one. For a model folder that is there."""
        if self._client is not None:
            self._meeting = self.background.begin(self._client.meet(self._tokenizer(), deadline_s))

    def meet_teacher(self, deadline_s: float) -> None:
        """Wait until it has answered. Raises as `TeacherClient.meet` does."""
        if self._client is not None and self._meeting is not None:
            self.sign.post(f"the teacher at {self._client.url} to answer")
            self.background.result(self._meeting, "meeting the teacher", deadline_s + CALL_DEADLINE_S)
            self.sign.clear()

    def _longest(self, of_model: int) -> int:
        """Tokens a segment may have: the model and the teacher take them."""
        of_teacher = None if self._client is None else self._client.max_tokens
        if of_teacher is None or of_teacher >= of_model:
            return of_model
        # One token is sampled behind a prompt: a teacher of the same context takes one less, which is nobody's mistake.
        say = _log.info if of_teacher == of_model - 1 else _log.warning
        say("longer segments are dropped: the teacher does not take them", longest=of_teacher, model=of_model)
        return of_teacher

    def loop(self, identity: Identity, roles: Roles, log: StepLog, interrupt: Interrupt) -> TrainingLoop:
        learner = roles.learner
        settings, config = self.arguments.settings, learner.model.config.get_text_config()
        # One thread: what is logged is written in order.
        journal = self._stack.enter_context(ThreadPoolExecutor(1, "step-log"))
        attempts = Attempts(identity.run_id, settings, roles, log, journal, self.background, self.folder.anomalies)
        tokenizer, advantage = self._tokenizer(), settings.trainer.advantage
        validator = Validator(
            self.arguments.run_id,
            int(config.vocab_size),
            self._longest(int(config.max_position_embeddings)),
            vocabulary_digest(tokenizer.get_vocab()),
            greedy_baseline=advantage.greedy_baseline,
            cost=advantage.cost.component,
            # A teacher tells logprobs of its whole distribution.
            masks=self._client is None,
            experts=None if learner.replay is None else learner.replay.shape,
        )
        group_filter = GroupFilter(
            most_equal=advantage.dynamic_sampling_most if advantage.dynamic_sampling else 0,
            baseline=advantage.greedy_baseline,
        )
        smallest = settings.rollout.min_group_size
        intake = Intake(
            self._open_reader,
            self.ledger,
            validator,
            lambda: learner.version,
            SIBLINGS_LAG_S,
            smallest,
            group_filter,
            follower=self._teacher,
        )
        return TrainingLoop(
            identity=identity,
            settings=settings,
            roles=roles,
            checkpoints=self.folder.checkpoints,
            background=self.background,
            intake=intake,
            reader=self.reader,
            updates=self._updates(learner, attempts),
            attempts=attempts,
            records=self._records(),
            recorder=self._recorder(tokenizer),
            sign=self.sign,
            interrupt=interrupt,
            tracing=self.arguments.tracing,
            store=self._store_use,
            evaluations=lambda: self.telemetry.evaluations,
            files=self._stack.enter_context(ThreadPoolExecutor(1, "run-files")),
            saving=self._saving(identity, roles, attempts),
            packing=self._stack.enter_context(ThreadPoolExecutor(1, "packing")),
            teacher=self._teacher,
            unknown_token=_unknown_token(tokenizer),
        )

    def _saving(self, identity: Identity, roles: Roles, attempts: Attempts) -> Saving:
        settings = self.arguments.settings
        return Saving(
            folder=self.folder.checkpoints,
            evaluations_file=self.folder.evaluations,
            roles=roles,
            run_id=identity.run_id,
            fingerprint=identity.fingerprint,
            every=settings.trainer.checkpoint_every,
            evaluation=settings.evaluation,
            logged=attempts.written,
            thread=self._stack.enter_context(ThreadPoolExecutor(1, "checkpoints")),
            background=self.background,
            save=self.arguments.save,
        )

    def _updates(self, learner: Learner, attempts: Attempts) -> WeightUpdates:
        arguments, weights = self.arguments, self.arguments.settings.weights
        publisher = make_publisher(arguments, learner, self.ranks, self._stack)
        self._stack.callback(publisher.close)
        bus = BusClient(
            arguments.bus_url,
            arguments.run_id,
            key=arguments.bus_key,
            trust=arguments.tls.trust,
            tracing=arguments.tracing,
        )
        self._close_later(bus.close, "closing the bus client")
        lines = read_metrics(self.folder.metrics)
        committed = max((line.commits for line in lines), default=0)
        updates = WeightUpdates(
            publisher, bus, self.background, weights.stage_timeout_s, attempts.announce, committed, arguments.tracing
        )
        self._stack.callback(updates.abandon)
        return updates

    def _tokenizer(self) -> Tokenizer:
        path = self.arguments.model / "tokenizer.json"
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # The tokenizers library raises bare Exceptions.
            raise UsageError(
                f"{path} is no tokenizer ({error})", "give --model a folder with a tokenizer.json"
            ) from error

    def _records(self) -> RunRecords:
        records = RunRecords(self.folder.metrics)
        self._stack.callback(records.close)
        return records

    def _recorder(self, tokenizer: Tokenizer) -> RolloutRecorder | None:
        settings = self.arguments.settings
        recorder = open_recorder(self.folder.rollouts, settings.samples, settings.k, tokenizer)
        if recorder is not None:
            self._stack.callback(recorder.close)
        return recorder

    def _store_use(self) -> StoreUse | None:
        store = self.telemetry.store
        if store is None:
            return None
        return store_use(store.used_bytes, store.most_bytes, self.arguments.settings.run_store.max_bytes)

    def _open_reader(self) -> TrajectoryReader:
        return TrajectoryReader(self.redis, self.arguments.run_id)

    def _close_later(self, close: Callable[[], Awaitable[None]], name: str) -> None:
        async def closing() -> None:
            await close()

        self._stack.callback(lambda: self.background.call(closing(), name, CALL_DEADLINE_S))


def _unknown_token(tokenizer: Tokenizer) -> int | None:
    """None where every text has tokens, as with bytes to fall back on."""
    name = getattr(tokenizer.model, "unk_token", None)
    if name is None or getattr(tokenizer.model, "byte_fallback", False):
        return None
    return tokenizer.token_to_id(name)
