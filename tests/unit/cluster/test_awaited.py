"""What is said of workers before they say it themselves."""

import pytest

from ray_ulysses.cluster.start_view import awaited


@pytest.mark.parametrize(
    ("workers", "there", "words"),
    [
        (4, 0, "waiting for 4 workers (0 started)"),
        (4, 2, "waiting for 4 workers (2 started)"),
        (4, 4, "loading libraries on 4 workers"),
        (4, None, "waiting for 4 workers"),
        (1, 0, "waiting for 1 worker (0 started)"),
    ],
)
def test_it_says_how_many_workers_are_there_where_that_is_known(workers: int, there: int | None, words: str) -> None:
    assert awaited(workers, there) == words
