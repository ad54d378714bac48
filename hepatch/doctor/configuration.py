"""The ds_config and the model that the doctor is given: read, and looked at without loading a weight."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class BadInputError(Exception):
    """What was given cannot be read; the message says what would do."""


@dataclass(frozen=True)
class Configuration:
    """What of a ds_config decides whether a region runs.

    Attributes:
        hybrid: whether it makes a HybridEngine.
        section: its `hybrid_engine` section, raw.
        zero_stage: its ZeRO stage.
    """

    hybrid: bool = True
    section: dict[str, Any] = field(default_factory=dict)
    zero_stage: int = 0


def read(path: Path | None) -> Configuration:
    """Reads a ds_config; without one, a plain hybrid engine is taken.

    Raises:
        BadInputError: no such file, no JSON, or a section of another kind than DeepSpeed's.
    """
    if path is None:
        return Configuration()
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"--config {path.name} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise BadInputError(f"--config {path.name} is no JSON: {error}.") from None
    if not isinstance(data, dict):
        raise BadInputError(f"--config {path.name} holds no JSON object; a ds_config is one.")
    section, zero = data.get("hybrid_engine", {}), data.get("zero_optimization", {})
    for name, value in (("hybrid_engine", section), ("zero_optimization", zero)):
        if not isinstance(value, dict):
            raise BadInputError(f"--config {path.name}: {name} is no JSON object.")
    stage = zero.get("stage", 0)
    if not isinstance(stage, int) or isinstance(stage, bool) or not 0 <= stage <= 3:  # noqa: PLR2004 - ZeRO's stages
        raise BadInputError(f"--config {path.name}: zero_optimization.stage is {stage!r}; DeepSpeed has 0 to 3.")
    return Configuration(bool(section.get("enabled", False)), section, stage)


def skeleton(where: str) -> Any:
    """The model of a folder, a `config.json` or a shape of `hepatch bench`, on the meta device: no memory, no weights.

    Raises:
        BadInputError: nothing of the kind, or transformers has no class for it.
    """
    import torch
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from hepatch.bench.shapes import SHAPES
    from hepatch.bench.workload import model_config

    path = Path(where)
    if where not in SHAPES and not path.exists():
        raise BadInputError(
            f"--model {where}: no such folder or file, and no shape ({', '.join(SHAPES)}). Nothing is downloaded."
        )
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True) if path.is_file() else model_config(where)
        with torch.device("meta"):
            try:
                return AutoModelForCausalLM.from_config(config).eval()
            except ValueError:
                # Not a causal LM: the guards are to say so, of the model that it is.
                return AutoModel.from_config(config).eval()
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BadInputError(f"--model {path.name}: transformers cannot make a model of it: {first}") from error
