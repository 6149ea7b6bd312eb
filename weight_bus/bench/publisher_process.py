"""The trainer's side of the benchmark: a process that holds the weights, changes them and hands them out in every way.

python -m weight_bus.bench.publisher_process MODEL RUN_ID
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from services.bench.piped import answer_lines, replies_only
from services.wire.errors import RollmeshError
from weight_bus.bench.in_place import broadcast, make_group
from weight_bus.bench.messages import (
    Broadcast,
    Change,
    Done,
    Join,
    Publish,
    Published,
    PublishRounds,
    Save,
    Span,
    TimePublishing,
    ToPublisher,
)
from weight_bus.bench.publishing import time_publishing
from weight_bus.manifest import encode_manifest
from weight_bus.one_piece import lay_in_one_piece
from weight_bus.publisher import Publisher
from weight_bus.scatter import DEFAULT_BUCKET_BYTES
from weight_bus.transports.select import make_exporter

_CHANGED = 4096
_DTYPE = "float32"


def load_weights(model: Path) -> dict[str, torch.Tensor]:
    """The folder's weights by name, in memory of their own: in one piece, as our trainer has them."""
    from safetensors.torch import load_file

    weights: dict[str, torch.Tensor] = load_file(model / "model.safetensors")
    if not lay_in_one_piece(weights):
        raise RollmeshError(f"the weights of {model} could not be laid in one piece", "give it weights in host memory")
    return weights


class _Trainer:
    def __init__(self, model: Path, run_id: str) -> None:
        self._run_id = run_id
        self._tensors = load_weights(model)
        self._publishers: dict[str, Publisher] = {}
        self._changes = 0
        self._group: object = None

    async def handle(self, command: ToPublisher) -> msgspec.Struct:
        match command:
            case Join(port):
                self._group = await asyncio.to_thread(make_group, port, 0)
                return Done()
            case Change():
                self._change()
                return Done()
            case Publish(transport, version):
                return await self._publish(transport, version)
            case TimePublishing(transport, rounds, apart):
                exporter = make_exporter(transport, self._run_id)
                tensors = {name: tensor.clone() for name, tensor in self._tensors.items()} if apart else self._tensors
                times = time_publishing(tensors, _DTYPE, exporter, DEFAULT_BUCKET_BYTES, rounds)
                return PublishRounds(times.memcpy_ms, times.publish_ms)
            case Save(path):
                from safetensors.torch import save_file

                return _timed(lambda: save_file(self._tensors, path, metadata={"format": "pt"}))
            case Broadcast():
                return await asyncio.to_thread(_timed, lambda: broadcast(self._group, self._tensors))

    async def _publish(self, transport: str, version: int) -> Published:
        publisher = self._publishers.get(transport)
        if publisher is None:
            exporter = make_exporter(transport, self._run_id)
            publisher = Publisher(self._run_id, self._tensors, _DTYPE, exporter, DEFAULT_BUCKET_BYTES)
            self._publishers[transport] = publisher
        publication = publisher.publish(version, self._tensors)
        return Published(encode_manifest(await asyncio.to_thread(publication.manifest)))

    def _change(self) -> None:
        """A few numbers of every tensor: every version differs everywhere, and the change itself costs nothing."""
        self._changes += 1
        factor = 1.01 if self._changes % 2 else 0.985
        with torch.no_grad():
            for tensor in self._tensors.values():
                tensor.view(-1)[:_CHANGED].mul_(factor)

    def close(self) -> None:
        for publisher in self._publishers.values():
            publisher.close()


def _timed(work: Callable[[], object]) -> Span:
    begin = time.monotonic()
    work()
    return Span(begin, time.monotonic())


async def _serve(replies: int, model: Path, run_id: str) -> None:
    trainer = _Trainer(model, run_id)
    try:
        await answer_lines(replies, ToPublisher, trainer.handle)
    finally:
        trainer.close()


def _main() -> None:
    from services.imports import leave_quickly

    replies = replies_only()
    # The engine decodes meanwhile: the trainer's process has one core, as the engine has.
    torch.set_num_threads(1)
    asyncio.run(_serve(replies, Path(sys.argv[1]), sys.argv[2]))
    leave_quickly()


if __name__ == "__main__":
    _main()
