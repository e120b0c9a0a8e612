"""Ranks compare configs before training, and end together."""

import contextlib
import os
import re
import resource
import signal
import socket
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch.distributed as dist

from torchtitan import train
from torchtitan.distributed.processes import peers as peers_module
from torchtitan.distributed.processes.peers import Peers, _listen, _problem_of
from torchtitan.distributed.processes.process_group import find_peers
from torchtitan.testing.gloo import run_ranks
from torchtitan.tools.errors import RunError


def problem_of(*ranks):
    """Each rank has a config, or the text of an error."""
    kinds = ("error" if isinstance(x, str) else "config" for x in ranks)
    told = [{"config": None, "error": None, kind: x} for kind, x in zip(kinds, ranks, strict=True)]
    return _problem_of(told)


def test_keys_that_differ_are_named_with_both_values():
    assert problem_of(*[{"a": float("nan"), "b": 1}] * 3) is None
    problem = problem_of({"a": 1, "b": "x"}, {"a": 1, "b": "y", "c": 3})
    assert "b is 'x' on rank 0 and 'y' on rank 1" in problem
    assert "c is None on rank 0 and 3 on rank 1" in problem and "a is" not in problem


def test_an_error_of_all_ranks_is_one_message_and_those_of_some_name_them():
    assert problem_of(*["no such key"] * 3) == "no such key"
    some = problem_of({}, "no such key", "no such key", "other")
    assert some == "ranks 1, 2: no such key\nrank 3: other"


def meet():
    peers = Peers(*find_peers(timedelta(seconds=20)))
    peers.compare({})
    return peers


@pytest.mark.parametrize(
    ("name", "addresses", "local_ranks", "listens_at"),
    [
        ("localhost", ["::1", "127.0.0.1"], "1", "127.0.0.1"),
        ("node0", ["127.0.0.1"], "2", "127.0.0.1"),  # all ranks on this machine
        ("node0", ["127.0.0.1"], "1", "::"),  # its own name for itself: others have another
        ("node0", ["192.0.2.1"], "1", "::"),  # of no interface here
    ],
)
def test_port_is_open_where_other_ranks_look_for_it(
    name, addresses, local_ranks, listens_at, monkeypatch
):
    monkeypatch.setenv("MASTER_ADDR", name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks)
    families = [socket.AF_INET6 if ":" in place else socket.AF_INET for place in addresses]
    found = [(f, 1, 6, "", (a, 0)) for f, a in zip(families, addresses, strict=True)]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_args, **_kwargs: found)
    with _listen() as server:
        assert server.getsockname()[0] in (listens_at, "0.0.0.0" if listens_at == "::" else "")


def hear(peers, wait_seconds=20):
    text = peers.describe_failure(wait_seconds)
    peers._leaving.set()  # this process is not to end
    return text


def hear_of_failure(failing_rank):
    peers = meet()
    if peers.rank == failing_rank:
        time.sleep(0.3)
        peers.report("the disk is gone\nand more")
        time.sleep(1)
        return None
    return hear(peers)


@pytest.mark.parametrize("rank", [0, 2])
def test_every_rank_hears_who_failed_and_why(rank):
    answers = run_ranks(hear_of_failure, 3, rank, init_process_group=False)
    for other, answer in enumerate(answers):
        if other != rank:
            assert answer == f"rank {other} ends because rank {rank} failed: the disk is gone"


def open_idle_connections(address):
    """More than rank 0 may have files."""
    return [real_connection(address) for _ in range(300)]


def send_what_is_no_greeting(address):
    brackets = b"[" * 200_000 + b"\n"  # deeper than a parser of JSON goes
    failed = b'{"failed": [1, "no"]}\n'
    for line in (b"", b"GET / HTTP/1.1\r\n\r\n", b"7\n", failed, brackets, b"\0" * 2**21):
        with real_connection(address) as stranger, contextlib.suppress(OSError):
            stranger.sendall(line)


def send_all_that_the_store_holds(address):
    """Claim to be rank 1 with every value that a program finds at MASTER_PORT, and hang up."""
    store = dist.TCPStore("localhost", int(os.environ["MASTER_PORT"]), timeout=LIMIT)
    values = [store.get(key) for key in store.list_keys()]
    values += re.findall(rb"\w{16,}", b" ".join(values))
    values += [bytes.fromhex(v.decode()) for v in values if re.fullmatch(rb"([0-9a-f]{2})+", v)]
    for value in values:
        for greeting in (value, value + b" 1\n"):
            with real_connection(address) as stranger, contextlib.suppress(OSError):
                stranger.sendall(greeting)


LIMIT = timedelta(seconds=60)
real_connection = socket.create_connection


def hear_of_failure_though(attack):
    """Rank 1 attacks rank 0's port before it connects itself; return what rank 0 hears, and where."""
    is_attacker, places, left_open = os.environ["RANK"] == "1", [], []
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024 if is_attacker else 256,) * 2)

    def attack_and_connect(address, *arguments, **options):
        if is_attacker and str(address[1]) != os.environ["MASTER_PORT"]:
            places.append(address)
            left_open.append(attack(address))
        return real_connection(address, *arguments, **options)

    socket.create_connection = attack_and_connect
    peers = meet()
    if is_attacker:
        peers.report("the disk is gone")
        peers._store.wait(["heard"], LIMIT)
        with pytest.raises(ConnectionRefusedError):  # the port is closed once all ranks are there
            real_connection(places[0])
        peers._store.set("done", "")
        return None
    return heard_by_rank_0(peers)


def heard_by_rank_0(peers):
    text = hear(peers)
    peers._store.set("heard", "")
    peers._store.wait(["done"], LIMIT)  # rank 0 has the store
    return text


def end_after_rank_0(peers):
    peers._store.wait(["heard"], LIMIT)
    peers._store.set("done", "")


@pytest.mark.parametrize(
    "attack", [open_idle_connections, send_what_is_no_greeting, send_all_that_the_store_holds]
)
def test_strangers_at_the_port_are_not_listened_to_and_keep_no_rank_out(attack):
    answer, _ = run_ranks(hear_of_failure_though, 2, attack, init_process_group=False)
    assert answer == "rank 0 ends because rank 1 failed: the disk is gone"


def hear_of_what_no_rank_sends(line):
    peers = meet()
    if peers.rank == 1:
        (connection,) = peers._connections
        connection.sendall(line)
        peers._leaving.set()
        return end_after_rank_0(peers)
    return heard_by_rank_0(peers)


@pytest.mark.parametrize(
    "line", [b"7\n", b"f\xff\n", b"f3\n", b"f" + b"[" * 200_000 + b"\n", b"f[1,"], ids=range(5)
)
def test_rank_that_sends_what_no_rank_sends_is_named(line):
    answer, _ = run_ranks(hear_of_what_no_rank_sends, 2, line, init_process_group=False)
    assert "rank 0 ends because rank 1 failed: it sent a message that no rank sen" in answer


def fail_in_the_watch():
    peers = meet()
    if peers.rank == 1:
        peers._read = lambda *_: 1 / 0
        peers._store.set("ready", "")
    else:
        peers._store.wait(["ready"], LIMIT)
        peers._send(b"a")
    if peers.rank == 0:
        return heard_by_rank_0(peers)
    text = hear(peers)
    end_after_rank_0(peers)
    return text


def test_watch_that_fails_itself_ends_all_ranks_with_its_error():
    for rank, answer in enumerate(run_ranks(fail_in_the_watch, 2, init_process_group=False)):
        assert answer.startswith(f"rank {rank} ends because rank 1 failed: its watch of other ran")
        assert "ZeroDivisionError" in answer


def test_second_process_of_a_rank_is_refused():
    store = dist.HashStore()
    dist.PrefixStore("torchtitan_peers", store).set("digest_1", "of the first one")
    with pytest.raises(RunError, match="two processes have RANK = 1; give each rank its own num"):
        Peers(store, 1, 2)


def hear_of_a_stopped_rank(stopped_rank):
    peers_module._longest_silence = lambda _timeout: 1.5
    peers = meet()
    peers._store.set(f"pid_{peers.rank}", str(os.getpid()))
    other = int(peers._store.get(f"pid_{1 - peers.rank}"))
    time.sleep(2)  # longer than a rank may be silent
    assert peers._first_failure is None
    if peers.rank == stopped_rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    text = hear(peers)
    if peers.rank != stopped_rank:
        os.kill(other, signal.SIGCONT)
    return text


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_rank_that_is_stopped_is_named_and_ends_when_it_is_continued(rank):
    answers = run_ranks(hear_of_a_stopped_rank, 2, rank, init_process_group=False)
    said = f"ends because rank {rank} failed: it was stopped, or its machine hangs: silent for 2 s"
    assert answers[1 - rank] == f"rank {1 - rank} {said}"
    assert answers[rank].startswith(f"rank {rank} ends because rank ")


def slow_to_read(store):
    slow = mock.Mock(wraps=store)
    slow.get.side_effect = lambda name: time.sleep(1) or store.get(name)
    return slow


def meet_twice():
    for setting in (1, 2):
        peers = train._find_peers(20)
        if peers.rank == 1:
            peers._store = slow_to_read(peers._store)
        peers.compare({"a": setting})
        peers.leave()


def test_ranks_of_one_process_meet_again_in_a_second_run():
    run_ranks(meet_twice, 2, init_process_group=False)
