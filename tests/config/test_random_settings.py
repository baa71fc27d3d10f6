"""Random settings are either refused by an error of one line, or JAX can trace their programs."""

import draw_settings
import pytest


@pytest.mark.parametrize(
    ("draws", "seed", "traced"),
    [
        pytest.param(40, 1, False, id="checked"),
        pytest.param(200, 1, False, id="more", marks=pytest.mark.slow),
        pytest.param(20, 2, True, id="traced"),
        pytest.param(10_000, 0, True, id="all", marks=pytest.mark.slow),
    ],
)
def test_random_settings_are_refused_in_a_line_or_their_programs_are_sound(draws, seed, traced):
    outcome = draw_settings.run(draws, seed, traced=traced)
    assert outcome.failures == []
    assert sum(outcome.counts.values()) == draws
    assert outcome.counts["accepted"] > draws / 10
    assert outcome.counts["refused by the settings"] > draws / 10
