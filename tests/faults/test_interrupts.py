"""Interrupts of the main thread, sampled; ``tools/torture.py interrupts`` makes thousands."""

from __future__ import annotations

from pathlib import Path

import pytest

from campaigns import interrupts


@pytest.mark.parametrize("durability", interrupts.DURABILITIES)
def test_ctrl_c_in_the_main_thread_neither_repeats_nor_loses_a_write_of_another_thread(
    scratch: Path, durability: str
) -> None:
    report = interrupts.run(scratch / durability, count=200, seed=3, durabilities=[durability])
    assert report.findings == ()
    assert report.kept()
    assert report.total("acknowledged") > 100
