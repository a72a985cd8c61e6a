from ray_ulysses.planner.report import build_report
from ray_ulysses.views.plan import render_plan
from tests.unit.planner.runs import make_config, make_corpus, make_plan, make_shape


def text_of(config, corpus):
    return render_plan(build_report(config, make_shape(config), corpus, make_plan(config, corpus)))


def test_every_section_is_there_and_the_end_says_whether_it_starts():
    text = text_of(make_config(), make_corpus([64, 64, 100, 1, 30]))
    for title in ("model", "layout", "data", "memory of a rank: a first estimate by formula, not a measurement"):
        assert f"\n{title}\n" in text
    assert "  workers              4 = dp 2 x sp 2\n" in text
    assert "  without idle turns   2, 4, 8\n" in text
    assert "byte entropy       3.250 nats" in text
    assert text.endswith("nothing speaks against starting it")


def test_problems_stand_at_the_end():
    text = text_of(make_config(run={"stop_step": 99}), make_corpus([64] * 9))
    assert "this run can't start:\n  - run.stop_step=99: is beyond the planned data" in text
    assert "nothing speaks against" not in text


def test_no_line_is_wider_than_a_wide_terminal():
    text = text_of(make_config(memory={"device_gib": 0.01}), make_corpus([64] * 9))
    assert max(len(line) for line in text.splitlines()) <= 140
