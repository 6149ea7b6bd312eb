"""Every overlay of deploy/kubernetes, rendered once."""

from __future__ import annotations

import pytest

from tests.support.manifests import Manifests, kustomize_command, render

VARIANTS = {
    "cpu": ("cpu",),
    "cpu-watched": ("cpu", "prometheus-operator", "autoscaling"),
    "gpu": ("gpu",),
    "gpu-full": ("gpu", "autoscaling", "rdma", "prometheus-operator"),
    "gpu-ranks": ("gpu-ranks",),
    "gpu-ranks-full": ("gpu-ranks", "rdma"),
}


@pytest.fixture(scope="session", params=VARIANTS)
def manifests(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Manifests:
    if kustomize_command() is None:
        pytest.skip("neither kubectl nor kustomize: ./dev test fetches one on Linux")
    overlay, *components = VARIANTS[request.param]
    return Manifests(render(tmp_path_factory.mktemp("kubernetes") / "deploy", overlay, *components))
