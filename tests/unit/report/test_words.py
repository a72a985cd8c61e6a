import pytest

from ray_ulysses.report.words import count, duration, facts, percent, size, table


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


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(4 << 20, "4.00 MiB"), (1 << 30, "1.00 GiB"), (27.4 * (1 << 30), "27.4 GiB")]
)
def test_sizes_are_in_powers_of_1024(num_bytes, text):
    assert size(num_bytes) == text


def test_almost_all_is_not_all():
    assert percent(0.9999) == "99.99%"


def test_columns_are_aligned():
    assert facts([("a", "1"), ("long", "2")]) == ["  a     1", "  long  2"]
    assert table(("n", "name"), [("10", "x"), ("7", "y")]) == ["   n  name", "  10  x", "   7  y"]
