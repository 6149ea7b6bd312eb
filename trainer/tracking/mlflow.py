"""MLflow: a server of the user's, or a file of SQLite in the run folder. A step is one transaction there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.tracking.base import Figures, TrackedRun

_RUN_TAG = "rollmesh.run_id"
_STEP = "step"
_DATABASE = "mlflow.db"
_LONGEST = 500
_MOST = 900
"""MLflow takes 1,000 figures a call, and parameters of 500 characters, 100 of them a call."""
_MOST_SETTINGS = 100


class Mlflow:
    def __init__(self, run: TrackedRun, uri: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        run.folder.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(tracking_uri=uri or _sqlite(run.folder))
        known = self._client.get_experiment_by_name(run.project)
        place = None if uri else (run.folder / "artifacts").as_uri()
        experiment = self._client.create_experiment(run.project, place) if known is None else known.experiment_id
        found = self._client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{run.run_id}'")
        if found:
            self._id = str(found[0].info.run_id)
            self._client.update_run(self._id, status="RUNNING")
        else:
            made = self._client.create_run(experiment, tags={_RUN_TAG: run.run_id}, run_name=run.name)
            self._id = str(made.info.run_id)
            settings = [Param(name, value[:_LONGEST]) for name, value in run.settings.items()]
            for first in range(0, len(settings), _MOST_SETTINGS):
                self._client.log_batch(self._id, params=settings[first : first + _MOST_SETTINGS])
        self._ended = False

    def held(self) -> set[int]:
        return {int(metric.step) for metric in self._client.get_metric_history(self._id, _STEP)}

    def log(self, figures: Sequence[Figures]) -> None:
        from mlflow.entities import Metric

        for each in figures:
            # `step` itself comes with the last of them: a step that is held is held whole.
            values = sorted(each.values.items(), key=lambda item: item[0] == _STEP)
            metrics = [Metric(name, value, round(each.at * 1e3), each.step) for name, value in values]
            for first in range(0, len(metrics), _MOST):
                self._client.log_batch(self._id, metrics=metrics[first : first + _MOST])
            if each.samples:
                self._client.log_text(self._id, each.samples, f"samples/{each.step:08d}.md")

    def finish(self, summary: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        self._client.log_batch(self._id, metrics=[Metric(f"summary/{k}", v, 0, 0) for k, v in summary.items()])
        self._ended = True

    def close(self) -> None:
        self._client.set_terminated(self._id, "FINISHED" if self._ended else "KILLED")


def _sqlite(folder: Path) -> str:
    """Of a database with all its tables: a process that was killed while it made them leaves none that cannot be used."""
    from mlflow import MlflowClient

    whole, making = folder / _DATABASE, folder / f".{_DATABASE}.making"
    if not whole.exists():
        making.unlink(missing_ok=True)
        MlflowClient(tracking_uri=f"sqlite:///{making}").search_experiments()
        making.rename(whole)
    return f"sqlite:///{whole}"
