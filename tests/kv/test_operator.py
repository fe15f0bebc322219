"""Drop, reset and the survey: what goes, what stays and why, and what an operator is shown."""

from __future__ import annotations

from engine.control import CacheControl, CacheView, Dropped, DropPrefix, PinPrefix, ResetCache, ShowCache
from engine.kv.digest import Digester
from engine.kv.disk_worker import NoDisk
from engine.kv.manager import KVCacheManager
from engine.kv.pins import PinLimits
from engine.kv.tier_cache import Tier, TierCache
from engine.kv.tiers import DiskTier, HostTier
from engine.request import Namespace
from tests.kv.test_manager import NS, start

SYSTEM = [*range(4)]
ALICE, BOB = Namespace(salt="alice"), Namespace(salt="bob")


def make() -> tuple[KVCacheManager, CacheControl]:
    manager = KVCacheManager(40, 2, pin_limits=PinLimits(40, 20, 10), clock=lambda: 0.0)
    return manager, CacheControl(manager)


def cache(manager: KVCacheManager, tokens: list[int], namespace: Namespace = NS, num_public: int = 0) -> None:
    match = manager.match_prefix(namespace, tokens, num_public)
    manager.admit("once", namespace, match)
    assert manager.allocate("once", len(tokens))
    manager.take_copies()
    manager.finish_step()
    manager.commit("once", tokens, len(tokens))
    manager.free("once")
    manager.check_integrity()


def dropped(num_blocks: int, referenced: int, pinned: int, continued: int, host: int = 0, host_continued: int = 0) -> Dropped:
    return Dropped(num_blocks, referenced, pinned, continued, num_host_blocks=host, num_continued_host_blocks=host_continued)


def num_found(manager: KVCacheManager, tokens: list[int], namespace: Namespace = NS, num_public: int = 0) -> int:
    return manager.match_prefix(namespace, [*tokens, 999], num_public).num_tokens


def drop(control: CacheControl, tokens: list[int], namespace: Namespace = NS, num_public: int = 0) -> object:
    return control.apply(DropPrefix(namespace, tuple(tokens), num_public))


def test_a_drop_takes_what_begins_with_the_tokens_and_leaves_what_others_continue() -> None:
    manager, control = make()
    cache(manager, [*SYSTEM, 10, 11, 12, 13])
    cache(manager, [*SYSTEM, 20, 21])
    assert drop(control, [*SYSTEM, 10, 11]) == dropped(2, 0, 0, 2)
    manager.check_integrity()
    assert num_found(manager, [*SYSTEM, 10, 11, 12, 13]) == 4
    assert num_found(manager, [*SYSTEM, 20, 21]) == 6
    assert drop(control, SYSTEM) == dropped(3, 0, 0, 0)
    assert manager.num_free_blocks == 40
    assert drop(control, SYSTEM) == dropped(0, 0, 0, 0)


def test_a_drop_of_tokens_that_end_inside_a_block_takes_only_blocks_that_begin_with_them() -> None:
    manager, control = make()
    cache(manager, [*SYSTEM, 10, 11])
    cache(manager, [*SYSTEM, 10, 77])
    cache(manager, [*SYSTEM, 20, 21])
    cache(manager, [*SYSTEM, 10])
    assert drop(control, [*SYSTEM, 10]) == dropped(2, 0, 0, 2)
    assert num_found(manager, [*SYSTEM, 20, 21]) == 6
    assert num_found(manager, [*SYSTEM, 10, 11]) == 4
    manager.check_integrity()


def test_what_is_in_use_or_pinned_stays_and_is_counted() -> None:
    manager, control = make()
    cache(manager, [*SYSTEM, 10, 11])
    cache(manager, [*SYSTEM, 20, 21, 22, 23])
    cache(manager, [30, 31])
    start(manager, "a", [*SYSTEM, 10, 11, 12])
    control.apply(PinPrefix("p", NS, (30, 31), 0, 60.0))
    assert control.apply(ResetCache()) == dropped(2, 3, 1, 0)
    manager.check_integrity()
    assert num_found(manager, [*SYSTEM, 10, 11]) == 6
    assert num_found(manager, [30, 31]) == 2
    manager.free("a")
    again = control.apply(ResetCache())
    assert isinstance(again, Dropped)
    assert (again.num_referenced_blocks, again.num_pinned_blocks) == (0, 1)
    assert (manager.num_free_blocks, manager.num_cached_blocks) == (39, 1)


def test_a_tenants_drop_leaves_public_blocks_and_other_tenants_alone() -> None:
    manager, control = make()
    prompt = [*SYSTEM, 10, 11]
    for tenant in (ALICE, BOB):
        cache(manager, prompt, tenant, 4)
    assert manager.num_cached_blocks == 4
    assert drop(control, prompt, ALICE, 4) == dropped(1, 0, 0, 0)
    assert num_found(manager, prompt, ALICE, 4) == 4
    assert num_found(manager, prompt, BOB, 4) == 6
    assert drop(control, SYSTEM, NS) == dropped(3, 0, 0, 0), "without a salt, all that continues public blocks is meant"
    manager.check_integrity()
    assert manager.num_free_blocks == 40


def show(control: CacheControl, top: int = 10, tokens: int = 100) -> CacheView:
    view = control.apply(ShowCache(top, tokens))
    assert isinstance(view, CacheView)
    return view


def test_the_survey_adds_up_and_ranks_prefixes() -> None:
    manager, control = make()
    for last in range(10, 15):
        cache(manager, [*SYSTEM, last, last, last])
    cache(manager, [*range(50, 70)], ALICE)
    cache(manager, [*SYSTEM, 60, 61], BOB, 4)
    start(manager, "a", [*SYSTEM, 10, 10])
    control.apply(PinPrefix("p", NS, tuple(SYSTEM), 0, 60.0))
    view = show(control)
    assert view.num_free_blocks + view.num_cached_blocks + view.num_referenced_blocks == view.num_blocks == 40
    assert (view.num_pinned_blocks, view.pin_limit_blocks, [pin.pin_id for pin in view.pins]) == (2, 20, ["p"])
    by_namespace = {item.namespace: item for item in view.namespaces}
    assert {ns: item.num_blocks for ns, item in by_namespace.items()} == {NS: 12, ALICE: 10, BOB: 1}
    assert by_namespace[ALICE].num_tokens == 20
    assert by_namespace[NS].num_pinned_blocks == 2
    assert by_namespace[NS].num_referenced_blocks == 3
    heaviest, busiest = view.by_bytes[0], view.by_hits[0]
    assert (heaviest.namespace, heaviest.token_ids, heaviest.num_blocks) == (ALICE, tuple(range(50, 70)), 10)
    assert (busiest.namespace, busiest.token_ids, busiest.num_tokens, busiest.num_blocks) == (NS, tuple(SYSTEM), 4, 2)
    assert busiest.num_hits == 6, "the four that followed the first, bob's, and the one that runs"
    assert busiest.num_blocks_below == 10
    assert sum(item.num_blocks for item in show(control, top=1000).by_bytes) == 12 + 10 + 1
    (bobs,) = [item for item in show(control, top=1000).by_bytes if item.namespace == BOB]
    assert bobs.token_ids == (*SYSTEM, 60, 61), "a path begins at the very start, in the public part"
    assert show(control, top=1, tokens=2).by_bytes[0].token_ids == (50, 51)
    assert show(control, top=0).by_bytes == ()


def test_an_empty_cache_can_be_shown_and_reset() -> None:
    _, control = make()
    view = show(control)
    assert (view.namespaces, view.by_bytes, view.by_hits, view.pins) == ((), (), (), ())
    assert control.apply(ResetCache()) == dropped(0, 0, 0, 0)


def make_tiered(num_blocks: int = 8, num_slots: int = 40) -> tuple[KVCacheManager, CacheControl]:
    """A small device over a large host tier; ``cache`` runs no steps, so what is stored is stored by name only."""
    tiers = TierCache(Digester(b"p" * 32), HostTier(num_slots), DiskTier(0), NoDisk())
    manager = KVCacheManager(num_blocks, 2, tiers=tiers, clock=lambda: 0.0)
    return manager, CacheControl(manager)


def num_below(manager: KVCacheManager, tokens: list[int], namespace: Namespace = NS, num_public: int = 0) -> int:
    """Tokens that the tiers below the device would add to a match."""
    match = manager.match_prefix(namespace, [*tokens, 999], num_public)
    return match.num_tier_tokens(Tier.HOST) + match.num_tier_tokens(Tier.DISK)


def push_out(manager: KVCacheManager) -> None:
    cache(manager, [*range(900, 916)])


def test_a_drop_reaches_what_was_pushed_out_to_host_memory() -> None:
    manager, control = make_tiered()
    for namespace in (ALICE, BOB):
        cache(manager, [*SYSTEM, 10, 11, 12, 13], namespace)
        cache(manager, [*SYSTEM, 20, 21], namespace)
    push_out(manager)
    assert num_below(manager, [*SYSTEM, 10, 11, 12, 13], ALICE) == 8
    assert drop(control, [*SYSTEM, 10, 11], ALICE) == dropped(0, 0, 0, 0, host=2, host_continued=2)
    assert num_below(manager, [*SYSTEM, 10, 11, 12, 13], ALICE) == 4
    assert num_below(manager, [*SYSTEM, 20, 21], ALICE) == 6
    assert drop(control, [*SYSTEM, 20, 21], ALICE) == dropped(0, 0, 0, 0, host=3), "nothing else continues the system prompt"
    assert num_below(manager, [*SYSTEM, 10, 11, 12, 13], BOB) == 8, "another tenant's is another prefix"
    manager.check_integrity()


def test_a_tenants_drop_leaves_public_blocks_in_host_memory_and_an_unsalted_one_takes_all_below() -> None:
    manager, control = make_tiered()
    prompt = [*SYSTEM, 10, 11]
    for namespace in (ALICE, BOB):
        cache(manager, prompt, namespace, 4)
    push_out(manager)
    assert drop(control, prompt, ALICE, 4) == dropped(0, 0, 0, 0, host=1)
    assert num_below(manager, prompt, ALICE, 4) == 4
    assert num_below(manager, prompt, BOB, 4) == 6
    assert drop(control, SYSTEM, ALICE, 4) == dropped(0, 0, 0, 0), "nothing of hers is left behind the public part"
    assert num_below(manager, prompt, BOB, 4) == 6
    assert drop(control, SYSTEM, NS) == dropped(0, 0, 0, 0, host=3)
    assert num_below(manager, prompt, BOB, 4) == 0
    manager.check_integrity()


def test_a_drop_reaches_what_the_tiers_have_behind_blocks_that_only_the_device_has() -> None:
    manager, control = make_tiered()
    cache(manager, [*SYSTEM, 10, 11])
    cache(manager, [*range(50, 62)])  # takes the block of 10 and 11, and leaves the two before it
    assert (num_below(manager, [*SYSTEM, 10, 11]), manager.tiers.host.num_used) == (2, 1)
    assert drop(control, SYSTEM[:2]) == dropped(2, 0, 0, 0, host=1)
    cache(manager, SYSTEM)
    assert num_found(manager, [*SYSTEM, 10, 11]) == 4
    manager.check_integrity()


def test_what_ends_inside_a_block_takes_all_that_continues_its_full_blocks_below() -> None:
    manager, control = make_tiered()
    cache(manager, [*SYSTEM, 10, 11])
    cache(manager, [*SYSTEM, 20, 21])
    push_out(manager)
    assert drop(control, [*SYSTEM, 10]) == dropped(0, 0, 0, 0, host=4), "below, blocks cannot be told apart by single tokens"
    cache(manager, [*SYSTEM, 20, 21])  # on the device they can
    assert drop(control, [*SYSTEM, 10]) == dropped(0, 0, 0, 2)
    assert num_found(manager, [*SYSTEM, 20, 21]) == 6
    manager.check_integrity()


def test_a_reset_empties_all_tiers_and_a_view_counts_them() -> None:
    manager, control = make_tiered()
    cache(manager, [*SYSTEM, 10, 11])
    cache(manager, [*SYSTEM, 10, 11], ALICE)
    push_out(manager)
    assert show(control).num_host_blocks == 6
    assert control.apply(ResetCache()) == dropped(8, 0, 0, 0, host=6)
    assert (show(control).num_host_blocks, manager.num_free_blocks) == (0, 8)
    for namespace in (NS, ALICE):
        assert num_found(manager, [*SYSTEM, 10, 11], namespace) == 0
    manager.check_integrity()
