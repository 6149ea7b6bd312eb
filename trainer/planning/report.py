"""What `rollmesh memory` prints: a table for people, or JSON."""

from __future__ import annotations

import msgspec
from rich.table import Table

_UNITS = 1 << 30
_WORDS = {
    "weights": "the policy's",
    "gradients": "the policy's",
    "optimizer": "the policy's moments",
    "reference": "a frozen model of its own",
    "critic": "its weights, gradients and moments",
    "gathered": "what ranks collect for a layer",
    "exchange": "what ranks exchange through",
    "activations": "kept by layers for the backward pass",
    "head": "language head and loss",
    "temporaries": "of an operation, a layer, or a layer computed once more",
}


class MomentReport(msgspec.Struct, frozen=True, kw_only=True):
    """`where`: what was going on; `parts`: bytes."""

    where: str
    bytes: int
    parts: dict[str, int]


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one rank. `device`: `cpu`, or `gpu`; `device_bytes`: of each GPU, None where nobody said.

    `peak`: of the fake run, None where it was not made; `formula_bytes`: what the formula says, `formula`: its sum in
    words. `host`: bytes by part that are in the host's memory, beside the device's. `settings`: lines to copy, of `--fit`.
    `reshard_after_forward`: whether layers' weights are collected twice a pass, None where there is one rank.
    """

    model: str
    parameters: int
    trained: int
    ranks: int
    layout: str
    device: str
    device_bytes: int | None
    dtype: str
    tokens: int
    peak: MomentReport | None
    moments: list[MomentReport]
    formula_bytes: int
    formula: str
    host: dict[str, int]
    fits: bool | None
    assumed: list[str]
    settings: list[str]
    reshard_after_forward: bool | None = None

    @property
    def bytes(self) -> int:
        """The peak, by the fake run where it was made."""
        return self.formula_bytes if self.peak is None else self.peak.bytes


def as_lines(report: MemoryReport) -> list[str | Table]:
    """For people, in order."""
    said: list[str | Table] = [
        f"{report.model}: {report.parameters / 1e9:.3g} billion weights, {report.trained / 1e9:.3g} trained; "
        f"{report.layout}; passes of {report.tokens:,} tokens in {report.dtype}"
    ]
    if report.reshard_after_forward is not None:
        how = "collected twice a pass" if report.reshard_after_forward else "kept from a forward to its backward pass"
        said.append(f"weights that ranks collect of layers are {how}")
    if report.peak is not None:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for column, justify in (("at the peak", "left"), ("GiB", "right"), ("", "left")):
            table.add_column(column, justify=justify)  # type: ignore[arg-type]
        for part, nbytes in report.peak.parts.items():
            table.add_row(part, _gib(nbytes), _WORDS.get(part, ""))
        table.add_row("sum", _gib(report.peak.bytes), f"tightest: {report.peak.where}")
        said.append(table)
    said.append(f"by the formula {_gib(report.formula_bytes)} GiB: {report.formula}")
    for part, nbytes in report.host.items():
        said.append(f"in the host's memory: {part} {_gib(nbytes)} GiB")
    if report.fits is not None and report.device_bytes is not None:
        verdict = "fits" if report.fits else "does not fit"
        said.append(f"{_gib(report.bytes)} GiB {verdict} into {_gib(report.device_bytes)} GiB")
    said += [f"assumed: {each}" for each in report.assumed]
    said += report.settings
    return said


def _gib(nbytes: int) -> str:
    return f"{nbytes / _UNITS:.2f}"
