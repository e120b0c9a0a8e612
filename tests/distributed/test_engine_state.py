"""An engine's state on gloo ranks: put away, exported."""

import pytest
import torch

from tests.distributed.layout_matrix import (
    BY_NAME,
    ONE_PROCESS,
    SHALLOW,
    batch_flags,
    build_engine,
    global_batch,
    run_step,
)
from tests.unit.checkpoint.test_weight_stream import paste
from torchtitan.checkpoint.stream import digest_of
from torchtitan.distributed.dtensor import is_dtensor, whole_tensor
from torchtitan.testing.gloo import run_ranks

TIED = "qwen3, tied"
FSDP = BY_NAME["FSDP 2"]


def build(case, layout, dump_folder, *flags):
    """An engine that checkpoints into `dump_folder`; tied models have uneven shards, too."""
    # llama3 has one layer for each of its four stages.
    own = [] if case == "llama3" else [SHALLOW]
    own += ["--model.args=hidden_dim=127"] if case == TIED else []
    own += [*layout.overrides(), *batch_flags(case, "whole rows"), *flags]
    more = ["--lr_scheduler.warmup_steps=2", "--checkpoint.enable"]
    return build_engine(case, [*own, *more], dump_folder)


def evaluate(engine):
    """Leaves the last FSDP unit gathered, as long as nobody frees it."""
    batch, _ = global_batch(0, with_positions=False)
    return engine.forward_step({"input": batch["input"][:2]}, output_fn=lambda x, _: x.sum())


def train(engine, *steps):
    """The losses of some steps, and a digest of all parameters after them."""
    losses = []
    for step in steps:
        losses.append(run_step(engine, FSDP, step))
        engine.optim_step()
    return losses, everything(engine)


def everything(engine):
    """A digest of this rank's parameters and optimizer state."""
    state = engine.model_parts[0].state_dict() | engine.optimizers.state_dict()
    tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
    local = {key: t.to_local() if is_dtensor(t) else t for key, t in tensors.items()}
    return digest_of(local.items()), engine.lr_schedulers.schedulers[0].last_epoch


def parameters(engine):
    return dict(engine.model_parts[0].named_parameters())


# ---- two ranks ----


def export_after_evaluation(engine):
    """A state dict costs no communication and is the parameters' own memory."""
    from torch.distributed.tensor.debug import CommDebugMode

    evaluate(engine)
    with CommDebugMode() as communication:
        state = engine.model_parts[0].state_dict()
        shards = dict(engine.iter_hf_weights(sharded=True))
    memory = {p.to_local().data_ptr() for p in parameters(engine).values()}
    return (
        communication.get_total_counts() == 0
        and all(is_dtensor(t) and t.to_local().data_ptr() in memory for t in state.values())
        and {shard.tensor.data_ptr() for shard in shards.values()} <= memory
    )


def put_away_and_back(case, folder):
    """Every tensor in new memory, twice, between forward-backward and optimizer step."""
    plain = build(case, FSDP, folder)
    expected = train(plain, 0, 1, 2)
    engine = build(case, FSDP, folder)
    found = {}
    train(engine, 0)
    run_step(engine, FSDP, 1)
    before = parameters(engine)
    evaluate(engine)
    old = {name: p.to_local().data_ptr() for name, p in before.items()}
    kept = []  # else the new memory may be the old

    def relocate(tensor):
        kept.append(tensor.to_local() if is_dtensor(tensor) else tensor)
        return tensor.clone()

    for _ in range(2):
        engine.offloader.replace({"model", "optimizer", "grad"}, relocate)
    after = parameters(engine)
    (model,) = engine.model_parts
    ids = {name: id(p) for name, p in after.items()}
    stepped = {id(p) for group in engine.optimizers.param_groups for p in group["params"]}
    found["same objects"] = ids == {name: id(p) for name, p in before.items()}
    found["in the optimizer"] = stepped == set(ids.values())
    found["moved"] = all(after[name].to_local().data_ptr() != ptr for name, ptr in old.items())
    found["tied"] = (model.output.weight is model.tok_embeddings.weight) == (case == TIED)
    engine.optim_step()
    found["same steps"] = train(engine, 2)[1] == expected[1]
    engine.to("cpu")
    found["nothing to move"] = train(engine, 3) == train(plain, 3)
    found["exported"] = export_after_evaluation(engine)
    return found


def on_two_ranks(folder):
    return {
        (case, name): finding
        for case in (TIED, "qwen3")
        for name, finding in put_away_and_back(case, f"{folder}/{case}").items()
    }


def test_state_is_put_away_and_exported_on_two_ranks(tmp_path):
    for found in run_ranks(on_two_ranks, 2, str(tmp_path), timeout_seconds=300):
        assert [what for what, finding in found.items() if not finding] == []


# ---- weights in every layout ----

EXPORTS = [
    ("TP 2, PP 2, Interleaved1F1B", "llama3"),
    ("FSDP 2, PP 2", TIED),
    ("FSDP 4, EP 2", "qwen3 MoE"),
    ("FSDP 2, TP 2, EP 2, ETP 2", "llama4"),
]
MORE_EXPORTS = [
    ("FSDP 2, TP 2", "llama3"),
    ("HSDP 2x2", TIED),
    ("FSDP 2, PP 2, EP 2", "deepseek_v3"),
    ("HSDP 2x2, EP 2", "gpt_oss"),
]


def export(cases, folder):
    """Of each case: names in order, digest, and this rank's own pieces."""
    results = []
    for layout, case in cases:
        engine = build(case, BY_NAME[layout], folder)
        stream = engine.iter_hf_weights(dtype=torch.bfloat16)
        received = [(name, whole_tensor(tensor).clone()) for name, tensor in stream]
        assert digest_of(received) == stream.digest
        pieces = list(engine.iter_hf_weights(sharded=True, dtype=torch.bfloat16))
        pieces = [(n, p._replace(tensor=p.tensor.clone())) for n, p in pieces]
        results.append(([name for name, _ in received], stream.digest, pieces))
        engine.close()
    return results


@pytest.mark.parametrize(
    "exports",
    [
        pytest.param(EXPORTS, id="some"),
        pytest.param(MORE_EXPORTS, id="more", marks=pytest.mark.slow),
    ],
)
def test_weights_are_the_same_in_every_layout_whole_and_in_pieces(tmp_path, exports):
    """The same names in the same order, and the same digest; all experts, all stages."""
    of_one_process = [(ONE_PROCESS.name, case) for _, case in exports]
    (alone,) = run_ranks(export, 1, of_one_process, str(tmp_path / "alone"))
    ranks = run_ranks(export, 4, exports, str(tmp_path), timeout_seconds=300)
    for i, (layout, case) in enumerate(exports):
        names, digest, _ = alone[i]
        for rank in ranks:
            assert rank[i][0] == names, (layout, case)
            assert rank[i][1] == digest, (layout, case)
        pieces = paste((piece for rank in ranks for piece in rank[i][2]), may_overlap=True)
        assert digest_of(pieces.items()) == digest, (layout, case)
