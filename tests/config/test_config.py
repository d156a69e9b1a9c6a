"""The run file: what is good loads, what is bad is one line that names the field."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.config import ConfigError, RunConfig, load_run_config
from gyre.config.run import Section

GOOD = """
name = "demo"
seed = 3
steps = 2
[policy]
path = "policy"
[tasks]
train = "tasks"
[[cells]]
name = "central"
central = true
[[cells]]
name = "sat"
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    (tmp_path / "policy").mkdir()
    (tmp_path / "tasks").mkdir()
    path = tmp_path / "run.toml"
    path.write_text(GOOD)
    return path


def rewrite(path: Path, old: str, new: str) -> Path:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return path


def test_good_file_has_absolute_paths_and_survives_json(run_file: Path) -> None:
    config = load_run_config(run_file)
    assert config.run_id == "demo-s3"
    assert config.policy.path == run_file.parent / "policy"
    assert config.central.name == "central"
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_overrides_replace_and_none_does_not(run_file: Path) -> None:
    config = load_run_config(run_file, seed=9, steps=None)
    assert (config.seed, config.steps) == (9, 2)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("seed = 3", "seeed = 3", "seeed: unknown field"),
        ("steps = 2\n", "", "steps: required field is missing"),
        ("steps = 2", "steps = 0", "steps: Input should be greater than or equal to 1"),
        ("steps = 2", 'steps = "two"', "steps: "),
        ('path = "policy"', 'path = "nowhere"', "policy.path: no folder at"),
        ('train = "tasks"', 'train = "tasks"\nheldout = "gone"', "tasks.heldout: no folder at"),
        ('name = "sat"', 'name = "central"', "cells: names must be unique"),
        ('name = "sat"', 'name = "Sat Two"', "cells.1.name: "),
        ("central = true", "central = false", "cells: exactly one cell must have central = true"),
        ("[[cells]]", "[rollouts]\ntime_limit_s = inf\n[[cells]]", "rollouts.time_limit_s: "),
        ("[[cells]]", "[harness]\nname = 'command'\n[[cells]]", "harness.command: required"),
        ("[[cells]]", "[scheduling]\ntrain_cells = ['x']\n[[cells]]", "scheduling.train_cells: no cell is named 'x'"),
        ("[[cells]]", "[sampling]\ntop_p = 0.9\n[[cells]]", "sampling.top_p: below 1 "),
        ('name = "demo"', "name = demo", "not valid TOML"),
    ],
)
def test_bad_field_is_one_line_naming_it(run_file: Path, old: str, new: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_run_config(rewrite(run_file, old, new))
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert str(error.value).count("pydantic") == 0


def test_a_nucleus_goes_with_a_ratio_that_does_not_hold_it(run_file: Path) -> None:
    rewrite(run_file, "[[cells]]", "[sampling]\ntop_p = 0.9\n[objective]\nold = 'trainer'\n[[cells]]")
    assert load_run_config(run_file).sampling.top_p == 0.9
    rewrite(rewrite(run_file, "top_p = 0.9", "top_p = 1.0"), "'trainer'", "'sampler'")
    assert load_run_config(run_file).sampling.top_p == 1.0


def test_a_quorum_is_of_a_group(run_file: Path) -> None:
    rewrite(run_file, "[policy]", "[rollouts]\ngroup_size = 8\nquorum = 6\nover_submit = 2\n[policy]")
    rollouts = load_run_config(run_file).rollouts
    assert (rollouts.launched, rollouts.handed_out_at) == (10, 6)
    rewrite(run_file, "quorum = 6\n", "")
    assert load_run_config(run_file).rollouts.handed_out_at == 8  # complete, though the surplus ones are still ending
    rewrite(run_file, "over_submit = 2\n", "")
    assert load_run_config(run_file).rollouts.handed_out_at is None
    for quorum, says in ((9, "quorum: must be at most group_size = 8, got 9"), (1, "rollouts.quorum")):
        rewrite(run_file, "group_size = 8\n", f"group_size = 8\nquorum = {quorum}\n")
        with pytest.raises(ConfigError, match=says) as error:
            load_run_config(run_file)
        assert "\n" not in str(error.value)
        rewrite(run_file, f"quorum = {quorum}\n", "")


def test_several_bad_fields_stand_in_one_line(run_file: Path) -> None:
    rewrite(rewrite(run_file, "seed = 3", "seeed = 3"), "steps = 2", "steps = 0")
    with pytest.raises(ConfigError) as error:
        load_run_config(run_file)
    assert "steps: " in str(error.value) and "seeed: unknown field" in str(error.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: no such run file"):
        load_run_config(tmp_path / "none.toml")


def test_every_field_is_documented() -> None:
    sections = [RunConfig, *Section.__subclasses__()]
    missing = [f"{m.__name__}.{n}" for m in sections for n, f in m.model_fields.items() if not f.description]
    assert missing == []
