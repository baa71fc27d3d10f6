"""Prefetching gives items and errors in their order; closing the iterator ends its thread."""

import threading

import pytest

from txl_jax.data.feed import prefetch


def test_items_come_in_order():
    assert list(prefetch(iter(range(50)))) == list(range(50))


def test_no_more_than_asked_is_read_ahead():
    made = []

    def items():
        for i in range(100):
            made.append(i)
            yield i

    ahead = prefetch(items(), size=2)
    next(ahead)
    ahead.close()
    assert len(made) <= 5


def test_an_error_is_raised_where_its_item_would_have_come():
    def items():
        yield 1
        raise ValueError("no second item")

    ahead = prefetch(items())
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="no second item"):
        next(ahead)


def test_closing_ends_the_thread():
    before = threading.active_count()
    ahead = prefetch(iter(range(10**9)))
    next(ahead)
    ahead.close()
    assert threading.active_count() == before
