"""Memory of a training step as a formula: bytes of one rank, from plain numbers, in microseconds. Pure.

What is always there, of P weights, of which t are trained, over n ranks that share them (data times context):

    weights 4·P   gradients 4·t   moments 8·t (AdamW; 2.03 in 8 bits)   reference 4·P   critic 4·P + 12·t        each ÷ n

Beside it, a sum for each moment that may be the fullest; the largest is the answer:

    head         all layers, a chunk of logits, the head's gradient
    backward     all layers, the head's gradient where it waits for the embedding's, what the last layer makes;
                 a checkpointed layer once more
    scatter      of several ranks: a layer's gradients, and a copy of them that is sent, beside the next layer's weights
    embedding    the gradients of embedding and head
    critic       its own layers; there is no head

A layer keeps for T tokens, in bytes a token, of width h, queries q, keys k, feed-forward f:

    float32      24·h + 20·q + 16·k + 16·f        bfloat16     26·h + 12·q + 10·k + 8·f, and its weights in 2 bytes

as autograd keeps them for `transformers`' decoders (norms in float32, SwiGLU). The numbers were read off fake runs
(`trainer.planning`), which tests hold them to: within 10 %.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from services.policies.training.layout import ALONE, Layout
from services.policies.training.model_shape import ModelShape

Checkpointing = Literal["none", "selective", "full"]

HEAD_CHUNK = {False: 1 << 23, True: 1 << 27}
"""Logits of a chunk of the language head, on a CPU and on a GPU (`trainer.model.head`)."""
EXCHANGE_BYTES = 16 << 20
"""At most, of what ranks of one machine exchange at a time, without GPUs (`trainer.parallel.exchange`)."""
SURE = 1.1
"""The formula is within 10 % of what a step takes."""
_PART = 256 << 20
"""Bytes of weights whose offloaded state is on a GPU at a time (`trainer.memory.host_state`)."""
_GIB = 1 << 30
_DEARER, _FILLED = 1.1, 0.8
"""What weights that stay collected may make of a step, and fill of a GPU."""


@dataclass(frozen=True)
class MemoryOptions:
    """`tokens` of a pass; `half`: passes in bfloat16; `gpu`: what is offloaded is elsewhere than the device.

    `serving_bytes`: of a published weight; `arenas`: versions that are held of them; `publish_on_device`: they lie there.
    The others are named as the settings are.
    """

    tokens: int
    half: bool = False
    layout: Layout = ALONE
    checkpointing: Checkpointing = "none"
    gpu: bool = False
    activation_offload: bool = False
    optimizer_offload: bool = False
    optimizer: Literal["adamw", "muon"] = "adamw"
    state_bits: int = 32
    lora_rank: int = 0
    reference: bool = False
    critic: bool = False
    offload_idle: bool = False
    serving_bytes: int = 4
    arenas: int = 2
    publish_on_device: bool = False
    reshard_after_forward: bool | Literal["auto"] = "auto"
    device_bytes: float | None = None
    """Of a GPU, where it is known."""


@dataclass(frozen=True)
class Estimate:
    """`parts`: bytes at the fullest moment, `where`, on the device. `host`: bytes in the host's memory."""

    where: str
    parts: Mapping[str, int]
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def words(self) -> str:
        """The sum, in GiB, largest first."""
        parts = sorted(self.parts.items(), key=lambda part: -part[1])
        return f"{self.where}: " + " + ".join(f"{name} {size / _GIB:.2f}" for name, size in parts if size)


def estimate(shape: ModelShape, options: MemoryOptions) -> Estimate:
    """The fullest moment of a step whose optimizer has its state. Of the first of equal ones."""
    return _fullest(shape, options, keeps_layers(shape, options))


def keeps_layers(shape: ModelShape, options: MemoryOptions) -> bool:
    """Whether ranks keep the weights of layers that they collect from the forward to the backward pass. `auto`: where that
    adds at most a tenth, and fills at most four fifths of a GPU whose memory is known."""
    if options.layout.ranks == 1:
        return False
    if options.reshard_after_forward != "auto":
        return not options.reshard_after_forward
    kept, without = (_fullest(shape, options, kept).total for kept in (True, False))
    most = float("inf") if options.device_bytes is None else _FILLED * options.device_bytes
    return kept <= min(_DEARER * without, most)


def _fullest(shape: ModelShape, options: MemoryOptions, kept: bool) -> Estimate:
    found = _Step(shape, options, kept)
    return max(found.moments(), key=lambda moment: moment.total)


class _Step:
    """The sums of one step. `kept`: as `keeps_layers`."""

    def __init__(self, shape: ModelShape, options: MemoryOptions, kept: bool) -> None:
        self.shape, self.options, self.kept = shape, options, kept
        layout = options.layout
        self.tensor, self.data = layout.tensor, layout.data * layout.context
        self.collects = layout.ranks > 1
        """Whether layers' weights are collected for their passes: also where nobody else has parts of them."""
        self.tokens = -(-options.tokens // layout.context)
        experts = shape.hidden * shape.experts * 3 * shape.expert_width
        self.layer = (shape.layer - experts) / self.tensor + experts / max(self.tensor, layout.expert)
        """Weights of a layer that this rank computes with."""
        self.outer = shape.outer - shape.embedding * (1.0 - 1.0 / self.tensor)
        """Of no layer: the head is cut, the embedding where it is the head."""
        self.held = shape.layer / self.tensor
        """That data ranks share: those that split experts hold no fewer of them, as fewer have the same ones."""
        self.weights = shape.layers * self.held + self.outer
        adapters = shape.layers * shape.adapters(options.lora_rank) / self.tensor
        self.trained = adapters if options.lora_rank else self.weights
        self.all = self.weights + (adapters if options.lora_rank else 0.0)

    def moments(self) -> list[Estimate]:
        shape, options = self.shape, self.options
        layers, width = shape.layers, shape.hidden
        kept = self._kept(layers)
        stem = 8.0 * width * self.tokens
        # The head's gradient waits for the embedding's, where they are one, and for all of those that ranks collect.
        waits = (shape.tied or self.collects) and not options.lora_rank
        waiting = 4.0 * self._vocabulary * width if waits else 0.0
        last = max(16.0 * width, self._within_layer()) * self.tokens
        again = self._again()
        outer = 0.0 if options.lora_rank or self.collects else 4.0 * self._vocabulary * width * (2 if shape.tied else 1)
        found = [
            self._moment("head", activations=kept + stem, head=self._head()),
            self._moment("backward", activations=kept + stem, head=waiting, temporaries=last),
            self._moment("embedding", activations=self._kept(1), temporaries=outer),
        ]
        if self.collects and layers > 1:
            rest = self._kept(layers - 1)
            found.append(self._moment("scatter", activations=rest, head=waiting, temporaries=4.0 * width * self.tokens))
        if again:
            # A last layer that kept all of its own is gone before the one below it is computed once more.
            gone = int(options.checkpointing == "selective" and layers % 2 == 0)
            rest = self._kept(layers - gone)
            found.append(self._moment("backward", activations=rest, head=waiting, temporaries=again))
        if options.critic:
            found.append(self._moment("critic", activations=kept + stem, temporaries=max(last, again), of_critic=True))
        return found

    @property
    def _vocabulary(self) -> float:
        return self.shape.vocabulary / self.tensor

    def _moment(
        self,
        where: str,
        *,
        activations: float = 0.0,
        head: float = 0.0,
        temporaries: float = 0.0,
        of_critic: bool = False,
    ) -> Estimate:
        options, data = self.options, self.data
        state = self.trained * self._state_bytes() / data
        reference = 4.0 * self.weights / data if options.reference else 0.0
        critic = (4.0 * self.weights + self.weights * self._state_bytes()) / data if options.critic else 0.0
        if of_critic:
            critic += 4.0 * self.weights / data
        elif options.offload_idle:
            critic = 0.0
        publishing = {"publishing": options.arenas * options.serving_bytes * self.weights / data}
        host: dict[str, float] = {} if options.publish_on_device else publishing
        on_device = {
            "weights": 4.0 * self.all / data,
            "gradients": 4.0 * self.trained / data,
            "optimizer": state,
            "reference": reference,
            "critic": critic,
            "gathered": self._gathered(where),
            "exchange": self._exchange(),
            "activations": activations,
            "head": head,
            "temporaries": temporaries,
            **(publishing if options.publish_on_device else {}),
        }
        if options.optimizer_offload:
            on_device["optimizer"] = 0.0
            host["optimizer"] = state
        if options.offload_idle:
            host["reference"], on_device["reference"] = reference, 0.0
        return Estimate(
            where,
            {part: int(size) for part, size in on_device.items() if size},
            {part: int(size) for part, size in host.items() if size},
        )

    def _state_bytes(self) -> float:
        """Of a trained weight."""
        if self.options.optimizer == "muon":
            # Hidden matrices have one moment.
            inside = 1.0 - self.outer / self.weights if not self.options.lora_rank else 1.0
            return 4.0 * inside + 8.0 * (1.0 - inside)
        # A code of 8 bits for each, and a float32 scale for 256.
        return 8.0 if self.options.state_bits == 32 else 2.0 * (1.0 + 4.0 / 256)

    def _kept(self, layers: int) -> float:
        """Bytes that the first `layers` keep between their forward and their backward pass; selectively, every second one
        keeps all of its own, and the first its input alone."""
        thin = 0.0 if self.options.activation_offload else 4.0 * self.shape.hidden * self.tokens
        whole = {"none": layers, "selective": layers // 2, "full": 0}[self.options.checkpointing]
        return whole * self._whole() + (layers - whole) * thin

    def _whole(self) -> float:
        """Bytes that a layer keeps where nothing is computed once more."""
        return self._a_token(_KEPT) * self.tokens + self._casts()

    def _a_token(self, table: Mapping[tuple[bool, bool], _Widths]) -> float:
        """Bytes a token, by a table of bytes for each of a layer's widths."""
        shape, half = self.shape, self.options.half
        widths = table[half, bool(self.options.lora_rank)]
        # What norms of queries and keys keep: their input, and, where they are trained, what they made of it.
        of_norms = 0.0 if shape.head_norms else 4.0 if self.options.lora_rank else 6.0 if half else 8.0
        queries, keys = widths.queries - of_norms, widths.keys - of_norms
        if half and self.options.gpu:
            # One kernel for all rows writes its output where the next product reads it.
            queries -= 2.0
        found = widths.hidden * shape.hidden
        found += (queries * shape.queries + keys * shape.keys) / self.tensor
        found += 4.0 * (2 + 2 * shape.heads / self.tensor)
        if shape.experts:
            # Its tokens are laid out once for each expert that they go to: tensor ranks that split experts lay out a part
            # of them each, others a part of the width.
            apart = self.tensor if self.options.layout.expert_on == "tensor" else 1
            # Adapters leave experts as they are: what only their weights' gradients need is not kept.
            frozen = 1 if self.options.lora_rank else 0
            own = 4.0 * ((2 - frozen) * shape.hidden / apart + (4 - frozen) * shape.expert_width / self.tensor)
            found += shape.chosen * own + 8.0 * shape.experts
        else:
            found += widths.feed_forward * shape.feed_forward / self.tensor
        return found + 7.0 * self.options.lora_rank * (2 if half else 4)

    def _casts(self) -> float:
        """16-bit copies of a layer's weights, which the backward pass needs."""
        if not self.options.half or self.shape.experts:
            return 2.0 * self.shape.attention / self.tensor if self.options.half else 0.0
        return 2.0 * self.shape.products / self.tensor

    def _within_layer(self) -> float:
        """Bytes a token that the backward pass of a layer holds beyond what it gives up."""
        widest = self.shape.expert_width * self.shape.chosen if self.shape.experts else self.shape.feed_forward
        return (2.0 if self.options.half else 8.0) * widest / self.tensor - 4.0 * self.shape.hidden

    def _again(self) -> float:
        """Bytes of a checkpointed layer that is computed once more and goes back."""
        if self.options.checkpointing == "none":
            return 0.0
        widest = self.shape.expert_width * self.shape.chosen if self.shape.experts else self.shape.feed_forward
        beyond = (2.0 if self.options.half else 8.0) * widest / self.tensor + 2.0 * self.shape.hidden
        return self._whole() + beyond * self.tokens

    def _head(self) -> float:
        """Of the chunked language head, forward and backward."""
        options, width = self.options, self.shape.hidden
        rows = max(1, HEAD_CHUNK[options.gpu] // int(self._vocabulary))
        logits = min(rows, self.tokens) * self._vocabulary
        size = self._vocabulary * width
        gradient, chunk = 0.0 if options.lora_rank else 4.0 * size, 8.0 * logits
        if options.half:
            chunk = 10.0 * logits
            if not options.lora_rank:
                # The gradient is computed in parts, beside slopes alone.
                chunk = max(chunk, 2.0 * (logits + min(size, HEAD_CHUNK[options.gpu])))
        casts = 2.0 * size if options.half else 0.0
        return chunk + gradient + casts + (4.0 if options.half else 8.0) * width * self.tokens

    def _gathered(self, where: str) -> float:
        """Whole weights and gradients that ranks collect: those of no layer all along; layers', one of them ahead, or all
        until their backward pass; in that a layer's gradients, and their share. At its end the gradients of those of no
        layer."""
        if not self.collects:
            return 0.0
        trains = not self.options.lora_rank
        if where == "embedding":
            return 4.0 * self.outer * (2 if trains else 1)
        kept, shared = self.shape.layers if self.kept else 0, self._within_exchange()
        if where == "head":
            return 4.0 * (self.outer + self.layer * (kept or 1 - shared))
        if where == "scatter":
            sent = 2.0 if trains else 0.0
            collected = kept - 1 if kept else min(2 - shared, self.shape.layers - 1)
            return 4.0 * (self.outer + self.layer * (collected + max(0.0, sent - shared)))
        collected = kept or min(2 - shared, self.shape.layers)
        # A layer that is computed once more is collected beside the one before it, but where that is in the exchange.
        again = 0 if self.options.checkpointing == "none" or self._exchange() else 1
        # Where nobody shares them, the gradients are their share.
        share = self.held / self.data if trains and self.data > 1 else 0.0
        return 4.0 * (self.outer + self.layer * (collected + again) + share)

    def _within_exchange(self) -> int:
        """1 where what is collected of a layer, and given out, is in the memory for that: a copy less of its own."""
        return int(bool(self._exchange()) and 4.0 * self.layer <= EXCHANGE_BYTES)

    def _exchange(self) -> float:
        """Memory through which ranks of one machine without GPUs exchange: for each model that is sharded, and where data
        ranks split experts for these once more."""
        shape, options, layout = self.shape, self.options, self.options.layout
        if options.gpu:
            return 0.0
        experts = shape.hidden * shape.experts * 3 * shape.expert_width if layout.expert_on == "data" else 0
        of_layers, of_experts = self.data, self.data // layout.expert if experts else 1
        found = sum(
            min(EXCHANGE_BYTES, 4.0 * weights) * (ranks + (2 if 4.0 * weights <= EXCHANGE_BYTES else 0))
            for weights, ranks in ((shape.layer - experts, of_layers), (experts, of_experts))
            if ranks > 1
        )
        return found * (1 + options.reference + options.critic)


@dataclass(frozen=True)
class _Widths:
    """Bytes a token that a layer keeps, for each number of a width."""

    hidden: float
    queries: float
    keys: float
    feed_forward: float


_KEPT = {
    (False, False): _Widths(24.0, 20.0, 16.0, 16.0),
    (True, False): _Widths(26.0, 12.0, 10.0, 8.0),
    (False, True): _Widths(16.0, 16.0, 12.0, 16.0),
    (True, True): _Widths(18.0, 10.0, 8.0, 8.0),
}
"""By whether passes are in bfloat16, and whether adapters alone are trained; with norms of queries and keys."""
