"""TensorBoard's event files: a step is one record, so that a process that is killed leaves all of it or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from trainer.tracking.base import Figures, TrackedRun

_TEXT = "text"


class TensorBoard:
    """Writes a file of its own in the run's folder; steps of files before it count as held."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder = run.folder
        run.folder.mkdir(parents=True, exist_ok=True)
        self._held = _steps(run.folder.glob("events.*"))
        self._writer = EventFileWriter(str(run.folder))
        if not self._held:
            lines = [f"| `{name}` | {value} |" for name, value in run.settings.items()]
            self._add(0, 0.0, {}, {"settings": "\n".join(["| setting | value |", "|---|---|", *lines])})

    def held(self) -> set[int]:
        return self._held

    def log(self, figures: Sequence[Figures]) -> None:
        for each in figures:
            self._add(each.step, each.at, each.values, {"samples": each.samples} if each.samples else {})
        self._writer.flush()

    def finish(self, summary: Mapping[str, float]) -> None:
        lines = [f"| {name} | {value:g} |" for name, value in summary.items()]
        self._add(0, 0.0, {}, {"summary": "\n".join(["| figure | value |", "|---|---|", *lines])})

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, at: float, values: Mapping[str, float], texts: Mapping[str, str]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        kept = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        for name, text in texts.items():
            kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=_TEXT))
            tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
            kept.append(Summary.Value(tag=name, metadata=kind, tensor=tensor))
        self._writer.add_event(Event(step=step, wall_time=at, summary=Summary(value=kept)))


def _steps(files: Iterable[Path]) -> set[int]:
    """Of whole records with figures."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    found = set()
    for file in files:
        for event in LegacyEventFileLoader(str(file)).Load():
            if any(value.HasField("simple_value") for value in event.summary.value):
                found.add(int(event.step))
    return found
