"""What a type checker says of a program that embeds the engine."""

import re
from pathlib import Path

import pytest
from mypy import api

import torchtitan

ROOT = Path(torchtitan.__file__).parents[1]
# Torch's types alone would take mypy longer than the rest. What is skipped is Any, its tensors too.
SKIPPED = (
    "numpy",
    "torch",
    *(
        f"torchtitan.{part}"
        for part in ("checkpoint", "config", "distributed", "models", "optim", "protocols", "tools")
    ),
)
CONFIG = f"""
[mypy]
mypy_path = {ROOT}
follow_imports = silent
[mypy-{",".join(f"{name}.*" for name in SKIPPED)}]
follow_imports = skip
"""
# Lines with a mistake end in what mypy is to say of it.
CLIENT = """
from torch import Tensor
from torchtitan.batch.batch import Batch
from torchtitan.engine import TrainingEngine
from torchtitan.loss.logprobs import TokenLogProbs, TokenOutputs

class MyBatch(Batch):
    returns: Tensor

def loss(outputs: TokenOutputs, labels: Tensor, batch: MyBatch) -> tuple[Tensor, dict[str, Tensor]]:
    return -outputs.logprobs.sum(), {"return": batch["returns"].sum()}

def bad_loss(outputs: TokenOutputs, labels: Tensor, batch: MyBatch) -> Tensor:
    return batch["return"] * outputs.entropy  # no key "return"

def client(engine: TrainingEngine, tokens: Tensor, mine: MyBatch) -> None:
    head = TokenLogProbs()
    outputs = engine.forward_step([{"input": tokens, "labels": tokens}], head=head)
    outputs[0].logprobs  # None
    engine.from_last_stage(outputs)[0].logprobs
    engine.from_last_stage(outputs)[0].logprob  # has no attribute "logprob"
    engine.forward_step(mine, head=head, output_fn=lambda o, batch: o.entropies)  # "entropies"
    engine.forward_step([{"inputs": tokens}], output_fn=lambda logits, batch: logits)  # incompatible
    engine.forward_backward_step(input_dict=mine, global_valid_tokens=1).item()
    step = engine.forward_backward_step(
        input_dict=[mine, mine], loss_fn=loss, head=head, metrics={"return": "sum"}
    )
    step.metrics["return"].item()
    step.metric  # has no attribute "metric"
    engine.forward_backward_step(input_dict=mine, metrics={"x": "mean"})  # Literal['sum', 'max']
    if engine.has_output:  # has no attribute "has_output"
        pass
"""


@pytest.mark.long
def test_mypy_finds_wrong_fields_of_a_client_and_nothing_else(tmp_path):
    client, config = tmp_path / "client.py", tmp_path / "mypy.ini"
    client.write_text(CLIENT)
    config.write_text(CONFIG)
    output, problem, _ = api.run(
        [f"--config-file={config}", f"--cache-dir={tmp_path}", "--no-error-summary", str(client)]
    )
    assert not problem
    errors = dict(re.findall(r"client\.py:(\d+): error: (.*)", output))
    expected = {
        str(number): line.rpartition("  # ")[2]
        for number, line in enumerate(CLIENT.splitlines(), start=1)
        if "  # " in line
    }
    assert errors.keys() == expected.keys(), output
    for number, words in expected.items():
        assert words in errors[number], output
