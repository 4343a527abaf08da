"""The config tree. Every key a user can set is here, with its unit and its default; nothing else is accepted.

`megarl.config.load` reads YAML and overrides into this tree, `megarl.config.check` looks across its fields.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from megarl.config.rollout import EnvironmentConfig, RewardConfig, RolloutConfig, SamplingConfig
from megarl.config.section import Beta, Section


class RunConfig(Section):
    """The run as a whole."""

    dir: str = Field("runs/default", description="run directory: config, metrics, checkpoints, rollouts, export")
    steps: PositiveInt = Field(100, description="experiences to train on")
    seed: NonNegativeInt = Field(0, description="of data order and sampling; each sample's own seed follows")
    require_apex: bool = Field(False, description="refuse to start without NVIDIA apex")


class ClusterConfig(Section):
    """Who does what. Ranks [0, trainers) train, ranks [trainers, trainers + rollouts) supervise engines."""

    trainers: PositiveInt = Field(1, description="ranks that train")
    rollouts: NonNegativeInt = Field(1, description="ranks that supervise sampling engines; 0: rollout.urls has all")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="of the trainers; auto: a GPU if there is one")
    store: str = Field("auto", description="control store: auto (trainer 0 hosts it) or host:port")
    timeout_s: PositiveFloat = Field(600.0, description="timeout of every collective, seconds")
    start_timeout_s: PositiveFloat = Field(300.0, description="until all ranks and engines are there, seconds")
    lease_timeout_s: PositiveFloat = Field(60.0, description="silence after which a rank or an engine is dead")


class ParallelConfig(Section):
    """Degrees of the trainer partition; the data-parallel degree follows."""

    tensor: PositiveInt = Field(1, description="ranks that share each matrix")
    pipeline: PositiveInt = Field(1, description="ranks that share the layers; see the section pipeline")
    layers_per_stage: list[PositiveInt] | Literal["auto"] = Field(
        "auto", description="layers of each pipeline stage; auto: balanced, the head counted in")
    context: PositiveInt = Field(1, description="ranks that share each sequence")
    expert: PositiveInt = Field(1, description="ranks that share the experts; inside tensor x context x data")
    expert_tensor: PositiveInt = Field(1, description="ranks that share each expert's matrices")
    sequence: bool | Literal["auto"] = Field("auto", description="sequence parallelism; auto: on if tensor > 1")


class PipelineConfig(Section):
    """How micro-batches pass through the pipeline ranks; of no effect where parallel.pipeline is 1."""

    schedule: Literal["auto", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipev", "dualpipe"] = Field(
        "auto", description="auto: where stages are is chosen at the start, the cheapest schedule for it at each step")
    chunks: int = Field(2, ge=2, description="stages on each rank; of the interleaved schedule")
    memory: PositiveFloat | None = Field(None, description="of auto: how many micro-batches' activations of the layers "
                                         "of one rank it may hold; none: as many as the cheapest schedule takes")
    reorder: bool = Field(True, description="put micro-batches of unequal length in the order that takes least time")


class BalanceConfig(Section):
    """Keeping the experts of a MoE model evenly loaded."""

    form: Literal["global", "megatron", "none"] = Field(
        "global", description="balancing loss; global: f over the whole optimizer step (layout-free); megatron: its "
        "per-micro-batch form")
    coefficient: NonNegativeFloat = Field(1e-3, description="of the balancing loss")
    z_loss: NonNegativeFloat = Field(0.0, description="coefficient of the router z-loss (ST-MoE, eq. 5)")
    bias_rate: NonNegativeFloat = Field(0.0, description="aux-loss-free balancing: how far an optimizer step moves the "
                                        "bias with which experts are chosen (DeepSeek-V3: 0.001); 0: it stays")


class CollapseConfig(Section):
    """What happens when a layer sends most of its tokens to few experts."""

    entropy: float = Field(0.0, ge=0, lt=1, description="a layer has collapsed if the entropy of its load, 1 when "
                           "even, is below; 0 is off")
    steps: PositiveInt = Field(3, description="optimizer steps in a row until something is done, and until more is")
    action: Literal["warn", "raise", "freeze", "stop"] = Field(
        "warn", description="raise: multiply balance.coefficient; freeze: the routers learn no more; stop: end the run")
    factor: float = Field(2.0, gt=1, description="of raise")


class MoEConfig(Section):
    """Training of a mixture of experts, its balance apart (model.balance)."""

    replay: Literal["none", "engine", "old"] = Field(
        "none", description="route a token in training as: engine: the engine did that sampled it; old: the trainer "
        "did for the old log-probs; none: the router would now")
    router_lr: NonNegativeFloat = Field(1.0, description="factor of the routers' learning rate; 0: they are frozen")
    collapse: CollapseConfig = Field(CollapseConfig(), description="alarm for uneven loads")


class ModelConfig(Section):
    """The policy: a Hugging Face checkpoint directory and how to run it."""

    path: str = Field(description="directory with config.json, *.safetensors and the tokenizer")
    weights: str = Field("", description="Megatron-core checkpoint that training begins with: a converted one, or a "
                         "step of another run, in any layout; empty: path's")
    implementation: Literal["auto", "local", "transformer_engine"] = Field(
        "auto", description="of the layers; auto: transformer_engine on a GPU where it is installed, else local")
    dtype: Literal["bf16", "fp32"] = Field("bf16", description="of weights and activations; master weights are fp32")
    recompute: Literal["none", "full"] = Field("none", description="activation recompute of whole layers")
    head_chunk_tokens: PositiveInt = Field(1024, description="tokens per chunk of the head-and-log-prob")
    balance: BalanceConfig = Field(BalanceConfig(), description="load of the experts")


class SourceConfig(Section):
    """One file of prompts."""

    path: str = Field(description="JSONL or Parquet file")
    name: str = Field("", description="data source name; the file's stem if empty")
    weight: PositiveFloat = Field(1.0, description="share of an epoch's draws relative to the other sources")
    prompt: str = Field("prompt", description="column: text, or a list of chat messages")
    label: str = Field("label", description="column with the reference answer; empty: there is none")
    environment: str = Field("", description="name of one of environments; empty: the model answers once")


class DataConfig(Section):
    """Training prompts."""

    sources: list[SourceConfig] = Field(min_length=1, description="files of prompts")
    max_prompt_tokens: PositiveInt = Field(1024, description="longest prompt, chat template included")
    on_long_prompt: Literal["drop", "error"] = Field("drop", description="drop longer ones and count them, or refuse")
    shuffle: bool = Field(True, description="a new order, from run.seed, in every epoch; false: as in the files")
    chat_template: Literal["auto", "always", "never"] = Field(
        "auto", description="auto: for chat messages; always: also wraps plain text as a user message")
    chat_template_options: dict[str, Any] = Field(
        default_factory=dict, description="variables of the chat template (Qwen3: enable_thinking)")
    prompts_per_step: PositiveInt = Field(32, description="groups in one experience, over all ranks")


class KLConfig(Section):
    """Distance to the reference model."""

    coefficient: NonNegativeFloat = Field(0.0, description="0: no reference model is kept")
    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="Schulman's estimators; k1 only in the reward")
    place: Literal["loss", "reward"] = Field("loss", description="where it is subtracted")


class CorrectionConfig(Section):
    """Importance sampling between the engine that sampled and the trainer's old log-probs."""

    kind: Literal["none", "truncated", "masked"] = Field("truncated", description="what happens to weights off bounds")
    level: Literal["token", "sequence", "geometric"] = Field(
        "token", description="one weight per token, or for a sequence their product or geometric mean")
    low: NonNegativeFloat = Field(0.0, description="masked: weights below are masked; truncated: unused")
    high: PositiveFloat = Field(2.0, description="truncated: weights are cut here; masked: weights above are masked")
    reject: Literal["none", "token", "sequence", "geometric"] = Field(
        "none", description="leave out tokens whose old / engine ratio at this level is off the next two bounds, "
        "whatever their weight")
    reject_low: NonNegativeFloat = Field(0.5, description="lower bound; for geometric means near 1, such as 0.999")
    reject_high: PositiveFloat = Field(2.0, description="upper bound; for geometric means near 1, such as 1.001")


class GapAlarmConfig(Section):
    """What happens when engine and trainer disagree on what was sampled, before anything is learned from it."""

    action: Literal["off", "warn", "stop"] = Field("warn", description="stop: end the run before the update")
    threshold: PositiveFloat = Field(0.1, description="mean absolute difference of old and engine log-probs, of tokens "
                                     "that the newest weights sampled; each version of lag adds as much again")


class ObjectiveConfig(Section):
    """The loss, written down once. `algorithm` sets the fields left at None (see objective.recipes)."""

    algorithm: Literal["grpo", "gspo", "gspo_token", "dapo", "dr_grpo"] = Field(
        "gspo", description="sets those of the next five keys and of dynamic_sampling that are null")
    ratio: Literal["token", "sequence", "sequence_token"] | None = Field(None, description="importance ratio's level")
    clip_low: NonNegativeFloat | None = Field(None, description="the ratio is clipped below 1 - clip_low")
    clip_high: NonNegativeFloat | None = Field(None, description="the ratio is clipped above 1 + clip_high")
    aggregation: Literal["sequence_mean", "token_mean", "constant"] | None = Field(
        None, description="sequence_mean: over a sequence's tokens, then over sequences; token_mean: over the step's "
        "tokens; constant: sum / (sequences * max_response_tokens)")
    normalize_std: bool | None = Field(None, description="divide advantages by a standard deviation of the rewards")
    std_over: Literal["group", "task"] = Field(
        "group", description="of the rewards of: group: the prompt's samples; task: all samples of the data source in "
        "the step, around their groups' means")
    std_ddof: Literal[0, 1] = Field(1, description="1: divide by n - 1 in the standard deviation, 0: by n")
    std_eps: NonNegativeFloat = Field(1e-6, description="added to the standard deviation")
    kl: KLConfig = Field(KLConfig(), description="distance to the reference model")
    entropy_bonus: NonNegativeFloat = Field(0.0, description="coefficient of the entropy added to the objective")
    proximal: Literal["old", "behaviour"] = Field(
        "old", description="what the ratio is taken against: the trainer's log-probs as the experience begins "
        "(decoupled), or the engine's (naive; correction.kind must be none)")
    correction: CorrectionConfig = Field(CorrectionConfig(), description="for the gap between engine and trainer")
    gap_alarm: GapAlarmConfig = Field(GapAlarmConfig(), description="for a gap that no correction should hide")
    dynamic_sampling: bool | None = Field(
        None, description="true: a group whose rewards are all equal (and where turns are credited apart, whose "
        "advantages are all 0) is not trained on, and one more prompt is sampled for it, at most "
        "refill_rounds * prompts_per_step times a step")
    refill_rounds: PositiveInt = Field(4, description="bound on the rounds of dynamic sampling")
    mask_truncated: bool = Field(False, description="overlong filter: do not train on samples cut by the length limit")
    overlong_buffer: NonNegativeInt = Field(0, description="soft overlong punishment: its length in tokens; 0 is off")
    overlong_penalty: NonNegativeFloat = Field(1.0, description="reward taken off at the length limit")


class BatchConfig(Section):
    """From an experience to optimizer steps."""

    minibatches: PositiveInt = Field(1, description="optimizer steps per pass over an experience")
    epochs: PositiveInt = Field(1, description="passes over an experience")
    max_tokens: PositiveInt = Field(8192, description="cap of a micro-batch in padded tokens, over its CP ranks")
    on_long_sequence: Literal["own", "error"] = Field(
        "own", description="a sequence above the cap gets a micro-batch of its own and a warning, or is refused")


class OptimConfig(Section):
    """AdamW on fp32 masters, through Megatron-core's distributed optimizer."""

    lr: PositiveFloat = Field(1e-6, description="learning rate after warm-up")
    warmup_steps: NonNegativeInt = Field(0, description="optimizer steps of linear warm-up from 0")
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False, description="decay of the two moments")
    eps: PositiveFloat = Field(1e-8, description="added to the root of the second moment")
    weight_decay: NonNegativeFloat = Field(0.0, description="decoupled")
    clip: NonNegativeFloat = Field(1.0, description="global gradient norm; 0 is off")
    distributed: bool = Field(True, description="shard optimizer state over data-parallel ranks")


class GuardConfig(Section):
    """The alarm for optimizer steps that are not like those before them."""

    spike: NonNegativeFloat = Field(10.0, description="standard deviations (by the median absolute deviation) above "
                                    "the median at which a loss, KL or gradient norm is a spike; 0 is off")
    window: int = Field(50, ge=10, description="optimizer steps that it is compared with (a KL: "
                        "with those in the same place of so many steps)")
    action: Literal["warn", "stop"] = Field("warn", description="warn: say so and write the step's samples to "
                                            "run.dir/guard; stop: end the run then")


class SyncConfig(Section):
    """Trainer weights -> engine weights."""

    transport: Literal["broadcast", "disk", "delta"] = Field(
        "broadcast", description="process groups with the engines; a directory that all hosts share; or only what "
        "changed, over HTTP")
    engines_per_set: PositiveInt = Field(4, description="engines updated together; a dead one stalls its set only")
    overlap: bool = Field(False, description="copy the weights and send them while the trainers go on (needs "
                          "rollout.max_lag of 1 or more, and host memory for a copy)")
    directory: str = Field("", description="disk: where versions of the weights are written, empty: run.dir/weights; "
                           "delta: where SGLang's relays keep copies, empty: in memory")
    bucket_mb: PositiveInt = Field(512, description="weights sent at a time, MiB")
    timeout_s: PositiveFloat = Field(120.0, description="of one bucket or one call to an engine, seconds")
    verify: bool = Field(False, description="compare a checksum of every tensor on both sides after each update")


class CheckpointConfig(Section):
    """Saving and resuming."""

    every: NonNegativeInt = Field(50, description="steps between saves; 0: only at the end")
    minutes: PositiveFloat | None = Field(None, description="also save when so many minutes have passed since the last")
    keep: PositiveInt = Field(2, description="newest checkpoints kept")
    keep_every: NonNegativeInt = Field(0, description="also keep those of every so many steps; 0: none")
    background: bool = Field(True, description="write in a thread: the run stops for a copy to host memory only")
    resume: bool = Field(True, description="continue from the newest checkpoint in the run directory")
    allow_changes: bool = Field(False, description="resume although settings that alter what is learnt have changed")
    export: bool = Field(True, description="write a Hugging Face checkpoint at the end (run.dir/export)")


class EvalSetConfig(Section):
    """One held-out set."""

    path: str = Field(description="JSONL or Parquet file")
    name: str = Field("", description="in the metrics; the file's stem if empty")
    prompt: str = Field("prompt", description="column: text, or a list of chat messages")
    label: str = Field("label", description="column with the reference answer; empty: there is none")
    environment: str = Field("", description="name of one of environments; empty: the model answers once")
    limit: PositiveInt | None = Field(None, description="use the first so many prompts")
    sampling: SamplingConfig = Field(SamplingConfig(), description="how it is sampled")
    pass_at: list[PositiveInt] = Field(default_factory=list, description="k of pass@k; each at most sampling.samples")
    success: float = Field(1.0, description="a reward of at least this counts as a pass")


class EvalConfig(Section):
    """Evaluation on held-out prompts."""

    every: NonNegativeInt = Field(0, description="steps between evaluations; 0: never during training")
    before_start: bool = Field(True, description="also evaluate before the first step")
    sets: list[EvalSetConfig] = Field(default_factory=list, description="held-out sets")


class ObserveConfig(Section):
    """What a run tells."""

    tensorboard: bool = Field(True, description="write TensorBoard files to run.dir/tensorboard")
    jsonl: bool = Field(True, description="write run.dir/metrics.jsonl, one line a step")
    rollouts: NonNegativeInt = Field(0, description="write the samples of every so many steps as JSONL; 0 is off")
    progress: bool = Field(True, description="progress bar on a terminal")
    trace_steps: list[PositiveInt] = Field(
        default_factory=list, description="steps whose pipeline timeline is written to run.dir/traces")


class DebugConfig(Section):
    """Sampling without training, and training without sampling."""

    dump_experience: str = Field("", description="directory to write each step's samples to, ready to train on")
    replay_experience: str = Field("", description="such a directory to train on: no engines, cluster.rollouts is 0")
    rollout_only: bool = Field(False, description="sample, score and write; no optimizer, no checkpoint")


class Config(Section):
    """The whole tree. `megatron` and `sglang` pass options through under those projects' own names."""

    run: RunConfig = Field(RunConfig(), description="the run as a whole")
    cluster: ClusterConfig = Field(ClusterConfig(), description="who does what")
    parallel: ParallelConfig = Field(ParallelConfig(), description="degrees of the trainer partition")
    pipeline: PipelineConfig = Field(PipelineConfig(), description="the order of work in a pipeline")
    model: ModelConfig = Field(description="the policy")
    moe: MoEConfig = Field(MoEConfig(), description="training of a mixture of experts")
    data: DataConfig = Field(description="training prompts")
    rollout: RolloutConfig = Field(RolloutConfig(), description="sampling during training")
    environments: list[EnvironmentConfig] = Field(default_factory=list, description="conversations of several turns")
    reward: RewardConfig = Field(RewardConfig(), description="how a sample is scored")
    objective: ObjectiveConfig = Field(ObjectiveConfig(), description="the loss")
    batch: BatchConfig = Field(BatchConfig(), description="from an experience to optimizer steps")
    optim: OptimConfig = Field(OptimConfig(), description="AdamW")
    guard: GuardConfig = Field(GuardConfig(), description="alarm for leaps of the loss")
    sync: SyncConfig = Field(SyncConfig(), description="trainer weights to engine weights")
    checkpoint: CheckpointConfig = Field(CheckpointConfig(), description="saving and resuming")
    eval: EvalConfig = Field(EvalConfig(), description="evaluation on held-out prompts")
    observe: ObserveConfig = Field(ObserveConfig(), description="what a run tells")
    debug: DebugConfig = Field(DebugConfig(), description="half a run at a time")
    megatron: dict[str, Any] = Field(default_factory=dict, description="TransformerConfig fields, by their own names")
    sglang: dict[str, Any] = Field(default_factory=dict, description="SGLang server arguments, by their own names")
