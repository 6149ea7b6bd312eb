"""KV memory keeps every row's own tokens through growth, moves and compaction."""

from __future__ import annotations

import random

import psutil
import pytest
import torch

from rollout_server.engines.torch.kv_cache import KvCache, KvShape

SHAPE = KvShape(layers=2, heads=3, key_dim=4, value_dim=5)


class Ledger:
    """What each row must hold: one number a token, written to keys as it is and to values negated."""

    def __init__(self, max_rows: int) -> None:
        self.slots = KvCache(SHAPE, max_rows=max_rows, dtype=torch.float32, device=torch.device("cpu"))
        self.rows: list[list[float]] = []
        self._next = 0.0

    def number(self) -> float:
        self._next += 1.0
        return self._next

    def place(self, lengths: list[int], copies: list[int]) -> None:
        window = self.slots.scratch(lengths)
        window.keys.fill_(-1.0)
        window.values.fill_(1.0)
        for row, (length, count) in enumerate(zip(lengths, copies, strict=True)):
            tokens = [self.number() for _ in range(length)]
            written = torch.tensor(tokens).view(-1, 1)
            window.keys[:, row, :, -length:] = written
            window.values[:, row, :, -length:] = -written
            self.rows += [list(tokens) for _ in range(count)]
        self.slots.place(window, lengths, copies)

    def step(self) -> None:
        window = self.slots.window()
        for row, tokens in enumerate(self.rows):
            tokens.append(self.number())
            window.keys[:, row, :, -1] = tokens[-1]
            window.values[:, row, :, -1] = -tokens[-1]
        self.check()
        self.slots.tick()

    def remove(self, finished: list[int]) -> None:
        for to, source in self.slots.remove(finished):
            self.rows[to] = self.rows[source]
        del self.rows[self.slots.rows :]

    def check(self) -> None:
        window = self.slots.window()
        rows, columns = self.slots.allocated
        # The newest token of each row is written, and not ticked.
        assert self.slots.use == pytest.approx((sum(map(len, self.rows)) - len(self.rows)) / (rows * columns))
        assert window.keys.shape[1] == len(self.rows) == self.slots.rows
        for row, tokens in enumerate(self.rows):
            own = window.columns >= window.starts[row]
            assert int(own.sum()) == len(tokens)
            assert torch.equal(window.keys[1, row, 2, own, 3], torch.tensor(tokens))
            assert torch.equal(window.values[0, row, 1, own, 4], -torch.tensor(tokens))
        assert torch.isfinite(window.keys).all()


def test_siblings_get_their_prompts_rows_and_go_their_own_ways() -> None:
    ledger = Ledger(64)
    ledger.place([5, 2, 9], [3, 1, 4])
    for _ in range(4):
        ledger.step()
    assert ledger.slots.rows == 8


def test_memory_grows_on_demand_and_no_further() -> None:
    ledger = Ledger(40)
    assert ledger.slots.allocated == (16, 128)
    ledger.place([3] * 2, [1, 1])
    assert ledger.slots.allocated == (16, 128)
    ledger.place([300], [20])
    ledger.step()
    rows, columns = ledger.slots.allocated
    assert rows == 32
    assert 300 < columns <= 1024
    ledger.place([4], [18])
    ledger.step()
    assert ledger.slots.allocated[0] == 40
    with pytest.raises(ValueError, match="41 rows do not fit 40 slots"):
        ledger.place([1], [1])


def test_only_what_rows_have_written_is_resident() -> None:
    # Filling what is allocated took seconds, in which nothing was decoded.
    slots = KvCache(KvShape(4, 8, 16, 16), max_rows=64, dtype=torch.float32, device=torch.device("cpu"))
    before = psutil.Process().memory_info().rss
    for lengths in ([8] * 33, [1100]):
        slots.place(slots.scratch(lengths, blank=True), lengths, [1] * len(lengths))
    assert slots.allocated == (64, 4096)
    assert psutil.Process().memory_info().rss - before < 100 << 20  # of 1 GiB


def test_a_long_stretch_of_short_rows_needs_no_more_columns() -> None:
    ledger = Ledger(4)
    for _ in range(60):
        ledger.place([6], [2])
        for _ in range(9):
            ledger.step()
        ledger.remove([0])
        for _ in range(2):
            ledger.step()
        ledger.remove([0])
    assert ledger.slots.allocated[1] == 128


def test_rows_that_overlap_in_time_move_to_the_front_together() -> None:
    ledger = Ledger(4)
    ledger.place([6], [1])
    for _ in range(80):
        ledger.place([5], [1])
        for _ in range(7):
            ledger.step()
        ledger.remove([0])
    assert ledger.slots.allocated[1] == 128


def test_any_order_of_events_keeps_every_row_whole() -> None:
    choose = random.Random(3)
    ledger = Ledger(24)
    for _ in range(300):
        event = choose.random()
        free = 24 - ledger.slots.rows
        if event < 0.25 and free:
            lengths = [choose.randint(1, 60) for _ in range(choose.randint(1, min(3, free)))]
            copies = [choose.randint(1, max(1, free // len(lengths))) for _ in lengths]
            ledger.place(lengths, copies)
        elif event < 0.5 and ledger.rows:
            ledger.remove(sorted(choose.sample(range(len(ledger.rows)), choose.randint(1, len(ledger.rows)))))
        elif ledger.rows:
            ledger.step()


def test_clear_wipes_what_is_not_finite() -> None:
    ledger = Ledger(4)
    ledger.place([3], [2])
    ledger.slots.window().keys.fill_(float("nan"))
    ledger.slots.clear()
    ledger.rows.clear()
    ledger.place([20], [1])
    ledger.step()


def test_clear_gives_what_has_grown_back() -> None:
    ledger = Ledger(64)
    ledger.place([300], [20])
    ledger.slots.clear()
    ledger.rows.clear()
    assert ledger.slots.allocated == (16, 128)
    ledger.place([300], [20])
    ledger.step()
