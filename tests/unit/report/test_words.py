import pytest

from ray_ulysses.report.words import count, duration


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999.6, "1.00k"),
        (12_345, "12.3k"),
        (999_600, "1.00M"),
        (8_030_261_248, "8.03B"),
        (123_456_789, "123M"),
    ],
)
def test_counts_have_three_digits_and_a_unit(number, text):
    assert count(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (-3, "0s"), (59.4, "59s"), (59.6, "1m00s"), (252, "4m12s"), (11_100, "3h05m"), (187_200, "2d04h")],
)
def test_durations_have_their_two_largest_units(seconds, text):
    assert duration(seconds) == text
