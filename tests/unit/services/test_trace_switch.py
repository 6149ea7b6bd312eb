"""Traces are off unless asked for, and cost nothing then; asked for without an SDK, they say what to install."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from services.config.traces import TraceSettings, as_environ, with_environ
from services.wire.errors import UsageError

OFF = """
import json, sys
{imports}
from services.config.traces import TraceSettings
from services.observability.setup import open_tracing
from services.observability.tracing import NO_TRACING
tracing = open_tracing(TraceSettings(), "gateway", "r", "g")
assert tracing is NO_TRACING
with tracing, tracing.begin("a") as span, tracing.span("b", parent="00-1-2-01"):
    span.note(x=1)
    assert (span.context, tracing.current(), tracing.headers()) == ("", "", {{}})
print(json.dumps([name for name in sys.modules if name.startswith({prefixes})]))
"""
MISSING = """
import sys
sys.modules["opentelemetry.sdk"] = None
sys.argv = ["rollmesh", "gateway", "--run-id", "r", "--port", "1", "--redis-url", "redis://127.0.0.1:1/0"]
from services.cli import main
main()
"""


def run(code: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLMESH_")}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment | environ,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("imports", "prefixes"),
    [
        (
            "import clients.runner.runner, clients.runner.cli, weight_bus.coordinator.app, services.rewards.app",
            ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto", "services.observability.otel"),
        ),
        # redis-py imports the SDK by itself, wherever it is installed, but never what exports traces.
        (
            "import services.gateway.app, services.supervisor.mesh",
            ("opentelemetry.exporter", "opentelemetry.proto", "services.observability.otel"),
        ),
    ],
)
def test_off_imports_neither_sdk_nor_exporter_and_records_nothing(imports: str, prefixes: tuple[str, ...]) -> None:
    done = run(OFF.format(imports=imports, prefixes=prefixes))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


@pytest.mark.parametrize("target", ["otlp", "console"])
def test_on_without_the_package_is_misuse_that_names_the_extra(target: str) -> None:
    done = run(MISSING, ROLLMESH_TRACES=target)
    assert done.returncode == 2
    assert "OpenTelemetry's SDK is not installed" in done.stderr
    assert "pip install '.[traces]'" in done.stderr


def test_errors_of_a_command_are_a_json_line_too_where_logs_are() -> None:
    done = run(MISSING, ROLLMESH_TRACES="otlp", ROLLMESH_LOG_JSON="1")
    (line,) = [json.loads(line) for line in done.stderr.splitlines()]
    assert (line["level"], line["service"], line["run"], line["exit_code"]) == ("error", "gateway", "r", 2)
    assert ".[traces]" in line["why"]


def test_environment_variables_go_before_settings_and_hand_them_on() -> None:
    settings = TraceSettings(traces="otlp", traces_ratio=0.5)
    changed = with_environ(settings, {"ROLLMESH_TRACES_RATIO": "0.25", "OTHER": "1", "ROLLMESH_TRACES": ""})
    assert changed == TraceSettings(traces="otlp", traces_ratio=0.25)
    assert with_environ(TraceSettings(), as_environ(changed)) == changed
    assert as_environ(TraceSettings()) == {}


@pytest.mark.parametrize(
    ("name", "value"), [("ROLLMESH_TRACES", "jaeger"), ("ROLLMESH_TRACES_RATIO", "2"), ("ROLLMESH_TRACES_RATIO", "x")]
)
def test_a_value_that_is_none_is_named(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{name}={value} "):
        with_environ(TraceSettings(), {name: value})
