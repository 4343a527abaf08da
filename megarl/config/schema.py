"""The config tree. Every key a user can set is here, with its unit and its default; nothing else is accepted.

`megarl.config.load` reads YAML and overrides into this tree, `megarl.config.check` looks across its fields.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


class Section(BaseModel):
    """A part of the tree: unknown keys are refused, values are not coerced across types, instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class RunConfig(Section):
    """The run as a whole."""

    dir: str = Field("runs/default", description="run directory: config, metrics, checkpoints, rollouts, export")
    steps: PositiveInt = Field(100, description="experiences to train on")
    seed: NonNegativeInt = 0
    require_apex: bool = Field(False, description="refuse to start without NVIDIA apex")


class ClusterConfig(Section):
    """Who does what. Ranks [0, trainers) train, ranks [trainers, trainers + rollouts) supervise engines."""

    trainers: PositiveInt = 1
    rollouts: PositiveInt = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"
    store: str = Field("auto", description="control store: auto (trainer 0 hosts it) or host:port")
    timeout_s: PositiveFloat = Field(600.0, description="timeout of every collective, seconds")
    start_timeout_s: PositiveFloat = Field(300.0, description="until all ranks and engines are there, seconds")


class ParallelConfig(Section):
    """Degrees of the trainer partition; the data-parallel degree follows."""

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    context: PositiveInt = 1
    expert: PositiveInt = 1
    expert_tensor: PositiveInt = 1
    sequence: bool | Literal["auto"] = Field("auto", description="sequence parallelism; auto: on if tensor > 1")


class BalanceConfig(Section):
    """Keeping the experts of a MoE model evenly loaded."""

    form: Literal["global", "megatron", "none"] = Field(
        "global", description="global: f over the whole optimizer step (layout-free); megatron: its per-micro-batch form")
    coefficient: NonNegativeFloat = 1e-3
    z_loss: NonNegativeFloat = Field(0.0, description="coefficient of the router z-loss (ST-MoE, eq. 5)")


class ModelConfig(Section):
    """The policy: a Hugging Face checkpoint directory and how to run it."""

    path: str = Field(description="directory with config.json, *.safetensors and the tokenizer")
    implementation: Literal["auto", "local", "transformer_engine"] = "auto"
    dtype: Literal["bf16", "fp32"] = "bf16"
    recompute: Literal["none", "full"] = Field("none", description="activation recompute of whole layers")
    head_chunk_tokens: PositiveInt = Field(1024, description="tokens per chunk of the head-and-log-prob")
    balance: BalanceConfig = BalanceConfig()


class SourceConfig(Section):
    """One file of prompts."""

    path: str = Field(description="JSONL or Parquet file")
    name: str = Field("", description="data source name; the file's stem if empty")
    weight: PositiveFloat = Field(1.0, description="share of an epoch's draws relative to the other sources")
    prompt: str = Field("prompt", description="column: text, or a list of chat messages")
    label: str = Field("label", description="column with the reference answer")


class DataConfig(Section):
    """Training prompts."""

    sources: list[SourceConfig] = Field(min_length=1)
    max_prompt_tokens: PositiveInt = 1024
    on_long_prompt: Literal["drop", "error"] = "drop"
    shuffle: bool = True
    chat_template: Literal["auto", "always", "never"] = Field(
        "auto", description="auto: for chat messages; always: also wraps plain text as a user message")
    prompts_per_step: PositiveInt = Field(32, description="groups in one experience, over all ranks")


class SamplingConfig(Section):
    """How an evaluation samples. (Training uses temperature only.)"""

    samples: PositiveInt = 1
    temperature: NonNegativeFloat = Field(1.0, description="0 is greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, description="-1: off")
    min_p: float = Field(0.0, ge=0, le=1)
    max_response_tokens: PositiveInt | None = Field(None, description="none: as in training")


class RolloutConfig(Section):
    """Sampling during training."""

    engine: Literal["embedded", "sglang"] = "embedded"
    engines_per_rank: PositiveInt = 1
    samples_per_prompt: PositiveInt = Field(8, description="group size n")
    temperature: PositiveFloat = 1.0
    top_p: float = Field(1.0, description="must stay 1 in training: log-probs are taken before truncation")
    top_k: int = Field(-1, description="must stay -1 in training")
    min_p: float = Field(0.0, description="must stay 0 in training")
    max_response_tokens: PositiveInt = 256
    stop: list[str] = Field(default_factory=list, description="stop strings")
    stop_token_ids: list[int] = Field(default_factory=list, description="beside the tokenizer's end of sequence")
    retries: NonNegativeInt = Field(3, description="re-issues of a failed group before it is dropped and counted")
    request_timeout_s: PositiveFloat = 300.0
    groups_in_flight: PositiveInt = Field(64, description="per leader; back-pressure above it")
    max_lag: NonNegativeInt = Field(0, description="weight versions an experience may be behind; 0 is synchronous")
    slots: PositiveInt = Field(64, description="embedded engine: sequences decoded together")


class RewardTerm(Section):
    """One reward function of the weighted sum."""

    name: str = Field(description="registered name, or module:function")
    weight: float = 1.0
    source: str = Field("", description="apply only to this data source; empty: to all")
    options: dict[str, Any] = Field(default_factory=dict, description="keyword arguments of the function")


class RewardConfig(Section):
    """How a sample is scored."""

    terms: list[RewardTerm] = Field(min_length=1)
    workers: PositiveInt = Field(2, description="worker processes per leader")
    timeout_s: PositiveFloat = 10.0
    on_error: Literal["drop", "value"] = Field("drop", description="what happens to a sample whose reward failed")
    error_value: float | None = Field(None, description="the value for on_error: value")


class KLConfig(Section):
    """Distance to the reference model."""

    coefficient: NonNegativeFloat = Field(0.0, description="0: no reference model is kept")
    estimator: Literal["k1", "k2", "k3"] = "k3"
    place: Literal["loss", "reward"] = "loss"


class CorrectionConfig(Section):
    """Importance sampling between the engine that sampled and the trainer's old log-probs."""

    kind: Literal["none", "truncated", "masked"] = "truncated"
    level: Literal["token", "sequence"] = "token"
    low: NonNegativeFloat = Field(0.0, description="masked: weights below are masked; truncated: unused")
    high: PositiveFloat = Field(2.0, description="truncated: weights are cut here; masked: weights above are masked")


class ObjectiveConfig(Section):
    """The loss, written down once. `algorithm` sets the fields left at None (see objective.recipes)."""

    algorithm: Literal["grpo", "gspo", "gspo_token", "dapo", "dr_grpo"] = "gspo"
    ratio: Literal["token", "sequence", "sequence_token"] | None = None
    clip_low: NonNegativeFloat | None = None
    clip_high: NonNegativeFloat | None = None
    aggregation: Literal["sequence_mean", "token_mean", "constant"] | None = Field(
        None, description="sequence_mean: over a sequence's tokens, then over sequences; token_mean: over the step's "
        "tokens; constant: sum / (sequences * max_response_tokens)")
    normalize_std: bool | None = Field(None, description="divide advantages by the group's standard deviation")
    std_ddof: Literal[0, 1] = 1
    std_eps: NonNegativeFloat = 1e-6
    kl: KLConfig = KLConfig()
    entropy_bonus: NonNegativeFloat = 0.0
    correction: CorrectionConfig = CorrectionConfig()
    dynamic_sampling: bool | None = Field(None, description="drop groups whose rewards are all equal and refill")
    refill_rounds: PositiveInt = Field(4, description="bound on the rounds of dynamic sampling")
    mask_truncated: bool = Field(False, description="overlong filter: samples cut by the length limit are not trained on")
    overlong_buffer: NonNegativeInt = Field(0, description="soft overlong punishment: its length in tokens; 0 is off")
    overlong_penalty: NonNegativeFloat = 1.0


class BatchConfig(Section):
    """From an experience to optimizer steps."""

    minibatches: PositiveInt = Field(1, description="optimizer steps per pass over an experience")
    epochs: PositiveInt = Field(1, description="passes over an experience")
    max_tokens: PositiveInt = Field(8192, description="cap of a micro-batch in padded tokens, over its CP ranks")
    on_long_sequence: Literal["own", "error"] = Field(
        "own", description="a sequence above the cap gets a micro-batch of its own and a warning, or is refused")


class OptimConfig(Section):
    """AdamW on fp32 masters, through Megatron-core's distributed optimizer."""

    lr: PositiveFloat = 1e-6
    warmup_steps: NonNegativeInt = Field(0, description="optimizer steps of linear warm-up from 0")
    betas: tuple[float, float] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip: NonNegativeFloat = Field(1.0, description="global gradient norm; 0 is off")
    distributed: bool = Field(True, description="shard optimizer state over data-parallel ranks")


class SyncConfig(Section):
    """Trainer weights -> engine weights."""

    bucket_mb: PositiveInt = 512
    timeout_s: PositiveFloat = 120.0
    verify: bool = Field(False, description="compare a checksum of every tensor on both sides after each update")


class CheckpointConfig(Section):
    """Saving and resuming."""

    every: NonNegativeInt = Field(50, description="steps between saves; 0: only at the end")
    keep: PositiveInt = Field(2, description="newest checkpoints kept")
    resume: bool = Field(True, description="continue from the newest checkpoint in the run directory")
    export: bool = Field(True, description="write a Hugging Face checkpoint at the end (run.dir/export)")


class EvalSetConfig(Section):
    """One held-out set."""

    path: str
    name: str = ""
    prompt: str = "prompt"
    label: str = "label"
    limit: PositiveInt | None = Field(None, description="use the first so many prompts")
    sampling: SamplingConfig = SamplingConfig()
    pass_at: list[PositiveInt] = Field(default_factory=list, description="k of pass@k; each at most sampling.samples")
    success: float = Field(1.0, description="a reward of at least this counts as a pass")


class EvalConfig(Section):
    """Evaluation on held-out prompts."""

    every: NonNegativeInt = Field(0, description="steps between evaluations; 0: never during training")
    before_start: bool = True
    sets: list[EvalSetConfig] = Field(default_factory=list)


class ObserveConfig(Section):
    """What a run tells."""

    tensorboard: bool = True
    jsonl: bool = True
    rollouts: NonNegativeInt = Field(0, description="write the samples of every so many steps as JSONL; 0 is off")
    progress: bool = True


class Config(Section):
    """The whole tree. `megatron` and `sglang` pass options through under those projects' own names."""

    run: RunConfig = RunConfig()
    cluster: ClusterConfig = ClusterConfig()
    parallel: ParallelConfig = ParallelConfig()
    model: ModelConfig
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig
    objective: ObjectiveConfig = ObjectiveConfig()
    batch: BatchConfig = BatchConfig()
    optim: OptimConfig = OptimConfig()
    sync: SyncConfig = SyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    observe: ObserveConfig = ObserveConfig()
    megatron: dict[str, Any] = Field(default_factory=dict, description="TransformerConfig fields, by their own names")
    sglang: dict[str, Any] = Field(default_factory=dict, description="SGLang server arguments, by their own names")
