"""What embedders build an engine from, on one process: specs, layouts, scoring."""

import inspect

import pytest
import torch
import torch.distributed as dist

from tests.unit.test_engine import make_config, make_engine, random_batch, step
from torchtitan.engine import EngineState, RankLayout, TrainingEngine
from torchtitan.loss.logprobs import TokenLogProbs, token_logprobs

pytestmark = pytest.mark.usefixtures("narrow_debugmodel")


def test_engine_for_scoring_takes_no_step_and_allocates_no_optimizer_state(tmp_path):
    with make_engine(tmp_path) as trained:
        step(trained)
        trained.save(str(tmp_path / "saved"))
        batch, _ = random_batch(2, 16)
        (expected,) = trained.forward_step(batch)
    with TrainingEngine(make_config(tmp_path / "scores"), forward_only=True) as engine:
        engine.load(str(tmp_path / "saved"))
        (logits,) = engine.forward_step(batch)
        assert torch.equal(logits, expected)
        for name in ("forward_backward_step", "optim_step"):
            with pytest.raises(RuntimeError, match=f"{name} needs .* forward_only=False"):
                step(engine) if name == "forward_backward_step" else engine.optim_step()
        engine.save(str(tmp_path / "weights"))
        assert len(engine.optimizers.state) == 0
    saved, weights = (
        sum(file.stat().st_size for file in (tmp_path / name).rglob("*.distcp"))
        for name in ("saved", "weights")
    )
    assert weights < 0.4 * saved, "Adam keeps two numbers per weight"


def test_updates_may_leave_the_schedule_to_their_caller(tmp_path):
    with make_engine(tmp_path) as engine:
        lrs = [step(engine, advance_schedule=False).lr for _ in range(2)]
        assert lrs[0] == lrs[1] == engine.lr
        engine.lr_schedulers.step()
        assert engine.lr == pytest.approx(2 * lrs[0]), "the second of the warm-up's steps"


def test_layout_is_known_before_the_model_and_serves_several_engines(tmp_path):
    config = make_config(tmp_path)
    with RankLayout.join(config) as layout:
        assert (layout.dp_rank, layout.dp_size) == (0, 1)
        assert layout.has_outputs and layout.is_output_source
        assert layout.dp_group.size() == 1
        config.training.steps = 77
        with TrainingEngine(config, layout=layout) as engine:
            assert engine.layout is layout
            assert engine.parallel_dims is layout.parallel_dims
        with TrainingEngine(make_config(tmp_path / "b"), layout=layout) as engine:
            step(engine)
        assert dist.is_initialized(), "the layout's group stays for the next engine"
    assert not dist.is_initialized()
    with RankLayout.join(config) as layout:
        config.parallelism.always_fsdp = True
        words = "always_fsdp = True instead of False.*make a RankLayout"
        with pytest.raises(ValueError, match=words):
            TrainingEngine(config, layout=layout)


def test_temperature_by_name_has_a_number_for_each_row_or_token_of_the_batch(tmp_path):
    engine, (batch, labels) = make_engine(tmp_path), random_batch(2, 32)
    batch, head = batch | {"labels": labels}, TokenLogProbs(temperature="t", entropy=True)
    rows = torch.tensor([0.5, 2.0])
    of_rows, of_tokens = (
        engine.forward_step(batch | {"t": t}, head=head)[0]
        for t in (rows, rows[:, None].expand(2, 32))
    )
    assert torch.equal(of_rows.logprobs, of_tokens.logprobs)
    for wrong, message in (
        ({}, r"must name a tensor .* of the batch, which has \['input', 'labels'\]"),
        ({"t": torch.ones(3)}, r"one entry per row \[2\] or token \[2, 32\], got \[3\]"),
        ({"t": torch.tensor([1.0, 0.0])}, "must be above 0, got 0.0"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.forward_step(batch | wrong, head=head)
    with pytest.raises(ValueError, match="only the engine's steps look up"):
        token_logprobs(torch.ones(1, 2, 4), torch.ones(1, 2, dtype=torch.long), temperature="t")


class Curriculum:
    """State of an embedding program that grows between saves."""

    def __init__(self, **state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_checkpoints_hold_states_of_the_caller(tmp_path):
    seen = {"epochs": [1, {"x": 2.5}], "name": "é", "buffer": torch.arange(5)}
    config = make_config(tmp_path)
    with TrainingEngine(config) as engine:
        engine.add_state("curriculum", Curriculum(**seen))
        engine.add_state("other", Curriculum(n=1))
        unsaved = Curriculum(engine=Curriculum)
        for name, state, problem in (
            ("other", Curriculum(), r"new and contain no dot, got 'other' beside \['curriculum'"),
            ("bad", {}, "'bad' must have the methods state_dict.*, got a dict"),
            ("bad", unsaved, "'bad', which checkpoints are to hold, cannot be"),
        ):
            with pytest.raises(ValueError, match=problem):
                engine.add_state(name, state)
        engine.save(str(tmp_path / "saved"))
        weights = engine.model_parts[0].state_dict()["norm.weight"].clone()
    with TrainingEngine(config) as engine:
        engine.load(str(tmp_path / "saved"))  # one that does not know of it
        curriculum = Curriculum(epochs=[])
        engine.add_state("curriculum", curriculum)
        step(engine)
        engine.load(str(tmp_path / "saved"))
        assert curriculum.state.pop("buffer").equal(seen.pop("buffer"))
        assert curriculum.state == seen
        assert torch.equal(engine.model_parts[0].state_dict()["norm.weight"], weights)
        engine.add_state("new", Curriculum())
        with pytest.raises(ValueError, match="lacks entries of user_state: user_state.new"):
            engine.load(str(tmp_path / "saved"))


# A change that breaks callers raises ENGINE_API_VERSION.
SIGNATURES = """\
TrainingEngine(job_config, *, train_spec=None, layout=None, forward_only=False)
from_hf(folder, job_config=None, **options)
init_distributed()
build_data()
packing
train_mode()
eval_mode()
to_device(batch)
post_dataloading_process(input_dict, labels)
forward_step(microbatches, *, labels=None, output_fn=None, head=None)
from_last_stage(outputs)
forward_backward_step(*, input_dict, labels=None, global_valid_tokens=None, loss_fn=None, head=None, whole_rows=False, metrics=None)
prepare(batch, labels=None, *, head=None)
backward(loss)
optim_step(*, lr=None, max_norm=None, denominator=None, advance_schedule=True)
dp_size
dp_rank
dp_group
loss_group
has_outputs
lr
state_dict()
load_state_dict(state_dict)
add_state(name, state)
weights_version
save(path=None, *, force=True)
save_hf(path, *, dtype=None)
save_peft(path, *, base_model=None)
load_peft(path)
adapters_off()
load(path=None, *, model_only=False)
to(device, *, model=True, optimizer=True, grad=True)
iter_hf_weights(*, dtype=None, sharded=False)
close()
"""


def test_public_names_of_the_engine_are_these_and_have_docstrings():
    """Without annotations, in the order of the code; properties by their names alone."""

    def line(name, function):
        parameters = inspect.signature(function).parameters.values()
        plain = [p.replace(annotation=p.empty) for p in parameters if p.name != "self"]
        return f"{name}{inspect.Signature(plain)}"

    lines, undocumented = [line("TrainingEngine", TrainingEngine)], []
    for cls in (TrainingEngine, EngineState):
        for name, member in vars(cls).items():
            if name.startswith("_"):
                continue
            if isinstance(member, property):
                lines.append(name)
            elif isinstance(member, classmethod) or inspect.isfunction(member):
                lines.append(line(name, getattr(cls, name)))
            else:
                continue
            undocumented += [] if member.__doc__ else [name]
    assert lines == SIGNATURES.splitlines()
    assert undocumented == []
