"""Checks of what belongs to mixtures of experts: replay, balancing, the alarm, dispatchers; and of FP8. Pure."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from megarl.config.schema import Config, MoEConfig
from megarl.errors import UserMistake

if TYPE_CHECKING:
    from megarl.model.hf_config import HFConfig

_FLEX_PACKAGES = {"deepep": "deep_ep", "hybridep": "deep_ep"}  # by backend of the flex dispatcher


def check(config: Config, hf: HFConfig) -> Iterator[UserMistake]:
    """Mistakes against this model."""
    if hf.experts:
        yield from _replay(config)
        yield from _balance(config, hf)
        yield from _collapse(config, hf)
    else:
        for name in ("replay", "router_lr", "collapse"):
            if getattr(config.moe, name) != MoEConfig.model_fields[name].default:
                yield UserMistake("the model has no experts", f"moe.{name}", "leave it out")
        if config.model.balance.bias_rate:
            yield UserMistake("the model has no experts", "model.balance.bias_rate", "leave it out")


def _replay(config: Config) -> Iterator[UserMistake]:
    if config.moe.replay == "none":
        return
    if config.megatron.get("moe_router_fusion"):
        yield UserMistake("the fused router chooses experts inside a kernel, where they cannot be replayed",
                          "megatron.moe_router_fusion", "leave it out, or set moe.replay: none")
    if config.model.balance.form == "megatron":
        yield UserMistake("Megatron-core's balancing loss counts experts that it chooses anew, not those that are "
                          "replayed", "model.balance.form", "use global or none, or set moe.replay: none")


def _balance(config: Config, hf: HFConfig) -> Iterator[UserMistake]:
    balance = config.model.balance
    if balance.bias_rate and not hf.router_bias:
        yield UserMistake(f"{hf.family} checkpoints have no bias of experts (e_score_correction_bias): engines would "
                          "route without it", "model.balance.bias_rate", "set it to 0 and use the balancing loss "
                          "(model.balance.form: global); glm4_moe models have one")


def _collapse(config: Config, hf: HFConfig) -> Iterator[UserMistake]:
    alarm, balance = config.moe.collapse, config.model.balance
    least = math.log(hf.top_k) / math.log(hf.experts) if hf.experts > 1 else 0.0
    if alarm.entropy and alarm.entropy <= least:
        yield UserMistake(f"with {hf.top_k} of {hf.experts} experts a token the entropy is never below {least:.3f}",
                          "moe.collapse.entropy", f"use a value between {least:.3f} and 1, or 0 for no alarm")
    if alarm.entropy and alarm.action == "raise" and not (balance.form == "global" and balance.coefficient):
        yield UserMistake("raise multiplies model.balance.coefficient, which is not in use", "moe.collapse.action",
                          "set model.balance.form: global and a coefficient above 0, or choose another action")
    if alarm.entropy and alarm.action == "freeze" and not config.moe.router_lr:
        yield UserMistake("the routers are frozen from the start (moe.router_lr: 0)", "moe.collapse.action",
                          "choose another action")


def check_hardware(config: Config) -> Iterator[UserMistake]:
    """FP8 and the flex dispatcher need a GPU; what the config shows of that."""
    for name, what in _wanted(config):
        if config.cluster.device == "cpu":
            yield UserMistake(f"{what} needs a GPU, but cluster.device is cpu", f"megatron.{name}", "leave it out")
        elif name != "moe_token_dispatcher_type" and config.model.implementation == "local":
            yield UserMistake(f"{what} is Transformer Engine's, but model.implementation is local", f"megatron.{name}",
                              "leave it out, or set model.implementation: auto")
    if config.megatron.get("fp8_param"):
        yield UserMistake("weights kept in FP8 can be neither published nor exported in this version",
                          "megatron.fp8_param", "leave it out: megatron.fp8 computes in FP8")


def check_packages(config: Config, transformer_engine: bool, accelerator: bool) -> Iterator[UserMistake]:
    """The same where the trainers run.

    Args:
        transformer_engine: whether the layers are Transformer Engine's.
        accelerator: whether there is a GPU.
    """
    for name, what in _wanted(config):
        where = f"megatron.{name}"
        if not accelerator:
            yield UserMistake(f"{what} needs a GPU", where, "leave it out on a CPU")
        elif name == "moe_token_dispatcher_type":
            backend = config.megatron.get("moe_flex_dispatcher_backend", "deepep")
            package = _FLEX_PACKAGES.get(backend, backend)
            if importlib.util.find_spec(package) is None:
                yield UserMistake(f"{what} with the backend {backend} needs the package {package}, which is not "
                                  "installed", where, "install it (github.com/deepseek-ai/DeepEP), or use alltoall")
        elif not transformer_engine:
            yield UserMistake(f"{what} needs Transformer Engine's layers, this run has the local ones", where,
                              "install transformer_engine (and use model.dtype bf16), or leave it out")


def _wanted(config: Config) -> Iterator[tuple[str, str]]:
    """(option, what it is) of those that need a GPU."""
    if config.megatron.get("moe_token_dispatcher_type") == "flex":
        yield "moe_token_dispatcher_type", "the flex dispatcher"
    for name in ("fp8", "fp4"):
        if config.megatron.get(name):
            yield name, name.upper()
