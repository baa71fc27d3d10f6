"""Sinusoidal encodings of distances, their limit ``clamp_len``, and the relative shift."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from txl_jax.model.positions import clamped, relative_shift, sinusoids
from txl_jax.model.scores import position_scores

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


def test_the_distance_zero_has_sines_of_zero_and_cosines_of_one():
    np.testing.assert_array_equal(sinusoids(jnp.array([0]), 4), [[0, 0, 1, 1]])


def test_clamp_len_limits_the_distances_above_it():
    np.testing.assert_array_equal(clamped(jnp.arange(5, -1, -1), 3), [3, 3, 3, 2, 1, 0])


@pytest.mark.parametrize("clamp_len", [3, -1])
def test_clamp_len_beyond_all_distances_changes_nothing(clamp_len):
    np.testing.assert_array_equal(clamped(jnp.arange(3, -1, -1), clamp_len), [3, 2, 1, 0])


def test_scalars_of_distances_are_scores_without_vectors():
    """In every row of the batch, the score of a query and a key is the scalar of their distance."""
    b = np.random.default_rng(0).standard_normal((2, 5)).astype(np.float32)
    scores = np.asarray(position_scores(jnp.zeros((2, 4, 3, 6)), None, None, jnp.asarray(b)))
    assert scores.shape == (2, 4, 3, 5)
    for i in range(3):
        for j in range(2 + i + 1):  # keys that causality allows
            expected = np.broadcast_to(b[:, None, 4 - (2 + i - j)], (2, 4))
            np.testing.assert_array_equal(scores[:, :, i, j], expected)
