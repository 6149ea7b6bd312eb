"""One forward pass over a packed row, for any Hugging Face causal language model.

    PackedForward(model) ──► terms(row, places, tokens) · hidden(row, places)      what each row gives alone

How rows are kept apart is chosen once, by trying: a few short rows are run packed, and each alone, with windows that are
shorter still (`trainer.model.reach`).

    within    attention is done row by row (`trainer.model.packed_attention`)
    masked    the model's own attention under the block mask that `transformers` makes of restarting positions
    apart     a pass a run of rows of one length: for what mixes tokens by more than attention, makes no such mask, or
              cannot be tried with short rows

On several context ranks (`trainer.parallel.ulysses`) each computes some of the row's tokens, head included, and all are
told what every one found.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import structlog
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from services.wire.errors import UsageError
from trainer.data.packing import KeptTokens, PackedRow, lay_end_to_end, lay_shared
from trainer.data.sharing import share
from trainer.model import packed_attention
from trainer.model.head import Terms, head_terms, linear_head, logit_terms
from trainer.model.precision import Precision, compute_dtype, computing
from trainer.model.reach import limited, short_reach, untried
from trainer.model.routers import RoutingReplay
from trainer.parallel.sharding import inside, let_go
from trainer.parallel.ulysses import ContextSlice, slice_of
from trainer.parallel.vocabulary import local_rows

Separation = Literal["within", "masked", "apart"]
_log = structlog.get_logger()

# The second row crosses the end of a chunk that begins with the first; the last is longer than a window, and than two.
_PROBE_LENGTHS = (2, 3, 3, 8)
_SIBLINGS = ((1, 2, 3, 4, 5), (1, 2, 3, 5, 4, 6), (1, 2, 3, 5, 1), (3, 1, 2, 4))
# Of the largest hidden state; for 16-bit floats, whose kernels round differently, coarser.
_TOLERANCE, _COARSE_TOLERANCE = 1e-4, 0.02


class PackedForward:
    """`model`, a causal language model or the layers of one, on packed rows.

    Its attention may be replaced; ordinary calls of it give what they gave before. It tries the model: made when weights
    are there, and sharded if they are to be. `terms` and `logits` are calls of the model; `hidden` must stand within one.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        precision: Precision = "float32",
        context: DeviceMesh | None = None,
        root: torch.nn.Module | None = None,
        replay: RoutingReplay | None = None,
    ) -> None:
        """`precision`: of passes; weights keep theirs. `context`: a mesh of one dimension, whose ranks share each row's
        tokens; all of them call the same things in the same order. `root`: what is sharded and has `model` as a part of it;
        left out: `model`. Its ranks all make this at the same time.

        `replay`: of the model; passes choose the experts that their rows say.

        Raises UsageError where the device does not have the precision, and where the model cannot be shared so, or its
        routing cannot be replayed.
        """
        self._replay: RoutingReplay | None = None
        self._model, self._root = model, model if root is None else root
        self._context: DeviceMesh | None = None
        self._dtype = compute_dtype(precision, model.device)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.stem_width: int | None = None
        self.separation: Separation = self._choose()
        self.stem_width = self._stem_width()
        """The hidden size, where rows may share stems (`trainer.data.sharing`); None where each is computed whole."""
        self._head = self._linear_head()
        if context is not None and context.size() > 1:
            self._share(context)
        if replay is not None:
            self._try_replay(replay)
        let_go(self._root)

    def terms(
        self,
        row: PackedRow,
        places: Tensor,
        tokens: Tensor,
        temperature: Tensor | None = None,
        *,
        kept: KeptTokens | None = None,
        entropy: bool = False,
    ) -> Terms:
        """What the model says of `tokens`, int64 `[N]`, behind those at `places`; as `logits` has them. `kept`: what each
        was sampled from."""
        row, places = self._condensed(row, places)
        part = self._part(row)
        if part is None:
            return self._terms(row, places, tokens, temperature, kept, entropy=entropy)
        mine, own = part.own_places(places)
        of_mine = None if temperature is None else temperature[mine]
        kept_of_mine = None if kept is None else kept.take(mine)
        found = self._terms(row, own, tokens[mine], of_mine, kept_of_mine, entropy=entropy)
        if found.entropy is None:
            return Terms(part.gathered(found.logprobs, mine, len(places)))
        both = part.gathered(torch.stack([found.logprobs, found.entropy], dim=-1), mine, len(places))
        return Terms(both[:, 0], both[:, 1])

    def each(self, row: PackedRow, places: Tensor, score: Callable[[Tensor], Tensor]) -> Tensor:
        """`score`, of weights of its own, of the hidden states of the tokens at `places`: `[n, width]` to `[n]`.

        Each context rank scores its own tokens, and gets the scores of all, `[N]`.
        """
        row, places = self._condensed(row, places)
        part = self._part(row)
        if part is None:
            return score(self._hidden(row, places))
        mine, own = part.own_places(places)
        return part.gathered(score(self._hidden(row, own)), mine, len(places))

    def logits(self, row: PackedRow, places: Tensor) -> Tensor:
        """The logits behind the tokens at `places`, int64 `[N]` in `0 … T − 1`: `[N, V]`; others are not computed.

        Where the row says which tokens it needs, others must not be asked for.
        """
        return self._gathered(self._logits, *self._condensed(row, places))

    def hidden(self, row: PackedRow, places: Tensor) -> Tensor:
        """What the last layer makes of the tokens at `places`, as above, the final norm included: `[N, width]`."""
        return self._gathered(self._hidden, *self._condensed(row, places))

    def part_of(self, row: PackedRow) -> ContextSlice | None:
        """Which of the tokens that are computed of `row` are this rank's; None for all."""
        return self._part(self._condensed(row, row.starts[:0])[0])

    def _gathered(self, compute: Callable[[PackedRow, Tensor], Tensor], row: PackedRow, places: Tensor) -> Tensor:
        part = self._part(row)
        if part is None:
            return compute(row, places)
        mine, own = part.own_places(places)
        return part.gathered(compute(row, own), mine, len(places))

    # What follows computes this rank's tokens of a condensed row; `places` are among them.

    def _terms(
        self,
        row: PackedRow,
        places: Tensor,
        tokens: Tensor,
        temperature: Tensor | None,
        kept: KeptTokens | None,
        *,
        entropy: bool,
    ) -> Terms:
        if self._head is None:
            return logit_terms(self._logits(row, places), tokens, temperature, kept=kept, entropy=entropy)
        head = self._head

        def by_head() -> tuple[Tensor, Tensor | None]:
            hidden = self._hidden(row, places)
            if self._dtype != torch.float32:
                # The last norm leaves float32 behind. Weights of another dtype than float32 keep theirs.
                hidden = hidden.to(self._dtype)
            # Read here: outside, the weights of a sharded model are other objects.
            weight, shard = local_rows(head.weight)
            bias = None if head.bias is None else local_rows(head.bias)[0]
            terms = head_terms(hidden, weight, tokens, temperature, kept=kept, bias=bias, entropy=entropy, shard=shard)
            # No view: nothing may be written into what stands for the whole pass.
            return terms.logprobs.clone(), terms.entropy

        return Terms(*inside(self._model, by_head))

    def _logits(self, row: PackedRow, places: Tensor) -> Tensor:
        with computing(self._dtype, self._model.device):
            if self.separation == "apart":
                return self._apart(row, lambda inputs: self._model(**inputs).logits).index_select(0, places)
            inputs = self._inputs(row)
            if self._keeps:
                logits: Tensor = self._model(**inputs, logits_to_keep=places).logits[0]
                return logits
            every: Tensor = self._model(**inputs).logits[0]
            return every.index_select(0, places)

    def _hidden(self, row: PackedRow, places: Tensor) -> Tensor:
        base = layers_of(self._model)
        with computing(self._dtype, self._model.device):
            if self.separation == "apart":
                return self._apart(row, lambda inputs: base(**inputs).last_hidden_state).index_select(0, places)
            hidden: Tensor = base(**self._inputs(row)).last_hidden_state[0]
            # Not by `hidden[places]`: its gradient adds up equal places in an order that threads decide.
            return hidden.index_select(0, places)

    def _part(self, row: PackedRow) -> ContextSlice | None:
        """Which of the row's tokens are this rank's; None for all."""
        return None if self._context is None else slice_of(self._context, row.input_ids.shape[1])

    def _condensed(self, row: PackedRow, places: Tensor) -> tuple[PackedRow, Tensor]:
        """The row without what nobody needs, each stem once; and where in it the tokens at `places` are."""
        if self.stem_width is None or row.needs is None:
            return row, places
        condensed = row.needs.condensed(self.stem_width, row.input_ids.device)
        return condensed.row, condensed.places[places]

    def _inputs(self, row: PackedRow) -> dict[str, Any]:
        part, ids, positions = self._part(row), row.input_ids, row.position_ids
        if part is not None:
            ids, positions = part.own(ids), part.own(positions)
        if self._replay is not None:
            experts = row.experts
            self._replay.give(experts if experts is None or part is None else part.own(experts))
        inputs = {"input_ids": ids, "position_ids": positions, "use_cache": False}
        return inputs | (packed_attention.keywords(row, part) if self.separation == "within" else {})

    def _apart(self, row: PackedRow, run: Callable[[dict[str, Any]], Tensor]) -> Tensor:
        """`run` on rows of one length at a time: `[T, …]`."""
        parts = torch.split(row.input_ids[0], [length * count for length, count in row.runs])
        batches = (part.view(count, length) for (length, count), part in zip(row.runs, parts, strict=True))
        return torch.cat([run({"input_ids": batch, "use_cache": False}).flatten(0, 1) for batch in batches])

    def _share(self, context: DeviceMesh) -> None:
        """Share rows among the ranks of `context`, where that gives what one rank does: tried too."""
        kind, ranks = self._model.config.model_type, context.size()
        if self.separation != "within":
            raise UsageError(
                f"trainer.parallel.context={ranks}: attention of {kind} models cannot be shared by heads, because their "
                f"packed rows are kept apart otherwise ({self.separation})",
                "set trainer.parallel.context=1",
            )
        # Every rank begins within a row.
        probe = _probe(self._model, (1, 3 * ranks))
        with short_reach(self._model):
            alone, self._context = self._every(probe), context
            # What each rank finds, all have: it is gathered.
            off = _off(self._every(probe), alone)
        if not off <= self._tolerance(alone):
            raise UsageError(
                f"trainer.parallel.context={ranks}: tokens of {kind} models see others by more than attention "
                f"(hidden states differ by {off:.1e} of the largest)",
                "set trainer.parallel.context=1",
            )

    def _choose(self) -> Separation:
        model, own = self._model, self._model.config._attn_implementation
        if own == packed_attention.NAME:
            return "within"
        why = untried(model)
        if why is not None:
            _log.info("packed rows are computed apart", model_type=model.config.model_type, why=why)
            return "apart"
        probe = _probe(model)
        self.separation = "apart"
        whole = self._every(probe) if limited(model) else None
        packed_attention.register()
        trials: tuple[tuple[str, Separation], ...] = ((packed_attention.NAME, "within"), (own, "masked"))
        with short_reach(model):
            alone = self._every(probe)
            if whole is not None and _off(alone, whole) <= self._tolerance(alone):
                why = "its window is not read where it can be made short"
                _log.info("packed rows are computed apart", model_type=model.config.model_type, why=why)
                return "apart"
            for attention, self.separation in trials:
                model.set_attn_implementation(attention)
                if model.config._attn_implementation == attention and self._agrees(probe, alone):
                    return self.separation
        _log.info("packed rows are computed apart", model_type=model.config.model_type, why="its tokens see other rows")
        return "apart"

    def _try_replay(self, replay: RoutingReplay) -> None:
        if self.separation == "apart":
            kind = self._model.config.model_type
            raise UsageError(
                f"rollout.routing_replay: packed rows of {kind} models are computed apart, for which it is not made",
                "leave it out",
            )
        replay.begin_trial()
        self._every(_probe(self._model))
        replay.end_trial()
        self._replay = replay

    def _stem_width(self) -> int | None:
        """Tried too, on three rows of which two begin alike."""
        if self.separation != "within":
            return None
        rows = [np.array(row, dtype=np.int32) for row in _SIBLINGS]
        tokens, lengths = np.concatenate(rows), np.array([len(row) for row in rows])
        layout = share(tokens, lengths.tolist(), lengths.tolist(), 1 << 30)
        with short_reach(self._model):
            alone = self._every(lay_end_to_end(rows, self._model.device))
            places = torch.from_numpy(layout.packed).to(self._model.device)
            if not self._agrees(lay_shared(layout, tokens, self._model.device), alone, places):
                return None
        return int(self._model.config.get_text_config().hidden_size)

    @torch.no_grad()
    def _linear_head(self) -> torch.nn.Linear | None:
        """The head, where logits are nothing but what it makes of hidden states: tried on some tokens."""
        head = linear_head(self._model)
        if head is None:
            return None
        probe = _probe(self._model)
        places = torch.arange(probe.input_ids.shape[1], device=self._model.device)
        linear = self._entered(lambda: head(self.hidden(probe, places)))
        logits = self._entered(lambda: self.logits(probe, places))
        return head if _off(linear, logits) <= self._tolerance(logits) else None

    @torch.no_grad()
    def _every(self, row: PackedRow) -> Tensor:
        places = torch.arange(row.input_ids.shape[1], device=row.input_ids.device)
        return self._entered(lambda: self.hidden(row, places))

    def _entered(self, work: Callable[[], Tensor]) -> Tensor:
        """`work()`, which calls parts of the model, to try it."""
        return inside(self._root, work)

    def _agrees(self, probe: PackedRow, alone: Tensor, places: Tensor | None = None) -> bool:
        """Whether `probe`, at `places`, gives what `alone` holds."""
        try:
            together = self._every(probe)
            together = together if places is None else together[places]
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            # The model does not take what packed attention needs, or the machine lacks the kernel: another way is slower.
            _log.info("attention does not keep packed rows apart", way=self.separation, why=str(error))
            return False
        return _off(together, alone) <= self._tolerance(alone)

    def _tolerance(self, found: Tensor) -> float:
        return _TOLERANCE if found.dtype.itemsize >= 4 and self._dtype == torch.float32 else _COARSE_TOLERANCE


def layers_of(model: PreTrainedModel) -> PreTrainedModel:
    """What gives the hidden states that `model`'s language head sees; `model` itself where it has none.

    `base_model` is the model itself where its prefix names a module that only a larger model has (Llama 4).
    """
    base: PreTrainedModel = model.base_model
    if base is not model or model.get_output_embeddings() is None:
        return base
    inner = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return inner[0] if len(inner) == 1 else base


def freeze_beside_text(model: PreTrainedModel) -> None:
    """Take what no text goes through (encoders of images and sound) out of training: weight decay would move it."""
    if model.config.get_text_config() is model.config:
        return
    text = [model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings()]
    trained = {id(parameter) for module in text if module is not None for parameter in module.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def _off(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def _probe(model: PreTrainedModel, lengths: Sequence[int] = _PROBE_LENGTHS) -> PackedRow:
    vocabulary = int(model.get_input_embeddings().weight.shape[0])
    tokens = np.arange(1, 1 + sum(lengths), dtype=np.int32) % vocabulary
    return lay_end_to_end(np.split(tokens, np.cumsum(lengths)[:-1]), model.device)
