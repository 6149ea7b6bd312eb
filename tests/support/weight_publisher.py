"""A trainer's publisher as a process of its own: `python -m tests.support.weight_publisher RUN_ID TRANSPORT`.

It reads lines `VERSION FOLDER`, publishes that folder's weights and answers each with a line of base64: the manifest.
It ends when its standard input does.
"""

from __future__ import annotations

import base64
import sys

import torch
from safetensors.torch import load_file

from weight_bus.manifest.manifest import encode_manifest
from weight_bus.publisher.publisher import Publisher
from weight_bus.transports.select import make_exporter

BUCKET_BYTES = 64 << 10


def main(run_id: str, transport: str) -> None:
    torch.set_num_threads(1)
    publisher: Publisher | None = None
    for line in sys.stdin:
        version, _, folder = line.strip().partition(" ")
        weights = load_file(f"{folder}/model.safetensors")
        if publisher is None:
            publisher = Publisher(run_id, weights, "float32", make_exporter(transport, run_id), BUCKET_BYTES)
        manifest = publisher.publish(int(version), weights).manifest()
        sys.stdout.write(base64.b64encode(encode_manifest(manifest)).decode() + "\n")
        sys.stdout.flush()
    if publisher is not None:
        publisher.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
