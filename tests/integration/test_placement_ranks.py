"""Real ranks announce placements: two gloo processes, one run, two epochs in the collector's ledger."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from transformers_there import transformers_or_skip

from .collector_process import collector, moetrace, rows
from .placement_worker import FIRST, SECOND

WORKER = Path(__file__).with_name("placement_worker.py")
STEPS = 60


@pytest.mark.multirank
def test_real_ranks_announce_two_epochs(tmp_path: Path) -> None:
    """Both versions with maps and diff, steps marked with their epoch, a sound chain, an honest verdict.

    The wait of a rank for its collector is nobody's business here: only what is in the store is looked at.
    """
    transformers_or_skip()
    directory = tmp_path / "run"
    with collector(directory) as process:
        ranks = [
            subprocess.Popen(
                [
                    sys.executable, str(WORKER), str(rank), "2", str(tmp_path / "rendezvous"),
                    process.http_address, str(STEPS),
                ],
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        for rank in ranks:
            _, said = rank.communicate(timeout=240)
            assert rank.returncode == 0, said
        assert process.terminate() == 0
    ledger = json.loads(moetrace("placement", "list", "--dir", str(directory), "--json").stdout)["rows"]
    # Two sends, in this order whatever the ranks' order: announced before the first step under it.
    assert [(row["event"], row["version"]) for row in ledger if row["event"] != "judged"] == [
        ("announced", FIRST), ("applied", FIRST), ("announced", SECOND), ("applied", SECOND),
    ]  # fmt: skip
    announced = next(row for row in ledger if row["version"] == SECOND)
    assert (announced["previous_version"], announced["rollback_version"]) == (FIRST, FIRST)
    assert announced["step"] == STEPS // 2
    # Two experts of four layers, each to one rank that does not hold it.
    assert (announced["experts_copied"], announced["copied_bytes"]) == (8, 8000)
    epochs = rows(
        directory,
        "SELECT placement_version AS version, min(step) AS first, max(step) AS last FROM rank_steps FINAL "
        "GROUP BY version ORDER BY version",
    )
    assert [(row["version"], int(str(row["first"])), int(str(row["last"]))) for row in epochs] == [
        (FIRST, 0, STEPS // 2 - 1),
        (SECOND, STEPS // 2, STEPS - 1),
    ]
    verified = moetrace("placement", "verify", "--dir", str(directory))
    assert (verified.returncode, "sound" in verified.stdout) == (0, True), verified.stdout
    compared = moetrace("placement", "compare", "--dir", str(directory), "--json")
    document = json.loads(compared.stdout)
    assert (document["before"], document["after"]) == (f"version {FIRST}", f"version {SECOND}")
    # 28 and 25 steps: fewer than a p95 needs, and that is said.
    assert (compared.returncode, document["verdict"]) == (3, "not_enough_evidence")
    assert "60 of each needed" in document["sentence"]
    doctor = json.loads(moetrace("doctor", "--dir", str(directory), "--json").stdout)
    status = {check["name"]: check["status"] for check in doctor["checks"]}
    assert status["rollback_target_present"] == "pass"
    assert status["instrumentation_coverage"] == "pass"
