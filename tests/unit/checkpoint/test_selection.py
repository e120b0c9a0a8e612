"""Which step is loaded when some are damaged, unfinished or missing."""

from pathlib import Path
from unittest import mock

import pytest

from tests import hostile
from tests.unit.checkpoint.runs import (
    Run,
    assert_same,
    assert_same_weights,
    resumed,
    steps_in,
    truncate,
)
from torchtitan.checkpoint import selection
from torchtitan.checkpoint.folder import (
    HASHES_FILE,
    find_damage,
    list_steps,
    mark_unfinished,
)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", HASHES_FILE])
@pytest.mark.parametrize("damage", [truncate, lambda path: path.write_bytes(b""), Path.unlink])
def test_damaged_newest_step_falls_back_to_the_one_before(tmp_path, name, damage, caplog):
    if (name, damage) == (HASHES_FILE, Path.unlink):
        pytest.skip("the folder is then as other tools write it, and whole")
    Run(tmp_path).train_and_save(1, 2)
    damage(tmp_path / "checkpoint" / "step-2" / name)
    assert resumed(tmp_path).counter.step == 1
    assert "step-2: it is damaged" in caplog.text and name in caplog.text


@pytest.mark.parametrize("half", [[], [([0, 0], [2, 4])]])
@pytest.mark.parametrize("name", ["layers.0.weight", "optimizer.state.layers.0.weight.exp_avg"])
def test_checkpoint_with_holes_is_not_loaded_whatever_its_hashes_say(tmp_path, name, half, caplog):
    Run(tmp_path).train_and_save(1, 2)
    step = tmp_path / "checkpoint" / "step-2"
    hostile.change_chunks(step, name, *half)
    hostile.remake_hashes(step)
    run = resumed(tmp_path)
    assert run.counter.step == 1 and "step-2: it is damaged" in caplog.text
    before = run.everything()
    for named in ({"step": 2}, {"path": str(step), "model_only": True}):
        with pytest.raises(ValueError, match=f"{len(half)} chunks of {name} do not cover every"):
            run.manager.load(**named)
    assert_same(before, run.everything())


@pytest.mark.parametrize("name", [".metadata", "model.safetensors"])
def test_junk_in_the_place_of_a_newer_step_is_passed_over(tmp_path, name, caplog):
    Run(tmp_path, keep_latest_k=2).train_and_save(1, 2)
    junk = tmp_path / "checkpoint" / "step-999999"
    junk.mkdir()
    (junk / name).write_bytes(b"junk")
    run = Run(tmp_path, keep_latest_k=2)
    assert run.manager.newest_step() == 2
    assert f"Passing over {junk}: it is damaged" in caplog.text
    run.manager.load()
    run.train_and_save(3)  # the junk is not counted among the steps to keep
    assert {step.step for step in list_steps(tmp_path / "checkpoint")} == {2, 3, 999999}


def test_files_are_hashed_once_to_find_and_load_the_newest_step(tmp_path):
    Run(tmp_path).train_and_save(1, 2)
    truncate(tmp_path / "checkpoint" / "step-2" / "__0_0.distcp")
    run = Run(tmp_path)
    with mock.patch.object(selection, "find_damage", side_effect=find_damage) as find:
        assert run.manager.newest_step() == 1
        assert run.manager.load()
    assert [Path(call.args[0]).name for call in find.call_args_list] == ["step-2", "step-1"]


def test_step_folder_made_and_not_yet_marked_is_unfinished(tmp_path, caplog):
    Run(tmp_path).train_and_save(1)
    (tmp_path / "checkpoint" / "step-2").mkdir()
    run = resumed(tmp_path)
    assert run.counter.step == 1
    assert "step-2: its save was interrupted" in caplog.text
    run.train_and_save(3)
    assert steps_in(tmp_path) == [1, 3]


def test_damage_in_a_named_step_or_path_and_a_missing_step_are_errors(tmp_path):
    """Other folders without a checkpoint are in tests/reliability/faults/checkpoints.py."""
    run, folder = Run(tmp_path), tmp_path / "checkpoint"
    run.train_and_save(1, 2)
    truncate(folder / "step-2" / "__0_0.distcp")
    for named, error, message in (
        ({"path": folder / "step-2"}, ValueError, "step-2 is damaged"),
        ({"path": folder}, ValueError, r"load\(path=...\) must be.*checkpoints in it: step-1"),
        ({"path": tmp_path / "step-1"}, FileNotFoundError, "must be a folder with a checkpoint"),
        ({"step": 3}, FileNotFoundError, "step 3 in .*checkpoint .steps there: 1, 2"),
    ):
        with pytest.raises(error, match=message):
            run.manager.load(**named)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="initial_load_path .*: none$"):
        Run(tmp_path / "new", initial_load_path=str(tmp_path / "empty")).manager.load()


def test_verification_can_be_turned_off(tmp_path):
    Run(tmp_path).train_and_save(1)
    hashes = tmp_path / "checkpoint" / "step-1" / HASHES_FILE
    hashes.write_text(hashes.read_text().replace("a", "b"))
    with pytest.raises(ValueError, match="Every checkpoint in .* is damaged"):
        Run(tmp_path).manager.load()
    assert Run(tmp_path, verify_on_load=False).manager.load()


def test_initial_path_is_used_when_own_folder_holds_nothing_whole(tmp_path):
    source, own = Run(tmp_path / "source"), tmp_path / "own"
    source.train_and_save(1)
    config = dict(seed=1, initial_load_path=str(tmp_path / "source" / "checkpoint" / "step-1"))
    mark_unfinished(str(own / "checkpoint" / "step-5"))

    weights = resumed(own, **config)
    assert weights.counter.step == 0
    assert_same_weights(weights, source)
    # Also if the run does not save, whatever lies in its folder.
    source.manager.save(2)
    unsaving = resumed(tmp_path / "source", enable=False, **config)
    assert_same(unsaving.everything(), weights.everything())
    all_of_it = resumed(own, initial_load_model_only=False, **config)
    assert_same(all_of_it.everything(), source.everything())
    all_of_it.train_and_save(6)  # goes before the initial checkpoint from now on
    assert_same(resumed(own, **config).everything(), all_of_it.everything())


def test_step_zero_is_a_seed_of_weights(tmp_path):
    run = Run(tmp_path, last_save_model_only=False)
    run.manager.save(0, last_step=True)
    other = Run(tmp_path, seed=1)
    other.train(2)
    assert other.manager.load(step=0)
    assert other.counter.step == 2
    assert_same_weights(run, other)
