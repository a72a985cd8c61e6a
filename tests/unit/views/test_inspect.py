from dataclasses import replace

from ray_ulysses.views.inspect import render_history
from tests.unit.views.histories import make_history


def test_a_run_is_told_in_full():
    text = render_history(make_history())
    assert text.splitlines()[0] == "run 'demo': finished at step 12"
    assert "data digest    00000000deadbeef" in text
    assert "lost steps     2 (trained, then trained again after a failure)" in text
    assert "goodput        81.25% of the time went into steps that count" in text
    assert "        1        4   2   2    1-7            12s  no word of its end" in text
    assert "        2        2   2   1   6-12          1m15s  finished" in text
    assert "    10        2      committed  checkpoints/step-00000010" in text
    assert "    12        -  not committed  checkpoints/step-00000012" in text
    assert "steps (the last 10 of 12)" in text
    assert "    12  3.8000   1,000  [44, 48)  2" in text


def test_missing_steps_are_not_hidden():
    text = render_history(make_history(missing_steps=(3, 7, 8, 9)))
    assert "MISSING: the journal has no record of steps 3, 7-9" in text


def test_a_run_that_has_not_started_is_told_too():
    text = render_history(
        make_history(0, status="not_started", attempts=(), checkpoints=(), goodput=None, lost_steps=0)
    )
    assert text.splitlines()[0] == "run 'demo': not_started at step 0"
    assert "goodput        - of" in text


def test_a_reason_of_many_lines_takes_one():
    attempts = make_history().attempts
    text = render_history(make_history(attempts=(replace(attempts[0], reason="failed: a\n  at b"),)))
    assert "failed: a\n" in text
    assert "at b" not in text
