"""What the policy drafts, in a world whose clock, texts and drafters are made up."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from specengine.draft_policy import policy as module
from specengine.draft_policy.cost_model import CycleCosts
from specengine.draft_policy.draft import Draft
from specengine.draft_policy.policy import FIRST, PLAIN, DraftPolicy, Gain
from specengine.draft_trees.scored_tree import ScoredTree
from specengine.draft_trees.tree import DraftTree
from specengine.drafters.policy_file import learned_of, teach

ROWS = {1: 1.0, 2: 1.05, 4: 1.15, 8: 1.35, 1024: 52.15}  # 0.05 seconds per row


class World:
    """A text of ones alone. right: by how far a drafter's next token is one; seconds: of cycles by rows."""

    def __init__(self, requests=1, row=0.05):
        self.now, self.row = 0.0, row
        self.draw = random.Random(1)
        self.requests = [SimpleNamespace(tokens=[1]) for _ in range(requests)]

    def clock(self):
        return self.now

    def cycle(self, policy, draft):
        trees = draft.trees
        committed = [[1] * (tree.accepted([1] * 99) + 1) for tree in trees]
        self.now += 0.95 + self.row * sum(len(tree.tokens) for tree in trees)
        for request, tokens in zip(self.requests, committed, strict=True):
            request.tokens += tokens
        policy.observe(draft, committed)
        return sum(map(len, committed))

    def run(self, policy, cycles):
        """Returns tokens per second."""
        began = self.now
        tokens = sum(self.cycle(policy, policy.draft(self.requests)) for _ in range(cycles))
        return tokens / (self.now - began)


class FakeSource:
    """Drafts chains, each of whose tokens is right by a chance, of which it knows."""

    def __init__(self, world, chance, first=0.1, further=0.1, levels=6):
        self.world, self.chance, self.seconds, self.most = world, chance, (first, further), levels
        self.learned, self.asked, self.skipped, self.levels = [[0.0]], 0, 0, []

    def propose(self, requests, min_gain):
        self.asked += 1
        levels = 1
        while levels < self.most and len(requests) * self.chance ** (levels + 1) >= min_gain:
            levels += 1
        self.levels.append(levels)
        self.world.now += self.seconds[0] + self.seconds[1] * (levels - 1)
        return [self.tree(request.tokens[-1], levels) for request in requests]

    def tree(self, root, levels):
        tokens = [1 if self.world.draw.random() < self.chance else 2 for _ in range(levels)]
        return ScoredTree([root, *tokens], range(-1, levels), [1.0, *[self.chance] * levels])

    def ready(self, requests):
        return len(requests)

    def drafted_levels(self, trees):
        return max(tree.levels for tree in trees)

    def skip(self, requests):
        self.skipped += 1


class Kept:
    """Remembers as a file does: through JSON."""

    def __init__(self, text="{}"):
        self.text = text

    def save(self, policy):
        self.text = json.dumps(learned_of(policy))


def policy_of(world, *sources, most=15, memory=None, **options):
    save = memory.save if memory else None
    policy = DraftPolicy(sources, most, costs=CycleCosts(ROWS), clock=world.clock, save=save, **options)
    if memory:
        teach(policy, json.loads(memory.text))
    return policy


def share_drafting(requests=1, cycles=6000):
    world = World(requests)
    source = FakeSource(world, chance=0.02, first=0.5)
    policy = policy_of(world, source)
    speed = world.run(policy, cycles)
    assert source.asked + source.skipped == cycles and source.asked > FIRST
    return 0.5 * source.asked / world.now, speed * 1.0 / requests


@pytest.mark.parametrize("requests", [1, 6])
def test_a_source_that_never_pays_takes_a_hundredth_of_the_time(monkeypatch, requests):
    share, _ = share_drafting(requests)
    assert share < 0.013
    monkeypatch.setattr(module, "EXPLORED", 0.2)
    assert share_drafting(requests)[0] > 0.1


def test_batches_that_change_in_every_cycle_are_explored_no_more():
    world = World(2)
    source, both = FakeSource(world, chance=0.02, first=0.5), world.requests
    policy = policy_of(world, source)
    for cycle in range(4000):
        world.requests = both[: 1 + cycle % 2]
        world.cycle(policy, policy.draft(world.requests))
    assert 0.5 * source.asked / world.now < 0.013


def test_a_source_that_pays_is_asked_in_every_cycle_but_a_plain_one_in_a_hundred():
    world = World()
    source = FakeSource(world, chance=0.8)
    policy = policy_of(world, source)
    world.run(policy, 100)
    assert world.run(policy, 1000) > 1.8 and source.skipped <= 1 + 1100 // PLAIN  # plain decoding: 1


@pytest.mark.parametrize("good", [0, 1])
def test_of_two_sources_the_one_that_pays_is_used(good):
    world = World()
    sources = [FakeSource(world, chance=0.8 if number == good else 0.02, first=0.3) for number in range(2)]
    policy = policy_of(world, *sources)
    speed = world.run(policy, 2000)
    assert sources[good].skipped < 40 and sources[1 - good].asked < 150
    alone = World()
    assert speed > 0.95 * alone.run(policy_of(alone, FakeSource(alone, chance=0.8, first=0.3)), 2000)


def test_a_source_that_comes_to_pay_is_found_and_one_that_ceases_to_is_left():
    world = World()
    source = FakeSource(world, chance=0.02, first=0.3)
    policy = policy_of(world, source)
    world.run(policy, 500)
    source.chance = 0.8
    world.run(policy, 4000)
    asked = source.asked
    world.run(policy, 200)
    assert source.asked - asked > 190
    source.chance = 0.02
    world.run(policy, 200)
    asked = source.asked
    world.run(policy, 500)
    assert source.asked - asked < 30


def test_levels_are_drafted_as_deep_as_they_pay():
    deepest = {}
    for further in (0.01, 0.3):
        world = World()
        source = FakeSource(world, chance=0.7, further=further, levels=12)
        world.run(policy_of(world, source), 300)
        deepest[further] = source.levels[-1]
    assert deepest[0.01] >= 4 > deepest[0.3] >= 1


@pytest.mark.parametrize(("row", "nodes"), [(0.001, 3), (0.25, 2), (0.45, 1), (0.9, 0)])
def test_a_node_is_kept_exactly_where_its_chance_exceeds_the_price_of_its_row(row, nodes):
    world = World()
    source = FakeSource(world, chance=0.6, levels=3)  # reached with 0.6, 0.36 and 0.216
    source.propose = lambda requests, min_gain: [source.tree(1, 3)]
    costs = CycleCosts({1: 1.0, 1024: 1 + 1023 * row})  # a plain cycle brings one token in one second
    (tree,) = DraftPolicy([source], 15, costs=costs, clock=world.clock).draft(world.requests).trees
    assert len(tree.tokens) - 1 == nodes


def test_a_policy_that_does_not_adapt_asks_everybody_for_everything_and_keeps_the_likeliest():
    world = World()
    sources = [FakeSource(world, chance=chance, first=9.0) for chance in (0.001, 0.002)]
    policy = policy_of(world, *sources, adaptive=False, most=4)
    for _ in range(50):
        draft = policy.draft(world.requests)
        assert [len(tree.tokens) for tree in draft.trees] == [5]
        world.cycle(policy, draft)
    assert [source.asked for source in sources] == [50, 50] and sources[0].levels == [6] * 50
    assert not policy.costs.known


def test_only_its_own_drafts_teach_a_policy():
    world = World()
    policy = policy_of(world, FakeSource(world, chance=0.5))
    world.cycle(policy, Draft(world.requests, [DraftTree([1], [-1])]))
    assert not policy.costs.known and not policy._rates
    world.cycle(policy, policy.draft(world.requests))
    assert policy.costs.known and policy._rates


@pytest.mark.parametrize(("chance", "used"), [(0.02, False), (0.9, True)])
def test_a_drafter_of_all_or_nothing_drafts_where_it_pays(chance, used):
    world, drafted = World(), []
    policy = policy_of(world)

    def grow(drafts):
        drafted.append(drafts)
        if not drafts:
            return [DraftTree([1], [-1])]
        world.now += 0.3
        return [DraftTree([1, 1 if world.draw.random() < chance else 2], [-1, 0])]

    for _ in range(3000):
        world.cycle(policy, policy.draft_whole(world.requests, grow))
    assert drafted[:FIRST] == [True] * FIRST
    assert (sum(drafted) >= 3000 * (1 - 1 / PLAIN) - 1) if used else (FIRST < sum(drafted) < 140)
    assert policy.draft_whole([], grow).trees == []


@pytest.mark.parametrize("chance", [0.02, 0.9])
def test_a_new_process_drafts_as_the_one_that_saved(chance):
    world, kept = World(), Kept()
    policy = policy_of(world, FakeSource(world, chance=chance, first=0.4), memory=kept)
    world.run(policy, 256)
    source = FakeSource(world, chance=chance, first=0.4)
    source.learned = [[7.0]]
    again = policy_of(world, source, memory=kept)
    assert source.learned == [[0.0]]
    learned, saved = learned_of(again), json.loads(kept.text)
    (gain,) = again.gains.values()
    assert gain.uses == FIRST  # other texts may teach otherwise soon
    assert all(json.loads(json.dumps(learned[name])) == saved[name] for name in ("costs", "chances"))
    world.run(again, 50)
    assert (source.skipped == 0) if chance > 0.5 else (source.asked < 4)
    fresh = FakeSource(world, chance=chance, first=0.4)
    world.run(policy_of(world, fresh), 50)
    assert fresh.asked >= FIRST


def test_it_saves_rarer_and_rarer():
    world, saved = World(), []
    policy = DraftPolicy(
        [FakeSource(world, chance=0.5)], 15, clock=world.clock, save=lambda _: saved.append(world.cycles)
    )
    for world.cycles in range(1, 301):
        world.run(policy, 1)
    assert saved == [16, 32, 64, 128, 256]


@pytest.mark.parametrize(
    "damage",
    [
        {"costs": []},
        {"costs": 3},
        {"costs": [[1, 1, [[1, "x"]]]]},
        {"gains": [[0]]},
        {"gains": [[0, 1, *[None] * 5]]},
        {"gains": [[0, 1, *[0.5] * 9]]},
        {"chances": [["x"]]},
        {"chances": None},
        {"chances": [[1.0], [2.0, 3.0]]},
    ],
)
def test_a_damaged_file_teaches_nothing_and_stops_nothing(damage):
    world = World()
    kept = Kept(json.dumps({"costs": [], "gains": [], "chances": []} | damage))
    for text in (kept.text, "{}"):
        kept.text = text
        source = FakeSource(world, chance=0.8)
        policy = policy_of(world, source, memory=kept)
        assert not policy.costs.known and not policy.gains and source.learned == [[0.0]]
        world.run(policy, 64)
        assert json.loads(kept.text)["costs"]


def test_a_larger_batch_begins_with_what_a_smaller_one_taught():
    world = World()
    source = FakeSource(world, chance=0.02, first=0.5)
    policy = policy_of(world, source)
    world.run(policy, 300)
    world.requests = [SimpleNamespace(tokens=[1]) for _ in range(4)]
    asked = source.asked
    world.run(policy, 100)
    assert source.asked - asked < 4
    (tree, *_) = policy.draft(world.requests).trees
    assert len(tree.tokens) == 1


def test_what_two_sources_draft_is_joined_and_each_source_is_named():
    world = World()
    one, two = FakeSource(world, 0.9), FakeSource(world, 0.5)
    one.propose = lambda requests, min_gain: [ScoredTree([1, 2], [-1, 0], [1.0, 0.9])]
    two.propose = lambda requests, min_gain: [ScoredTree([1, 2, 3], [-1, 0, 0], [1.0, 0.3, 0.5])]
    draft = policy_of(world, one, two).draft(world.requests)
    assert draft.trees == [DraftTree([1, 2, 3], [-1, 0, 0])] and [step.source for step in draft.steps] == [0, 1]
    two.propose = lambda requests, min_gain: [ScoredTree.root(1)]
    draft = policy_of(world, one, two).draft(world.requests)
    assert draft.trees == [DraftTree([1, 2], [-1, 0])]


def test_plain_cycles_are_measured_now_and_then_so_that_dear_rows_are_noticed(monkeypatch):
    def speed():
        """Of plain decoding, where a second row takes two thirds more."""
        world = World(row=2.0)
        policy = policy_of(world, FakeSource(world, chance=0.5))
        world.run(policy, 1000)
        return world.run(policy, 2000) * (0.95 + 2.0)

    assert speed() > 0.97
    monkeypatch.setattr(module, "PLAIN", 10**9)
    assert speed() < 0.93


class Reader(FakeSource):
    """Drafts for the requests that were read."""

    def ready(self, requests):
        return sum(request.read for request in requests)

    def propose(self, requests, min_gain):
        trees = super().propose(requests, min_gain)
        pairs = zip(requests, trees, strict=True)
        return [tree if request.read else ScoredTree.root(request.tokens[-1]) for request, tree in pairs]


def serve(world, policy, cycles, batch=4, length=60):
    """Runs cycles; a request of 60 tokens follows each that ends. Returns the share of requests that were read."""
    reads = []
    for _ in range(cycles):
        world.requests = [request for request in world.requests if len(request.tokens) < 20 + length]
        while len(world.requests) < batch:
            reads.append(policy.reads(0, 20, length, batch))
            world.requests.append(SimpleNamespace(tokens=[1] * 20, read=reads[-1]))
            if reads[-1]:
                policy.charge(0, 20, 0.5)
                world.now += 0.5
        world.cycle(policy, policy.draft(world.requests))
    return sum(reads) / max(1, len(reads))


def test_requests_are_read_where_drafts_pay_and_now_and_then_elsewhere():
    world = World(0)
    source = Reader(world, chance=0.02, first=0.5)
    policy = policy_of(world, source)
    serve(world, policy, 200)
    asked = source.asked
    assert 0 < serve(world, policy, 6000) < 0.5
    assert 0 < 0.5 * (source.asked - asked) / 6200 < 0.03
    source.chance = 0.9
    serve(world, policy, 6000)
    assert serve(world, policy, 200) > 0.9
    source.chance = 0.02
    serve(world, policy, 600)
    assert serve(world, policy, 1000) < 0.5


def test_no_prompt_is_read_for_an_answer_too_short_to_pay_for_it():
    world = World(0)
    policy = policy_of(world, Reader(world, chance=0.9))
    serve(world, policy, 1000)
    policy.charge(0, 20, 0.5)
    asked = [policy.reads(0, 20, answer, 4) for answer in (2, 60) for _ in range(20)]
    assert sum(asked[:20]) <= 1 and all(asked[20:])


def test_a_prompt_is_read_at_the_price_of_plain_decoding():
    world = World()
    world.requests = [SimpleNamespace(tokens=[1], read=True)]
    policy = policy_of(world, Reader(world, chance=0.9))
    policy.gains[0, 1] = Gain(uses=FIRST, tokens=0.5, nodes=1.0, levels=1.0, first=0.3)
    policy.charge(0, 20, 1.0)
    policy._rates[1] = (3.0, 1.5)  # the text before was copied
    assert policy.reads(0, 20, 60, 1)
    policy.draft(world.requests)
    assert policy.sources[0].asked == 0


@pytest.mark.parametrize("tokens", [-1.0, -1.5])
def test_no_prompt_is_read_for_a_source_that_takes_tokens_away(tokens):
    world = World()
    policy = policy_of(world, Reader(world, chance=0.9))
    policy.gains[0, 1] = Gain(uses=FIRST, tokens=tokens, nodes=1.0, levels=1.0, first=0.3)
    policy.charge(0, 20, 1.0)
    assert not policy.reads(0, 20, 60, 1)


def test_who_is_read_ends_the_rest_of_those_who_were_not():
    world = World()
    reader = Reader(world, chance=0.9)
    policy = policy_of(world, reader)
    for read in (True, False, True):
        world.requests = [SimpleNamespace(tokens=[1], read=read)]
        before = reader.asked
        assert not read or policy.reads(0, 1, 60, 1)
        world.run(policy, 8)
    assert reader.asked - before >= 7  # and not a rest of 16 cycles


@pytest.mark.parametrize("requests, tokens, pays", [(1, 0.16, True), (2, 0.2, False), (2, 0.22, True)])
def test_a_token_counts_less_in_a_batch(requests, tokens, pays):
    world = World(requests)
    source = FakeSource(world, chance=0.9)
    policy = policy_of(world, source)
    policy.gains[0, requests.bit_length()] = Gain(uses=FIRST, tokens=tokens, nodes=1.0, levels=1.0, first=0.1)
    policy.draft(world.requests)
    assert source.asked == pays  # at batch 2 a token at its full price would pay from 0.19 on


@pytest.mark.parametrize("levels, pays", [(1, True), (3, False)])
def test_every_level_of_a_draft_has_to_pay(levels, pays):
    world = World()
    source = FakeSource(world, chance=0.9)
    policy = policy_of(world, source)
    policy.gains[0, 1] = Gain(uses=FIRST, tokens=0.3, nodes=1.0, levels=levels, first=0.1, further=0.1)
    policy.draft(world.requests)
    assert source.asked == pays  # a row takes 0.05 s; levels take 0.1 or 0.3 s for 0.3 tokens, which are worth 0.3 s


@pytest.mark.parametrize("sources", [1, 2])
def test_drafting_goes_on_after_requests_that_nobody_read(sources):
    world, unread = World(), 300
    readers = [Reader(world, chance=0.9) for _ in range(sources)]
    policy = policy_of(world, *readers)
    for read, cycles in ((True, 20), (False, unread), (True, 200)):
        world.requests = [SimpleNamespace(tokens=[1], read=read)]
        before = readers[0].asked
        world.run(policy, cycles)
    assert readers[0].asked - before > 150


def test_a_batch_of_any_size_has_a_price():
    costs = CycleCosts(ROWS)
    curve = costs.curve(512, 100)
    assert curve(512 * 63) == pytest.approx(2 * curve(512 * 31), rel=0.01)
    costs.observe(curve, 100, 512 * 63, 3e3)
    assert costs.curve(512, 100)(512 * 63) > 0


def test_seconds_are_learned_for_the_nodes_that_are_verified():
    """A grammar cuts drafted nodes and adds forced ones."""
    world, sizes = World(), (12, 3)
    policy = DraftPolicy([FakeSource(world, 0.9)], 15, clock=world.clock)
    for cycle in range(400):
        draft, size = policy.draft(world.requests), sizes[cycle % 2]
        world.cycle(policy, replace(draft, trees=[DraftTree([1] * (size + 1), range(-1, size))]))
    curve = policy.costs.curve(1, len(world.requests[0].tokens))
    assert curve(12) / curve(3) == pytest.approx((0.95 + 13 * 0.05) / (0.95 + 4 * 0.05), rel=0.1)
