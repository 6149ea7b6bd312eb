"""The dashboard's HTTP application: its page, the JSON routes that the page reads, and who may open them.

    browser ──GET / ──► page/index.html, app.js (router) ──import──► one module a view ──context.api──► /api/runs/{run}/…
            ──GET /api/runs/{run}/events ──► server-sent events: what has changed since the event before

How to add to it
- **Routes**: a module with `…_routes(plan: DashboardPlan, authorizer: Authorizer) -> APIRouter`, listed in
  `make_dashboard_app`. Paths are `/api/runs/{run}/…`; `plan.runs.named(run)` is the run (`open_runs.OpenRun`: folder,
  run id, Redis), or a NotFoundError. Every route names its scope: `dependencies=authorizer.of("reading")`,
  `"operator"` for what changes anything. Blocking reads of files run in a thread (`def` routes). Answers are small: a
  bound on rows, on characters of a text, and pages of what is more. Each route stands in the tables of
  tests/contract/services/test_every_scope.py.
- **A view**: `page/NAME.js` exports `default {title, mount(element, context), unmount()}` and is listed in `page/app.js`
  (`VIEWS`); its CSS is `page/NAME.css`, linked in index.html. `context`:
    - `run`: name of the run that is chosen; another choice mounts the view again. `runs`: all of them.
    - `api(path, options)`: GET JSON below `/api/runs/{run}/`; throws an Error whose message is for the user. `options`:
      `{signal, method, body}`. `get(path, options)`: the same for any path.
    - `subscribe(callback)`: `callback(state, changed)` now, where something is known, and at each event: `state` is all
      that was told so far by section, `changed` the names of the sections that are new. Ends with the view.
    - `parameters`: URLSearchParams behind `#/NAME?…`; `navigate(view, parameters)` goes there; `replace(parameters)`
      notes them in the address without mounting again.
    - `theme()`: `light` or `dark`; `operator`: whether the key may change things; `signal`: aborted when the view ends.
- **Text of a run** goes into the page with `textContent` alone: `page/dom.js` has `element(tag, attributes, ...children)`,
  where a string is text, and `plain(text, most)`, which shows control and bidirectional characters as visible signs and
  shortens. The browser refuses anything else (`page_files.POLICY`), inline scripts and styles too: set classes, or
  `node.style.setProperty`.
- **Charts**: `page/chart.js` has `chart(element, {title, unit, series, …})` around uPlot.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version

from fastapi import FastAPI
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from services.dashboard.actions import action_routes
from services.dashboard.compare import compare_routes
from services.dashboard.curves import curve_routes
from services.dashboard.login import CookieKeys, Logins, SameAddress, login_routes
from services.dashboard.look.events import Watches, event_routes
from services.dashboard.look.live import looking
from services.dashboard.page_files import LOGIN_FILES, PageHeaders, page_routes, read_page
from services.dashboard.plan import DashboardPlan
from services.dashboard.rollouts.routes import rollout_routes
from services.dashboard.run_list import run_routes
from services.dashboard.steps import StepFiles
from services.http.app import BodyLimit, Stop, make_app
from services.http.auth import AuthMiddleware, Authorizer
from services.observability.metrics import Metrics
from services.security.permissions import is_keyless

OPEN_PATHS = frozenset(("/login", *(f"/page/{name}" for name in LOGIN_FILES)))
_FROM_ELSEWHERE = ("/docs", "/docs/oauth2-redirect", "/redoc")
"""Pages of the framework that load scripts from the internet."""
_MOST_BODY = 1 << 16


def make_dashboard_app(plan: DashboardPlan, stop: Stop) -> FastAPI:
    """The application. Open streams of events end when `stop` begins."""
    authorizer, logins, keyless = Authorizer(plan.keys), Logins(), is_keyless(plan.keys)
    steps = StepFiles()
    watches = Watches(lambda run: looking(run, plan))
    stop.on_stop = watches.end

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with watches:
            yield

    app = make_app(
        "rollmesh dashboard",
        version("rollmesh"),
        lifespan,
        lambda: [],
        Metrics(),
        metrics_access=authorizer.of("metrics"),
    )
    app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) not in _FROM_ELSEWHERE]
    app.include_router(login_routes(logins, authorizer, keyless=keyless, secure=plan.secure))
    app.include_router(run_routes(plan, authorizer))
    app.include_router(event_routes(plan, watches, authorizer))
    app.include_router(curve_routes(plan, steps, authorizer))
    app.include_router(compare_routes(plan, steps, authorizer))
    app.include_router(action_routes(plan, authorizer))
    app.include_router(rollout_routes(plan, authorizer))
    app.include_router(page_routes(read_page()))
    app.add_middleware(BodyLimit, limit_bytes=_MOST_BODY)
    app.add_middleware(AuthMiddleware, authorizer=authorizer, also_open=OPEN_PATHS)
    # From the outside in: headers, then who calls, then whether it may.
    if keyless:
        app.add_middleware(SameAddress)
    else:
        app.add_middleware(ToLogin)
        app.add_middleware(CookieKeys, logins=logins)
    app.add_middleware(PageHeaders)
    return app


class ToLogin:
    """ASGI middleware: who opens the page without a login is sent there. It runs behind `CookieKeys`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        opens_page = scope["type"] == "http" and scope["path"] == "/" and scope["method"] == "GET"
        if opens_page and not any(name == b"authorization" for name, _ in scope["headers"]):
            await RedirectResponse("/login", status_code=303)(scope, receive, send)
        else:
            await self._app(scope, receive, send)
