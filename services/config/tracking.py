"""Settings of logging backends (`rollmesh track`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.config.base import Section

BackendName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class TrackingSettings(Section):
    """Where a run's figures, samples and settings are written beside its folder's own files."""

    backends: list[BackendName] = Field(
        default=[], description="Logging backends: `tensorboard`, `wandb`, `mlflow`, `trackio`"
    )
    project: str = Field(default="rollmesh", min_length=1, description="Project, or experiment, that runs are put in")
    name: str | None = Field(default=None, description="The run's name there; empty: its id")
    wandb_mode: Literal["offline", "online"] = Field(
        default="offline", description="offline: files in the run folder, for `wandb sync`"
    )
    mlflow_uri: str | None = Field(
        default=None, description="MLflow's server; empty: a file of SQLite in the run folder"
    )
