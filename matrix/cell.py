"""Runs one cell: `python -m matrix.cell DEEPSPEED TRANSFORMERS [--torch VERSION] [--check]`.

Three sides, each in processes of its own, answer for each model: transformers alone (the oracle), DeepSpeed as it
comes, and DeepSpeed with hepatch. Then the patch suite and the contract tests run against the same releases. What came
out is written to `matrix/results.json`; with `--check` it is compared with what is written there instead.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matrix import hosts, results, verdict
from matrix.pairs import PAIRS, TORCH, Pair
from tests import forked

SECONDS_PER_SUITE = 900
# Of the orders of events the two that differ most; the others differ in hepatch, not in its hosts.
_ORDERS = (
    "test_order[hepatch first]",
    "test_order[engine first]",
    "test_missing_target_leaves_the_real_hosts_untouched",
    "test_environment_gives_stock_back",
)
SUITES = {
    "patches": [
        "tests/test_patching.py",
        "tests/test_targets.py",
        *(f"tests/test_orders_real.py::{test}" for test in _ORDERS),
    ],
    "contracts": ["tests/contracts"],
}
"""Test files that each cell runs against its releases, by what they are about."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One model as each side meets it.

    Attributes:
        family: a key of `tests.engines.FAMILIES`.
        stage: ZeRO stage.
        backend: the `torch.compile` backend of regions. Inductor takes half a minute, so one model is enough.
    """

    family: str
    stage: int = 0
    backend: str = "eager"

    @property
    def name(self) -> str:
        """The case's name in the results."""
        return f"{self.family}, ZeRO-{self.stage}" if self.stage else self.family


CASES = (
    Case("opt"),
    Case("llama", backend="inductor"),
    Case("gpt_neox"),
    Case("bloom"),
    Case("qwen2"),
    Case("llama", stage=2),
    Case("qwen2", stage=3),
)

_SHARED = ("torch", "transformers", "transformers.generation.utils", "tests.engines", "matrix.rollouts")
# The compiler takes seconds to load, which every child would pay.
_COMPILER = ("torch._dynamo", "torch._inductor.compile_fx", "torch._inductor.cudagraph_trees")


def run(pair: Pair, suites: Mapping[str, list[str]]) -> dict[str, Any]:
    """One cell's record, as `matrix.results` keeps it.

    Args:
        pair: the releases.
        suites: test files to run against them, as in `SUITES`.

    Raises:
        hosts.InstallError: a release does not install.
    """
    start = time.perf_counter()
    environment = hosts.environment(pair)
    record: dict[str, Any] = {"pair": dataclasses.asdict(pair), "versions": _versions(environment)}
    if "error" in record["versions"]:
        # A fault of the hosts' own. hepatch must leave it as it is: the same error with it as without.
        record["inert"] = _versions(environment, first="import hepatch; ") == record["versions"]
        record["models"] = record["suites"] = {}
    else:
        record["models"] = _models(environment)
        record["suites"] = {name: _suite(files, environment) for name, files in suites.items()}
    record["passed"] = not list(results.faults(record))
    record["seconds"] = round(time.perf_counter() - start)
    return record


def _versions(environment: dict[str, str], first: str = "") -> dict[str, str]:
    """What the cell's processes really import, and under which Python; `error` alone where they do not load."""
    code = first + (
        "import platform, torch, deepspeed, transformers; print('versions', torch.__version__, deepspeed.__version__,"
        " transformers.__version__, platform.python_version())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, cwd=hosts.ROOT, capture_output=True, text=True, check=False
    )
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("versions ")]
    if not found:
        return {"error": (done.stderr.strip().splitlines() or ["?"])[-1]}
    return dict(zip(("torch", "deepspeed", "transformers", "python"), found[0], strict=True))


def _models(environment: dict[str, str]) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as folder,
        forked.Forks(_SHARED, environment) as plain,
        forked.Forks(("deepspeed", *_SHARED), environment) as stock,
        forked.Forks(("hepatch", "deepspeed", *_SHARED, *_COMPILER), environment) as patched,
    ):
        found = {}
        for case in CASES:
            trained = Path(folder) / "trained"
            order = {"family": case.family, "stage": case.stage, "trained": str(trained)}
            backend = {"HEPATCH_COMPILE_BACKEND": case.backend}
            ours = patched.run("matrix.rollouts:patched", order, backend)
            if not trained.exists():
                order["trained"] = ""
            oracle = plain.run("matrix.rollouts:plain", order)
            theirs = stock.run("matrix.rollouts:stock", order)
            found[case.name] = verdict.compared(oracle, theirs, ours)
            trained.unlink(missing_ok=True)
    return found


def _suite(files: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """How many tests passed and which failed, from pytest's own report."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", f"--junitxml={report}", *files]
        done = subprocess.run(
            command,
            env=environment,
            cwd=hosts.ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS_PER_SUITE,
        )
        if not report.exists():
            return {"passed": 0, "skipped": 0, "failed": [(done.stderr.strip().splitlines() or ["no report"])[-1]]}
        # Written by the pytest that was just started here.
        cases = list(ET.parse(report).getroot().iter("testcase"))  # noqa: S314
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = [case for case in cases if case.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "skipped": len(skipped),
        "failed": sorted(f"{case.get('classname', '').replace('.', '/')}::{case.get('name')}" for case in failed),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run one cell; 0 where it is green."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("deepspeed", help="a version, or newest")
    parser.add_argument("transformers", help="a version, or newest")
    parser.add_argument("--torch", default=TORCH)
    parser.add_argument("--check", action="store_true", help="compare with the recorded result and write nothing")
    given = parser.parse_args(arguments)
    asked = Pair(given.deepspeed, given.transformers, given.torch)
    try:
        pair = hosts.resolved(asked)
        if asked != pair and pair in PAIRS:
            print(f"{asked.name} is {pair.name} today, which is a cell of its own")
            return 0
        # `make test` has run the suites against the releases of its own environment.
        record = run(pair, {} if given.check and hosts.are_installed(pair) else SUITES)
    except hosts.InstallError as error:
        print(f"RED {asked.name}: {error}")
        return 1
    print(results.told(pair.name, record))
    if given.check:
        changed = results.changed(pair, record)
        for line in changed:
            print(f"  not as recorded: {line}")
        return 1 if changed or not record["passed"] else 0
    results.write(pair, record)
    return 0 if record["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
