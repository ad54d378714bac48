"""Every `HEPATCH_*` variable and every hepatch key of a ds_config: type, default, meaning.

This file is the only reader of the environment. A value that is not accepted costs one log line and the default is
used, so that no import fails because of it; under `HEPATCH_STRICT=1` the same line is raised instead.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

GRAPH_CAPTURE_KEYS = ("enable_graph_capture", "enable_cuda_graph")
"""Keys of ds_config's `hybrid_engine` section that ask for hepatch or refuse it; the first present one counts."""

_logger = logging.getLogger("hepatch")


def _tidy(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


_Switch = Annotated[bool, BeforeValidator(_tidy)]


class Settings(BaseSettings):
    """What the environment asks of hepatch; field names are for code, the variables are in `variable_of`."""

    # populate_by_name, which is for code, would also make variables of the field names, `log` among them. With this
    # prefix none can exist: no name in an environment has an equals sign.
    model_config = SettingsConfigDict(
        frozen=True,
        case_sensitive=True,
        env_prefix="=",
        env_ignore_empty=True,
        populate_by_name=True,
        extra="forbid",
    )

    enabled: _Switch = Field(
        default=True, validation_alias="HEPATCH", description="Whether hepatch does anything at all."
    )
    backend: Annotated[Literal["auto", "kernels", "native"], BeforeValidator(_tidy)] = Field(
        default="auto",
        validation_alias="HEPATCH_BACKEND",
        description="How the model's forward is expressed inside a region.",
    )
    strict: _Switch = Field(
        default=False,
        validation_alias="HEPATCH_STRICT",
        description="A refusal or a failure raises instead of falling back.",
    )
    log: Annotated[Literal["debug", "info", "warning"], BeforeValidator(_tidy)] = Field(
        default="warning",
        validation_alias="HEPATCH_LOG",
        description="Lowest level that the logger `hepatch` passes on.",
    )
    bucket_tokens: int = Field(
        default=128,
        ge=16,
        validation_alias="HEPATCH_BUCKET_TOKENS",
        description="KV positions by which a region's key grows.",
    )
    max_recordings: int = Field(
        default=64, ge=1, validation_alias="HEPATCH_MAX_RECORDINGS", description="Region keys admitted per engine."
    )
    max_positions: int = Field(
        default=4096,
        ge=1,
        validation_alias="HEPATCH_MAX_POSITIONS",
        description="The same for DeepSpeed's kernels, where each position of each batch size is a key.",
    )
    cache_mib: int | None = Field(
        default=None,
        ge=1,
        validation_alias="HEPATCH_CACHE_MIB",
        description="Budget of the static KV cache, in MiB; none if absent.",
    )
    stop_check_steps: int = Field(
        default=8,
        ge=1,
        validation_alias="HEPATCH_STOP_CHECK_STEPS",
        description="Decode steps between two reads of the stop flags.",
    )
    compile_backend: Annotated[str, Field(min_length=1)] = Field(
        default="inductor",
        validation_alias="HEPATCH_COMPILE_BACKEND",
        description="The torch.compile backend; anything but inductor is for debugging and tests.",
    )


def read() -> Settings:
    """The settings of the environment as it is now.

    Raises:
        ValueError: a variable has a value that is not accepted and `HEPATCH_STRICT` is on. Otherwise the same line is
            logged once per process and the default is used.
    """
    try:
        return Settings()
    except ValidationError as error:
        lines, defaults = _explain(error)
    # What is given by name wins over the environment, so bad variables are passed over and good ones still count.
    settings = Settings(**defaults)
    if settings.strict:
        raise ValueError(" ".join(lines))
    for line in lines:
        _warn_once(line)
    return settings


def variable_of(field: str) -> str:
    """The environment variable behind a field of `Settings`: `variable_of("enabled") == "HEPATCH"`."""
    return str(Settings.model_fields[field].validation_alias)


def c_compiler() -> str | None:
    """The C compiler that the user named for Triton.

    Source:
        triton/runtime/build.py, which reads CC before it looks for gcc and clang.
    """
    return os.environ.get("CC") or None


def nvtx_tool() -> bool:
    """Whether a profiler that reads NVTX ranges, such as Nsight Systems, has started this process.

    Source: the NVTX headers (nvtxDetail/nvtxInit.h), which load the tool that NVTX_INJECTION64_PATH names.
    """
    return bool(os.environ.get("NVTX_INJECTION64_PATH"))


def graph_capture_requested(hybrid_engine_section: Mapping[str, Any]) -> bool | None:
    """Whether a ds_config asks for graph capture, refuses it, or says nothing.

    Args:
        hybrid_engine_section: the raw `hybrid_engine` dictionary as the user wrote it. The parsed config will not do:
            its default False cannot be told from a user's.

    Returns:
        True or False as written, None where neither key is present.

    Raises:
        ValueError: the value is no boolean.

    Source:
        deepspeed/runtime/config.py, get_hybrid_engine_config.
    """
    for key in GRAPH_CAPTURE_KEYS:
        value = hybrid_engine_section.get(key)
        if value is None:
            continue
        try:
            return TypeAdapter(_Switch).validate_python(value)
        except ValidationError:
            raise ValueError(f"ds_config hybrid_engine.{key}={value!r} is not accepted; write true or false.") from None
    return None


def without_hepatch_keys(section: Mapping[str, Any], known_fields: Collection[str]) -> dict[str, Any]:
    """A `hybrid_engine` section that the installed DeepSpeed accepts.

    Args:
        section: the raw section.
        known_fields: field names of the installed `HybridEngineConfig`, which forbids every other key.

    Returns:
        A copy without those of `GRAPH_CAPTURE_KEYS` that DeepSpeed does not know; a misspelt key stays, for DeepSpeed
        to refuse.
    """
    return {key: value for key, value in section.items() if key not in GRAPH_CAPTURE_KEYS or key in known_fields}


def _explain(error: ValidationError) -> tuple[list[str], dict[str, Any]]:
    """One line for each bad variable, and the default of each by field name."""
    fields = {variable_of(name): name for name in Settings.model_fields}
    bad = {str(detail["loc"][0]): detail["input"] for detail in error.errors()}
    defaults = {fields[variable]: Settings.model_fields[fields[variable]].default for variable in bad}
    lines = [
        f"{variable}={value!r} is not accepted; write {_accepted(fields[variable])}"
        f" (default {_spelled(defaults[fields[variable]])})."
        for variable, value in bad.items()
    ]
    return lines, defaults


def _accepted(field: str) -> str:
    """The accepted values of a field, in words."""
    schema = Settings.model_json_schema()["properties"][variable_of(field)]
    schema = next((option for option in schema.get("anyOf", ()) if option["type"] != "null"), schema)
    if "enum" in schema:
        return ", ".join(schema["enum"][:-1]) + f" or {schema['enum'][-1]}"
    if schema["type"] == "integer":
        return f"a whole number of at least {schema['minimum']}"
    return "0 or 1" if schema["type"] == "boolean" else "the name of a torch.compile backend"


def _spelled(default: object) -> str:
    if default is None:
        return "no limit"
    return str(int(default)) if isinstance(default, bool) else str(default)


@functools.cache
def _warn_once(line: str) -> None:
    _logger.warning("hepatch: %s The default is used.", line)
