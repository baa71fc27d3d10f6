"""A single row is multiplied as it is, and as two equal rows on a GPU."""

import jax
import numpy as np
import pytest

from txl_jax.model import products


@pytest.mark.parametrize(
    ("platform", "rows", "multiplied"), [("cpu", 1, 1), ("gpu", 1, 2), ("gpu", 3, 3)]
)
def test_a_gpu_multiplies_two_rows_or_more(monkeypatch, platform, rows, multiplied):
    monkeypatch.setattr(products, "platform_of", lambda mesh: platform)
    x, matrix = (jax.random.normal(jax.random.key(n), s) for n, s in enumerate([(rows, 5), (5, 7)]))
    seen = []

    def product(x):
        seen.append(len(x))
        return x @ matrix

    result = products.product_of_rows(product, x, None)
    assert seen == [multiplied]
    np.testing.assert_allclose(result, np.asarray(x) @ np.asarray(matrix), rtol=1e-5)  # float32
