"""Models of a run file. Each field is documented where it is defined; a default lives here and nowhere else.

Pure data: workflows may import this module inside Temporal's sandbox.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator


class Section(BaseModel):
    """A table of the run file: unknown keys and non-finite numbers are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True, use_attribute_docstrings=True)


class PolicyConfig(Section):
    """The model that is trained."""

    path: Path
    """Folder of a Hugging Face checkpoint (Llama, Qwen2 or dense Qwen3), relative to the run file."""
    name: str = "policy"
    """Model name that harnesses send; any other name is refused by the gateway."""
    renderer: str = "qwen3"
    """Name of the `renderers` renderer that turns messages into token ids and back."""
    context: int = Field(2048, ge=64)
    """Longest prompt + completion, in tokens. Beyond it the gateway answers with the provider's context error."""


class TasksConfig(Section):
    """Folders of Harbor tasks."""

    train: Path
    """Folder whose sub-folders are the training tasks, relative to the run file."""
    heldout: Path | None = None
    """Folder of tasks used for evaluation only; none: no evaluation."""


class KindRule(Section):
    """What calls of one kind look like. Every condition that is given must hold; one at least must be given."""

    kind: Literal["main", "main-summary", "sub-agent", "sub-agent-summary", "auxiliary"]
    """The kind of a call that looks so; a summary is the call that shortens a history (compaction)."""
    header: str | None = None
    """A header that the call has."""
    matches: str | None = None
    """A regular expression that is found in that header's value; none: any value."""
    system: str | None = None
    """A regular expression that is found in the system text at the beginning."""
    last: str | None = None
    """A regular expression that is found in what was said since the last answer."""
    tools: bool | None = None
    """Whether the call offers tools."""

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.header is None and self.system is None and self.last is None and self.tools is None:
            raise ValueError("needs a condition: header, system, last or tools")
        if self.matches is not None and self.header is None:
            raise ValueError("matches: needs header")
        for name in ("matches", "system", "last"):
            if (value := getattr(self, name)) is not None:
                _regex(value, name)
        return self


class DialectConfig(Section):
    """How the calls of a `command` harness speak. Without it, kinds come from the shape of the tree alone."""

    agent_header: str | None = None
    """Header whose value names the agent that calls; calls of the main agent don't have it."""
    kinds: list[KindRule] = []
    """Rules ([[harness.dialect.kinds]] tables); the first that fits says the kind, the tree where none does."""
    strip_system: list[str] = []
    """Regular expressions; what they match is taken out of system texts. For what changes and means nothing there
    (a date, a session's id): it would break the prefix that a rollout's calls share."""

    @model_validator(mode="after")
    def _patterns_are_patterns(self) -> Self:
        for i, value in enumerate(self.strip_system):
            _regex(value, f"strip_system[{i}]")
        return self


def _regex(value: str, name: str) -> None:
    try:
        re.compile(value)
    except re.error as error:
        raise ValueError(f"{name}: {value!r} is no regular expression: {error}") from error


class HarnessConfig(Section):
    """The program that acts: run unmodified, attributed by its base URL."""

    name: str = "mini-swe-agent"
    """`mini-swe-agent`, `claude-code`, `qwen-code`, `codex`, or `command` for any program that is described here
    (docs/harnesses.md)."""
    version: str | None = None
    """Of a harness from npm: the installed version to run; none: the one that it is written against."""
    args: list[str] = []
    """Of a harness from npm: further arguments of its command line; the same placeholders as in `command`."""
    command: list[str] = []
    """For `command`: argv. `{base_url}`, `{api_key}`, `{model}`, `{instruction}`, `{workspace}`, `{home}`, `{context}`
    and `{max_tokens}` are filled in."""
    files: dict[str, str] = {}
    """For `command`: settings files, written before it starts: path below its home folder = text, with the same
    placeholders."""
    dialect: DialectConfig = DialectConfig()
    """For `command`: how its calls speak."""
    config: Path | None = None
    """The harness's own settings file, relative to the run file."""
    env: dict[str, str] = {}
    """Extra environment of the harness process; the same placeholders as `command` are filled in."""
    warm: bool = True
    """Fork rollouts from a process that has already imported the harness, where the harness allows it."""


class RolloutConfig(Section):
    """How many rollouts, and within which bounds."""

    groups_per_step: int = Field(8, ge=1)
    """Tasks in one step; each gives one group."""
    group_size: int = Field(16, ge=2)
    """Rollouts of one task in one step (G)."""
    quorum: int | None = Field(None, ge=2)
    """Rewards at which a group is handed out to the trainers; each of its other members follows as it settles, with the
    statistics of all that have settled by then. None: a group waits for its last member. Less waiting for some bias
    (docs/objective.md, "Quorum")."""
    over_submit: int = Field(0, ge=0)
    """Rollouts of each group of a step that are started beyond `group_size`. As `group_size` have a reward, the others
    are ended and excluded as `surplus`: no reward, not trained. It prefers short rollouts (docs/objective.md)."""
    max_concurrent: int = Field(64, ge=1)
    """Rollouts that may run at once over the whole run (the launch window; whole groups first)."""
    order: Literal["longest_first", "shuffled"] = "longest_first"
    """Order in which a step or an evaluation launches its groups. `longest_first`: by the seconds that their tasks took
    when they were last measured, so that its end is not one long rollout that began late (docs/scheduling.md, "The
    order of launches"). It goes by measured times, so two runs of one seed may launch in different orders. `shuffled`:
    by the seed alone. Which tasks a step takes, and each group's position in it, are the seed's either way."""
    time_limit_s: float = Field(600.0, gt=0)
    """Seconds a harness may run; a task's `agent.timeout_sec` lowers it. Then its process tree is ended and the
    workspace is scored as it stands."""
    score_time_limit_s: float = Field(120.0, gt=0)
    """Seconds that one attempt at scoring may take; a task's `verifier.timeout_sec` lowers it."""
    score_attempts: int = Field(3, ge=1)
    """Attempts at scoring before the reward is NULL and the rollout is excluded."""
    max_staleness: int = Field(0, ge=0)
    """Optimizer steps by which the policy that samples may be behind the one that is trained. 0: on-policy. A rollout
    with an older token is not trained (fate `stale`)."""
    branch_cap: int = Field(5, ge=1)
    """Branches of one rollout that are trained, by rank of kind."""

    @model_validator(mode="after")
    def _quorum_is_of_a_group(self) -> Self:
        if self.quorum is not None and self.quorum > self.group_size:
            raise ValueError(f"quorum: must be at most group_size = {self.group_size}, got {self.quorum}")
        return self

    @property
    def launched(self) -> int:
        """Rollouts that are started of one group of a step."""
        return self.group_size + self.over_submit

    @property
    def handed_out_at(self) -> int | None:
        """Rewards at which a group is handed out though members run; None: never."""
        return self.quorum or (self.group_size if self.over_submit else None)


class SamplingConfig(Section):
    """Sampling parameters of the run; they override whatever a harness asks for."""

    temperature: float = Field(1.0, gt=0)
    """Softmax temperature; behaviour log-probs are of this distribution."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus mass; below 1 the behaviour log-probs are of the truncated distribution, the trainer's of the whole one.
    So their ratio falls short by the mass that was kept, and only objective.old = "trainer" goes with it."""
    max_tokens: int = Field(512, ge=1)
    """Longest completion of one call, in tokens."""


class ObjectiveConfig(Section):
    """The loss; docs/objective.md has the formulas."""

    algorithm: Literal["gspo", "grpo", "dapo"] = "gspo"
    """`gspo`: one ratio a sequence (Zheng et al. 2025); `grpo`: one a token, a mean over each rollout (Shao et al.
    2024); `dapo`: one a token, a mean over the step's tokens (Yu et al. 2025)."""
    clip_low: float = Field(3e-4, ge=0, lt=1)
    """Lower clip of the ratio: 1 - clip_low. Without a value: 3e-4 for gspo, 0.2 for grpo and dapo."""
    clip_high: float = Field(4e-4, ge=0)
    """Upper clip of the ratio: 1 + clip_high. Without a value: 4e-4 for gspo, 0.2 for grpo, 0.28 for dapo."""
    ratio: Literal["branch", "rollout"] = "branch"
    """What a sequence is: one branch's owned tokens, or the whole rollout's (its branches then share a micro-batch,
    even one above `trainer.micro_batch_tokens`). Off-policy under a narrow clip, `rollout` learnt faster where it was
    measured (docs/objective.md); on-policy both are the same."""
    old: Literal["sampler", "trainer"] = "sampler"
    """Whose policy the ratio's denominator is: `sampler`, the one that sampled; `trainer`, the trainer's own before the
    step, so that the ratio is 1, nothing is clipped, and `correction` alone weighs the difference to the sampler.
    `sampler` needs sampling.top_p = 1."""
    correction: Literal["none", "truncate", "mask"] = "none"
    """Of the difference between sampler and trainer, w = pi / mu. `truncate` (for old = "trainer"): weigh by min(w,
    cap); `mask`: reject what has w outside floor..cap."""
    correction_level: Literal["token", "sequence"] = "sequence"
    """Whether w is a token's, or the geometric mean over its sequence."""
    correction_cap: float = Field(2.0, gt=0)
    """Largest w: above it, w is cut or its target rejected."""
    correction_floor: float = Field(0.0, ge=0)
    """For `mask`: smallest w that is not rejected."""
    kl: Literal["none", "k1", "k2", "k3"] = "none"
    """Estimator of a KL penalty in the loss."""
    kl_coefficient: float = Field(1e-3, ge=0)
    """What multiplies the penalty."""
    kl_reference: Literal["sampler", "initial"] = "sampler"
    """From whom the penalty keeps the policy: the one that sampled, or the run's first weights (`policy.path`), whose
    copy each trainer then holds and runs forward once a micro-batch."""
    denominator: Literal["trained", "valid"] = "trained"
    """R of gspo and grpo: rollouts whose tokens are trained, or all of the step that have a valid reward. dapo divides
    by tokens, and takes no other value."""
    normalize_std: bool = True
    """Divide advantages by the group's standard deviation (plus 1e-6)."""
    min_std: float = Field(1e-4, ge=0)
    """Smallest standard deviation of a group's rewards that gives a gradient. Below it they differ by noise only, which
    `normalize_std` would blow up to full size. (Of rewards 0 and 1 it is above 1e-4 in any group under 1e8.)"""

    @model_validator(mode="before")
    @classmethod
    def _clips_of_the_algorithm(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        low, high = {"grpo": (0.2, 0.2), "dapo": (0.2, 0.28)}.get(str(data.get("algorithm")), (None, None))
        return data if low is None else {"clip_low": low, "clip_high": high, **data}

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.correction == "truncate" and self.old != "trainer":
            raise ValueError(
                "correction: 'truncate' needs old = 'trainer'; with old = 'sampler' the clipped ratio carries the "
                "weight already, and it would count twice"
            )
        if self.correction == "mask" and self.correction_floor >= self.correction_cap:
            raise ValueError("correction_floor: must be below correction_cap")
        if self.algorithm == "dapo" and self.denominator != "trained":
            raise ValueError("denominator: dapo divides by the step's trained tokens; only 'trained' fits")
        return self

    @property
    def whole_rollouts(self) -> bool:
        """Whether all of a rollout's targets must lie in one micro-batch."""
        sequences = self.algorithm == "gspo" or (self.correction != "none" and self.correction_level == "sequence")
        return self.ratio == "rollout" and sequences


class OptimizerConfig(Section):
    """Adam, as Megatron runs it."""

    lr: float = Field(1e-6, gt=0)
    """Learning rate (constant after warm-up)."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the rate rises linearly from lr / (warmup_steps + 1)."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Adam's first moment decay."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Adam's second moment decay."""
    eps: float = Field(1e-8, gt=0)
    """Adam's epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    clip_grad: float = Field(1.0, ge=0)
    """Global gradient-norm clip; 0 turns it off."""


class TrainerConfig(Section):
    """How a training cell computes."""

    micro_batch_tokens: int = Field(8192, ge=64)
    """Distinct tokens of one micro-batch at most (the unit of work that a training cell takes). A rollout above it is
    cut between branches, and what they share is computed once a part; a single branch above it stays whole."""
    logprob_chunk: int = Field(1024, ge=1)
    """Positions whose vocabulary logits exist at once."""
    recompute: bool = False
    """Recompute activations in the backward pass."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer."""


class ServingConfig(Section):
    """How a cell serves."""

    max_running: int = Field(32, ge=1)
    """Requests one cell decodes at once; also the capacity that the scheduler counts with."""
    kv_tokens: int = Field(65536, ge=1024)
    """Tokens of KV cache of one cell."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Arithmetic of the server. float32 keeps |log-prob sampler - trainer| under 1e-3."""
    request_timeout_s: float = Field(60.0, gt=0)
    """Silence of an engine after which the gateway takes the call elsewhere."""
    on_update: Literal["continue", "finish"] = "continue"
    """What becomes of a cell's running calls when a new version comes. `continue`: they go on under it from their next
    token, their keys and values computed anew, and each span of tokens carries its version. `finish`: they end under
    the version that they began with; meanwhile the cell takes no new calls (those go to other cells, or wait) and keeps
    its old weights. A call that is moved to another cell goes on under what that one serves, either way."""
    finish_limit_s: float = Field(300.0, gt=0)
    """For `finish`: seconds that a new version waits for running calls. Then they go on under it as with `continue`, so
    that one endless call cannot hold a cell back. A cell's change of role waits as long."""
    kv_migration: Literal["auto", "on", "off"] = "auto"
    """Whether a call that goes on at another cell finds its prefix's keys and values there. `auto`: prefixes move where
    that is estimated to take half the time of computing them, and nothing is set up where none of `policy.context`
    tokens would (docs/architecture.md, "Keys and values on the move"); `on`: they move whatever that estimate says,
    which is for measuring; `off`: they are always computed anew."""


class LayoutConfig(Section):
    """How a cell's trainer is split over processes, its ranks; docs/training.md, "Parallel layouts"."""

    tensor_parallel: int = Field(1, ge=1)
    """Ranks that share every layer. Divides the policy's attention heads, key-value heads and intermediate size."""
    pipeline_parallel: int = Field(1, ge=1)
    """Stages that the layers are dealt to, in equal parts. Divides the policy's number of layers."""
    context_parallel: int = Field(1, ge=1)
    """1 only: a row of trees is not split over ranks."""

    @field_validator("context_parallel")
    @classmethod
    def _rows_are_whole(cls, ranks: int) -> int:
        if ranks != 1:
            raise ValueError('only 1: a row of trees is not split over ranks (docs/training.md, "Parallel layouts")')
        return ranks

    @property
    def ranks(self) -> int:
        """Processes of the trainer."""
        return self.tensor_parallel * self.pipeline_parallel


class ServingLayoutConfig(Section):
    """How the server of a cell with CUDA devices is split over them; docs/training.md, "Cells on CUDA"."""

    pipeline_parallel: int = Field(1, ge=1)
    """Stages. Each is tensor-parallel over an equal share of the cell's devices."""
    memory_fraction: float | None = Field(None, gt=0, lt=1)
    """Part of a device's memory for weights and KV cache; none: SGLang's own choice."""


class CellConfig(Section):
    """Devices that share one training layout."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,30}$")
    """Name of the cell, unique in the run."""
    central: bool = False
    """Owns the authoritative weights and the optimizer. Exactly one cell does."""
    cpus: list[int] = []
    """CPU cores that the cell's engine and trainer are pinned to (a CPU cell is a device); empty: no pinning."""
    devices: list[int] = []
    """CUDA devices of the cell, on each of its machines; empty: CPU. The trainer's ranks take the first, one each."""
    nodes: list[str] = []
    """Machines of the cell, by name or address, where it has several: on the first runs its agent, and the others'
    processes are started there by hand with what `gyre cells RUN.toml` prints. Empty: this machine."""
    rendezvous_port: int = Field(29500, ge=1024, le=65534)
    """With several `nodes`: port of the first at which the trainer's ranks meet; the server's meet at the next one."""
    layout: LayoutConfig = LayoutConfig()
    """How its trainer is split over processes. Cells may differ in it."""
    serving: ServingLayoutConfig = ServingLayoutConfig()
    """How its server is split over `devices`."""

    @model_validator(mode="after")
    def _a_device_a_rank(self) -> Self:
        machines = max(1, len(self.nodes))
        if machines > 1 and not self.devices:
            raise ValueError("nodes: a cell of several machines needs devices; machines without are cells of their own")
        if len(set(self.nodes)) < len(self.nodes):
            raise ValueError(f"nodes: a machine is there twice in {self.nodes}")
        if self.layout.ranks % machines:
            raise ValueError(f"nodes: the layout's {self.layout.ranks} ranks do not divide over {machines} machines")
        if self.devices and len(self.devices) * machines < self.layout.ranks:
            raise ValueError(f"devices: the layout's {self.layout.ranks} ranks need as many, got {self.devices}")
        if self.serving.pipeline_parallel > 1 and not self.devices:
            raise ValueError("serving.pipeline_parallel: a cell without devices is served by one process")
        if self.devices and len(self.devices) * machines % self.serving.pipeline_parallel:
            raise ValueError(
                f"serving.pipeline_parallel: {self.serving.pipeline_parallel} stages do not divide the cell's "
                f"{len(self.devices) * machines} devices"
            )
        return self


class SchedulingConfig(Section):
    """Who decides the cells' roles."""

    policy: Literal["elastic", "colocate", "async"] = "elastic"
    """`elastic`: cells move as the water level falls; `colocate`: all serve, then all train; `async`: a fixed split."""
    train_cells: list[str] = []
    """For `async`: the cells that train always; empty: the central cell."""
    min_backlog_tokens: int = Field(2048, ge=0)
    """For `elastic`: tokens ready to train before a cell leaves serving."""
    rollouts_per_slot: float = Field(1.0, ge=1)
    """For `elastic`: live rollouts that each place in a cell's batch (`serving.max_running`) serves. Above 1 where they
    wait for their tools most of the time: 1 / (the share of its life for which a rollout generates). Cells then leave
    serving earlier, and rollouts that wait for the launch window keep none of them."""


class EvaluationConfig(Section):
    """Held-out measurement."""

    every: int = Field(0, ge=0)
    """Evaluate after every n-th step; 0: only before the first and after the last."""
    samples: int = Field(2, ge=1)
    """Rollouts of each held-out task."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature of evaluation rollouts."""


class CheckpointConfig(Section):
    """Durability of weights and optimizer."""

    keep: int = Field(2, ge=1)
    """Newest checkpoints that stay on disk."""


class RetentionConfig(Section):
    """What `gyre prune` removes. Nothing goes by itself, and nothing of a step whose optimizer step is not done."""

    folders: int | None = Field(None, ge=0)
    """Newest trained steps, and newest evaluations, whose rollouts' folders stay; none: all stay."""
    requests: int | None = Field(None, ge=0)
    """Newest trained steps, and newest evaluations, whose raw request messages stay; none: all stay."""
    cpu_days: float | None = Field(None, ge=0)
    """Days for which CPU samples stay; none: for ever."""
    log_mb: int | None = Field(None, ge=1)
    """Megabytes that stay of each process's log, its end; none: all."""


class StackConfig(Section):
    """The local stack. Port 0 means: any free one."""

    temporal_port: int = Field(0, ge=0, le=65535)
    """Temporal's gRPC port."""
    ui_port: int = Field(0, ge=0, le=65535)
    """Port of Temporal's Web UI."""
    gateway_port: int = Field(0, ge=0, le=65535)
    """Port of the gateway; of the first one, where there are several."""
    gateways: int = Field(1, ge=1, le=64)
    """Gateway processes (each takes one core at most); a rollout belongs to one of them, by its token."""
    listen: str = "127.0.0.1"
    """IPv4 address of this machine in the network that it shares with those of `remote_cells`: Postgres and this
    machine's cells listen there, and Temporal at every address of the machine (its server cannot at one alone). Whoever
    reaches Temporal or a cell may use it: the machine must be in a private network."""
    remote_cells: list[str] = []
    """Names of cells whose agents are started on other machines, with what `gyre cells RUN.toml` prints once the stack
    is up; the stack starts those of the others."""
    transfer: Literal["auto", "mooncake", "socket"] = "auto"
    """How bytes move between cells. `auto`: Mooncake by RDMA where there is a device for it and its library loads, else
    plain sockets (over TCP they are faster than Mooncake: docs/architecture.md, "Weights and gradients on the move").
    `mooncake` without such a device goes over TCP."""

    @model_validator(mode="after")
    def _is_reached(self) -> Self:
        try:
            known = IPv4Address(self.listen)
        except ValueError:
            raise ValueError(f"listen: {self.listen!r} is no IPv4 address, like 10.0.0.1") from None
        if known.is_unspecified:
            raise ValueError("listen: other machines use this address, too: give one of this machine, not 0.0.0.0")
        if self.remote_cells and known.is_loopback:
            raise ValueError(f"remote_cells: other machines do not reach this one at {self.listen}; give stack.listen")
        return self


class RunConfig(Section):
    """A whole run file."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{0,60}$")
    """Name of the run; with the seed it is the run's id, so a second start resumes it."""
    seed: int = Field(0, ge=0)
    """Seed of task order and sampling."""
    steps: int = Field(ge=1)
    """Optimizer steps of the run."""
    policy: PolicyConfig
    """The model that is trained."""
    tasks: TasksConfig
    """Folders of Harbor tasks."""
    harness: HarnessConfig = HarnessConfig()
    """The program that acts."""
    rollouts: RolloutConfig = RolloutConfig()
    """How many rollouts, and within which bounds."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling parameters of the run."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """The loss."""
    trainer: TrainerConfig = TrainerConfig()
    """How a training cell computes."""
    serving: ServingConfig = ServingConfig()
    """How a cell serves."""
    cells: list[CellConfig] = Field(min_length=1)
    """The cells ([[cells]] tables)."""
    scheduling: SchedulingConfig = SchedulingConfig()
    """Who decides the cells' roles."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out measurement."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Durability of weights and optimizer."""
    retention: RetentionConfig = RetentionConfig()
    """What `gyre prune` removes."""
    stack: StackConfig = StackConfig()
    """The local stack."""

    @property
    def run_id(self) -> str:
        """Identity of the run: the same name and seed resume the same run."""
        return f"{self.name}-s{self.seed}"

    @property
    def central(self) -> CellConfig:
        """The one cell that owns the authoritative weights."""
        return next(c for c in self.cells if c.central)

    @model_validator(mode="after")
    def _ratio_is_of_one_distribution(self) -> Self:
        if self.sampling.top_p < 1 and self.objective.old == "sampler":
            raise ValueError(
                "sampling.top_p: below 1 the sampler's log-probs are of the nucleus alone and the ratio to them is too "
                "small; use top_p = 1, or objective.old = 'trainer' with a correction"
            )
        return self

    @model_validator(mode="after")
    def _cells_are_coherent(self) -> Self:
        names = [c.name for c in self.cells]
        if len(set(names)) != len(names):
            raise ValueError(f"cells: names must be unique, got {names}")
        if sum(c.central for c in self.cells) != 1:
            raise ValueError("cells: exactly one cell must have central = true")
        for name in self.scheduling.train_cells:
            if name not in names:
                raise ValueError(f"scheduling.train_cells: no cell is named {name!r}; cells are {names}")
        for name in self.stack.remote_cells:
            if name not in names:
                raise ValueError(f"stack.remote_cells: no cell is named {name!r}; cells are {names}")
        if self.scheduling.policy == "async":
            train = self.scheduling.train_cells or [self.central.name]
            if self.central.name not in train:
                raise ValueError("scheduling.train_cells: the central cell must be one of them under policy 'async'")
            if set(train) == set(names):
                raise ValueError("scheduling.train_cells: policy 'async' needs at least one cell left to serve")
        if self.harness.name == "command" and not self.harness.command:
            raise ValueError("harness.command: required when harness.name = 'command'")
        for name in ("command", "files", "dialect"):
            told = getattr(self.harness, name) != HarnessConfig.model_fields[name].default
            if told and self.harness.name != "command":
                raise ValueError(f"harness.{name}: only for harness.name = 'command', which is {self.harness.name!r}")
        for path in self.harness.files:
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or not PurePosixPath(path).name:
                raise ValueError(f"harness.files: {path!r} must be a path below the harness's home folder")
        return self
