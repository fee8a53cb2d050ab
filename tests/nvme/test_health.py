"""Breakers and states, on a clock that the test moves. No drive, no thread."""

import errno
import os

import pytest

from kvtier.tiers.contracts import Answer, Flight, Signal
from kvtier.tiers.errors import RecordRefused, StoreCorrupt
from kvtier.tiers.nvme.breaker import Breaker
from kvtier.tiers.nvme.files import ShortRead, ShortWrite
from kvtier.tiers.nvme.health import FAILED_READS, Admission, Fault, Health, Patience, State
from kvtier.tiers.nvme.landing import Landing
from kvtier.tiers.nvme.watch import WRITE_FACTOR, Call, Watch


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


FULL = OSError(errno.ENOSPC, "full")
BROKEN = OSError(errno.EIO, "broken")


def test_a_breaker_lets_one_probe_through_after_each_back_off_which_doubles_up_to_a_limit() -> None:
    breaker, now = Breaker(1.0, 5.0), 0.0
    assert breaker.failed(now) and breaker.is_open
    for back_off in (1.0, 2.0, 4.0, 5.0, 5.0):
        assert not breaker.probe(now + back_off - 0.01)
        now += back_off
        assert breaker.is_due(now) and breaker.probe(now)
        assert not breaker.is_due(now)  # one at a time
        assert not breaker.failed(now)  # it was open already
    breaker.probe(now + 5)
    assert breaker.succeeded(now + 5) and not breaker.is_open
    assert breaker.trips == 1


def test_old_news_neither_closes_an_open_breaker_nor_lengthens_its_wait() -> None:
    breaker = Breaker(1.0, 30.0)
    breaker.failed(0.0)
    assert not breaker.failed(0.9)
    assert not breaker.succeeded(0.9) and breaker.is_open
    assert breaker.probe(1.0)


def test_a_probe_without_a_verdict_is_taken_again_at_once() -> None:
    breaker = Breaker(1.0, 30.0)
    breaker.failed(0.0)
    assert breaker.probe(1.0)
    breaker.withdraw()
    assert breaker.is_open and breaker.probe(1.0)


@pytest.mark.parametrize(("after", "back_off"), [(0.5, 2.0), (29.0, 2.0), (31.0, 1.0)])
def test_what_fails_again_soon_is_left_alone_for_longer(after: float, back_off: float) -> None:
    breaker = Breaker(1.0, 30.0)
    breaker.failed(0.0)
    breaker.probe(1.0)
    breaker.succeeded(1.0)
    now = 1.0 + after
    assert breaker.failed(now)
    assert not breaker.is_due(now + back_off - 0.01) and breaker.is_due(now + back_off)
    assert breaker.trips == 2


def test_a_back_off_that_is_no_range_is_refused() -> None:
    with pytest.raises(ValueError, match="0 < first <= most"):
        Breaker(2.0, 1.0)


@pytest.mark.parametrize(("error", "state"), [(FULL, State.FULL), (BROKEN, State.FAILING)])
def test_a_failed_write_stops_puts_and_not_reads_until_a_probe_has_worked(
    error: OSError, state: State
) -> None:
    clock = Clock()
    health = Health(clock, Patience())
    health.write_failed(error)
    assert (health.state, health.serves, health.admits) == (state, True, False)
    assert health.admission() is Admission.NONE
    clock.now += 1
    assert health.admits and health.admission() is Admission.ONE
    assert not health.admits
    health.write_failed(error)
    clock.now += 1
    assert not health.admits  # two seconds now
    clock.now += 1
    assert health.admission() is Admission.ONE
    health.write_undecided()
    assert health.admission() is Admission.ONE
    health.write_worked()
    assert (health.state, health.admission()) == (State.OK, Admission.ALL)
    assert health.report().trips == 1


def test_reads_failing_in_a_row_on_different_extents_take_the_drive_out() -> None:
    clock = Clock()
    health = Health(clock, Patience())
    for extent in (1, 1, 2, 1):
        health.read_failed(extent, BROKEN)
    health.read_worked()
    for extent in range(FAILED_READS - 1):
        health.read_failed(extent, BROKEN)
    assert health.serves and not health.probe_reads()
    health.read_failed(99, BROKEN)
    assert (health.state, health.serves, health.admits) == (State.FAILING, False, False)
    clock.now += 1
    assert health.probe_reads() and not health.probe_reads()
    health.reads_probed(BROKEN)
    clock.now += 1.9
    assert not health.probe_reads()
    clock.now += 0.1
    assert health.probe_reads()
    health.reads_probed(None)
    assert health.state is State.OK and health.admits
    health.read_failed(1, BROKEN)
    assert health.serves  # counted from the start again


def test_a_hung_drive_is_out_until_its_calls_have_returned_and_the_wait_is_over() -> None:
    clock = Clock()
    health = Health(clock, Patience())
    for _ in range(3):
        health.hung("a read")
    assert (health.state, health.serves) == (State.HUNG, False)
    assert health.report().errors["hung"] == health.report().trips == 1
    health.returned()
    assert not health.serves  # not before the back-off
    clock.now += 1
    health.returned()
    assert health.state is State.OK


def test_a_drive_that_hangs_while_it_is_being_probed_is_hung() -> None:
    clock = Clock()
    health = Health(clock, Patience())
    for extent in range(FAILED_READS):
        health.read_failed(extent, BROKEN)
    clock.now += 1
    assert health.probe_reads()
    health.hung("a read")
    health.reads_probed(None)
    assert health.is_hung
    clock.now += 2
    assert not health.probe_reads()
    health.returned()
    assert health.state is State.OK


def test_a_store_that_is_taken_out_comes_back_to_what_the_drive_is() -> None:
    health = Health(Clock(), Patience())
    health.write_failed(FULL)
    health.take_out(State.REBUILDING)
    assert (health.state, health.serves, health.admits) == (State.REBUILDING, False, False)
    health.bring_back()
    assert health.state is State.FULL and health.serves


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FULL, Fault.ENOSPC),
        (OSError(errno.EDQUOT, "quota"), Fault.ENOSPC),
        (BROKEN, Fault.EIO),
        (ShortRead("end"), Fault.SHORT_READ),
        (ShortWrite(errno.ENOSPC, "end"), Fault.SHORT_WRITE),
        (StoreCorrupt("row"), Fault.CATALOGUE),
        (OSError(errno.EBADF, os.strerror(errno.EBADF)), Fault.OTHER),
    ],
)
def test_errors_are_counted_by_kind(error: Exception, kind: Fault) -> None:
    health = Health(Clock(), Patience())
    health.count(error)
    health.count(FULL, Fault.CATALOGUE)
    errors = health.report().errors
    assert set(errors) == {fault.value for fault in Fault}
    expected = {kind.value: 1, "catalogue": 1} if kind is not Fault.CATALOGUE else {"catalogue": 2}
    assert {name: n for name, n in errors.items() if n} == expected
    assert health.state is State.OK


def test_a_state_is_logged_once_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    health = Health(clock, Patience())
    for _ in range(3):
        health.write_failed(FULL)
    clock.now += 1
    health.admission()
    health.write_worked()
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "NVMe store is full",
        "NVMe store is ok",
    ]


@pytest.mark.parametrize("call", Call)
def test_a_call_is_overdue_after_its_time_and_not_once_it_has_returned(call: Call) -> None:
    clock = Clock()
    watch = Watch(clock, 0.5)
    factor = 1 if call in (Call.READ, Call.LOOP) else WRITE_FACTOR
    with watch.during(call):
        clock.now += 0.5 * factor
        assert watch.overdue() is None
        clock.now += 0.01
        assert watch.overdue() is call
    assert watch.overdue() is None


def test_a_loop_that_works_through_a_long_queue_does_not_hang() -> None:
    clock = Clock()
    watch = Watch(clock, 0.5)
    with watch.during(Call.LOOP):  # a ping, far behind in the queue
        for _ in range(9):
            clock.now += 0.4
            assert watch.overdue() is None
            watch.moved()
        clock.now += 0.51
        assert watch.overdue() is Call.LOOP


def test_giving_up_answers_everyone_once() -> None:
    watch, signal = Watch(Clock(), 0.5), Signal()
    answer, told, put = Answer(signal), Answer(signal), Flight(3, signal)
    landing = Landing(Flight(4, signal), Clock())
    for request in (answer, told, put, landing):
        watch.owe(request)
    told.give(7)
    put.land([0])
    assert landing.begin(1, 2)
    assert watch.give_up(BROKEN) == 1
    assert watch.give_up(BROKEN) == 0  # stalled already
    answer.give(5)  # too late
    assert (answer.value, told.value) == (0, 7)
    assert put.status.tolist() == [1, 2, 2]
    assert landing.flight.status.tolist() == [2, 0, 0, 2] and landing.flight.stalled
    landing.arrived(1, [11, 12])
    landing.end(1)
    assert landing.flight.status.tolist() == [2, 0, 0, 2]  # behind a block that failed
    assert watch.give_up(BROKEN) == 0
    assert landing.flight.done and not landing.flight.stalled


def test_a_short_read_is_a_refused_record_and_a_short_write_an_error_of_the_drive() -> None:
    assert issubclass(ShortRead, RecordRefused) and issubclass(ShortWrite, OSError)
