"""The contract with embedding programs holds, and the conformance kit finds violations.

All ranks run all checks, one after the other in the same processes.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.engine import TrainingEngine
from torchtitan.testing import conformance, contract
from torchtitan.testing.contract import Check, Kit
from torchtitan.testing.gloo import RankFailure, run_ranks
from torchtitan.testing.tiny_jobs import PlainLoop, logprobs_of, make_documents, num_valid, pack
from torchtitan.tools import host

# fp32, with sums in another order: losses and norms of about 4, and log-probabilities of about -4.
SAME_STEP = dict(rtol=1e-5, atol=0)
SAME_LOGPROBS = dict(rtol=0, atol=5e-6)


def run_checks_on_rank(checks: list[Check], folder: str) -> None:
    """Run checks until one fails, which the error names."""
    kit = Kit(folder)
    for check in checks:
        try:
            check.function(kit, *check.case)
        except BaseException as error:
            raise AssertionError(f"{check.name} does not hold: {check.holds}") from error
        dist.barrier()  # or a rank that is ahead would fail, or hang, in the next check


def plain_logprobs(engine: TrainingEngine, documents: list[Tensor]) -> Tensor:
    """Return the log-probabilities of all documents' tokens but the first, by a plain loop."""
    plain = PlainLoop(engine)
    with torch.no_grad():
        return torch.cat([plain.logprobs(document) for document in documents])


def numbers_of_the_global_batch(kit: Kit, layout: str) -> None:
    """Under {}, losses, metrics, outputs, and a client's own forward, equal those of a plain loop."""
    documents = make_documents(46)
    n = num_valid(documents)

    def loss_fn(logits, labels, batch):
        logprobs = logprobs_of(logits.float(), labels)
        metrics = {"worst": -logprobs.min(), "tokens": (labels != IGNORE_INDEX).sum()}
        return -logprobs.sum() / n, metrics, logprobs

    with kit.build(layout) as engine:
        last = engine.pp_has_last_stage
        assert last is (None if layout != "pp" else kit.rank >= kit.world_size // 2)
        assert engine.has_outputs is (last is not False)
        parts = [
            documents[engine.dp_rank + i * engine.dp_size :: 2 * engine.dp_size] for i in (0, 1)
        ]
        packed = [pack(part) for part in parts]
        batches = [batch | {"labels": labels} for batch, labels in packed]
        expected = [plain_logprobs(engine, part) for part in parts]
        worst = -plain_logprobs(engine, documents).min()
        plain = PlainLoop(engine)

        step = engine.forward_backward_step(
            input_dict=batches, loss_fn=loss_fn, metrics={"tokens": "sum", "worst": "max"}
        )
        assert (step.outputs is None) is not engine.has_outputs
        outputs = engine.from_last_stage(step.outputs)
        for ours, (_, labels), theirs in zip(outputs, packed, expected, strict=True):
            assert_close(ours[labels != IGNORE_INDEX], theirs, **SAME_LOGPROBS)
        assert list(step.metrics) == ["tokens", "worst"] and step.metrics["tokens"] == n
        assert_close(step.metrics["worst"], worst, **SAME_STEP)
        norm = engine.optim_step().grad_norm
        assert_close((step.loss.item(), float(norm)), plain.run_step(documents), **SAME_STEP)

        if layout == "pp":
            for call, argument in ((engine.prepare, batches[0]), (engine.backward, step.loss)):
                with pytest.raises(ValueError, match="call forward_backward_step with a loss_fn"):
                    call(argument)
            return
        loss = torch.zeros(())
        for batch in batches:
            microbatch = engine.prepare(batch)
            with engine.train_context(), engine.maybe_enable_amp:
                logits = engine.model_parts[0](microbatch.inputs, **microbatch.kwargs)
                logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
                share, *_ = loss_fn(logits, microbatch.labels, microbatch.batch)
            engine.backward(share)
            loss += share.detach()
        if engine.loss_group is not None:
            dist.all_reduce(loss, group=engine.loss_group)
        norm = engine.optim_step().grad_norm
        assert_close((loss.item(), float(norm)), plain.run_step(documents), **SAME_STEP)


ALL_CHECKS = [*contract.CHECKS.values()]
ALL_CHECKS += [
    Check(numbers_of_the_global_batch, 2, (x,)) for x in ("fsdp", "ddp", "tp", "cp", "pp")
]


@pytest.mark.parametrize(
    "nproc, least_min_ranks",
    [
        pytest.param(1, 1, id="1"),
        # In CI one rank runs the checks that do not need two.
        pytest.param(2, 2, id="2, checks that need ranks"),
        pytest.param(2, 1, id="2", marks=pytest.mark.slow),
        pytest.param(4, 1, id="4", marks=pytest.mark.slow),
    ],
)
def test_contract_holds(nproc, least_min_ranks, tmp_path):
    checks = [c for c in ALL_CHECKS if nproc >= c.min_ranks >= least_min_ranks]
    run_ranks(run_checks_on_rank, nproc, checks, str(tmp_path), timeout_seconds=900)


def test_command_runs_checks_on_ranks_of_their_own(capsys):
    assert conformance.main(["--nproc", "2", "--only", "forward_step"]) == 0
    output = capsys.readouterr().out
    assert "pass  forward_step_pp_varlen" in output and "4 passed, 0 failed" in output


def wrong(kit):
    """What is wrong."""
    raise ValueError("1 is not 2")


def test_check_that_fails_is_a_failure():
    outcome, why = conformance.run_check(Check(wrong), 1, 60.0)
    assert outcome == "FAIL" and "ValueError: 1 is not 2" in why


def break_and_run(folder):
    host.move_out = lambda *_: None
    run_checks_on_rank([contract.CHECKS["guest_leaves_what_it_found"]], folder)


def test_broken_contract_is_noticed(tmp_path):
    with pytest.raises(RankFailure, match="AssertionError"):
        run_ranks(break_and_run, 1, str(tmp_path))
