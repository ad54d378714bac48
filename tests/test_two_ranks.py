"""Two data-parallel ranks with ZeRO-2 that stop at different steps: right tokens on each, no collective in generate.

Run as a program, this file is one rank.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WATCHDOG_S = 120
NEW = 12
STOPS = (2, 8)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What the two ranks wrote; a hang fails here instead of hanging the suite."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started = [_start(rank, port, folder) for rank in range(2)]
    deadline = time.monotonic() + WATCHDOG_S
    try:
        codes = [process.wait(max(1.0, deadline - time.monotonic())) for process in started]
    except subprocess.TimeoutExpired:
        pytest.fail(f"the ranks hung: {[(folder / f'{rank}.log').read_text()[-1500:] for rank in range(2)]}")
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [0, 0], [(folder / f"{rank}.log").read_text()[-3000:] for rank in range(2)]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def _start(rank, port, folder):
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HEPATCH_COMPILE_BACKEND": "eager",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    with (folder / f"{rank}.log").open("w") as log:
        command = [sys.executable, __file__, str(folder / f"{rank}.json")]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


class TestTwoRanks:
    def test_they_stop_at_different_steps(self, ranks):
        """The run is the one that was meant."""
        assert [rank["stopped_after"] for rank in ranks] == [stop + 1 for stop in STOPS]
        assert [rank["rank"] for rank in ranks] == [0, 1]

    def test_tokens_are_right_on_each(self, ranks):
        """Every generate of every rank equals its oracle's, before and after the optimizer steps, and is fused."""
        for rank in ranks:
            assert len(rank["calls"]) >= 4
            assert all(call["equal"] and call["path"] == "fused" for call in rank["calls"]), rank["calls"]

    def test_training_moved_the_tokens(self, ranks):
        """The steps between the rollouts, whose gradients are reduced over both ranks, were seen."""
        assert all(rank["moved"] for rank in ranks)
        assert ranks[0]["weights"] == ranks[1]["weights"]

    def test_generate_runs_no_collective(self, ranks):
        """No operation of the process group starts within a generate, and one rank generates while the other waits."""
        assert all(rank["control"] >= 1 for rank in ranks), "the counter must see a collective where there is one"
        assert [rank["collectives"] for rank in ranks] == [0, 0]
        assert [rank["alone"] for rank in ranks] == [0, 3]


def main(result):
    """Run one rank."""
    import torch
    import torch.distributed as dist

    from tests import engines
    from tests.agreement import Actor

    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    actor = Actor(engines.build_model("llama"), stage=2, lr=0.05, train_batch_size=4)
    prompt = engines.prompts(2, 8, (2, 0), seed=rank)
    calls, collectives = [], _Collectives()

    def generate(**more):
        expected = actor.expected(**prompt, max_new_tokens=NEW, **more)
        with collectives:
            got = actor.generated(**prompt, max_new_tokens=NEW, **more)
        last = actor.report.last_call
        calls.append({"equal": torch.equal(expected, got), "path": last.path, "reason": last.reason})
        return got

    free = generate()[:, 8:]
    # Each rank ends its whole batch at a step of its own, the first when the second still has steps to go.
    ends = [free[row, STOPS[rank]].item() for row in range(2)]
    first = generate(eos_token_id=ends)
    for cycle in range(2):
        actor.train(seed=10 * cycle + rank)
        last = generate()
    alone = 0
    if rank == 1:
        # The other rank waits in the all_reduce: a collective in here would meet it and hang, or fail.
        for _ in range(3):
            generate()
            alone += 1
    control = _Collectives()
    with control:
        dist.all_reduce(torch.ones(1))
    weights = float(sum(parameter.double().abs().sum() for parameter in actor.model.parameters()))
    written = {
        "rank": rank,
        "stopped_after": first.shape[1] - 8,
        "calls": calls,
        "moved": not torch.equal(free, last[:, 8:]),
        "weights": weights,
        "collectives": collectives.count,
        "control": control.count,
        "alone": alone,
    }
    Path(result).write_text(json.dumps(written))


class _Collectives:
    """Counts the operations of torch's process group that run within the context."""

    def __init__(self):
        self.count = 0
        self.profiler = None

    def __enter__(self):
        import torch

        self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
        self.profiler.__enter__()

    def __exit__(self, *error):
        self.profiler.__exit__(*error)
        self.count += sum(
            event.count for event in self.profiler.key_averages() if event.key.startswith(("c10d::", "gloo:"))
        )


if __name__ == "__main__":
    main(sys.argv[1])
