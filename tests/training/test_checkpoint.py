"""Checkpoints are whole or absent, and load elsewhere."""

from __future__ import annotations

import json
import resource

import pytest
import torch

from gyre.serving.cpu_platform import activate
from gyre.training import checkpoint
from gyre.training.batch import pack_samples
from gyre.training.checkpoint import CheckpointError, CheckpointMeta, read_meta, read_optimizer, version_folder
from gyre.trajectory.packed import TreeRow
from tests.training.conftest import random_samples


@pytest.fixture
def stepped(make_trainer):
    trainer = make_trainer()
    trainer.micro_batch(pack_samples(random_samples(0)), "micro-batch 0")
    trainer.optimizer_step(4)
    return trainer


def test_transformers_loads_it_with_the_same_logits(stepped, tiny_policy, tmp_path):
    folder = stepped.save(tmp_path, "run-s0", 12)
    assert folder == tmp_path / "v1"
    assert read_meta(folder) == CheckpointMeta("run-s0", 1, 12, 0)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (tiny_policy / name).read_bytes()
    activate()
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.arange(20) * 4
    torch.testing.assert_close(
        stepped.policy.logits(TreeRow.sequences([20]), ids), theirs(ids[None]).logits[0], atol=1e-5, rtol=0
    )


def test_a_save_that_dies_leaves_nothing_under_a_good_name(stepped, tmp_path, monkeypatch):
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "_sync", die)
    with pytest.raises(KeyboardInterrupt):
        stepped.save(tmp_path, "run-s0", None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_where_there_is_no_room_the_folder_is_named_and_the_next_try_succeeds(stepped, tmp_path, part):
    """torch says of a full disk `unexpected pos 2474816 vs 2474704`."""
    folder = stepped.save(tmp_path / "roomy", "run-s0", 1)
    most = (folder / "model.safetensors").stat().st_size // 2
    if part == "optimizer":
        most = (folder / "optimizer.pt").stat().st_size - 1000
        assert most > (folder / "model.safetensors").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))  # no file may be longer
    try:
        with pytest.raises(CheckpointError) as full:
            stepped.save(tmp_path / "full", "run-s0", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(full.value).startswith(f"{tmp_path / 'full'}: the checkpoint of version 1 cannot be written, where ")
    assert list((tmp_path / "full").iterdir()) == []
    again = stepped.save(tmp_path / "full", "run-s0", 1)
    assert (again / "optimizer.pt").stat().st_size == (folder / "optimizer.pt").stat().st_size


def test_a_killed_writers_drafts_are_cleaned(stepped, tmp_path):
    folder = stepped.save(tmp_path, "run-s0", None)
    (tmp_path / ".v2.0123").mkdir()
    (tmp_path / ".v2.0123" / "model.safetensors").write_bytes(b"half")
    checkpoint.clean(tmp_path, {folder.name}, 1)
    assert list(tmp_path.iterdir()) == [folder]
    checkpoint.clean(tmp_path, set(), 0)
    assert list(tmp_path.iterdir()) == []


def test_versions_of_a_database_that_is_gone_stay(tmp_path):
    for name in ("v1", "v2", "v2.2", "v11", "values"):
        (tmp_path / name).mkdir()
    checkpoint.clean(tmp_path, set(), 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v11", "v2", "v2.2", "values"]


def test_no_save_touches_another_ones_folder(stepped, tmp_path):
    """Two writers of a version, one of them replaced without knowing: the row says later which of them counts."""
    folders = [stepped.save(tmp_path, "run-s0", 1) for _ in range(3)]
    assert [f.name for f in folders] == ["v1", "v1.2", "v1.3"]
    stepped.load(1, folders[1])
    checkpoint.clean(tmp_path, {folders[1].name}, 1)
    assert list(tmp_path.iterdir()) == [folders[1]]


def test_only_folders_of_the_run_are_deleted(tmp_path, tiny_policy):
    root = tmp_path / "checkpoints"
    version_folder(root, 3).mkdir(parents=True)
    checkpoint.delete_checkpoints(root, [version_folder(root, 3), tiny_policy, root / "v99"])
    assert list(root.iterdir()) == []
    assert (tiny_policy / "config.json").is_file()


def test_broken_checkpoints_are_named(stepped, make_trainer, tmp_path):
    folder = stepped.save(tmp_path, "run-s0", None)
    with pytest.raises(CheckpointError, match="holds version 1, not 5"):
        make_trainer().load(5, folder)
    (folder / "optimizer.pt").write_bytes(b"PK torn")
    with pytest.raises(CheckpointError, match=r"optimizer\.pt: cannot be read"):
        read_optimizer(folder)
    (folder / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer\.pt: no such file"):
        read_optimizer(folder)
    (folder / "meta.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(CheckpointError, match=r"meta\.json: not a checkpoint"):
        read_meta(folder)
