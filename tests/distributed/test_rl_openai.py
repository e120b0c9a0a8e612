"""A server of completions for several ranks: one rank sends it weights, all ranks send prompts."""

import pytest

from tests.distributed.rl_runs import LAYOUTS
from tests.distributed.test_rl_roles import run_roles
from tests.unit.rl.test_openai_generator import (
    FILES,
    LORA,
    SHORT,
    StandIn,
    flags_of,
    served,
    server,  # noqa: F401, a fixture
)


@pytest.mark.parametrize(
    "flags",
    [LAYOUTS["FSDP"], ["--rl.generator.ranks=1", "--rl.async_steps=1"]],
    ids=["FSDP", "a rank that generates"],
)
def test_server_gets_each_version_once_before_it_draws(flags, server, tmp_path):  # noqa: F811
    flags = [*SHORT, *flags, *flags_of(server.url, FILES), "--training.steps=3"]
    first, *_ = run_roles(tmp_path, 2, *flags)
    assert len(first["steps"]) == 3
    for step in first["steps"]:
        ahead = "--rl.async_steps=1" in flags and step["step"] > 1
        assert step["rl/lag"] == ahead
        assert ahead or step["loss/logprob_diff_max"] <= 5e-6
    versions = [message["version"] for message in server.reloads]
    assert versions == sorted(set(versions)) and {0, 1} <= set(versions)
    assert len(server.requests) == 3 * 2 * 4


def test_rank_that_generates_ahead_gives_the_server_adapters_alone(tmp_path):
    with served(StandIn(tmp_path / "server", *LORA)) as stand_in:
        more = flags_of(stand_in.url, "adapters", "ranks=1")
        flags = [*SHORT, *LORA, *more, "--rl.async_steps=1", "--training.steps=3"]
        first, *_ = run_roles(tmp_path, 2, *flags)
        # A step is drawn with the adapters of the step before, except the first.
        assert [step["rl/lag"] for step in first["steps"]] == [0, 1, 1]
        assert first["steps"][0]["loss/logprob_diff_max"] <= 5e-6
        assert [request["model"][-1] for request in stand_in.requests] == [*"0" * 16, *"1" * 8]
        (name,) = stand_in.adapters
        assert name.startswith("toy-") and name.endswith("-1")
