"""One run of the benchmark: starts the systems, lets them take turns, and gathers what they answer.

A system that fails, is refused or takes too long is a row that says how; the others go on without it. Every phase
looks at the clock, so that a run ends near its limit and holds what it has measured by then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import Any

from hepatch.bench import rows as tables
from hepatch.bench.client import Place, Worker, WorkerError, remaining, without_folders
from hepatch.bench.spread import machine
from hepatch.bench.systems import OURS, SYSTEMS, Kernels, Unpatched
from hepatch.bench.workload import Workload, end_tokens, live_tokens

Step = Callable[[str], AbstractContextManager[None]]
"""Called with a title, gives a context manager around the work that has it."""

MOST_TOKENS_PROFILED = 256
"""Longer calls have more kernels than a profile of them is worth waiting for."""

FEWEST_ROUNDS = 1
_ROUNDS_SHARE, _ROUNDS_SHARE_WITH_TRAINING = 0.85, 0.5
_BUILD_S, _BUILD_S_WITH_OP = 240.0, 560.0
_USUAL_BUILD_S = 60.0
_LONGEST_ERROR = 4000


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        systems: keys of `SYSTEMS`, in the order of the table.
        rounds: timed calls of each system and batch.
        iterations: RLHF-shaped iterations of each system; 0: no training.
        kernels: whether kernels per step are counted (on a GPU).
        seconds: the whole run's limit; rounds, then iterations are cut short to keep it.
        train_in_turns: systems whose iterations take turns as well. Their optimizers' memory is held at once: on a
            device that is nearly full, the allocator's own work is what a step measures.
        train_steps: with `train_in_turns`, further training steps of each system, each after a short generate:
            enough of them to compare steps that differ more from one to the next than systems do.
    """

    systems: tuple[str, ...] = tuple(SYSTEMS)
    rounds: int = 5
    iterations: int = 2
    kernels: bool = True
    seconds: float = 230.0
    train_in_turns: tuple[str, ...] = ()
    train_steps: int = 0

    def steps(self, batches: int) -> int:
        """How many steps a progress bar has to count."""
        return 2 + len(self.systems) * 3 + batches * (2 + self.rounds)


@dataclass
class SystemRun:
    """What is known of one system.

    Attributes:
        worker: its process; None once it has failed or ended.
        failure: why it has no (more) rows, in one line.
        facts: what does not depend on the batch.
        calls: by batch, what was measured.
    """

    worker: Worker | None = None
    failure: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)


class Run:
    """One run.

    Args:
        workload: what is run.
        plan: how much of it.
        place: where.
        step: shows what is going on.
        command: as the user gave it, for the result.
    """

    def __init__(self, workload: Workload, plan: Plan, place: Place, step: Step, command: str) -> None:
        self.workload, self.plan, self.place, self.step = workload, plan, place, step
        self.systems = {name: SystemRun() for name in plan.systems}
        self.deadline = time.monotonic() + plan.seconds
        self.result: dict[str, Any] = {
            "command": command,
            "machine": machine(place.device),
            "workload": {**asdict(workload), "model": workload.model_name, "decoding": "greedy"},
            "versions": {},
            "reference": None,
            "interrupted": False,
            "errors": [],
        }

    @property
    def live(self) -> dict[str, Worker]:
        """The workers that have not failed."""
        return {name: system.worker for name, system in self.systems.items() if system.worker is not None}

    def measure(self) -> dict[str, Any]:
        """Everything, in order; the workers are ended whatever happens.

        An interrupt ends it early: what was measured by then is the result, and `interrupted` says so.
        """
        try:
            with self.step(f"start {len(self.systems)} processes"):
                self._build()
            with self.step("copy rate of the device"):
                self._copy_rate()
            # The largest first: DeepSpeed's containers size their workspace once, by the first batch that comes.
            for index, rows in enumerate(sorted(self.workload.batches, reverse=True)):
                self._batch(index, rows)
            self._kernels()
            self._iterations()
        except KeyboardInterrupt:
            self.result["interrupted"] = True
        finally:
            for worker in self.live.values():
                worker.stop(patience_s=1.0 if self.result["interrupted"] else 5.0)
        return tables.finish(self.result, self.workload, self.systems)

    def _ask(self, name: str, command: str, *arguments: Any) -> Any:
        """A command's answer; None where the system fails at it, which ends the system."""
        worker = self.systems[name].worker
        if worker is None:
            return None
        try:
            return worker.ask(command, *arguments)
        except WorkerError as error:
            self._fail(name, command, error)
            return None

    def _fail(self, name: str, command: str, error: WorkerError) -> None:
        system = self.systems[name]
        system.failure = without_folders(error.line)
        self.result["errors"].append(
            {"system": name, "during": command, "error": without_folders(str(error))[-_LONGEST_ERROR:]}
        )
        worker, system.worker = system.worker, None
        if worker is not None:
            worker.stop(patience_s=1.0)

    def _build(self) -> None:
        """All processes build at once."""
        started = time.monotonic()
        for name, system in self.systems.items():
            system.worker = Worker(name, self.workload, self.place)
        for worker in self.live.values():
            worker.send("build")
        weights: set[float] = set()
        for name, worker in self.live.items():
            try:
                with_op = self.place.build_op or name == Kernels.name
                built = worker.receive(max(self.place.timeout, _BUILD_S_WITH_OP if with_op else _BUILD_S))
            except WorkerError as error:
                self._fail(name, "build", error)
                continue
            weights.add(built.pop("weights"))
            self.result["versions"] |= built.pop("versions")
            self.systems[name].facts |= built
        self.result["weights_equal"] = len(weights) == 1
        # nvcc's minutes are no part of the run's limit.
        self.deadline += max(0.0, time.monotonic() - started - _USUAL_BUILD_S)

    def _copy_rate(self) -> None:
        for name in list(self.live):
            rate = self._ask(name, "copy_rate")
            if rate is not None:
                self.result["copy_gb_per_s"] = round(rate, 2)
                return

    def _batch(self, index: int, rows: int) -> None:
        if index > 0 and remaining(self.deadline) <= 0:
            return
        chose, ends = self._choose_ends(index, rows) if self.workload.early_ends else (None, ())
        answers: dict[str, list[list[int]]] = {}
        for name in self.systems:
            with self._first_step(index, name):
                self._ask(name, "use", rows, ends)
                first = index == 0 and name != chose
                if first:
                    self.systems[name].facts |= self._ask(name, "first_call", False) or {}
                # hepatch's first call records, and what is compared is a replay; of the others any call will do.
                answer = self._ask(name, "tokens" if name in OURS or not first else "latest_tokens")
                if answer is not None:
                    answers[name] = answer
                # The prompt alone is timed as well, and a system may compile or record for it.
                self._ask(name, "generate", 1)
        with self.step(f"batch {rows}: compare tokens"):
            self._compare(rows, answers, ends)
        self._rounds(rows, (len(self.workload.batches) - index))
        with self.step(f"batch {rows}: memory"):
            for name in list(self.live):
                self._keep(name, rows, self._ask(name, "memory"))
                self._keep(name, rows, self._ask(name, "state"))

    def _first_step(self, index: int, name: str) -> AbstractContextManager[None]:
        if index == 0:
            return self.step(f"{SYSTEMS[name].title}: first calls")
        from contextlib import nullcontext

        return nullcontext()

    def _choose_ends(self, index: int, rows: int) -> tuple[str | None, tuple[int, ...]]:
        """The first system that has an answer, and end tokens out of it.

        The first call of that system is a longer one than those that are timed, so nothing is said of it.
        """
        for name in list(self.live):
            self._ask(name, "use", rows)
            if index == 0:
                self._ask(name, "first_call", False)
            answer = self._ask(name, "tokens" if index else "latest_tokens")
            if answer is not None:
                return name, end_tokens(self.workload, self._new(answer))
        return None, ()

    def _new(self, answer: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        return [row[self.workload.prompt_tokens :] for row in answer]

    def _compare(self, rows: int, answers: dict[str, list[list[int]]], ends: tuple[int, ...]) -> None:
        """Every answer against the reference's: the unpatched engine's, or that of the first system not hepatch's."""
        others = [name for name in answers if name not in OURS]
        reference = Unpatched.name if Unpatched.name in answers else next(iter(others or answers), None)
        if reference is None:
            return
        self.result["reference"] = self.result["reference"] or reference
        expected = self._new(answers[reference])
        lengths = sorted(live_tokens([row], ends) for row in expected)
        self.result.setdefault("answer_lengths", {})[rows] = [lengths[0], lengths[len(lengths) // 2], lengths[-1]]
        for name, answer in answers.items():
            new = self._new(answer)
            pairs = [
                (mine[step] if step < len(mine) else None, its[step] if step < len(its) else None)
                for mine, its in zip(new, expected, strict=True)
                for step in range(max(len(mine), len(its)))
            ]
            found: dict[str, Any] = {
                "columns": len(new[0]),
                "live_tokens": live_tokens(new, ends),
                "tokens_equal": sum(mine == its for mine, its in pairs),
                "tokens_total": len(pairs),
            }
            if name in OURS and found["tokens_equal"] < found["tokens_total"]:
                verdict = self._ask(reference, "compare", answers[reference], answer)
                found["all_differences_are_ties"] = None if verdict is None else verdict["all_differences_are_ties"]
                found["first_differences"] = [] if verdict is None else verdict["first_differences"]
            self._keep(name, rows, found)

    def _keep(self, name: str, rows: int, found: dict[str, Any] | None) -> None:
        if found is not None:
            self.systems[name].calls.setdefault(rows, {}).update(found)

    def _rounds(self, rows: int, batches_left: int) -> None:
        """The timed calls: every system once a round, another one first each time.

        A system of which one more call would take longer than what is left keeps the repeats that it has.
        """
        trains = self.workload.trains and self.plan.iterations
        share = _ROUNDS_SHARE_WITH_TRAINING if trains else _ROUNDS_SHARE
        until = time.monotonic() + share * remaining(self.deadline) / batches_left
        for name in self.live:
            self._keep(name, rows, {"generate_times_ms": [], "prefill_times_ms": []})
        for turn in range(self.plan.rounds):
            with self.step(f"batch {rows}: round {turn + 1} of {self.plan.rounds}"):
                for name in self._in_turn(turn):
                    measured = self.systems[name].calls[rows]
                    if turn >= FEWEST_ROUNDS and remaining(until) <= measured["generate_times_ms"][-1] / 1e3:
                        continue
                    whole, prompt = self._ask(name, "generate"), self._ask(name, "generate", 1)
                    if whole is not None and prompt is not None:
                        measured["generate_times_ms"].append(whole)
                        measured["prefill_times_ms"].append(prompt)

    def _kernels(self) -> None:
        """Kernels of a step, at the batch that is trained."""
        wanted = (
            self.plan.kernels
            and self.place.device != "cpu"
            and self.workload.new_tokens <= MOST_TOKENS_PROFILED
            and not self.workload.early_ends
        )
        rows = self.workload.trained_rows
        for name in self.systems:
            with self.step(f"{SYSTEMS[name].title}: kernels of a step"):
                if wanted and remaining(self.deadline) > 0 and rows in self.workload.batches:
                    self._ask(name, "use", rows)
                    self._ask(name, "generate")
                    self._keep(name, rows, {"kernels_per_step": self._ask(name, "kernels")})

    def _iterations(self) -> None:
        """RLHF-shaped iterations; a process ends after its own, because only then is its optimizer's memory free."""
        rows = self.workload.trained_rows
        together = [name for name in self.plan.train_in_turns if name in self.systems]
        wanted = self.workload.trains and self.plan.iterations > 0
        # First those whose comparison is asked for: the time may not be enough for all.
        for name in sorted(self.systems.keys() - together, key=[Unpatched.name, *OURS, *self.systems].index):
            with self.step(f"{SYSTEMS[name].title}: RLHF iterations"):
                if wanted and remaining(self.deadline) > 0:
                    self._ask(name, "use", rows)
                    self._keep(name, rows, {"iterations": self._ask(name, "iterations", self.plan.iterations)})
                self._end(name)
        if wanted and together:
            self._iterations_in_turns(rows)
        for name in together:
            self._end(name)

    def _end(self, name: str) -> None:
        worker, self.systems[name].worker = self.systems[name].worker, None
        if worker is not None:
            worker.stop(patience_s=5.0)

    def _iterations_in_turns(self, rows: int) -> None:
        """One unmeasured iteration of every system that is left, then measured ones, then training steps alone."""
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in self.live}
        steps: dict[str, list[float]] = {name: [] for name in self.live}
        for name in runs:
            self._ask(name, "use", rows)
            self._ask(name, "iterations", 0)
        for turn in range(self.plan.iterations):
            with self.step(f"RLHF iterations, round {turn + 1} of {self.plan.iterations}"):
                for name in self._in_turn(turn):
                    runs[name] += self._ask(name, "iterations", 1, False) or []
        with self.step(f"{self.plan.train_steps} further training steps of each"):
            for turn in range(self.plan.train_steps):
                for name in self._in_turn(turn):
                    elapsed_ms = self._ask(name, "training")
                    steps[name] += [] if elapsed_ms is None else [elapsed_ms]
        for name, measured in runs.items():
            if measured:
                self._keep(name, rows, {"iterations": measured, "train_steps_ms": steps[name]})

    def _in_turn(self, turn: int) -> list[str]:
        """The systems that have not failed, another one first each turn."""
        return in_turn(list(self.live), turn)


def in_turn(names: list[str], turn: int) -> list[str]:
    """The names, another one first each turn, so that none always follows the same."""
    first = turn % len(names) if names else 0
    return names[first:] + names[:first]
