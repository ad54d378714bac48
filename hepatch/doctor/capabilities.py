"""What is installed and what this machine can do, each with what follows from it."""

from __future__ import annotations

import importlib
import importlib.util
import sys

from hepatch.doctor.findings import Capability

HOSTS = {
    "torch": "torch",
    "deepspeed": "deepspeed.runtime.hybrid_engine",
    "transformers": "transformers.generation.utils",
}
"""Package, and the module of it that hepatch works on."""

_MEANING_OF_OP = "only DeepSpeed's containers need it; hepatch's native regions do not"


def load_hosts() -> list[Capability]:
    """Imports what hepatch works on; what is missing or fails is found out here."""
    return [_load(package, module) for package, module in HOSTS.items()]


def _load(package: str, module: str) -> Capability:
    if package not in sys.modules and _is_missing(package):
        return Capability(package, False, "not installed", f"hepatch has nothing to work on: pip install {package}")
    try:
        importlib.import_module(module)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the user would meet
        return Capability(package, False, f"import fails: {type(error).__name__}: {error}", f"repair {package} first")
    return Capability(package, True, str(getattr(sys.modules[package], "__version__", "unknown version")))


def _is_missing(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is None
    except (ImportError, ValueError):
        return True


def machine() -> list[Capability]:
    """CUDA, compilers and Triton; needs torch."""
    import torch

    from hepatch import probes, settings

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    found = []
    if cuda:
        detail = f"{torch.cuda.get_device_name(0)}, torch built for CUDA {torch.version.cuda}"
        found.append(Capability("CUDA", True, detail))
    else:
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        found.append(
            Capability(
                "CUDA",
                False,
                f"no device; {built}",
                "regions are compiled and run, but no graphs are recorded: right tokens, little speed",
            )
        )
    compiler = probes.compiler_obstacle(device, settings.read().compile_backend)
    found.append(Capability("compiler for Inductor", compiler is None, compiler or "found"))
    triton = probes.has_triton()
    found.append(
        Capability(
            "Triton", triton, "found" if triton else "not installed", "" if triton or not cuda else "needed on a GPU"
        )
    )
    return found


def inference_op() -> list[Capability]:
    """Whether DeepSpeed's inference op could be built; needs DeepSpeed."""
    from hepatch import stock_probes

    try:
        obstacles = stock_probes.op_obstacles()
    except Exception as error:  # noqa: BLE001 - a DeepSpeed that is built otherwise
        return [Capability("DeepSpeed inference op", None, f"cannot be asked: {type(error).__name__}: {error}")]
    nvcc = obstacles.get("no-nvcc")
    found = [Capability("nvcc", nvcc is None, nvcc or "found", _MEANING_OF_OP if nvcc else "")]
    if obstacles:
        reasons = "; ".join(f"[{name}] {reason}" for name, reason in obstacles.items())
        return [*found, Capability("DeepSpeed inference op", False, f"cannot be built: {reasons}", _MEANING_OF_OP)]
    return [*found, Capability("DeepSpeed inference op", True, "nothing stands against building it")]
