"""Drops and resets over a device, host memory and a disk: nothing that was dropped is hit afterwards, nothing else is lost."""

from __future__ import annotations

import pytest

from engine.control import CacheControl, Pinned, PinPrefix
from engine.kv.pins import PinLimits
from engine.request import Namespace
from tests.factories import make_request
from tests.fake_disk import FakeDisk
from tests.sched.test_scheduler_tiers import Setup, make_setup, prompt_of, sources

NS = Namespace()


def evicted(max_files: int = 50) -> Setup:
    """A prompt of five full blocks and a token is in the tiers, and not on the device."""
    setup = make_setup(num_blocks=8, num_slots=20, max_files=max_files)
    setup.ask("a", prompt_of(1, 21), max_tokens=1)
    setup.ask("b", prompt_of(2, 31), max_tokens=1)
    assert setup.core.scheduler.manager.match_prefix(NS, prompt_of(1, 21)).nodes == ()
    return setup


def num_found(setup: Setup, prompt: list[int]) -> int:
    return len(setup.core.scheduler.manager.match_prefix(NS, prompt).below)


@pytest.mark.parametrize("length", [20, 21, 18])
def test_what_was_dropped_is_hit_on_no_tier_wherever_the_tokens_end(length: int) -> None:
    setup = evicted()
    assert num_found(setup, prompt_of(1, 21)) == 5
    setup.core.scheduler.manager.operator.drop(NS, prompt_of(1, 21)[:length], 0)
    setup.settle()
    assert num_found(setup, prompt_of(1, 21)) == 0
    setup.core.scheduler.manager.check_integrity()


def test_a_write_under_way_is_deleted_when_it_lands_and_a_read_under_way_is_orphaned() -> None:
    for keep_files in (False, True):
        setup = evicted()
        manager = setup.core.scheduler.manager
        if keep_files:  # only on the disk: a read has to bring it back
            for entry in [*manager.tiers.host]:
                manager.tiers.host.forget(entry)
            setup.core.add(make_request("c", prompt_of(1, 21), max_tokens=1))
            assert not setup.step().has_run
        manager.operator.reset()
        setup.settle()
        setup.run()
        assert setup.disk.files == {}
        assert not keep_files or sources(setup.admissions["c"]) == (0, 0, 0)
        manager.check_integrity()


def test_a_file_that_cannot_be_deleted_is_not_hit_after_the_next_look() -> None:
    setup = evicted()
    setup.disk.stuck = set(setup.disk.files)
    setup.core.scheduler.manager.operator.reset()
    setup.settle()
    setup.disk.scan()
    setup.core.poll_disk()
    assert setup.disk.files
    assert num_found(setup, prompt_of(1, 21)) == 0
    assert setup.core.scheduler.manager.tiers.num_undeleted == len(setup.disk.files)


@pytest.mark.parametrize("everything", [True, False])
def test_files_of_another_server_that_were_not_seen_yet_go_too(everything: bool) -> None:
    setup = evicted()
    setup.ask("c", prompt_of(3, 31), max_tokens=1)  # the second prompt's files are there too
    hidden = dict(setup.disk.files)
    manager = setup.core.scheduler.manager
    manager.operator.reset()
    setup.settle()
    setup.disk.files = hidden  # the other server's
    if everything:
        manager.operator.reset()
    else:
        manager.operator.drop(NS, prompt_of(1, 20), 0)
    setup.settle()
    setup.disk.scan()
    setup.core.poll_disk()
    assert num_found(setup, prompt_of(1, 21)) == 0
    assert bool(setup.disk.files) is not everything, "the other prompt's files stay"


def test_a_tenants_drop_of_the_public_prefix_leaves_it_and_others_in_the_tiers() -> None:
    setup = make_setup(num_blocks=8, num_slots=20, max_files=0)
    public, tenants = prompt_of(9, 8), {"x": prompt_of(5, 9), "y": prompt_of(6, 9)}
    manager = setup.core.scheduler.manager
    for salt, rest in tenants.items():
        request = make_request(salt, [*public, *rest], max_tokens=1, salt=salt)
        request.num_public_tokens = 8
        setup.core.add(request)
        setup.run()
    setup.ask("fill", prompt_of(7, 31), max_tokens=1)
    found = lambda salt: manager.match_prefix(Namespace(salt=salt), [*public, *tenants[salt]], 8).num_tokens  # noqa: E731
    assert (found("x"), found("y")) == (16, 16)
    manager.operator.drop(Namespace(salt="x"), public, 8)
    assert (found("x"), found("y")) == (8, 16)
    manager.check_integrity()


def test_what_went_down_and_came_back_is_labelled_host_never_evicted_and_can_be_pinned() -> None:
    setup = evicted(max_files=0)
    manager = setup.core.scheduler.manager
    control, command = CacheControl(manager), PinPrefix("p", NS, tuple(prompt_of(1, 20)), 0, 60.0)
    assert not isinstance(control.apply(command), Pinned)
    admission = setup.ask("c", prompt_of(1, 21), max_tokens=1)  # what the server does then
    assert (admission.sources.host, admission.sources.evicted, admission.sources.unseen) == (20, 0, 1)
    manager.operator.pins.limits = PinLimits(8, 5, 1)
    assert isinstance(control.apply(command), Pinned)
    manager.check_integrity()  # ghosts too
    assert isinstance(setup.disk, FakeDisk)
