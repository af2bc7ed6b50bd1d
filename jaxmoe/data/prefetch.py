"""Items prepared ahead of use, in a background thread."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

K = TypeVar("K")
T = TypeVar("T")


class Prefetcher(Generic[K, T]):
    """Iterator over `load(key)` for every key, in order, up to `depth` of them ahead; a context manager.

    depth 0 loads each item when it is asked for, in the caller's thread. What `load` raises comes out of `next` in
    place of its item, with the thread's traceback. `close` (or leaving the `with` block) waits for the item that is
    being loaded and drops the rest.
    """

    def __init__(self, load: Callable[[K], T], keys: Iterable[K], depth: int):
        assert depth >= 0, depth
        self._load = load
        self._keys = iter(keys)
        self._depth = depth
        self._ahead: deque[Future[T]] = deque()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch") if depth else None
        self._fill()

    def _fill(self) -> None:
        while self._thread is not None and len(self._ahead) < self._depth:
            try:
                key = next(self._keys)
            except StopIteration:
                return
            self._ahead.append(self._thread.submit(self._load, key))

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if self._depth == 0:
            return self._load(next(self._keys))
        if not self._ahead:
            raise StopIteration
        item = self._ahead.popleft().result()
        self._fill()
        return item

    def close(self) -> None:
        """Ends the thread. Idempotent; nothing can be taken afterwards."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread = None
        self._ahead.clear()
        self._keys = iter(())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
