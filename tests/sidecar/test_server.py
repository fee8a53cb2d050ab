"""The server as its clients see it: one that breaks the rules, or dies, disturbs nobody else."""

import os
import signal
import socket
import stat
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kvtier.index.errors import KvtierError
from kvtier.index.namespace import BlockLayout
from kvtier.tiers.errors import SidecarUnavailable
from kvtier.tiers.memory import NotEnoughMemory
from kvtier.tiers.sidecar import wire
from kvtier.tiers.sidecar.client import SidecarClient, observe
from kvtier.tools.serve import serve
from tests.sidecar.conftest import Join, Speak, StartSidecar
from tests.sidecar.rig import (
    LAYOUT,
    NAMESPACE,
    RawClient,
    Sidecar,
    finish,
    python,
    tokens_of,
    wait_for,
)

OTHER_LAYOUT = BlockLayout(layers=1, kv_heads=1, block_size=16, head_dim=4, dtype="float16")


def lookup_frame(request_id: int = 7) -> bytes:
    return wire.encode(wire.Lookup(request_id, NAMESPACE, wire.ints_to_bytes(tokens_of(2)), True))


def commit_of(client: RawClient, slots: list[int], checksums: list[int]) -> wire.Commit:
    return wire.Commit(
        client.new_id(),
        NAMESPACE,
        wire.ints_to_bytes(tokens_of(len(slots))),
        0,
        wire.ints_to_bytes(np.array(slots, np.int32)),
        wire.checksums_to_bytes(np.array(checksums, np.uint64)),
    )


def reserved(reply: wire.Reply | None) -> list[int]:
    assert isinstance(reply, wire.Reserved)
    return [int(slot) for slot in wire.ints_from_bytes(reply.slots)]


@pytest.mark.parametrize(
    "bad",
    [
        b"\x00\x00\x00\x00",
        (wire.MAX_FRAME + 1).to_bytes(4, "little"),
        b"\x02\x00\x00\x00\xc1\xc1",
        wire.encode(wire.GiveBack(3, bytes(4))),
        wire.encode(wire.GiveBack(3, b"abc")),
        wire.encode(wire.Commit(3, bytes(32), b"", 0, bytes(4), b"")),
        wire.encode(wire.Hello(3, wire.PROTOCOL_VERSION, None, "again")),
        wire.encode(wire.Released(3))[:4] + b"\x92\x43\x03",
    ],
)
def test_a_client_that_breaks_the_protocol_is_dropped_and_nobody_else_notices(
    shared: Sidecar, speak: Speak, bad: bytes
) -> None:
    neighbour, offender = speak(shared), speak(shared)
    offender.send_bytes(bad)
    assert offender.receive() is None
    neighbour.send_bytes(lookup_frame())
    assert neighbour.receive() == wire.Found(7, 0, 0)


@pytest.mark.parametrize(
    "first",
    [
        lookup_frame(),
        wire.MAX_HELLO.to_bytes(4, "little") + bytes(wire.MAX_HELLO),
        (wire.MAX_HELLO + 1).to_bytes(4, "little"),
        wire.encode(wire.Hello(1, wire.PROTOCOL_VERSION, wire.WireLayout.of(LAYOUT), "x"))
        + lookup_frame(),
    ],
)
def test_hello_comes_first_and_is_answered_before_anything_else(
    shared: Sidecar, first: bytes
) -> None:
    client = RawClient(shared.socket)
    client.send_bytes(first)
    replies = [client.receive(), client.receive()]
    assert not any(isinstance(reply, wire.Found) for reply in replies)
    assert replies[-1] is None
    client.close()


def test_another_protocol_version_is_told_both_versions(shared: Sidecar) -> None:
    client = RawClient(shared.socket)
    # A hello as some later version may spell it: more fields than we know.
    body = b"\x97\x01\x05\x03" + b"\xc0\xa1x\xc3\x07"
    client.send_bytes(len(body).to_bytes(4, "little") + body)
    reply = client.receive()
    assert isinstance(reply, wire.Refused)
    assert (reply.id, reply.code) == (5, wire.Code.VERSION)
    assert "protocol 2, the client 3" in reply.text
    assert client.receive() is None
    client.close()


def test_a_second_layout_is_refused_by_name(shared: Sidecar, speak: Speak) -> None:
    speak(shared)
    with pytest.raises(SidecarUnavailable, match="head_dim=10.*not of.*head_dim=4"):
        SidecarClient.connect(shared.socket, OTHER_LAYOUT, client_name="other")
    speak(shared)


def test_a_slab_too_small_for_one_block_is_refused_with_the_cure(
    sidecar_with: StartSidecar,
) -> None:
    sidecar = sidecar_with(num_slots=1)
    large = BlockLayout(layers=64, kv_heads=8, block_size=16, head_dim=128, dtype="float32")
    with pytest.raises(SidecarUnavailable, match="hold no block.*--dram"):
        SidecarClient.connect(sidecar.socket, large, client_name="large")


def test_an_observer_reads_counters_and_may_do_nothing_else(shared: Sidecar) -> None:
    client = RawClient(shared.socket)
    assert isinstance(
        client.ask(wire.Hello(1, wire.PROTOCOL_VERSION, None, "observer")), wire.Welcome
    )
    statistics = client.ask(wire.Stats(2))
    assert isinstance(statistics, wire.Statistics)
    assert statistics.numbers["sidecar.connections"] >= 1
    client.send_bytes(lookup_frame())
    assert client.receive() is None
    client.close()


def test_only_its_user_may_open_the_socket(shared: Sidecar) -> None:
    assert stat.S_IMODE(shared.socket.stat().st_mode) == 0o600


def test_a_live_sidecars_socket_is_not_taken(shared: Sidecar) -> None:
    second = shared.launch()
    _, err = second.communicate(timeout=30)
    assert second.returncode != 0
    assert f"a sidecar already answers at {shared.socket}" in err
    assert observe(shared.socket).numbers["sidecar.connections"] >= 1


def test_a_dead_sidecars_socket_is_replaced(sidecar: Sidecar) -> None:
    sidecar.end(signal.SIGKILL)
    assert sidecar.socket.is_socket()
    with pytest.raises(SidecarUnavailable, match="kvtier serve --socket"):
        observe(sidecar.socket)
    sidecar.start()
    assert observe(sidecar.socket).numbers["sidecar.connections"] == 1


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    sidecar = Sidecar(tmp_path)
    sidecar.socket.write_text("precious")
    process = sidecar.launch()
    _, err = process.communicate(timeout=30)
    assert process.returncode != 0
    assert str(sidecar.socket) in err
    assert sidecar.socket.read_text() == "precious"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_cleanly_and_removes_the_socket(
    sidecar: Sidecar, speak: Speak, number: int
) -> None:
    client = speak(sidecar)
    returncode, _, err = sidecar.end(number)
    assert (returncode, err) == (0, "")
    assert not sidecar.socket.exists()
    assert client.receive() is None


def test_the_sidecar_process_loads_no_torch(shared: Sidecar, speak: Speak) -> None:
    speak(shared).ask(wire.Lookup(5, NAMESPACE, wire.ints_to_bytes(tokens_of(3)), True))
    maps = Path(f"/proc/{shared.pid}/maps").read_text()
    assert "numpy" in maps
    assert "torch" not in maps
    assert "triton" not in maps


def test_the_client_side_loads_no_torch_either() -> None:
    code = "import sys, kvtier.tiers.sidecar.tier; print([m for m in sys.modules if 'torch' in m])"
    out, _ = python(code).communicate(timeout=60)
    assert out == "[]\n"


# ---- what clients hold --------------------------------------------------------------------------


def test_one_client_may_hold_half_of_the_slab_and_no_more(
    sidecar_with: StartSidecar, speak: Speak
) -> None:
    sidecar = sidecar_with(num_slots=13)
    greedy, other = speak(sidecar), speak(sidecar)
    too_many = greedy.reserve(7)
    assert isinstance(too_many, wire.Refused) and too_many.code is wire.Code.FULL
    assert len(reserved(greedy.reserve(6))) == 6
    one_more = greedy.reserve(1)
    assert isinstance(one_more, wire.Refused) and "may hold 6 blocks" in one_more.text
    assert len(reserved(other.reserve(6))) == 6


def test_an_acquire_beyond_the_cap_gets_a_shorter_path(
    sidecar_with: StartSidecar, join: Join, speak: Speak
) -> None:
    sidecar = sidecar_with(num_slots=13)
    engine, client = join(sidecar), speak(sidecar)
    tokens = tokens_of(9)
    assert engine.put(tokens).status.all() and engine.held(tokens) == 9
    path = wire.ints_to_bytes(tokens)
    reply = client.ask(wire.Acquire(50, NAMESPACE, path, 0))
    assert isinstance(reply, wire.Progress)
    assert (reply.done, len(reply.sources)) == (True, 6)
    assert client.ask(wire.Acquire(51, NAMESPACE, path, 0)) == wire.Progress(51, 0, b"", b"", True)
    assert client.ask(wire.Release(52, 50)) == wire.Released(52)
    again = client.ask(wire.Acquire(53, NAMESPACE, path, 4))
    assert isinstance(again, wire.Progress)
    assert (again.first, len(again.sources)) == (4, 2)


def test_a_reserve_waits_for_room_while_other_requests_are_answered(
    sidecar_with: StartSidecar, speak: Speak
) -> None:
    sidecar = sidecar_with(num_slots=12)
    first, second, third = speak(sidecar), speak(sidecar), speak(sidecar)
    held = reserved(first.reserve(6))
    assert len(reserved(second.reserve(6))) == 6
    third.send_bytes(wire.encode(wire.Reserve(70, 2, 60_000)) + lookup_frame(71))
    assert third.receive() == wire.Found(71, 0, 0)
    slots = wire.ints_to_bytes(np.array(held[:2], np.int32))
    assert isinstance(first.ask(wire.GiveBack(72, slots)), wire.Released)
    assert sorted(reserved(third.receive())) == sorted(held[:2])


def test_a_reserve_is_refused_when_its_wait_is_over(
    sidecar_with: StartSidecar, speak: Speak
) -> None:
    sidecar = sidecar_with(num_slots=2)
    first, second, third = speak(sidecar), speak(sidecar), speak(sidecar)
    assert len(reserved(first.reserve(1))) == len(reserved(second.reserve(1))) == 1
    reply = third.reserve(1, wait_ms=50)
    assert isinstance(reply, wire.Refused) and reply.code is wire.Code.FULL


def test_bytes_that_do_not_match_their_checksum_are_not_taken_in(
    shared: Sidecar, speak: Speak
) -> None:
    client = speak(shared)
    slots = reserved(client.reserve(3))
    assert client.ask(commit_of(client, slots, [1, 2, 3])) == wire.Committed(102, 0)
    numbers = shared.numbers()
    assert numbers["sidecar.checksum_mismatches"] == 1
    assert 0 <= numbers["sidecar.slab_huge_bytes"] <= numbers["sidecar.slab_bytes"] > 0
    assert numbers["sidecar.num_free"] == numbers["sidecar.num_slots"]


@pytest.mark.parametrize("clean", [True, False])
def test_slots_of_a_killed_client_are_free_once_its_process_is_gone(
    sidecar: Sidecar, join: Join, closing: ExitStack, clean: bool
) -> None:
    """It dies holding a reservation and a lease; with `clean` its socket is closed long before."""
    engine = join(sidecar)
    tokens = tokens_of(5)
    assert engine.put(tokens).status.all() and engine.held(tokens) == 5
    code = (
        "import sys; from tests.sidecar.rig import *; c = RawClient.greeted(Path(sys.argv[1])); "
        "c.reserve(3); "
        "c.ask(wire.Acquire(9, NAMESPACE, wire.ints_to_bytes(tokens_of(5)), 0)); "
        "c.close() if sys.argv[2] == 'True' else None; print('holding', flush=True); "
        "sys.stdin.read()"
    )
    child = python(code, sidecar.socket, clean)
    closing.callback(child.kill)
    assert child.stdout is not None
    assert child.stdout.readline() == "holding\n"
    where = "sidecar.quarantined_blocks" if clean else "sidecar.held_blocks"
    wait_for(lambda: sidecar.numbers()[where] == 8)
    assert sidecar.numbers()["cache.dram.pinned"] == 5
    returncode, _, _ = finish(child, signal.SIGKILL)
    assert returncode == -signal.SIGKILL
    wait_for(lambda: sidecar.numbers()["sidecar.quarantined_blocks"] == 0)
    numbers = sidecar.numbers()
    assert numbers["sidecar.held_blocks"] == 0
    assert numbers["cache.dram.pinned"] == 0
    assert numbers["sidecar.num_free"] == numbers["sidecar.num_slots"] - 5


def test_a_child_that_keeps_a_dead_clients_connection_open_keeps_none_of_its_slots(
    sidecar: Sidecar, closing: ExitStack
) -> None:
    code = (
        "import os, sys; from tests.sidecar.rig import *; "
        "c = RawClient.greeted(Path(sys.argv[1])); c.reserve(3); "
        "child = os.fork(); child and print('holding', flush=True); sys.stdin.read()"
    )
    client = python(code, sidecar.socket)
    closing.callback(client.kill)
    assert client.stdout is not None and client.stdin is not None
    assert client.stdout.readline() == "holding\n"
    assert sidecar.numbers()["sidecar.held_blocks"] == 3
    client.kill()
    client.wait(30)
    wait_for(lambda: sidecar.numbers()["sidecar.held_blocks"] == 0)
    numbers = sidecar.numbers()
    assert numbers["sidecar.num_free"] == numbers["sidecar.num_slots"]
    client.communicate(timeout=30)  # closes the child's standard input: it ends as well


def test_slots_of_a_closed_connection_stay_out_of_use_while_its_process_lives(
    sidecar_with: StartSidecar, speak: Speak
) -> None:
    sidecar = sidecar_with(num_slots=8)
    leaver, other = speak(sidecar), speak(sidecar)
    held = reserved(leaver.reserve(4))
    leaver.close()
    wait_for(lambda: sidecar.numbers()["sidecar.quarantined_blocks"] == 4)
    rest = reserved(other.reserve(4))
    assert not set(rest) & set(held)
    assert sidecar.numbers()["sidecar.num_free"] == 0


def test_descriptors_do_not_pile_up_with_clients_that_come_and_go(
    shared: Sidecar, speak: Speak
) -> None:
    stays = speak(shared)
    fds = Path(f"/proc/{shared.pid}/fd")
    before = len(os.listdir(fds))
    for _ in range(20):
        client = RawClient.greeted(shared.socket)
        client.ask(wire.Lookup(5, NAMESPACE, wire.ints_to_bytes(tokens_of(1)), True))
        client.close()
    wait_for(lambda: len(os.listdir(fds)) <= before)
    assert stays.ask(wire.Lookup(5, NAMESPACE, b"", True)) == wire.Found(5, 0, 0)


def test_a_socket_path_that_is_too_long_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120) / "s.sock"
    with pytest.raises(KvtierError, match="sidecar at"):
        observe(path)


def test_no_sidecar_is_a_clear_error_with_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with pytest.raises(SidecarUnavailable) as caught:
        observe(path)
    assert str(caught.value) == (
        f"no sidecar at {path}: start one with `kvtier serve --socket {path}`"
    )


def test_a_server_that_never_greets_is_given_up_on_in_time(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as mute:
        mute.bind(str(path))
        mute.listen()
        with pytest.raises(SidecarUnavailable, match="no answer to the hello within 0.1 s"):
            observe(path, timeout_s=0.1)


def test_more_dram_than_the_machine_has_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughMemory, match=r"--dram of .* make the pool smaller"):
        serve(tmp_path / "s.sock", None, dram_bytes=1 << 60, nvme_bytes=1 << 30)
    assert not (tmp_path / "s.sock").exists()
