"""What ranks find out about one another before they train, and how they end together."""

import os
import time

import pytest
import torch.distributed as dist

from torchtitan.distributed.peers import PeerError, Peers, _problem_of
from torchtitan.testing.gloo import run_ranks


def told(config=None, error=None):
    return {"config": config, "error": error}


def test_equal_configs_are_no_problem_nor_is_nan():
    assert _problem_of([told({"a": float("nan"), "b": 1})] * 3) is None


def test_keys_that_differ_are_named_with_both_values():
    problem = _problem_of([told({"a": 1, "b": "x"}), told({"a": 1, "b": "y", "c": 3})])
    assert "b is 'x' on rank 0 and 'y' on rank 1" in problem
    assert "c is None on rank 0 and 3 on rank 1" in problem and "a is" not in problem


def test_an_error_of_all_ranks_is_one_message_and_those_of_some_name_them():
    assert _problem_of([told(error="no such key")] * 3) == "no such key"
    some = [told({}), told(error="no such key"), told(error="no such key"), told(error="other")]
    assert _problem_of(some) == "ranks 1, 2: no such key\nrank 3: other"


def meet(config_of_rank, timeout_seconds=20):
    from datetime import timedelta

    from torchtitan.distributed.process_group import find_peers

    peers = Peers(*find_peers(timedelta(seconds=timeout_seconds)))
    try:
        peers.compare(config_of_rank[peers.rank])
    except PeerError as error:
        return str(error)
    return peers


def test_paths_may_differ_and_settings_may_not():
    own_paths = [{"job": {"dump_folder": f"/disk{n}"}, "training": {"steps": 5}} for n in (0, 1)]
    assert run_ranks(first_answer, 2, own_paths, init_process_group=False) == [None, None]
    own_paths[1]["training"]["steps"] = 6
    for answer in run_ranks(first_answer, 2, own_paths, init_process_group=False):
        assert "training.steps is 5 on rank 0 and 6 on rank 1" in answer


def first_answer(configs):
    answer = meet(configs)
    if isinstance(answer, str):
        return answer
    if answer.rank == 0:  # its store has to outlive the others' calls
        time.sleep(0.5)
    answer.leave()
    return None


def hear_of_failure(failing_rank):
    peers = meet([{}] * 3)
    if peers.rank == failing_rank:
        time.sleep(0.3)
        peers.report("the disk is gone\nand more")
        time.sleep(1)
        return None
    text = peers.describe_failure(wait_seconds=5)
    peers._leaving.set()  # this process is not to end
    return text


@pytest.mark.parametrize("rank", [0, 2])
def test_every_rank_hears_who_failed_and_why(rank):
    answers = run_ranks(hear_of_failure, 3, rank, init_process_group=False)
    for other, answer in enumerate(answers):
        if other != rank:
            assert answer == f"rank {other} ends because rank {rank} failed: the disk is gone"


def hear_of_failure_though_strangers_call():
    import socket

    ports = []
    create_server = socket.create_server

    def remember(*args, **kwargs):
        server = create_server(*args, **kwargs)
        ports.append(server.getsockname()[1])
        return server

    socket.create_server = remember
    peers = meet([{}] * 2)
    if peers.rank == 1:
        time.sleep(1)
        peers.report("the disk is gone")
        return time.sleep(1)
    for line in (b"GET / HTTP/1.1\r\n\r\n", b"7\n", b'{"failed": [1, "no"]}\n', b"\0" * 2**21):
        with socket.create_connection(("localhost", ports[0])) as stranger:
            try:
                stranger.sendall(line)
            except OSError:
                pass  # it has hung up
    text = peers.describe_failure(wait_seconds=5)
    peers._leaving.set()
    return text


def test_strangers_that_find_the_port_are_not_listened_to():
    answers = run_ranks(hear_of_failure_though_strangers_call, 2, init_process_group=False)
    assert answers[0] == "rank 0 ends because rank 1 failed: the disk is gone"


def leave_one_after_the_other():
    peers = meet([{}] * 3)
    time.sleep(0.2 * (1 + os.getpid() % 3))
    peers.leave()
    time.sleep(1)
    return peers._first_failure


def test_ranks_that_are_done_are_not_missed():
    assert run_ranks(leave_one_after_the_other, 3, init_process_group=False) == [None] * 3


def test_store_of_this_process_alone_is_enough():
    Peers(dist.HashStore(), 0, 1).compare({"a": 1})
