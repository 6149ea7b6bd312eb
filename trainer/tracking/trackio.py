"""trackio's local records, a file of SQLite: `trackio show` opens them.

The library's own store is called, without the server that `trackio.init` starts beside it: a step is there when the call
returns, and one that is written twice is kept once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from trainer.tracking.base import Figures, TrackedRun

_STEP = "step"
_ITS_OWN = frozenset(("step", "time", "timestamp", "project", "run", "metrics"))
"""Names that the library keeps for itself."""
_ALWAYS = "reward"
"""A figure that every step has, and the summary has not."""


class Trackio:
    def __init__(self, run: TrackedRun) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        # Read when the library is imported.
        os.environ["TRACKIO_DIR"] = str(run.folder)
        from trackio.sqlite_storage import SQLiteStorage

        self._store, self._run = SQLiteStorage, run
        SQLiteStorage.init_db(run.project)

    def held(self) -> set[int]:
        logs = self._store.get_logs(self._run.project, self._run.name, run_id=self._run.run_id)
        return {int(log[_STEP]) for log in logs if _ALWAYS in log}

    def log(self, figures: Sequence[Figures]) -> None:
        self._store.bulk_log(
            self._run.project,
            self._run.name,
            [_entry(each) for each in figures],
            steps=[each.step for each in figures],
            timestamps=[datetime.fromtimestamp(each.at, UTC).isoformat() for each in figures],
            config=dict(self._run.settings),
            log_ids=[f"{self._run.run_id}/{each.step}" for each in figures],
            run_id=self._run.run_id,
        )

    def finish(self, summary: Mapping[str, float]) -> None:
        self._store.bulk_log(
            self._run.project,
            self._run.name,
            [{f"summary/{name}": value for name, value in summary.items()}],
            log_ids=[f"{self._run.run_id}/summary"],
            run_id=self._run.run_id,
        )

    def close(self) -> None: ...


def _entry(each: Figures) -> dict[str, object]:
    values: dict[str, object] = {name: value for name, value in each.values.items() if name not in _ITS_OWN}
    return {**values, "samples": each.samples} if each.samples else values
