"""What the cascading manager promises, one promise per test, on tiers in memory."""

from __future__ import annotations

import pytest
from support.cascade import BLOCK_SIZE, Cascade, block_bytes
from support.inside import demoters, first_tier
from support.keys import key, keys

from kvcascade.config.schema import WriteMode
from kvcascade.manager.admission import admit_second_touch
from kvcascade.manager.base import BlockEvent, LookupState
from kvcascade.manager.core import MAX_BATCH_BLOCKS, MAX_EVENT_BLOCKS, ManagerOptions
from kvcascade.manager.counters import Reason
from kvcascade.manager.promotion import promoter
from kvcascade.manager.request import Request
from kvcascade.manager.stores import MAX_DEFERRALS
from kvcascade.tiers.base import BlockHash, BlockOutcome, BlockStatus
from kvcascade.tiers.endurance import DAY_S

HIT, MISS, PENDING, RETRY = (
    LookupState.HIT,
    LookupState.MISS,
    LookupState.PENDING,
    LookupState.RETRY,
)


def states(cascade: Cascade, request: Request, hashes: list[BlockHash]) -> list[LookupState]:
    return [cascade.manager.lookups.lookup_block(block_hash, request) for block_hash in hashes]


class TestStore:
    def test_blocks_become_hits_only_when_complete(self) -> None:
        cascade = Cascade((8, 16))
        request = Request()
        output = cascade.manager.prepare_store(keys(0, 3), request)
        assert output is not None and output.block_hashes_to_store == keys(0, 3)
        assert states(cascade, request, keys(0, 2)) == [PENDING, PENDING]
        cascade.manager.complete_store(set(keys(0, 3)))
        assert states(cascade, request, keys(0, 4)) == [HIT, HIT, HIT, MISS]

    def test_what_is_present_is_not_stored_again(self) -> None:
        cascade = Cascade((8, 16))
        cascade.store(keys(0, 3))
        assert cascade.store(keys(1, 5)) == keys(3, 5)

    def test_a_failed_store_leaves_nothing(self) -> None:
        cascade = Cascade((8, 16))
        cascade.manager.prepare_store(keys(0, 3))
        cascade.manager.complete_store(set(keys(0, 3)), success=False)
        assert cascade.manager.lookup(keys(0, 3)) == 0
        assert cascade.backends[0].get_num_free_blocks() == 8

    def test_lookup_counts_the_leading_run(self) -> None:
        cascade = Cascade((8, 16))
        cascade.store([key(0), key(1), key(3)])
        assert cascade.manager.lookup(iter(keys(0, 5))) == 2
        assert cascade.manager.lookup([]) == 0

    def test_a_list_that_cannot_fit_is_taken_from_its_start(self) -> None:
        cascade = Cascade((8, 64), is_immediate=True)
        assert cascade.store(keys(0, 20)) == keys(0, 8)
        assert cascade.manager.counters.store_truncated_blocks == 12

    def test_none_while_every_slot_is_being_written(self) -> None:
        cascade = Cascade((4, 16), is_immediate=True)
        cascade.manager.prepare_store(keys(0, 4))
        assert cascade.manager.prepare_store(keys(4, 6)) is None
        assert cascade.manager.counters.store_refused_busy == 1
        cascade.manager.complete_store(set(keys(0, 4)))
        assert cascade.store(keys(4, 6)) == keys(4, 6)

    def test_none_while_dirty_blocks_are_on_their_way_down(self) -> None:
        cascade = Cascade((4, 16))
        cascade.store(keys(0, 4))
        assert cascade.manager.prepare_store(keys(4, 8)) is None
        cascade.run_transfers()
        assert cascade.store(keys(4, 8)) == keys(4, 8)
        assert all(cascade.holds(1, block_hash) for block_hash in keys(0, 4))
        assert cascade.manager.counters.dropped_dirty_blocks == 0

    def test_a_request_is_not_put_off_for_ever(self) -> None:
        """What fits is taken then; nobody's dirty blocks are dropped for it."""
        cascade = Cascade((8, 16))
        cascade.store(keys(0, 6))
        request = Request()
        for _ in range(MAX_DEFERRALS):
            assert cascade.manager.prepare_store(keys(6, 10), request) is None
        output = cascade.manager.prepare_store(keys(6, 10), request)
        assert output is not None and output.block_hashes_to_store == keys(6, 8)
        cascade.manager.finish_request(request)
        counters = cascade.manager.counters
        assert (counters.store_truncated_blocks, counters.store_lost_blocks) == (2, 0)
        assert counters.dropped_dirty_blocks == 0

    def test_what_a_request_could_not_store_before_it_ended_is_counted(self) -> None:
        cascade = Cascade((4, 16))
        cascade.store(keys(0, 4))
        requests = [Request(), Request()]
        for request, offered in zip(requests, (keys(4, 7), keys(8, 10)), strict=True):
            assert cascade.manager.prepare_store(offered, request) is None
        cascade.manager.finish_request(requests[1])
        cascade.run_transfers()
        assert cascade.manager.prepare_store(keys(4, 7), requests[0]) is not None
        cascade.manager.finish_request(requests[0])
        assert cascade.manager.counters.store_lost_blocks == 2

    def test_offered_blocks_are_not_evicted_for_one_another(self) -> None:
        cascade = Cascade((4,))
        cascade.store(keys(0, 4))
        assert cascade.store([key(0), key(9), key(1)]) == [key(9)]
        assert cascade.manager.lookup([key(0)]) == 1
        assert cascade.manager.lookup([key(1)]) == 1


class TestDemotion:
    def test_the_cold_end_is_kept_clean_ahead_of_demand(self) -> None:
        cascade = Cascade((20, 100), ManagerOptions(low_watermark=0.1, high_watermark=0.3))
        for i in range(20):
            cascade.store([key(i)])
            cascade.run_transfers()
        on_disk = [i for i in range(20) if cascade.holds(1, key(i))]
        assert on_disk == list(range(len(on_disk))), "the coldest go first"
        assert 2 <= len(on_disk) <= 8, "no more than the high watermark asks for"
        assert all(cascade.holds(0, key(i)) for i in range(20)), "clean blocks stay readable"
        assert cascade.store([key(100)]) == [key(100)], "and their slots are there at once"

    def test_what_a_search_found_is_written_only_while_it_is_dirty(self) -> None:
        """One search finds blocks for several jobs: some may have been written or left since."""
        cascade = Cascade((8192, 8192))
        (down,) = cascade.down
        cascade.store(keys(0, 8192))
        cascade.manager.end_step()
        down.wait({min(down.queued)})
        cascade.manager.end_step()  # one job more, of the four that were found
        assert cascade.manager.counters.links[0].demoted_blocks == MAX_BATCH_BLOCKS
        cascade.manager.reset_cache()
        cascade.run_transfers()
        cascade.store(keys(10_000, 10_000 + 8192))
        cascade.run_transfers()
        cascade.run_transfers()
        assert not any(cascade.holds(1, key(i)) for i in range(8192)), "they are no more"
        written = [i for i in range(8192) if cascade.holds(1, key(10_000 + i))]
        assert written == list(range(8192 - len(written), 8192)), "the tail of what is there"
        assert written

    def test_nothing_leaves_without_a_copy_below(self) -> None:
        cascade = Cascade((8, 200))
        for i in range(60):
            while not cascade.store([key(i)]):
                cascade.run_transfers()
        cascade.run_transfers()
        assert all(cascade.holds(0, key(i)) or cascade.holds(1, key(i)) for i in range(60))
        assert cascade.manager.counters.dropped_dirty_blocks == 0

    def test_a_failed_block_stays_dirty_and_is_offered_again(self) -> None:
        cascade = Cascade((4, 16))
        cascade.store(keys(0, 4))
        cascade.down[0].fate = lambda source, target: BlockOutcome.IO_ERROR
        cascade.manager.flush_dirty(cascade.now_s + 1)
        assert not any(cascade.holds(1, block_hash) for block_hash in keys(0, 4))
        assert cascade.manager.counters.links[0].demote_failed_blocks == 4
        cascade.down[0].fate = lambda source, target: BlockOutcome.OK
        cascade.now_s += 60
        assert cascade.manager.flush_dirty(cascade.now_s + 1)
        assert all(cascade.holds(1, block_hash) for block_hash in keys(0, 4))

    def test_stores_go_on_when_the_tier_below_fails(self) -> None:
        cascade = Cascade((4, 16), is_immediate=True)
        cascade.down[0].accepts = False
        cascade.store(keys(0, 4))
        assert cascade.store(keys(4, 8)) == keys(4, 8)
        assert cascade.manager.counters.dropped_dirty_blocks == 4

    def test_a_block_that_the_tier_below_lost_is_dirty_again(self) -> None:
        cascade = Cascade((6, 6), is_immediate=True)
        cascade.store(keys(0, 3))
        assert cascade.manager.flush_dirty(cascade.now_s + 1)
        cascade.store(keys(10, 13))
        assert cascade.manager.flush_dirty(cascade.now_s + 1)
        cascade.store([key(20)])
        assert cascade.manager.flush_dirty(cascade.now_s + 1)
        lost = [i for i in range(3) if cascade.holds(0, key(i)) and not cascade.holds(1, key(i))]
        assert lost == [], "what only the first tier held was written again"

    def test_write_through_writes_every_block_at_once(self) -> None:
        cascade = Cascade((8, 16), ManagerOptions(write_mode=WriteMode.THROUGH), is_immediate=True)
        cascade.store(keys(0, 3))
        cascade.manager.end_step()
        cascade.manager.end_step()
        assert all(cascade.holds(1, block_hash) for block_hash in keys(0, 3))

    def test_write_back_writes_what_has_come_of_age(self) -> None:
        options = ManagerOptions(write_mode=WriteMode.BACK, dirty_age_s=5.0)
        cascade = Cascade((50, 60), options, is_immediate=True)
        cascade.store(keys(0, 3))
        cascade.manager.maintain()
        assert not cascade.holds(1, key(0))
        cascade.now_s += 5.1
        cascade.manager.maintain()
        cascade.run_transfers()
        assert all(cascade.holds(1, block_hash) for block_hash in keys(0, 3))

    @pytest.mark.parametrize("mode", [WriteMode.BACK, WriteMode.THROUGH])
    def test_what_a_smaller_tier_below_drops_is_not_written_again_by_itself(
        self, mode: WriteMode
    ) -> None:
        """Or an idle engine would write for ever: each block would push another one out."""
        options = ManagerOptions(write_mode=mode, low_watermark=0.1, high_watermark=0.2)
        cascade = Cascade((32, 8), options, is_immediate=True)
        for step in range(200):
            if step < 6:
                cascade.store(keys(4 * step, 4 * step + 4))
            cascade.now_s += 10.0
            cascade.manager.maintain()
        counters = cascade.manager.counters
        assert counters.links[0].demoted_blocks == 24
        assert counters.evicted_blocks[1] > 0 and len(cascade.policies[1]) == 8
        assert first_tier(cascade.manager).dirt.dirty_mask.sum() == 16
        cascade.store(keys(100, 116))
        assert cascade.manager.counters.dropped_dirty_blocks == 0, "written when they leave"

    def test_second_touch_admits_what_is_used_again(self) -> None:
        cascade = Cascade((8, 16), is_immediate=True, admission=admit_second_touch)
        cascade.store(keys(0, 4))
        request = Request()
        assert states(cascade, request, keys(0, 2)) == [HIT, HIT]
        cascade.manager.prepare_load(keys(0, 2), request)
        cascade.manager.complete_load(set(keys(0, 2)))
        cascade.manager.finish_request(request)
        assert cascade.manager.flush_dirty(cascade.now_s + 1)
        assert [cascade.holds(1, key(i)) for i in range(4)] == [True, True, False, False]
        assert cascade.manager.counters.links[0].demote_refused_blocks == 2

    def test_a_refused_block_gets_another_chance(self) -> None:
        cascade = Cascade((8, 16), is_immediate=True, admission=admit_second_touch)
        cascade.store([key(0)])
        cascade.manager.flush_dirty(cascade.now_s + 1)
        request = Request()
        cascade.manager.prepare_store([key(0)], request)
        cascade.manager.finish_request(request)
        cascade.manager.flush_dirty(cascade.now_s + 1)
        assert cascade.holds(1, key(0))

    def test_a_refused_block_is_known_when_it_comes_back(self) -> None:
        cascade = Cascade((8, 64), is_immediate=True, admission=admit_second_touch)
        for start in (0, 8, 16):
            assert cascade.store(keys(start, start + 8))
        assert not any(cascade.holds(0, key(i)) for i in range(8))
        assert cascade.store(keys(0, 4)) == keys(0, 4), "it had left, and is used again"
        cascade.manager.flush_dirty(cascade.now_s + 1)
        assert [h for h in keys(0, 24) if cascade.holds(1, h)] == keys(0, 4)

    def test_second_touch_spares_half_where_half_is_never_used_again(self) -> None:
        written = []
        for admission in (None, admit_second_touch):
            cascade = Cascade((8, 400), is_immediate=True, admission=admission)
            for start in range(0, 160, 4):
                cascade.store(keys(1000 + start, 1004 + start))  # never again
                cascade.store(keys(start, start + 4))
                if start >= 16:  # these left the first tier long ago
                    cascade.store(keys(start - 16, start - 12))
                cascade.manager.end_step()
            cascade.manager.flush_dirty(cascade.now_s + 1)
            written.append(cascade.manager.counters.links[0].demoted_blocks)
        assert written == [320, 144], "each once; with second_touch each that was used again"

    @pytest.mark.parametrize("mode", [WriteMode.BACK, WriteMode.THROUGH])
    def test_what_was_refused_and_is_used_again_is_written_in_time(self, mode: WriteMode) -> None:
        options = ManagerOptions(write_mode=mode, dirty_age_s=2.0)
        cascade = Cascade((32, 64), options, is_immediate=True, admission=admit_second_touch)
        cascade.store(keys(0, 4))
        cascade.now_s += 3.0
        cascade.manager.maintain()
        assert cascade.manager.counters.links[0].demote_refused_blocks == 4
        request = Request()
        cascade.manager.prepare_load(keys(0, 4), request)
        cascade.manager.complete_load(set(keys(0, 4)))
        cascade.manager.finish_request(request)
        cascade.now_s += 3.0
        cascade.manager.maintain()
        cascade.manager.maintain()
        assert all(cascade.holds(1, key(i)) for i in range(4))

    def test_a_step_looks_at_a_bounded_number_of_blocks(self) -> None:
        cascade = Cascade((4000, 8000), is_immediate=True, admission=admit_second_touch)
        cascade.store(keys(0, 3500))
        refused = []
        for _ in range(5):
            cascade.manager.end_step()
            refused.append(cascade.manager.counters.links[0].demote_refused_blocks)
        window = 4000 // 2 - 500
        assert refused == [512, 1024, window, window, window]
        assert cascade.manager.flush_dirty(cascade.now_s + 1), "a shutdown looks at all of them"
        assert cascade.manager.counters.links[0].demote_refused_blocks == 3500

    def test_a_store_need_not_wait_for_what_need_not_be_written(self) -> None:
        cascade = Cascade((2000, 8000), is_immediate=True, admission=admit_second_touch)
        cascade.store(keys(0, 2000))
        assert cascade.store(keys(2000, 2008)) == keys(2000, 2008)
        assert cascade.manager.counters.links[0].demote_refused_blocks == 512
        assert cascade.manager.counters.dropped_dirty_blocks == 0

    def test_the_write_budget_holds_over_a_sliding_day(self) -> None:
        cascade = Cascade((16, 64), is_immediate=True, bytes_per_day=3 * BLOCK_SIZE)
        cascade.store(keys(0, 5))
        cascade.manager.flush_dirty(cascade.now_s + 1)
        assert sum(cascade.holds(1, key(i)) for i in range(5)) == 3
        cascade.now_s += DAY_S * 1.1
        cascade.manager.end_step()  # the writer's figures come
        cascade.store(keys(5, 8))
        cascade.manager.flush_dirty(cascade.now_s + 1)
        assert sum(cascade.holds(1, key(i)) for i in range(8)) == 6

    def test_what_was_cut_off_a_job_is_tried_again(self) -> None:
        options = ManagerOptions(write_mode=WriteMode.THROUGH)
        cascade = Cascade((64, 4, 64), options, is_immediate=True)
        cascade.store(keys(0, 6))
        for _ in range(4):
            cascade.manager.maintain()
        assert all(cascade.holds(1, key(i)) or cascade.holds(2, key(i)) for i in range(6))

    def test_shutdown_writes_everything_and_refreshes_recency(self) -> None:
        cascade = Cascade((8, 16))
        cascade.store(keys(0, 6))
        cascade.policies[0].touch(keys(0, 2))
        cascade.manager.shutdown()
        assert all(cascade.holds(1, block_hash) for block_hash in keys(0, 6))
        coldest = [block_hash for block_hash, _ in cascade.policies[1].coldest(16)]
        assert coldest == [key(5), key(4), key(3), key(2), key(1), key(0)]


class TestPromotion:
    def test_a_block_below_is_pending_then_a_hit_with_its_bytes(self) -> None:
        cascade = Cascade((8, 16))
        cascade.below_only(keys(0, 3))
        request = Request()
        assert states(cascade, request, keys(0, 4)) == [PENDING, PENDING, PENDING, MISS]
        cascade.manager.end_step()
        assert cascade.manager.has_pending_work()
        assert len(cascade.up[0].queued) == 1, "what one step asks for travels together"
        cascade.run_transfers()
        assert states(cascade, request, keys(0, 3)) == [HIT, HIT, HIT]
        spec = cascade.manager.prepare_load(keys(0, 3), request)
        slots = spec.slots.tolist()
        assert [cascade.read_top(slot) for slot in slots] == list(map(block_bytes, keys(0, 3)))
        assert request.sources == dict.fromkeys(keys(0, 3), "M1")
        assert cascade.manager.counters.loaded_blocks == [0, 3]
        assert not cascade.manager.has_pending_work()

    @pytest.mark.parametrize("outcome", [BlockOutcome.CORRUPT, BlockOutcome.GONE])
    def test_a_bad_block_is_a_miss_and_leaves_the_tier(self, outcome: BlockOutcome) -> None:
        cascade = Cascade((8, 16))
        cascade.below_only(keys(0, 3))
        request = Request()
        states(cascade, request, keys(0, 3))
        bad = cascade.policies[1].get(key(1))
        assert bad is not None
        cascade.up[0].fate = lambda source, _: (
            outcome if source == bad.block_id else BlockOutcome.OK
        )
        cascade.manager.end_step()
        cascade.run_transfers()
        assert states(cascade, request, keys(0, 3)) == [HIT, MISS, HIT]
        assert not cascade.holds(1, key(1))
        assert states(cascade, Request(), [key(1)]) == [MISS]

    def test_an_unreadable_block_is_a_miss_for_this_request_only(self) -> None:
        cascade = Cascade((8, 16))
        cascade.below_only(keys(0, 1))
        request = Request()
        states(cascade, request, keys(0, 1))
        cascade.up[0].fate = lambda source, target: BlockOutcome.IO_ERROR
        cascade.manager.end_step()
        cascade.run_transfers()
        assert states(cascade, request, keys(0, 1)) == [MISS]
        assert states(cascade, Request(), keys(0, 1)) == [PENDING]
        assert cascade.manager.counters.links[0].promote_failed_blocks == 1

    def test_a_stalled_read_becomes_a_miss_by_the_deadline(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        cascade = Cascade((8, 16), ManagerOptions(promotion_deadline_s=3.0))
        cascade.below_only(keys(0, 2))
        request = Request()
        states(cascade, request, keys(0, 2))
        cascade.manager.end_step()
        cascade.now_s += 2.9
        assert states(cascade, request, keys(0, 2)) == [PENDING, PENDING]
        cascade.manager.end_step()
        cascade.now_s += 0.2
        assert states(cascade, request, keys(0, 2)) == [MISS, MISS]
        assert cascade.manager.counters.recomputed_blocks[Reason.DEADLINE] == 2
        for _ in range(3):
            cascade.manager.end_step()
        assert caplog.text.count("ended no transfer for 3 s") == 1
        cascade.run_transfers()
        assert states(cascade, request, keys(0, 2)) == [HIT, HIT], "late, but verified: a hit"

    def test_asking_again_looks_at_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cascade = Cascade((8, 16))
        cascade.below_only(keys(0, 3))
        request = Request()
        states(cascade, request, keys(0, 3))
        cascade.manager.end_step()
        with monkeypatch.context() as patch:
            patch.setattr(cascade.manager.lookups, "look_below", None)
            assert states(cascade, request, keys(0, 3)) == [PENDING] * 3
        cascade.run_transfers()
        assert states(cascade, request, keys(0, 3)) == [HIT] * 3

    def test_a_long_queue_is_not_looked_through_at_every_step(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(promoter, "MAX_JOBS_IN_FLIGHT", 0)
        cascade = Cascade((64, 64), ManagerOptions(promotion_deadline_s=10.0))
        cascade.below_only(keys(0, 16))
        request = Request()
        states(cascade, request, keys(0, 16))
        cascade.manager.end_step()
        cascade.now_s += 4.0
        with monkeypatch.context() as patch:
            patch.setattr(cascade.manager._promoter, "pending", None)
            cascade.manager.end_step()
        cascade.now_s += 6.0
        cascade.manager.end_step()
        assert request.missed == set(keys(0, 16)), "nothing moved for ten seconds"

    def test_hits_of_the_step_stay_while_promotions_take_slots(self) -> None:
        cascade = Cascade((4, 16), ManagerOptions(promotion_budget_slots=4))
        cascade.below_only(keys(10, 14))
        cascade.store(keys(0, 4))
        cascade.manager.flush_dirty(cascade.now_s + 1)
        first, second = Request(), Request()
        assert states(cascade, first, keys(0, 3)) == [HIT, HIT, HIT]
        states(cascade, second, keys(10, 14))
        cascade.manager.maintain()
        cascade.run_transfers()
        assert all(cascade.holds(0, block_hash) for block_hash in keys(0, 3))

    def test_hits_before_a_pending_block_are_held_until_the_load(self) -> None:
        cascade = Cascade((6, 32), ManagerOptions(promotion_budget_slots=5))
        cascade.below_only(keys(3, 5))
        cascade.store(keys(0, 3))
        cascade.manager.flush_dirty(cascade.now_s + 1)
        request = Request()
        assert states(cascade, request, keys(0, 5)) == [HIT, HIT, HIT, PENDING, PENDING]
        cascade.manager.end_step()
        cascade.store(keys(20, 26))  # a flood that would evict everything idle
        cascade.run_transfers()
        cascade.store(keys(30, 36))
        assert states(cascade, request, keys(0, 5)) == [HIT] * 5
        cascade.manager.prepare_load(keys(0, 5), request)
        cascade.manager.complete_load(set(keys(0, 5)))
        cascade.manager.finish_request(request)
        cascade.run_transfers()
        cascade.run_transfers()
        assert len(cascade.policies[0].coldest(6)) == 6, "nothing is pinned any more"

    def test_a_prefix_beyond_the_budget_is_promoted_as_far_as_it_goes(self) -> None:
        cascade = Cascade((16, 64), ManagerOptions(promotion_budget_slots=3))
        cascade.below_only(keys(0, 8))
        request = Request()
        assert states(cascade, request, keys(0, 5)) == [PENDING] * 5
        cascade.manager.end_step()
        assert states(cascade, request, keys(0, 5)) == [PENDING] * 3 + [MISS] * 2
        cascade.manager.end_step()
        cascade.run_transfers()
        assert states(cascade, request, keys(0, 4)) == [HIT] * 3 + [MISS]
        assert cascade.manager.counters.recomputed_blocks[Reason.BUDGET] == 2

    def test_what_is_held_and_what_is_on_its_way_share_the_budget(self) -> None:
        """Or waiting requests could pin the whole tier, and stores would wait for slow reads."""
        cascade = Cascade((8, 64), ManagerOptions(promotion_budget_slots=4), is_immediate=False)
        cascade.below_only(keys(0, 4))
        cascade.below_only(keys(4, 5))
        cascade.store(keys(20, 24))
        states(cascade, Request(), keys(0, 4))
        second = Request()
        assert states(cascade, second, [*keys(20, 24), key(4)]) == [HIT] * 4 + [PENDING]
        cascade.manager.end_step()
        demoters(cascade.manager)[0].demote_coldest(4)
        cascade.down[0].step()
        cascade.manager.end_step()
        assert cascade.store(keys(30, 34)) == keys(30, 34), "there is room while both wait"

    def test_who_must_ask_again_is_told_so_without_a_look(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        cascade = Cascade((16, 64), ManagerOptions(promotion_budget_slots=3))
        cascade.below_only(keys(0, 8))
        cascade.store(keys(20, 21))
        first, second = Request(), Request()
        states(cascade, first, keys(0, 3))
        assert states(cascade, second, keys(4, 7)) == [PENDING] * 3
        cascade.manager.end_step()
        for _ in range(2):
            states(cascade, first, keys(0, 3))
            with monkeypatch.context() as patch:
                patch.setattr(cascade.policies[1], "get", None)
                assert states(cascade, second, keys(4, 9)) == [RETRY] * 3 + [MISS] * 2
                assert states(cascade, second, keys(20, 21)) == [HIT], "what is here still counts"
            cascade.manager.end_step()
        cascade.run_transfers()
        states(cascade, first, keys(0, 3))
        cascade.manager.prepare_load(keys(0, 3), first)
        cascade.manager.complete_load(keys(0, 3))
        cascade.manager.end_step()
        assert states(cascade, second, keys(4, 8)) == [PENDING] * 3 + [MISS], "its turn has come"

    def test_requests_that_share_a_prefix_share_its_promotion(self) -> None:
        cascade = Cascade((16, 64))
        cascade.below_only(keys(0, 4))
        first, second = Request(), Request()
        states(cascade, first, keys(0, 4))
        assert states(cascade, second, keys(0, 4)) == [PENDING] * 4
        cascade.manager.end_step()
        cascade.run_transfers()
        assert cascade.manager.counters.links[0].promoted_blocks == 4
        assert states(cascade, first, keys(0, 4)) == [HIT] * 4
        assert states(cascade, second, keys(0, 4)) == [HIT] * 4

    def test_promotion_waits_for_dirty_blocks_to_be_written(self) -> None:
        cascade = Cascade((4, 32), ManagerOptions(promotion_budget_slots=4))
        cascade.below_only(keys(0, 4))
        cascade.store(keys(10, 14))  # the first tier is all dirty
        request = Request()
        assert states(cascade, request, keys(0, 4)) == [PENDING] * 4
        for _ in range(4):
            cascade.manager.end_step()
            cascade.run_transfers()
        assert states(cascade, request, keys(0, 4)) == [HIT] * 4
        assert cascade.manager.counters.dropped_dirty_blocks == 0

    def test_a_request_reads_only_from_media_it_allows(self) -> None:
        cascade = Cascade((8, 16))
        cascade.below_only(keys(0, 1))
        cascade.store(keys(1, 2))
        only_top = Request(allowed_media=frozenset({"M0"}))
        assert states(cascade, only_top, keys(0, 2)) == [MISS, HIT]
        only_below = Request(allowed_media=frozenset({"M1"}))
        assert states(cascade, only_below, keys(0, 2)) == [PENDING, MISS]

    def test_a_request_does_not_wait_for_what_it_may_not_read(self) -> None:
        cascade = Cascade((8, 16))
        cascade.below_only(keys(0, 1))
        nowhere = Request(allowed_media=frozenset())
        only_top = Request(allowed_media=frozenset({"M0"}))
        assert states(cascade, Request(), keys(0, 1)) == [PENDING]
        for _ in range(2):  # queued, then on its way
            assert states(cascade, nowhere, keys(0, 1)) == [MISS]
            assert states(cascade, only_top, keys(0, 1)) == [MISS]
            assert nowhere.claim is only_top.claim is None
            cascade.manager.end_step()
        cascade.run_transfers()
        assert states(cascade, nowhere, keys(0, 1)) == [MISS]
        assert states(cascade, only_top, keys(0, 1)) == [HIT]


class TestReset:
    def test_everything_before_is_unreachable(self) -> None:
        cascade = Cascade((8, 16))
        cascade.below_only(keys(0, 2))
        cascade.store(keys(2, 4))
        cascade.manager.reset_cache()
        assert states(cascade, Request(), keys(0, 4)) == [MISS] * 4
        assert cascade.store(keys(0, 4)) == keys(0, 4)

    def test_what_was_stored_before_is_not_announced_after_it(self) -> None:
        """The engine has announced by then that every block is gone."""
        cascade = Cascade((8, 16), ManagerOptions(with_events=True))
        cascade.below_only(keys(0, 2))
        cascade.store(keys(2, 4))
        cascade.manager.reset_cache()
        assert list(cascade.manager.take_events()) == []
        cascade.store(keys(4, 6))
        (event,) = cascade.manager.take_events()
        assert set(event.block_hashes) == set(keys(4, 6))

    def test_slots_that_workers_may_still_write_stay_out_of_use(self) -> None:
        cascade = Cascade((4, 16), ManagerOptions(steps_until_flushed=3))
        output = cascade.manager.prepare_store(keys(0, 3))
        assert output is not None
        cascade.manager.reset_cache()
        assert cascade.backends[0].get_num_free_blocks() == 1
        for _ in range(2):
            cascade.manager.end_step()
        assert cascade.backends[0].get_num_free_blocks() == 1
        cascade.manager.end_step()
        assert cascade.backends[0].get_num_free_blocks() == 4

    def test_an_engine_that_says_so_need_not_wait(self) -> None:
        cascade = Cascade((4, 16))
        cascade.store(keys(0, 2))
        cascade.manager.prepare_load(keys(0, 2))
        cascade.manager.reset_cache()
        assert cascade.backends[0].get_num_free_blocks() == 2
        cascade.manager.on_reset_flushed()
        assert cascade.backends[0].get_num_free_blocks() == 4

    def test_a_read_that_outlives_the_reset_is_no_hit(self) -> None:
        cascade = Cascade((8, 16))
        cascade.below_only(keys(0, 2))
        request = Request()
        states(cascade, request, keys(0, 2))
        cascade.manager.end_step()
        cascade.manager.reset_cache()
        assert cascade.backends[0].get_num_free_blocks() == 6, "its slots are still written"
        cascade.run_transfers()
        assert states(cascade, request, keys(0, 2)) == [MISS, MISS]
        assert cascade.backends[0].get_num_free_blocks() == 8
        assert cascade.backends[1].get_num_free_blocks() == 16


@pytest.mark.parametrize("polls", [1, 20])
def test_a_miss_counts_once_however_often_it_is_asked_for(polls: int) -> None:
    """While what comes before it is on its way, the engine asks at every step."""
    cascade = Cascade((8, 16))
    cascade.below_only(keys(0, 3))
    request = Request()
    for _ in range(polls):
        assert states(cascade, request, keys(0, 4)) == [PENDING] * 3 + [MISS]
        cascade.manager.end_step()
    cascade.run_transfers()
    assert states(cascade, request, keys(0, 4)) == [HIT] * 3 + [MISS]
    cascade.manager.end_step()
    assert cascade.manager.counters.lookup_misses == 1


def test_events_tell_what_lies_where() -> None:
    cascade = Cascade((2, 8), is_immediate=True)
    cascade.store(keys(0, 2))
    cascade.manager.flush_dirty(cascade.now_s + 1)
    cascade.store(keys(2, 3))
    first, *others = cascade.manager.take_events()
    assert (set(first.block_hashes), first.medium, first.removed) == (set(keys(0, 2)), "M0", False)
    assert others == [
        BlockEvent((key(0), key(1)), "M1", False, "M1"),
        BlockEvent((key(1),), "M0", True, "M0"),
        BlockEvent((key(2),), "M0", False, "M0"),
    ]
    assert cascade.manager.take_events() == []


def test_what_an_earlier_engine_left_is_told_in_batches() -> None:
    """Blocks that have left the tier meanwhile are left out, as are those that are stored anew."""
    count = MAX_EVENT_BLOCKS + 5
    cascade = Cascade((count,))
    found = keys(0, count)
    cascade.manager.adopt(found, adopted_by(cascade, found))
    stored = cascade.manager.prepare_store(keys(count, count + 2))
    assert stored is not None and len(stored.block_hashes_evicted) == 2
    assert cascade.manager.prepare_store(stored.block_hashes_evicted) is not None
    present = {h for h in found if cascade.holds(0, h)}
    told: set[BlockHash] = set()
    for _ in range(2):
        for event in cascade.manager.take_events():
            if not event.removed:
                assert len(event.block_hashes) <= MAX_EVENT_BLOCKS
                told |= set(event.block_hashes)
    assert told == present
    assert cascade.manager.take_events() == []


def adopted_by(cascade: Cascade, found: list[BlockHash]) -> list[BlockStatus]:
    """Slots that hold these blocks since an earlier engine."""
    statuses = cascade.backends[0].allocate_blocks(found)
    for status in statuses:
        status.ref_cnt = 0
    return statuses


@pytest.mark.parametrize("policy", ["arc", "lru"])
def test_storing_a_block_is_one_use_and_finding_it_again_another(policy: str) -> None:
    cascade = Cascade((8,), policy=policy)
    first, second = Request(), Request()
    for part in (keys(0, 2), keys(2, 4)):  # a prompt that was stored bit by bit
        output = cascade.manager.prepare_store(part, first)
        assert output is not None
        cascade.manager.complete_store(set(part))
    cascade.manager.finish_request(first)
    coldest = [block_hash for block_hash, _ in cascade.policies[0].coldest(8)]
    assert coldest == [key(3), key(2), key(1), key(0)], "tails leave before heads"
    cascade.store(keys(4, 6))
    cascade.manager.prepare_store(keys(0, 2), second)
    cascade.manager.finish_request(second)
    coldest = [block_hash for block_hash, _ in cascade.policies[0].coldest(8)]
    assert coldest[-2:] == [key(1), key(0)]
