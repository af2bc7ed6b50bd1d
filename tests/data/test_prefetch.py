import threading
import time

import pytest

from jaxmoe.data import Prefetcher

DEPTHS = [0, 1, 3, 50]


@pytest.mark.parametrize("depth", DEPTHS)
def test_items_come_in_order(depth):
    with Prefetcher(lambda key: key * key, range(3, 20), depth) as items:
        assert list(items) == [key * key for key in range(3, 20)]
    assert list(items) == []


@pytest.mark.parametrize("depth", DEPTHS)
def test_an_error_comes_out_in_place_of_its_item(depth):
    def load(key):
        if key == 2:
            raise OSError(f"disk gone at {key}")
        return key

    with Prefetcher(load, range(5), depth) as items:
        assert [next(items), next(items)] == [0, 1]
        with pytest.raises(OSError, match="disk gone at 2"):
            next(items)


def test_depth_zero_works_in_the_callers_thread():
    with Prefetcher(lambda _: threading.current_thread(), range(2), 0) as items:
        assert set(items) == {threading.current_thread()}


def test_items_are_made_before_they_are_asked_for_but_not_too_far_ahead():
    made, enough = [], threading.Event()

    def load(key):
        made.append(key)
        if len(made) == 4:
            enough.set()
        return key

    with Prefetcher(load, range(100), 3) as items:
        next(items)
        assert enough.wait(10)
        time.sleep(0.05)
        assert made == [0, 1, 2, 3]


def test_close_ends_the_thread_and_drops_what_was_not_begun():
    begun, go_on, made = threading.Event(), threading.Event(), []

    def load(key):
        made.append(key)
        begun.set()
        assert go_on.wait(10)
        return key

    before = threading.active_count()
    items = Prefetcher(load, range(100), 5)
    assert begun.wait(10)
    go_on.set()
    items.close()
    items.close()
    assert threading.active_count() == before
    assert len(made) <= 5
    with pytest.raises(StopIteration):
        next(items)
