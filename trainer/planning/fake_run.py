"""The trainer's own step on fake tensors: tensors with shapes and without memory, on which every operation is done but
computing. What they would hold is counted (`trainer.memory.tracker`).

    config.json ──► fake models ──► roles, as a run makes them ──► a step, then one of two passes ──► Plan
                                                                   makes the state      counted

The second step stands for all later ones: the optimizer has its state, and its second pass finds gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from services.config.settings import RunSettings
from services.config.training.lora import LoraSettings
from services.host.models import check_code
from services.policies.training.layout import Layout
from services.policies.training.memory import MemoryOptions, keeps_layers
from services.policies.training.model_shape import shape_of
from services.wire.errors import NoModelError
from trainer.data.packing import PackedBatch
from trainer.memory.tracker import Tracker
from trainer.model import packed_attention
from trainer.model.adapters import Adapters
from trainer.model.forward import freeze_beside_text
from trainer.model.reach import untried
from trainer.model.roles import make_roles
from trainer.planning.as_gpu import attention_of_gpu, for_cpu, larger_chunks, placed
from trainer.planning.fake_ranks import FakeRanks, fake_ranks
from trainer.planning.step import full_batch, run_step
from trainer.planning.timeline import Moment, moments, with_head
from trainer.planning.watch import Watch

_ANSWER = 1e-6
"""To whatever is read of a fake tensor: so little that trials of a model agree, and a number that can be divided by."""


@dataclass(frozen=True)
class Plan:
    """`moments`: the fullest of each part of a step, in their order. `trained`, `parameters`: numbers of weights.

    `separation`: how rows that stand in one are kept apart. `assumed`: what was counted in place of being run.
    """

    moments: tuple[Moment, ...]
    parameters: int
    trained: int
    separation: str
    assumed: tuple[str, ...] = ()

    @property
    def tightest(self) -> Moment:
        return max(self.moments, key=lambda moment: moment.total)


def read_config(folder: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """Raises NoModelError for a folder without a config.json that `transformers` understands, and UsageError for one whose
    code is not trusted."""
    check_code(folder, trusted=trust_remote_code)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise NoModelError(folder, error) from error
    return config


def run_fake(config: PretrainedConfig, settings: RunSettings, options: MemoryOptions, row: int | None = None) -> Plan:
    """The plan of one rank. `options`: of the settings, for the machine that is planned for; `row`: tokens of each row of a
    pass, left out: one row is the pass.

    Raises UsageError as `make_roles` does.
    """
    packed_attention.register()
    kept = options.layout.ranks > 1 and keeps_layers(shape_of(config.to_dict()), options)
    told = True
    while True:
        try:
            with attention_of_gpu(options.gpu and options.half), fake_ranks(options.layout, gpu=options.gpu) as ranks:
                return _run(config, for_cpu(settings, options, kept), options, row, ranks, told=told)
        except NotImplementedError:
            # Its attention is not what it was said to be: it is found by trying, as in a run.
            if not told:
                raise
            told = False


def _run(
    config: PretrainedConfig,
    settings: RunSettings,
    options: MemoryOptions,
    row: int | None,
    ranks: FakeRanks | None,
    *,
    told: bool,
) -> Plan:
    text = config.get_text_config()
    tied = bool(getattr(config, "tie_word_embeddings", False))
    shared = {torch.Size((int(text.vocab_size), int(text.hidden_size)))} if tied else set()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    tracker = Tracker(answer=_ANSWER, found=1.0 / options.layout.context, summed=shared)
    watch = Watch(tracker)
    made: list[PreTrainedModel] = []

    def load() -> PreTrainedModel:
        made.append(_fake_policy(config, told=told, trusted=settings.model.trust_remote_code))
        watch.sends_evenly(made[-1], options.layout)
        return made[-1]

    def adapt(model: PreTrainedModel, lora: LoraSettings, seed: int) -> Adapters:
        return _fake_adapters(model, lora, seed, fake)

    with fake, tracker:
        roles = make_roles(load, settings, 0, ranks=ranks, adapt=adapt)
    learner, critic = roles.learner, roles.critic
    watch.holds("weights", _tensors(learner.model))
    if critic is not None:
        watch.holds("critic", _tensors(critic.model))
    if ranks is not None and ranks.exchange:
        watch.holds("exchange", ranks.exchange)
    for model in made:
        # Those of the others are known: they keep their part.
        watch.known = {**dict.fromkeys(tracker.add(_tensors(model)), "reference"), **watch.known}
    whose = {id(learner.model): "", **({} if critic is None else {id(critic.model.policy): "critic's "})}
    batches = [full_batch(roles, settings.trainer.micro_batch_tokens, row, passes) for passes in (1, 2)]
    since = 0
    with ExitStack() as following:
        for model in made:
            following.enter_context(watch.following(model, whose.get(id(model), "reference's ")))
        with fake, tracker:
            for batch in batches:
                since = len(tracker.events)
                run_step(roles, batch, watch)
    watch.known = {**dict.fromkeys(tracker.gathered, "gathered"), **watch.known}
    stem = 4 * int(text.hidden_size) * _computed(batches[0])
    events, assumed = placed(tracker.events, watch.known, options, stem)
    more = larger_chunks(int(text.vocab_size), options) if options.gpu else 0
    weights = list(learner.model.parameters())
    return Plan(
        tuple(with_head(moments(events, watch.known, since), more)),
        sum(weight.numel() for weight in weights),
        sum(weight.numel() for weight in weights if weight.requires_grad),
        learner.separation,
        (*assumed, *_even(options.layout)),
    )


def _even(layout: Layout) -> list[str]:
    return ["each rank's experts get as many tokens as another's"] if layout.expert > 1 else []


def _computed(batch: PackedBatch) -> int:
    """Tokens of a pass that the model computes: the last ones, which nothing is sampled after, are not."""
    needs = batch.micro_batches[0].row.needs
    return int(batch.micro_batches[0].row.input_ids.shape[1]) if needs is None else int(needs.needed.sum())


def _fake_policy(config: PretrainedConfig, *, told: bool, trusted: bool) -> PreTrainedModel:
    """As `trainer.checkpoint.model_folder.load_policy` makes it, without weights."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=trusted)
    freeze_beside_text(model)
    if told and untried(model) is None:
        # What is tried on numbers cannot be on none.
        model.set_attn_implementation(packed_attention.NAME)
    return model


def _fake_adapters(model: PreTrainedModel, settings: LoraSettings, seed: int, fake: FakeTensorMode) -> Adapters:
    """Adapters of a fake model. peft moves what it makes to the model's device, which fake weights do not stand: it makes
    them on none, and fake ones take their place."""
    with unset_fake_temporarily(), torch.device("meta"):
        adapters = Adapters(model, settings, seed)
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.device.type == "meta":
                with fake:
                    empty = torch.empty(weight.shape, dtype=weight.dtype, device="cpu")
                    setattr(module, name, nn.Parameter(empty, requires_grad=weight.requires_grad))
    return adapters


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
