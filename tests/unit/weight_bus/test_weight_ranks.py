"""Publishing by the ranks of an FSDP2 trainer: no rank gathers a weight, and one manifest names all their arenas."""

from __future__ import annotations

import multiprocessing
import socket
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from services.wire.errors import UsageError  # noqa: E402
from tests.weight_parts import PlainTarget  # noqa: E402
from weight_bus.manifest.manifest import (  # noqa: E402
    check_signature,
    decode_manifest,
    encode_manifest,
)
from weight_bus.publisher.sharding import plan_owner  # noqa: E402
from weight_bus.receiver.receiver import Receiver  # noqa: E402
from weight_bus.transports.shm import ShmReader  # noqa: E402

RANKS = 2
KEY = "the key of the run"


class Small(nn.Module):
    """Rows that two ranks cannot share evenly, one row alone, and a parameter that stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.inner = nn.Linear(6, 5)
        self.single = nn.Linear(6, 1)
        self.scale = nn.Parameter(torch.tensor(1.5))


def model_of(seed: int) -> Small:
    torch.manual_seed(seed)
    return Small()


def publish_as(rank: int, port: int, run_id: str, mailbox: Any, command: Any) -> None:
    """One rank: shard the model, publish versions 1 and 2, then refuse what must be refused."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, distribute_tensor

    from services.wire.errors import ConflictError, RollmeshError
    from weight_bus.publisher.publisher import Publisher
    from weight_bus.publisher.sharding import Ranks
    from weight_bus.transports.shm import ShmExporter

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))

    def parameters(seed: int) -> dict[str, torch.Tensor]:
        model = model_of(seed)
        scale, shared = model.scale, distribute_tensor(torch.full((3, 2), float(seed)), mesh, [Replicate()])
        fully_shard(model, mesh=mesh, ignored_params={scale})
        return dict(model.named_parameters()) | {"shared": shared}

    ranks = Ranks(wait_s=20)
    publisher = Publisher(run_id, parameters(1), "float32", ShmExporter(run_id), 64, key=KEY, ranks=ranks)
    for version in (1, 2):
        manifest = publisher.publish(version, parameters(version)).manifest()
        mailbox.put((rank, version, encode_manifest(manifest)))
        assert command.get(timeout=60) == "go on"
    # Every rank comes to the same judgement.
    try:
        publisher.publish(2, parameters(7)).manifest()
    except ConflictError as error:
        mailbox.put((rank, 0, str(error).encode()))
    # What one rank cannot publish, no rank does, and none hangs.
    if rank == 1:
        publisher._exporter.export = refuse  # type: ignore[method-assign]
    try:
        publisher.publish(3, parameters(3)).manifest()
    except RollmeshError as error:
        mailbox.put((rank, 0, str(error).encode()))
    assert command.get(timeout=60) == "go on"
    publisher.close()
    ranks.close()
    dist.destroy_process_group()


def refuse(*_: object) -> Any:
    from weight_bus.errors import TransportError

    raise TransportError("memory is full")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_receiver_has_the_whole_tensors_of_all_ranks(run_id: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    mailbox, commands, port = spawn.Queue(), [spawn.Queue() for _ in range(RANKS)], free_port()
    processes = [
        spawn.Process(target=publish_as, args=(rank, port, run_id, mailbox, commands[rank])) for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    try:
        target = PlainTarget(whole(0))
        receiver = Receiver(target, run_id, [ShmReader()])
        for version in (1, 2):
            answers = dict(sorted(mailbox.get(timeout=60)[::2] for _ in range(RANKS)))
            assert answers[0] == answers[1], "every rank makes the same manifest"
            manifest = decode_manifest(answers[0])
            check_signature(manifest, KEY)
            held = [[(shard.tensor, shard.nbytes) for shard in owner.shards or ()] for owner in manifest.owners]
            names = [entry.name for entry in manifest.layout.tensors]
            assert [{names[tensor] for tensor, _ in one} for one in held] == [
                {"scale", "embed.weight", "inner.weight", "inner.bias", "single.weight", "single.bias", "shared"},
                {"embed.weight", "inner.weight", "inner.bias"},
            ]
            # 7 rows of 24 bytes: 4 and 3.
            assert [dict(one)[names.index("embed.weight")] for one in held] == [96, 72]
            staged = receiver.stage(manifest)
            assert staged.root_digest == manifest.root_digest
            receiver.commit(version)
            assert target.live().keys() == whole(version).keys()
            for name, expected in whole(version).items():
                assert torch.equal(target.live()[name], expected), name
            assert receiver.digest().root_digest == manifest.root_digest
            for command in commands:
                command.put("go on")
        refusals = sorted(mailbox.get(timeout=60)[2].decode() for _ in range(2 * RANKS))
        assert ["version 2 is published with other bytes" in said for said in refusals].count(True) == RANKS
        assert [said for said in refusals if "memory is full" in said] == [
            "rank 1 could not publish version 3 (memory is full)"
        ] * RANKS
        receiver.close()
    finally:
        for command in commands:
            command.put("go on")
        for process in processes:
            process.join(30)
            if process.is_alive():
                process.kill()
    assert [process.exitcode for process in processes] == [0] * RANKS


def whole(seed: int) -> dict[str, torch.Tensor]:
    shared = {"shared": torch.full((3, 2), float(seed))}
    return {name: value.detach().clone() for name, value in model_of(seed).named_parameters()} | shared


def test_a_placement_that_is_no_range_of_rows_is_refused(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from weight_bus.publisher.sharding import Ranks

    with pytest.raises(UsageError, match="no process group is initialised"):
        Ranks()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        columns = {"w": distribute_tensor(torch.ones(4, 6), mesh, [Shard(1)])}
        with pytest.raises(UsageError, match=r"w is placed .*no range of its bytes"):
            plan_owner(columns, "float32", 0)
        rows = {"w": distribute_tensor(torch.ones(4, 6), mesh, [Shard(0)])}
        with pytest.raises(UsageError, match="w is spread over ranks, and this publisher is alone"):
            plan_owner(rows, "float32", None)
        assert plan_owner(rows, "bfloat16", 0).total_bytes == 64
    finally:
        dist.destroy_process_group()
