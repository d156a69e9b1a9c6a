"""The report of a run with known numbers."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from sqlalchemy import Engine, text

from gyre.report import write_close_up, write_report
from gyre.report.data import ReportError, read_report
from gyre.store.db import transaction
from tests.report.story import tell


def test_the_page_holds_the_numbers_of_the_run(engine: Engine, tmp_path: Path) -> None:
    path = write_report(engine, tell(engine), tmp_path / "runs" / "report.html")
    page = path.read_text()
    assert {text: number for number, text in re.findall(r"<div><b>([^<]*)</b>([^<]*)</div>", page)} == {
        "held-out success before (v0)": "25.0 %",
        "held-out success after (v2)": "75.0 %",
        "mean |log-prob sampler - trainer|": "2.0e-05",
        # 8 training rollouts of 15 tokens and 8 held-out ones of 7.
        "tokens sampled": "176",
        # 7 of them have a reward.
        "tokens trained": "105",
        "orchestration, share of CPU": "8.3 %",
        "orchestration, share of wall time": "5.1 %",
    }
    assert "evaluator, excluded: evaluator_failed" in page
    assert re.search(r"<td>step 1</td>(<td>[\d,]*</td>)*<td>60</td></tr>", page)
    assert page.count("<svg") == 5


def test_it_opens_offline(engine: Engine, tmp_path: Path) -> None:
    page = write_report(engine, tell(engine), tmp_path / "report.html").read_text()
    assert not re.search(r"""(src|href)=|url\(|@import|<script|https?://""", page)


def test_where_time_went_adds_up(engine: Engine) -> None:
    data = read_report(engine, tell(engine))
    for time in data.times:
        assert time.seconds == pytest.approx(39)
        assert sum(time.parts.values()) == pytest.approx(39)
        assert time.parts["training"] == pytest.approx(12)
    step = next(w for w in data.windows if w.name == "step 1")
    assert step.cpu == {"engine": 30, "trainer": 8, "harness": 6, "temporal": 2, "postgres": 1, "control": 1}
    assert step.orchestration_cpu == pytest.approx(4 / 48)
    assert step.life == {
        "waiting_s": pytest.approx(4),
        "harness_and_tools_s": pytest.approx(4 * (17 - 6 - 6)),
        "queue_s": pytest.approx(4),
        "prefill_s": pytest.approx(4 * 2),
        "decode_s": pytest.approx(4 * 9),
        "scoring_s": pytest.approx(4 * 2),
        "settling_s": pytest.approx(0),
    }
    assert sum(step.life.values()) == pytest.approx(4 * 20)


def test_where_the_cells_time_went(engine: Engine) -> None:
    tell(engine)
    with transaction(engine) as s:
        rows = s.execute(text("SELECT step, cell, role, seconds, busy_s FROM cell_time")).all()
    found = {(r.step, r.cell, r.role): (pytest.approx(r.seconds), pytest.approx(r.busy_s)) for r in rows}
    for step in (0, 1):
        # Calls run on central from 3 to 8 and from 10 to 16 s; it serves until 20 s, and again from 38 to 39 s. A
        # micro-batch takes 22 to 34 s; the optimizer step begins there and its weights are out at 39 s.
        assert found.pop((step, "central", "rollout")) == (21.0, 11.0)
        assert found.pop((step, "central", "to_train")) == (1.0, 1.0)
        assert found.pop((step, "central", "train")) == (15.0, 14.0)
        assert found.pop((step, "central", "to_rollout")) == (2.0, 2.0)
        assert found.pop((step, "satellite", "rollout")) == (39.0, 0.0)
    assert found == {}


def test_a_run_that_is_not_there_is_one_line(engine: Engine) -> None:
    with pytest.raises(ReportError, match="no run 'nope-s0' in this database"):
        read_report(engine, "nope-s0")


def test_an_empty_run_has_a_page(engine: Engine, tmp_path: Path) -> None:
    from gyre.store import queries
    from gyre.store.db import transaction

    with transaction(engine) as s:
        queries.create_run(s, "young-s0", {"steps": 3}, "young-s0")
    assert "young-s0" in write_report(engine, "young-s0", tmp_path / "report.html").read_text()


def test_a_cell_that_moves_in_the_midst_of_a_step_is_said_and_drawn(engine: Engine, tmp_path: Path) -> None:
    run = tell(engine)
    with transaction(engine) as s:  # the last rollout of step 2 settles only at 30 s: central trains while it is live
        s.execute(
            text(
                "UPDATE rollouts SET settled_at = settled_at + make_interval(secs => 10) WHERE id = ("
                "SELECT r.id FROM rollouts r JOIN groups g ON g.id = r.group_id JOIN steps s ON s.id = g.step_id"
                " WHERE s.index = 1 ORDER BY r.id LIMIT 1)"
            )
        )
        s.execute(
            text("UPDATE steps SET rollouts_done_at = rollouts_done_at + make_interval(secs => 10) WHERE index = 1")
        )
        s.execute(
            text("UPDATE role_changes SET started_at = started_at - make_interval(secs => 1) WHERE to_role = 'train'")
        )
    words = write_close_up(engine, run, tmp_path / "step.svg")
    assert words == (
        "Step 2, 39.0 s. central left serving after 19.0 s, with 4 rollouts still live, changed in 2.00 s and trained 1"
        " micro-batch, 0 of them before the last rollout was settled."
    )
    drawing = ElementTree.fromstring((tmp_path / "step.svg").read_text())
    titles = [e.text or "" for e in drawing.iter("{http://www.w3.org/2000/svg}title")]
    assert any(t.startswith("to_train, 2.00 s; water is low; drain 0.25 s") for t in titles)
    assert [t for t in titles if t.startswith("micro-batch")] == ["micro-batch, 12.00 s, 340 tokens"]
    assert words in write_report(engine, run, tmp_path / "report.html").read_text()
    assert write_close_up(engine, run, tmp_path / "step.svg", 0).startswith("Step 1, 39.0 s. central left")
    with pytest.raises(ReportError, match="step 7 of run 'demo-s0' is not there, or not finished yet"):
        write_close_up(engine, run, tmp_path / "step.svg", 6)
