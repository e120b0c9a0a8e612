"""Units of `patches` on the published torchtitan 0.2.2: what it does before and after, on the CPU.

Needs torch, pytest and what 0.2.2 itself imports: `pytest --confcutdir tests/patches tests/patches`.
0.2.2 is a black box here: it is downloaded, and run in processes of its own (rehearse.py).
"""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from patches.__main__ import main
from patches.tool import Target, load_units, unified_diff

HERE = Path(__file__).parent
UNITS = load_units()
ONE_RANK = ["group", "dataloader", "documents", "forward", "schedule"]
TWO_RANKS = ["lists", "layouts", "aggregation"]
CHECKS_OF = {1: ["group"], 2: ["dataloader"], 3: ["documents"], 4: ["forward"]}
CHECKS_OF |= {5: ["lists"], 6: ["layouts", "aggregation"], 7: ["schedule"]}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """Download 0.2.2, or take the wheel that the variable TORCHTITAN_WHEEL names."""
    if "TORCHTITAN_WHEEL" in os.environ:
        return Path(os.environ["TORCHTITAN_WHEEL"])
    folder = tmp_path_factory.mktemp("download")
    command = [sys.executable, "-m", "pip", "download", "torchtitan==0.2.2", "--no-deps"]
    result = subprocess.run([*command, "-d", folder], capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"torchtitan 0.2.2 could not be downloaded: {result.stderr[-300:]}")
    (file,) = folder.glob("*.whl")
    return file


@pytest.fixture
def copy(wheel, tmp_path):
    """A fresh copy of 0.2.2."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    return tmp_path


def texts(root):
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


# ---- the tool ----


def test_applying_twice_changes_nothing_and_undo_restores_every_byte(copy):
    before = texts(copy)
    assert main(["apply", str(copy), "--units", "1", "3"]) == 0
    two = texts(copy)
    assert main(["apply", str(copy), "--units", "3"]) == 0
    assert texts(copy) == two != before
    assert main(["apply", str(copy)]) == 0 and Target(copy).applied == list(UNITS)
    assert main(["undo", str(copy)]) == 0
    assert texts(copy) == before


def test_edited_function_is_refused_and_other_edits_are_kept(copy, capsys):
    file = copy / "torchtitan/distributed/utils.py"
    source = file.read_text()
    file.write_text(source.replace("def init_distributed(", "def init_distributed(  # ours\n", 1))
    before = texts(copy)
    assert main(["apply", str(copy)]) == 1
    assert "init_distributed is not that of 0.2.2, so unit 1" in capsys.readouterr().err
    assert texts(copy) == before
    file.write_text(source + "\n\ndef ours():\n    pass\n")
    assert main(["apply", str(copy), "--units", "1"]) == 0
    assert "def ours" in file.read_text() and "use_existing_group" in file.read_text()


def test_diff_is_what_apply_does(copy):
    """patch(1) takes the diff, in the order of the units' files."""
    if shutil.which("patch") is None:
        pytest.skip("needs the program `patch`")
    for number in UNITS:
        diff = unified_diff(Target(copy), UNITS[number])
        Target(copy).apply([number])
        applied = {path: text for path, text in texts(copy).items() if ".patches" not in str(path)}
        Target(copy).undo()
        patch = functools.partial(subprocess.run, input=diff, text=True, cwd=copy, check=True)
        patch(["patch", "-p1", "-s"])
        assert texts(copy) == applied
        patch(["patch", "-p1", "-s", "-R", "-E"])


def test_sizes_on_the_page_are_those_of_the_diffs(copy):
    target, rows = Target(copy), []
    for number, unit in UNITS.items():
        _, *files = unified_diff(target, unit).split("--- ")
        edits = "".join(file.split("\n", 2)[2] for file in files if "/dev/null" not in file[:10])
        plus, minus = (len(re.findall(rf"^\{sign}", edits, re.M)) for sign in "+-")
        added = sum(len(text.splitlines()) for text in unit.new.values())
        changed = len(files) - len(unit.new)
        rows.append(f"| {number} | +{plus} −{minus} | {changed} |{f' {added}' if added else ''} |")
    page = (HERE.parents[1] / "docs/patch-set.md").read_text()
    assert re.findall(r"^\| \d \| \+.*$", page, re.M) == rows


# ---- what 0.2.2 does, before and after ----


@pytest.fixture(scope="session")
def found(wheel, tmp_path_factory):
    """state -> check -> what was observed; states are "before", "all" and the units' numbers."""
    root, jobs = tmp_path_factory.mktemp("states"), []
    states = {"before": [], "all": list(UNITS)} | {str(number): [number] for number in UNITS}
    for state, numbers in states.items():
        folder = root / state
        zipfile.ZipFile(wheel).extractall(folder)
        Target(folder).apply(numbers) if numbers else None
        checks = CHECKS_OF[numbers[0]] if len(numbers) == 1 else ONE_RANK + TWO_RANKS
        for ranks, group in ((1, ONE_RANK), (2, TWO_RANKS)):
            if own := [check for check in group if check in checks]:
                result = str(root / f"{state}_{ranks}.json")
                job = {"folder": str(folder), "checks": own, "ranks": ranks, "result": result}
                jobs.append(job | {"state": state})
    (root / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, HERE / "rehearse.py", root / "jobs.json"]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that imports leave CUDA to the forks
    subprocess.run(
        command, env=os.environ | environment, cwd=root, timeout=600, capture_output=True
    )
    values: dict = {state: {} for state in states}
    for job in jobs:
        result = json.loads(Path(job["result"]).read_text())
        assert "error" not in result, (job["state"], result["error"])
        values[job["state"]] |= result
    return values


@pytest.fixture(params=["alone", "all"])
def after(request, found):
    """Return a check's value with its unit alone, and with all units."""

    def value(check):
        (number,) = [n for n, checks in CHECKS_OF.items() if check in checks]
        return found["all" if request.param == "all" else str(number)][check]

    return value


def test_warning_names_the_settings_that_an_existing_group_leaves_without_effect(found, after):
    before, now = found["before"]["group"], after("group")
    assert before["size"] == now["size"] == 1 and len(before["warnings"]) == 1
    assert "init_timeout_seconds" not in before["warnings"][0]
    (warning,) = now["warnings"]
    assert "comm.init_timeout_seconds = 7, comm.trace_buf_size = 0" in warning
    assert now["variables"] == []


def test_group_that_cannot_serve_the_device_is_refused(found, after):
    assert found["before"]["group"]["other device"] == 1  # its number of ranks: it goes on
    assert "has backends cpu:gloo, and none for cuda" in after("group")["other device"]


def test_missing_dataloader_is_part_of_the_type_and_train_says_how_to_feed_batches(found, after):
    before, now = found["before"]["dataloader"], after("dataloader")
    assert not before["None is in the type"] and now["None is in the type"]
    assert before["train"].startswith("AssertionError") and "your own batches" in now["train"]
    assert before["batch_generator"].startswith("TypeError")
    assert "build_dataloader_fn" in now["batch_generator"]
    assert now["own batch"] == before["own batch"]


def documents_of(mask):
    """Number the documents of row 0 of a mask [B, T, T], after checking that they are causal blocks."""
    seen = mask["seen"][0]
    firsts = [row.index(1) for row in seen]
    for q, row in enumerate(seen):
        assert row == [int(firsts[q] <= k <= q) for k in range(len(row))]
    return [sorted(set(firsts)).index(first) for first in firsts]


EXPECTED = {
    "mixed": [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2],
    "padding": [0, 0, 0, 0, 0, 1, 1, 1, 2, 3, 4],  # each token of padding sees itself
    "one dimension": [0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2],
}


@pytest.mark.parametrize("case", EXPECTED)
def test_positions_separate_documents_under_flex_and_varlen(found, after, case):
    now = after("documents")
    for family in ("llama3", "qwen3", "deepseek_v3"):
        name = f"{family} flex position_block_causal {case}"
        assert found["before"]["documents"][name].startswith("ValueError")
        assert documents_of(now[name]) == EXPECTED[case]
    starts = [EXPECTED[case].index(number) for number in sorted(set(EXPECTED[case]))]
    lengths = [b - a for a, b in zip(starts, [*starts[1:], 11], strict=True)]
    for family in ("llama3", "qwen3"):
        metadata = now[f"{family} varlen position_block_causal {case}"]
        assert metadata == {"cu_seqlens": [*starts, 11], "longest": max(lengths)}


def test_masks_of_causal_and_block_causal_are_those_of_before(found, after):
    before, now = found["before"]["documents"], after("documents")
    for name, mask in before.items():
        if "position" not in name and isinstance(mask, dict):
            assert now[name] == mask, name
    assert now["llama3 varlen causal"].split(":")[0] == "ValueError"


@pytest.mark.parametrize(
    "kind, separator",
    [("block_causal", "a tokenizer's eos_id"), ("position_block_causal", "'positions' [B, T]")],
)
def test_one_warning_says_which_separator_rules(found, after, kind, separator):
    assert found["before"]["documents"][kind] == []
    (warning,) = after("documents")[kind]  # of two batches
    assert f"attn_mask_type '{kind}': {separator}" in warning and "row 0 at token 3" in warning


def test_tokenizer_is_needed_only_where_its_token_separates(found, after):
    name = "position_block_causal without a tokenizer"
    assert found["before"]["documents"][name].startswith("AssertionError")
    assert after("documents")[name] == ["attention_masks", "positions"]
    without = after("documents")["block_causal without a tokenizer"]
    assert "needs a tokenizer's eos_id, got None" in without


def test_override_of_forward_step_runs_in_training_and_scores_without_gradients(found, after):
    before, now = found["before"]["forward"], after("forward")
    assert before["calls in training"] == 0 and now["calls in training"] == 1
    assert before["score"].startswith("AttributeError") and now["score"] is True
    assert now["loss"] == before["loss"] == 0 and now["gradient"] == before["gradient"] == 0


def test_lists_of_unequal_microbatches_give_the_gradients_of_one_process(found, after):
    now = after("lists")
    for name, before in found["before"]["lists"].items():
        assert str(before).startswith("TypeError"), name
        if name != "one and two":
            error, loss = now[name]
            assert error < 1e-5 and loss == pytest.approx(1, abs=1e-5), name
    assert "lists of equal length, at least 1, got 1 and 2" in now["one and two"]


# torch computes norms in fp32 on the CPU, which is off by up to 2e-4; ours is in float64.
NORM = pytest.approx(1, abs=1e-3)


def test_gradient_norm_is_that_of_one_process_in_every_layout(found, after):
    before, now = found["before"]["layouts"], after("layouts")
    for ratios in [*before.values(), *now.values()]:
        assert ratios[1] == pytest.approx(1, abs=1e-5)  # the logged loss
    assert {layout: ratios[0] for layout, ratios in now.items()} == dict.fromkeys(now, NORM)
    assert before["data_parallel_shard_degree"][0] == NORM
    assert before["data_parallel_replicate_degree"][0] == pytest.approx(0.5, abs=1e-3)
    assert before["pipeline_parallel_degree"][0] > 100  # the number of tokens


def test_aggregations_are_those_of_one_process_for_any_split(found, after):
    assert set(found["before"]["aggregation"].values()) == {
        "AssertionError: training.loss_aggregation"  # no such key
    }
    now = after("aggregation")
    assert len(now) == 8
    for name, (norm, loss) in now.items():
        assert norm == NORM and loss == pytest.approx(1, abs=1e-5), name


def test_warm_up_starts_at_zero_with_offset_minus_one(found, after):
    before, now = found["before"]["schedule"], after("schedule")
    steps = range(11)  # ten steps, four of warm-up, as `transformers` counts them with -1
    assert now["-1"] == pytest.approx([min(k / 4, (10 - k) / 6) for k in steps])
    assert now["0"] == before["0"] != now["-1"] and before["-1"] == "no key"
    assert "step_offset must be 0 or -1, got -5" in now["-5"]
