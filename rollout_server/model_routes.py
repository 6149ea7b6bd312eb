"""`GET /v1/models`: the one model that this server serves, as OpenAI lists models, with vLLM's `max_model_len`."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request

from rollout_server.route_errors import ERRORS
from rollout_server.server import RolloutServer
from services.wire.engine_api import ModelCard, ModelList


def model_list(server: RolloutServer, created: int) -> ModelList:
    """The list, also for routes under a session. `created`: Unix seconds. Raises NotReadyError before the engine is up."""
    model = server.plan.model
    card = ModelCard(id=model.name, created=created, root=str(model), max_model_len=server.parts().engine.max_model_len)
    return ModelList(data=[card])


def model_routes(server: RolloutServer) -> APIRouter:
    router = APIRouter(tags=["engine"], responses=ERRORS)
    created = int(time.time())

    @router.get("/v1/models")
    async def models(request: Request) -> ModelList:
        """The model. Its `id` is the folder's name; calls may name any model and get this one."""
        server.parts().access.require_any(request)
        return model_list(server, created)

    return router
