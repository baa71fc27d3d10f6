"""The benchmark of large arrays reports memory, loading time and tokens per second."""

import json

import numpy as np
import pytest

from benchmarks import token_feed
from txl_jax.data.pieces import check_starts


def test_the_documents_of_the_benchmark_cover_the_array():
    starts = token_feed.draw_starts(300_000)
    check_starts(starts, 300_000, "starts")
    assert 800 < np.diff(starts).mean() < 1200
    assert starts[-1] > 300_000 - 2 * token_feed.MEAN


@pytest.mark.integration
def test_arrays_with_documents_and_without_are_loaded_and_fed(tmp_path):
    out = tmp_path / "report.json"
    token_feed.main(["--tokens=300000", "--rounds=2", f"--out={out}"])
    report = json.loads(out.read_text())
    assert [result["documents"] for result in report["results"]] == [False, True]
    for result in report["results"]:
        assert result["peak_gib"] > 0  # a new process starts from its parent's peak
        assert result["ready_seconds"] > 0
        for fed in result["fed"].values():
            assert 0 < fed["lowest"] <= fed["tokens_per_second"] <= fed["highest"]
