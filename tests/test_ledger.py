"""The position ledger against a model of the kernels' counter, over random interleavings of what moves it."""

from __future__ import annotations

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hepatch.ledger import LedgerError, PositionLedger

LAYERS = 3


class Kernels:
    """The counter as DeepSpeed's kernels have it: a prompt sets it, the last layer moves it, nothing else does."""

    def __init__(self) -> None:
        self.counter = 1
        self.written: list[int] = []

    def prompt(self, tokens: int) -> None:
        self.counter = tokens + 1

    def put(self, tokens: int) -> None:
        self.counter = tokens

    def layer(self, index: int) -> int:
        """Runs a layer on the host; what it takes the length to be."""
        seen = self.counter
        if index == LAYERS - 1:
            self.written.append(seen)
            self.counter += 1
        return seen


def step(ledger: PositionLedger, kernels: Kernels, tokens: int) -> None:
    """A step that runs host code."""
    ledger.begin(tokens, replay=False)
    for index in range(LAYERS):
        ledger.ran(index, kernels.layer(index))
    ledger.end(replay=False)


class Interleavings(RuleBasedStateMachine):
    """Prompts, steps on the host, replays and failures in any order: what is written is always where it belongs."""

    @initialize()
    def start(self) -> None:
        self.kernels = Kernels()
        self.ledger = PositionLedger(self.kernels, LAYERS)
        self.length: int | None = None

    @rule(tokens=strategies.integers(2, 50))
    def prompt(self, tokens: int) -> None:
        self.kernels.prompt(tokens)
        self.ledger.prompt(tokens)
        self.length = tokens

    @precondition(lambda self: self.length is not None)
    @rule()
    def host_step(self) -> None:
        """An eager step, a warm-up or a recording: all run host code once."""
        self.length += 1
        step(self.ledger, self.kernels, self.length)
        assert self.kernels.written[-1] == self.length

    @precondition(lambda self: self.length is not None)
    @rule(count=strategies.integers(1, 30))
    def replays(self, count: int) -> None:
        for _ in range(count):
            self.length += 1
            before = self.kernels.counter
            self.ledger.begin(self.length, replay=True)
            self.ledger.end(replay=True)
            assert self.kernels.counter == before, "a replay moves nothing"

    @precondition(lambda self: self.length is not None)
    @rule(layers=strategies.integers(0, LAYERS))
    def host_code_where_a_replay_was_expected(self, layers: int) -> None:
        self.length += 1
        self.ledger.begin(self.length, replay=True)
        for index in range(layers):
            self.ledger.ran(index, self.kernels.layer(index))
        if layers:
            with pytest.raises(LedgerError):
                self.ledger.end(replay=True)
            self.length = None
        else:
            self.ledger.end(replay=True)

    @precondition(lambda self: self.length is not None)
    @rule(layers=strategies.integers(0, LAYERS - 1))
    def failure_within_a_step(self, layers: int) -> None:
        """Some layers ran, then something raised; the ledger is told by its owner."""
        self.ledger.begin(self.length + 1, replay=False)
        for index in range(layers):
            self.ledger.ran(index, self.kernels.layer(index))
        self.ledger.lose()
        self.length = None

    @precondition(lambda self: self.length is not None)
    @rule(layers=strategies.integers(0, LAYERS - 1))
    def step_that_skips_layers(self, layers: int) -> None:
        self.ledger.begin(self.length + 1, replay=False)
        for index in range(layers):
            self.ledger.ran(index, self.kernels.layer(index))
        with pytest.raises(LedgerError):
            self.ledger.end(replay=False)
        self.length = None

    @precondition(lambda self: self.length is not None)
    @rule(moved=strategies.integers(1, 40))
    def counter_moved_behind_its_back(self, moved: int) -> None:
        """Somebody else's forward: the layers see another number than the ledger predicts."""
        self.ledger.begin(self.length + 1, replay=False)
        self.kernels.counter += moved
        for index in range(LAYERS):
            self.ledger.ran(index, self.kernels.layer(index))
        with pytest.raises(LedgerError):
            self.ledger.end(replay=False)
        self.length = None

    @precondition(lambda self: self.length is None)
    @rule(replay=strategies.booleans())
    def nothing_runs_on_a_doubtful_counter(self, replay: bool) -> None:
        with pytest.raises(LedgerError):
            self.ledger.begin(9, replay=replay)

    @invariant()
    def knows_or_says_that_it_does_not(self) -> None:
        if self.length is None:
            assert self.ledger.counter is None
        else:
            assert self.ledger.counter == self.kernels.counter


Interleavings.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase


def test_the_counter_is_put_only_where_it_is_wrong() -> None:
    """Putting it costs a capture on a GPU: once after replays, never between steps that follow each other."""
    kernels = Kernels()
    ledger = PositionLedger(kernels, LAYERS)
    ledger.prompt(4)
    kernels.prompt(4)

    step(ledger, kernels, 5)
    step(ledger, kernels, 6)
    assert ledger.moves == 0
    for tokens in range(7, 40):
        ledger.begin(tokens, replay=True)
        ledger.end(replay=True)
    step(ledger, kernels, 40)
    step(ledger, kernels, 41)

    assert ledger.moves == 1
    assert kernels.written == [5, 6, 40, 41]


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ([], "no host code at all"),
        ([(0, 5), (1, 5)], "container 0 at 5 tokens, container 1 at 5 tokens"),
        ([(0, 9), (1, 9), (2, 9)], "container 2 at 9 tokens"),
        ([(0, 5), (1, 5), (2, 5), (0, 5), (1, 5)], "and 2 more"),
    ],
    ids=["none", "too few", "another length", "too many"],
)
def test_a_wrong_step_is_told_in_one_line(seen: list[tuple[int, int]], words: str) -> None:
    ledger = PositionLedger(Kernels(), LAYERS)
    ledger.prompt(4)
    ledger.begin(5, replay=False)
    for layer, tokens in seen:
        ledger.ran(layer, tokens)

    with pytest.raises(LedgerError, match=words):
        ledger.end(replay=False)
