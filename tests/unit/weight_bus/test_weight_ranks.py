"""Publishing by the ranks of a sharded trainer: nobody gathers a weight, and engines serve what one rank would publish."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from services.wire.errors import ConflictError, RollmeshError, UsageError  # noqa: E402
from tests.support.rank_pool import RankPool  # noqa: E402
from tests.weight_parts import PlainTarget  # noqa: E402
from weight_bus.errors import TransportError  # noqa: E402
from weight_bus.manifest.computed import ComputedTensor, PublishedTensor  # noqa: E402
from weight_bus.manifest.manifest import (  # noqa: E402
    Manifest,
    check_signature,
    decode_manifest,
    encode_manifest,
)
from weight_bus.publisher.publisher import Publisher  # noqa: E402
from weight_bus.publisher.ranks import Ranks  # noqa: E402
from weight_bus.publisher.sharding import local_part, plan_owner  # noqa: E402
from weight_bus.receiver.rank_sharing import RankSharing, sharing_bytes  # noqa: E402
from weight_bus.receiver.receiver import Receiver  # noqa: E402
from weight_bus.receiver.slices import Slice  # noqa: E402
from weight_bus.transports.shm import ShmExporter, ShmReader  # noqa: E402

KEY = "the key of the run"
BUCKET = 200
"""Bytes: cuts rows, and runs of rows, of the small model."""
LARGE_BUCKET = 64 << 10


class Small(nn.Module):
    """Rows and columns that ranks cannot share evenly, one row alone, and a parameter that stays whole."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(7 * width, 6)
        self.inner = nn.Linear(6, 5)
        self.single = nn.Linear(6, 1)
        self.experts = nn.Parameter(torch.randn(8, 4 * width, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))


def model_of(seed: int, width: int = 1) -> Small:
    torch.manual_seed(seed)
    return Small(width)


def whole(seed: int, width: int = 1) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model_of(seed, width).named_parameters()}


def nudged(seed: int, width: int = 1) -> dict[str, torch.Tensor]:
    """The weights with a few elements changed, in the first and the last rows."""
    weights = whole(seed, width)
    for tensor in weights.values():
        tensor.view(-1)[:: max(1, tensor.numel() // 3)] += 1.0
    return weights


def spread(layout: str, weights: dict[str, torch.Tensor], width: int = 1) -> dict[str, PublishedTensor]:
    """`weights` as this rank of a trainer has them."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    world = dist.get_world_size()
    flat = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))

    def cut(mesh: Any, placements: Any) -> dict[str, PublishedTensor]:
        return {
            name: distribute_tensor(tensor, mesh, [placements(tensor, dim) for dim in range(mesh.ndim)])
            for name, tensor in weights.items()
        }

    model = model_of(0, width)
    model.load_state_dict(weights)
    if layout == "fsdp":
        fully_shard(model, mesh=flat, ignored_params={model.scale})
        return dict(model.named_parameters())
    square = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "tensor"))
    if layout == "hsdp":
        fully_shard(model, mesh=square, ignored_params={model.scale})
        return dict(model.named_parameters())
    if layout == "columns":
        return cut(flat, lambda tensor, _: Shard(1) if tensor.ndim > 1 else Replicate())
    if layout == "last":
        return cut(flat, lambda tensor, _: Shard(tensor.ndim - 1) if tensor.ndim > 2 else Replicate())
    if layout == "interleaved":
        return cut(flat, lambda tensor, _: _StridedShard(1, split_factor=2) if tensor.ndim > 2 else Replicate())
    if layout == "corner":
        # Both dimensions behind the first: a shard for each expert.
        return cut(square, lambda tensor, dim: Shard(dim + 1) if tensor.ndim > 2 else Replicate())
    if layout == "computed":
        own = cut(flat, lambda tensor, _: Shard(0) if tensor.ndim else Replicate())
        return {name: ComputedTensor(tensor.shape, lambda one=tensor: one * 1, tensor) for name, tensor in own.items()}  # type: ignore[misc]
    # FSDP2 over tensor parallel: the tensor dimension is cut first, by rows or by columns.
    assert layout in ("rows over fsdp", "columns over fsdp")
    dim = int(layout == "columns over fsdp")
    for module, name in ((model.embed, "weight"), (model.inner, "weight"), (model, "experts")):
        parallel = distribute_tensor(getattr(module, name), square["tensor"], [Shard(dim)])
        module.register_parameter(name, nn.Parameter(parallel))
    for module, name in ((model.inner, "bias"), (model.single, "weight"), (model.single, "bias")):
        parallel = distribute_tensor(getattr(module, name), square["tensor"], [Replicate()])
        module.register_parameter(name, nn.Parameter(parallel))
    fully_shard(model, mesh=square["data"], ignored_params={model.scale})
    return dict(model.named_parameters())


def publish(rank: int, layout: str, run_id: str) -> None:
    """Publish three versions, the third also as a delta; on rank 0 an engine takes them."""
    ranks = Ranks(wait_s=120)
    publisher = Publisher(
        run_id,
        spread(layout, whole(1)),
        "float32",
        ShmExporter(run_id),
        BUCKET,
        key=KEY,
        ranks=ranks,
        delta_max_ratio=0.9,
    )
    receiver = Receiver(PlainTarget(whole(0)), run_id, [ShmReader()], key=KEY)
    pair = sharing_pair(run_id)
    for version, weights in ((1, whole(1)), (2, whole(2)), (3, nudged(2))):
        manifest = decode_manifest(encode_manifest(publisher.publish(version, spread(layout, weights)).manifest()))
        check_signature(manifest, KEY)
        assert len({*ranks.exchange(encode_manifest(manifest))}) == 1, "every rank makes the same manifest"
        assert manifest.root_digest == digest_of_one(weights)
        assert manifest.delta is not None or version < 3
        if rank == 0:
            staged = receiver.stage(manifest)
            assert manifest.delta is None or staged.bytes_read == manifest.delta.total_bytes
            receiver.commit(version)
            assert_serves(receiver, manifest, weights)
            # As one that has not served the version before, and as one of two ranks that have half of the columns each.
            for target, slices in ((whole(0), {}), halves(whole(0))):
                fresh = Receiver(PlainTarget(target), run_id, [ShmReader()], key=KEY, slices=slices)
                fresh.stage(manifest)
                fresh.commit(version)
                assert_serves(fresh, manifest, halves(weights)[0] if slices else weights)
                fresh.close()
            # And as two such ranks that read together.
            with ThreadPoolExecutor(2) as threads:
                staging = [threads.submit(each.stage, manifest, version) for each in pair]
            read = sum(each.result().bytes_read for each in staging)
            assert read <= manifest.total_bytes if manifest.delta is None else read == manifest.delta.total_bytes
            for number, each in enumerate(pair):
                each.commit(version)
                assert_serves(each, manifest, halves(weights, number)[0])
        ranks.exchange(b"read")
    for each in (receiver, *pair):
        each.close()
    publisher.close()
    ranks.close()


def halves(weights: dict[str, torch.Tensor], rank: int = 1) -> tuple[dict[str, torch.Tensor], dict[str, Slice]]:
    """The first or the second half of each matrix's columns."""
    matrices = {name: tensor for name, tensor in weights.items() if tensor.ndim == 2}
    mine = {name: tensor.tensor_split(2, 1)[rank].clone() for name, tensor in matrices.items()}
    slices = {name: Slice(tuple(one.shape), 1, rank * one.shape[1] // 2) for name, one in matrices.items()}
    return weights | mine, slices


def sharing_pair(run_id: str) -> list[Receiver]:
    """The two ranks of an engine; a round takes a few of the small model's buckets."""
    with NamedTemporaryFile() as file:
        file.write(bytes(sharing_bytes(512)))
        file.flush()
        return [
            Receiver(
                PlainTarget(halves(whole(0), rank)[0]),
                run_id,
                [ShmReader()],
                key=KEY,
                slices=halves(whole(0), rank)[1],
                sharing=RankSharing(Path(file.name), rank, 2),
            )
            for rank in (0, 1)
        ]


def assert_serves(receiver: Receiver, manifest: Manifest, weights: dict[str, torch.Tensor]) -> None:
    live = receiver.target.live()
    assert live.keys() == weights.keys()
    for name, expected in weights.items():
        assert torch.equal(live[name], expected), name
    assert receiver.digest().root_digest == manifest.root_digest


def digest_of_one(weights: dict[str, torch.Tensor], bucket: int = BUCKET) -> str:
    """The digest that these weights have where one rank publishes all of them."""
    publisher = Publisher("one", weights, "float32", ShmExporter("one"), bucket)
    try:
        return publisher.digest(1, weights)
    finally:
        publisher.close()


@pytest.mark.parametrize(
    ("world", "layout"),
    [
        (2, "fsdp"),
        (4, "fsdp"),
        (4, "hsdp"),
        (2, "columns"),
        (3, "columns"),
        (2, "last"),
        (2, "interleaved"),
        (4, "corner"),
        (4, "rows over fsdp"),
        (4, "columns over fsdp"),
        (2, "computed"),
    ],
)
def test_engines_serve_what_one_rank_would_publish(rank_pool: RankPool, run_id: str, world: int, layout: str) -> None:
    rank_pool.run(world, publish, layout, run_id)


def refuse(rank: int, run_id: str) -> list[str]:
    """What every rank says of what cannot be published."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    said = []
    ranks = Ranks(wait_s=120)
    publisher = Publisher(run_id, spread("fsdp", whole(1)), "float32", ShmExporter(run_id), BUCKET, ranks=ranks)
    first = publisher.publish(1, spread("fsdp", whole(1))).manifest()
    assert publisher.publish(1, spread("fsdp", whole(1))).manifest() == first
    try:
        publisher.publish(1, spread("fsdp", whole(7))).manifest()
    except ConflictError as error:
        said.append(str(error))
    if rank == 1:
        publisher._exporter.export = full  # type: ignore[method-assign]
    try:
        publisher.publish(2, spread("fsdp", whole(2))).manifest()
    except RollmeshError as error:
        said.append(str(error))
    publisher.close()
    other = {f"{name}{rank}": tensor for name, tensor in whole(1).items()}
    try:
        plan_owner(other, "float32", ranks)
    except ConflictError as error:
        said.append(str(error).split(" publishes layout")[0])
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for tensors, of in (
        ({"w": DTensor.from_local(torch.ones(4), mesh, [Partial()])}, ranks),
        (spread("columns", whole(1)), None),
    ):
        try:
            plan_owner(tensors, "float32", of)
        except UsageError as error:
            said.append(str(error).split(";")[0])
    ranks.close()
    return said


def full(*_: object) -> Any:
    raise TransportError("memory is full")


def test_what_one_rank_cannot_publish_no_rank_does(rank_pool: RankPool, run_id: str) -> None:
    for said in rank_pool.run(2, refuse, run_id):
        assert [each.split(":")[0] for each in said] == [
            "version 1 is published with other bytes",
            "rank 1 could not publish version 2 (memory is full)",
            said[2],
            "w is placed P(sum), which is no part of it",
            "experts is spread over ranks, and this publisher is alone",
        ]
        assert said[2] in ("rank 0", "rank 1")
    with pytest.raises(UsageError, match="no process group is initialised"):
        Ranks()


def held(rank: int, layout: str, run_id: str, width: int) -> list[dict[str, int]]:
    """Bytes that this rank keeps for publishing, and what it has allocated for that: with one arena, and with two."""
    return [held_in(buffers, layout, run_id, width) for buffers in (1, 2)]


def held_in(buffers: int, layout: str, run_id: str, width: int) -> dict[str, int]:
    ranks = Ranks(wait_s=120)
    exporter = ShmExporter(run_id)
    weights = whole(1, width)
    parts = spread(layout, weights, width)
    publisher = Publisher(run_id, parts, "float32", exporter, LARGE_BUCKET, buffers=buffers, ranks=ranks)
    publisher.publish(1, spread(layout, whole(2, width), width)).manifest()
    manifest = publisher.publish(2, spread(layout, weights, width)).manifest()
    assert manifest.root_digest == digest_of_one(weights, LARGE_BUCKET)
    found = {
        "held": publisher.held_bytes,
        "local": sum(local_part(part).nbytes for part in parts.values() if not isinstance(part, ComputedTensor)),
        "arenas": sum(arena.nbytes for arena in exporter._arenas),
        "all": manifest.layout.total_bytes,
        "shards": sum(len(owner.shards or ()) for owner in manifest.owners),
        "encoded": len(encode_manifest(manifest)),
    }
    publisher.close()
    ranks.close()
    return found


@pytest.mark.parametrize(
    ("world", "layout"), [(2, "fsdp"), (4, "fsdp"), (4, "hsdp"), (2, "columns"), (4, "rows over fsdp")]
)
def test_no_rank_holds_more_than_its_share_and_two_buckets(
    rank_pool: RankPool, run_id: str, world: int, layout: str
) -> None:
    """`publish_peak_share`. With two arenas two versions of its share: so also where it is alone."""
    for each in rank_pool.run(world, held, layout, run_id, 2000):
        for arenas, found in enumerate(each, start=1):
            # Parts are aligned in an arena, to 64 bytes or half a page.
            assert found["held"] <= arenas * (found["local"] + 4096) + 2 * LARGE_BUCKET, found
            if layout != "hsdp":
                # Replicas share tensors, not parts of them: here one has the embedding's part, the other the experts'.
                assert found["held"] <= 1.02 * arenas * found["all"] / world + 2 * LARGE_BUCKET, found
            assert found["held"] - 2 * LARGE_BUCKET <= found["arenas"] <= found["held"]
            # Twelve thousand columns a rank are one shard.
            assert found["shards"] <= 8 * world


def experts(rank: int, run_id: str) -> None:
    """A model whose experts are one tensor each layer: published by the folder's names, an expert each."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from weight_bus.manifest.published import PublishedNames

    torch.manual_seed(3)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=31,
            hidden_size=16,
            intermediate_size=32,
            moe_intermediate_size=6,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            num_experts=3,
            num_experts_per_tok=2,
        )
    )
    plain = {name: value.detach() for name, value in model.named_parameters()}
    whole_ones = PublishedNames(model, plain).views(plain)
    wanted = digest_of_one(whole_ones)
    mesh, ranks = init_device_mesh("cpu", (dist.get_world_size(),)), Ranks(wait_s=120)
    for dim in range(3):
        parts = {
            name: distribute_tensor(value, mesh, [Shard(dim) if value.ndim > dim else Replicate()])
            for name, value in plain.items()
        }
        names = PublishedNames(model, parts)
        published = names.views(parts)
        assert "model.layers.0.mlp.experts.2.gate_proj.weight" in published
        publisher = Publisher(run_id, published, "float32", ShmExporter(run_id), BUCKET, ranks=ranks)
        manifest = publisher.publish(1, names.views(parts)).manifest()
        assert manifest.root_digest == wanted, dim
        if rank == 0:
            receiver = Receiver(PlainTarget(whole_ones), run_id, [ShmReader()])
            receiver.stage(manifest)
            receiver.commit(1)
            assert_serves(receiver, manifest, whole_ones)
            receiver.close()
        ranks.exchange(b"read")
        publisher.close()
    ranks.close()


def test_fused_experts_are_published_by_the_names_of_the_folder(rank_pool: RankPool, run_id: str) -> None:
    rank_pool.run(2, experts, run_id)


def test_a_transport_without_ranges_is_refused_for_several_ranks(rank_pool: RankPool, run_id: str) -> None:
    assert (
        rank_pool.run(2, refused_transport, run_id)
        == ["several ranks cannot publish over collective: use weights.transport=nixl, or shm on one host"] * 2
    )


def refused_transport(_: int, run_id: str) -> str:
    ranks, exporter = Ranks(wait_s=120), ShmExporter(run_id)
    exporter.name = "collective"
    try:
        Publisher(run_id, spread("fsdp", whole(1)), "float32", exporter, BUCKET, ranks=ranks)
    except UsageError as error:
        return str(error)
    finally:
        ranks.close()
    return "published"
