"""The unit tests that take long by themselves, which ``make test-unit`` leaves out and ``make test`` runs.

They are listed in ``tests/unit/long.txt``. To list them anew, run the unit tests with ``--junitxml=FILE`` and then
``python -m tests.long_tests FILE``.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

LISTED = Path(__file__).parent / "unit" / "long.txt"
_LONGEST_CASE_S = 0.3
_LONGEST_TEST_S = 1.5
"""A test is long if one of its cases takes longer than the first, or all of them together longer than the second."""


def long_tests(listed: Path = LISTED) -> frozenset[str]:
    return frozenset(listed.read_text(encoding="utf-8").split())


def without_case(node_id: str) -> str:
    """Return the id of a test without that of its case: ``tests/unit/test_a.py::test_b`` of ``...::test_b[case]``."""
    return node_id.split("[", 1)[0]


def found_long(seconds: Mapping[str, Sequence[float]]) -> tuple[str, ...]:
    return tuple(
        sorted(one for one, took in seconds.items() if max(took) > _LONGEST_CASE_S or sum(took) > _LONGEST_TEST_S)
    )


def seconds_of(report: Path) -> dict[str, list[float]]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(report).iter("testcase"):
        names = case.attrib["classname"].split(".")
        if names[:2] == ["tests", "unit"]:
            seconds[without_case(f"{'/'.join(names)}.py::{case.attrib['name']}")].append(float(case.attrib["time"]))
    return dict(seconds)


def main(reports: Iterable[str]) -> None:
    """List the tests that took long in a report."""
    seconds = {test: took for report in reports for test, took in seconds_of(Path(report)).items()}
    LISTED.write_text("\n".join((*found_long(seconds), "")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
