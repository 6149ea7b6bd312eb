"""Routes for whoever operates the mesh: which servers there are, and letting one go."""

from __future__ import annotations

from fastapi import APIRouter, Request

from services.gateway.gateway import Gateway
from services.wire.admin_api import Draining
from services.wire.errors import NotFoundError
from services.wire.gateway_api import DrainServer, KnownServer, KnownServers

_ANNOUNCED = [name for name in KnownServer.model_fields if name != "in_flight"]
_METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]


def admin_routes(gateway: Gateway) -> APIRouter:
    """The gateway's own routes; what is neither theirs nor proxied is answered with where it belongs."""
    router = APIRouter(tags=["admin"])

    @router.get("/admin/servers", dependencies=gateway.doors.of("service"))
    async def read_servers() -> KnownServers:
        """The servers that are alive, as they announce themselves and as this gateway uses them."""
        servers = gateway.parts().servers
        known = [
            KnownServer(**{name: getattr(server.record, name) for name in _ANNOUNCED}, in_flight=server.in_flight)
            for server in servers.all()
        ]
        return KnownServers(servers=known, not_ready=servers.not_ready())

    @router.post("/admin/drain", status_code=202, dependencies=gateway.doors.of("operator"))
    async def drain(call: DrainServer, request: Request) -> Draining:
        """Have a server let go of its sessions, which others take up, and end. The caller's own key is shown to it."""
        parts = gateway.parts()
        server = parts.servers.named(call.server_id)
        if server is None:
            known = ", ".join(each.name for each in parts.servers.all()) or "none"
            raise NotFoundError(f"no rollout server {call.server_id!r} is alive", f"known: {known}")
        content = await parts.upstream.ask(server, "POST", "/admin/drain", request.headers.get("authorization"))
        return Draining.model_validate_json(content)

    @router.api_route("/{path:path}", methods=_METHODS, include_in_schema=False)
    async def elsewhere(path: str) -> None:
        raise NotFoundError(
            f"the gateway has no /{path}",
            "operate an engine at its rollout server itself: GET /admin/servers has its url",
        )

    return router
