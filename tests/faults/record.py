"""Injects the cases of cases.py by running their tests, the slow ones too.

Writes results/faults.json, and with it docs/reliability.md.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from cases import CASES

from gredp.storage.record import header

ROOT = Path(__file__).parent.parent.parent
RECORD = ROOT / "results" / "faults.json"


class Tally:
    """Counts, by case, what the tests that passed have injected: once, or as often as they say."""

    def __init__(self) -> None:
        self.injected: Counter[str] = Counter()
        self.tests = 0

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = (yield).get_result()
        if report.when == "call" and report.passed:
            self.tests += 1
            for mark in item.iter_markers("fault"):
                self.injected[mark.args[0]] += dict(item.user_properties).get("injected", 1)


def write_record() -> None:
    tally = Tally()
    status = pytest.main(["-q", "-m", "fault", "-o", "addopts=", str(ROOT / "tests")], plugins=[tally])
    unknown, missing = set(tally.injected) - set(CASES), set(CASES) - set(tally.injected)
    if status or unknown or missing:
        sys.exit(f"not recorded: status {int(status)}, unknown cases {unknown}, not injected {missing}")
    cases = [
        {"case": case, "injected": tally.injected[key], "outcome": outcome}
        for key, (case, outcome) in CASES.items()
    ]
    facts = {"command": "python tests/faults/record.py", "tests": tally.tests, "cases": cases}
    RECORD.write_text(json.dumps({**header(), **facts}, indent=2, ensure_ascii=False) + "\n")


def main() -> None:
    write_record()
    subprocess.run([sys.executable, str(ROOT / "benchmarks" / "pages.py"), "reliability"], check=True)


if __name__ == "__main__":
    main()
