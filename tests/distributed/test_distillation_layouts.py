"""A teacher and a student spread over ranks take the steps of one process."""

from pathlib import Path

import pytest

from tests.distillation_jobs import curves, job, make_folders
from torchtitan.testing.gloo import run_ranks
from torchtitan.trainer import Trainer

TP, PP, CP = (f"parallelism__{axis}_parallel_degree" for axis in ("tensor", "pipeline", "context"))
ALL = {"loss__label_weight": 0.3, "loss__temperature": 2.0}
TOP = {"loss__divergence": "reverse", "loss__top_k": 8}
LAYOUTS = {
    "FSDP 2, all": {},
    "TP 2, all": {TP: 2},
    "TP 2, top": {TP: 2},
    "PP 2, all": {PP: 2},
    "CP 2, all": {CP: 2},
    "CP 2, top": {CP: 2},
}


def train(folder: Path, out: Path, name: str, **degrees: int) -> None:
    settings = ALL if name.endswith("all") else TOP
    settings = settings | {"validation__enable": True, "validation__steps": 1}
    steps = {"training__steps": 2, "validation__freq": 2}
    with Trainer(job(folder, out / name, **settings, **steps, **degrees)) as trainer:
        trainer.train()


def train_in_layouts(folder: Path, out: Path) -> None:
    for name, degrees in LAYOUTS.items():
        train(folder, out, name, **degrees)


def test_every_layout_takes_the_steps_of_one_process(tmp_path):
    make_folders(tmp_path)
    expected = {}
    for name in ("all", "top"):
        train(tmp_path, tmp_path, name)
        expected[name] = curves(tmp_path / name, validation=True)
    run_ranks(train_in_layouts, 2, tmp_path, tmp_path / "ranks", timeout_seconds=300)
    for name in LAYOUTS:
        found = curves(tmp_path / "ranks" / name, validation=True)
        assert len(found) == 4
        for ours, theirs in zip(found, expected[name[-3:]], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5), name
