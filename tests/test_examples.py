"""The example agent remembers with memory and guesses without."""

import runpy

import pytest
import tiny_runs

AGENT = tiny_runs.ROOT / "examples" / "agent.py"


@pytest.mark.integration
def test_the_agent_learns_what_only_memory_can_bring():
    train = runpy.run_path(str(AGENT))["train"]
    assert train(150, mem_len=16)[-1] > 0.95
    assert abs(train(150, mem_len=0)[-1] - 0.5) < 0.15
