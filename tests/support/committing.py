"""A weight update of a hosted server as the weight bus does it, without weights."""

from __future__ import annotations

from tests.support.rollout_host import Host
from weight_bus.manifest.manifest import Bucket, Layout, Manifest, Owner, ShmSource, encode_manifest


async def commit(host: Host, version: int) -> None:
    """Stage and commit `version`; the server must run a scripted engine."""
    manifest = Manifest(
        run_id=host.run_id,
        version=version,
        layout=Layout(tensors=[], total_bytes=4, digest="l"),
        buckets=[Bucket(offset=0, length=4, hash="bb" * 32)],
        root_digest=f"digest-{version}",
        owners=[Owner(total_bytes=4, sources=[ShmSource(path="/nowhere", length=4, host="h")])],
    )
    staged = await host.http.post("/weights/stage", content=encode_manifest(manifest))
    answer = staged.json()
    assert (answer["version"], answer["root_digest"], answer["bytes_read"]) == (version, f"digest-{version}", 4)
    committed = await host.http.post("/weights/commit", json={"version": version})
    assert committed.json()["version"] == version
