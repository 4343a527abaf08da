"""Options passed through to Megatron-core and SGLang, checked against their classes where those are installed.

Megatron-core's classes are read from their source files: importing it is slow, and it must not be imported before the
device is prepared. SGLang's are read in `config.sglang`.
"""

from __future__ import annotations

import ast
import importlib.util
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from megarl.config import keys
from megarl.errors import UserMistake

_MODEL = "it comes from the model's config.json"
MEGATRON_OWNED = {  # fields that follow from other keys or from the model; set twice they could contradict
    "tensor_model_parallel_size": "set parallel.tensor", "pipeline_model_parallel_size": "set parallel.pipeline",
    "context_parallel_size": "set parallel.context", "expert_model_parallel_size": "set parallel.expert",
    "expert_tensor_parallel_size": "set parallel.expert_tensor", "sequence_parallel": "set parallel.sequence",
    "params_dtype": "set model.dtype", "pipeline_dtype": "set model.dtype", "bf16": "set model.dtype",
    "fp16": "set model.dtype", "moe_aux_loss_coeff": "set model.balance.coefficient",
    "moe_router_load_balancing_type": "set model.balance.form", "moe_z_loss_coeff": "set model.balance.z_loss",
    **dict.fromkeys(("delay_wgrad_compute", "overlap_moe_expert_parallel_comm"), "they follow from pipeline.schedule"),
    "calculate_per_token_loss": "megarl's denominators are global already",
    **dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels",
                     "ffn_hidden_size", "num_moe_experts", "moe_router_topk", "moe_ffn_hidden_size",
                     "layernorm_epsilon", "normalization", "gated_linear_unit", "add_bias_linear", "add_qkv_bias",
                     "qk_layernorm", "activation_func", "moe_router_pre_softmax", "moe_router_score_function",
                     "moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk",
                     "moe_layer_freq", "moe_shared_expert_intermediate_size", "softmax_scale", "softmax_type",
                     "window_size", "no_rope_freq", "attention_output_gate", "rotary_interleaved",
                     "multi_latent_attention", "mtp_num_layers"), _MODEL),
    **dict.fromkeys(("virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout",
                     "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
                     "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
                    "set pipeline.schedule or parallel.layers_per_stage"),
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), "megarl trains without dropout: log-probs must repeat"),
    "moe_enable_routing_replay": "set moe.replay",
}


def check_megatron(options: Mapping[str, Any]) -> Iterator[UserMistake]:
    """Mistakes in `megatron: {...}` against the installed TransformerConfig."""
    fields: dict[str, Any] = {}
    core = _package("megatron.core") if options else None
    if core:
        fields = {**class_fields(core / "model_parallel_config.py", "ModelParallelConfig"),
                  **class_fields(core / "transformer" / "transformer_config.py", "TransformerConfig")}
    yield from check_fields("megatron", options, fields, MEGATRON_OWNED, "TransformerConfig")


def check_fields(section: str, options: Mapping[str, Any], fields: Mapping[str, Any], owned: Mapping[str, str],
                 class_name: str) -> Iterator[UserMistake]:
    """Mistakes in a section of options.

    Args:
        section: its key.
        options: name -> value.
        fields: known name -> type; empty if not known here: then only `owned` is checked.
        owned: name that must not be set -> remedy.
        class_name: whose fields they are, for the messages.
    """
    for name, value in options.items():
        where = f"{section}.{name}"
        if name in owned:
            yield UserMistake("cannot be set here", where, owned[name])
        elif fields and name not in fields:
            meant = keys.close(name, list(fields))
            yield UserMistake(f"{class_name} has no such field", where, f"did you mean {section}.{meant}?" if meant else
                              f"use the names of the installed {section}'s {class_name}")
        elif fields and not _fits(value, fields[name]):
            yield UserMistake(f"{value!r} does not fit {class_name}.{name}", where,
                              f"give a value of the type {_type_name(fields[name])}")


def _fits(value: Any, annotation: Any) -> bool:
    try:
        TypeAdapter(annotation).validate_python(value, strict=not isinstance(value, list))
        return True
    except ValidationError:
        return False
    except PydanticUserError:  # a type that only its own project can judge
        return True


def _type_name(annotation: Any) -> str:
    return annotation.__name__ if isinstance(annotation, type) else str(annotation).replace("typing.", "")


def _package(name: str) -> Path | None:
    """Folder of an installed package, without running its code (a parent namespace package is looked up)."""
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        return None
    return Path(spec.origin).parent if spec and spec.origin else None


def class_fields(path: Path, class_name: str) -> dict[str, Any]:
    """Annotated fields of a class by name, read from the source; {} if the file or the class is not there.

    A type that names something beyond builtins and `typing` reads as Any.
    """
    if not path.is_file():
        return {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return {item.target.id: evaluate(item.annotation) for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)}
    return {}


def evaluate(annotation: ast.expr) -> Any:
    """The type that an annotation means; Any if it names something beyond builtins and `typing`."""
    names = {**vars(typing), "int": int, "float": float, "bool": bool, "str": str, "list": list, "tuple": tuple,
             "dict": dict, "__builtins__": {}}
    try:
        return eval(compile(ast.Expression(annotation), "<annotation>", "eval"), names)
    except (NameError, AttributeError, TypeError):
        return Any
