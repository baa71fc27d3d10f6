"""Sinusoids of distances, their clamp, and the relative shift."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax.model.positions import distance_encodings, relative_shift, sinusoids

SHAPES = [(1, 1), (1, 4), (2, 2), (3, 3), (3, 5), (4, 4), (4, 9), (5, 6), (7, 20), (8, 8)]


@pytest.mark.parametrize(("seg_len", "n_keys"), SHAPES)
def test_relative_shift_puts_the_score_of_every_distance_at_its_key(seg_len, n_keys):
    mem_len = n_keys - seg_len
    scores = np.random.default_rng(0).standard_normal((2, 3, seg_len, n_keys)).astype(np.float32)
    shifted = np.asarray(relative_shift(jnp.asarray(scores)))
    assert shifted.shape == scores.shape
    for i in range(seg_len):
        for j in range(mem_len + i + 1):  # keys that causality allows
            distance = mem_len + i - j
            column = n_keys - 1 - distance  # columns stand for the distances K-1 .. 0
            np.testing.assert_array_equal(shifted[..., i, j], scores[..., i, column])


def test_relative_shift_of_the_matrix_drawn_in_its_docstring():
    distances = np.tile(np.arange(4, -1, -1.0), (3, 1))
    shifted = np.asarray(relative_shift(jnp.asarray(distances)))
    for i, row in enumerate(([2, 1, 0], [3, 2, 1, 0], [4, 3, 2, 1, 0])):
        np.testing.assert_array_equal(shifted[i, : len(row)], row)


def test_sinusoids_are_all_sines_then_all_cosines_of_the_papers_frequencies():
    d_model = 6
    encodings = np.asarray(sinusoids(jnp.arange(40), d_model))
    assert encodings.shape == (40, d_model)
    assert encodings.dtype == np.float32
    for distance in range(40):
        for k in range(d_model // 2):
            angle = distance / 10000 ** (2 * k / d_model)
            np.testing.assert_allclose(encodings[distance, k], math.sin(angle), atol=5e-6)
            np.testing.assert_allclose(encodings[distance, 3 + k], math.cos(angle), atol=5e-6)


def test_sinusoids_at_long_distances_keep_float32_accuracy():
    encodings = np.asarray(sinusoids(jnp.array([3799, 4927]), 8))
    for row, distance in zip(encodings, (3799, 4927), strict=True):
        for k in range(4):
            np.testing.assert_allclose(row[k], math.sin(distance / 10000 ** (k / 4)), atol=2e-3)


def test_distance_encodings_run_from_the_farthest_distance_to_zero():
    rows = np.asarray(distance_encodings(n_keys=5, d_model=4))
    np.testing.assert_array_equal(rows, sinusoids(jnp.array([4, 3, 2, 1, 0]), 4))
    np.testing.assert_array_equal(rows[-1], [0, 0, 1, 1])


def test_clamp_len_gives_distances_above_it_its_own_row():
    rows = np.asarray(distance_encodings(n_keys=6, d_model=4, clamp_len=3))
    np.testing.assert_array_equal(rows, sinusoids(jnp.array([3, 3, 3, 2, 1, 0]), 4))


def test_clamp_len_beyond_all_distances_changes_nothing():
    rows = distance_encodings(n_keys=4, d_model=4)
    np.testing.assert_array_equal(distance_encodings(n_keys=4, d_model=4, clamp_len=3), rows)
