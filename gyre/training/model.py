"""A policy as Megatron-Core's `GPTModel` inside its `DistributedDataParallel`, in Hugging Face's weights.

With a layout of several ranks each holds its part (`gyre.training.shards`), and whole tensors exist on rank 0 only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gyre.config import LayoutConfig
from gyre.training import megatron_cpu, parallel
from gyre.training.attention import TreeAttention
from gyre.training.convert import check_weights, hf_to_megatron, megatron_to_hf
from gyre.training.hf_config import ModelShape, check_layout, read_shape
from gyre.training.logprobs import TargetLogprobs, TargetQuery
from gyre.training.norm import RmsNorm
from gyre.training.packing import pack
from gyre.training.shards import WHOLE, Shard, join_hf, padded_vocab, split_hf
from gyre.training.swiglu import SwiGlu
from gyre.training.weights import read_hf_weights
from gyre.trajectory.packed import TreeRow

megatron_cpu.install()

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402


@dataclass
class Policy:
    """A model ready for training. Gradients accumulate in `ddp`'s buffers until they are zeroed."""

    shape: ModelShape
    config: Any
    """Megatron's TransformerConfig."""
    ddp: Any
    """Megatron's DistributedDataParallel around the GPTModel."""
    shard: Shard = WHOLE
    """The part of the model that this rank holds."""

    @property
    def model(self) -> Any:
        """The GPTModel itself."""
        return self.ddp.module

    @property
    def dtype(self) -> torch.dtype:
        """Arithmetic of weights and activations."""
        dtype: torch.dtype = self.config.params_dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        device: torch.device = next(self.ddp.parameters()).device
        return device

    def load_hf(self, weights: Mapping[str, Tensor] | None) -> None:
        """Replace the weights, in place. Raises WeightsError for tensors that do not fit, before anything changes.

        With several ranks all call it: rank 0 with the weights (checked before: the others cannot know), the others
        with None.
        """
        state = self.from_hf(weights)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state.pop(name))
        if state:
            raise RuntimeError(f"the Megatron model has no parameter {next(iter(state))}")

    def export_hf(self) -> dict[str, Tensor]:
        """A copy of the weights by Hugging Face's names, float32. With several ranks all call it; rank 0 gets them."""
        named = {name: p.detach() for name, p in self.model.named_parameters()}
        return {name: t.to(torch.float32).clone() for name, t in self.to_hf(named).items()}

    def to_hf(self, named: Mapping[str, Tensor], *, sums: bool = False) -> dict[str, Tensor]:
        """Tensors of all parameters (weights, gradients, moments) by Hugging Face's names instead of Megatron's.

        With several ranks all call it; rank 0 gets whole tensors, the others none. `sums`: gradients that Megatron has
        not reduced over ranks yet.
        """
        part = megatron_to_hf(named, self.shape, self.shard)
        if parallel.world() == 1:
            return part
        if parallel.rank() != 0:
            parallel.give(part)
            return {}
        return join_hf(parallel.collect(part), self.shape, sums=sums)

    def from_hf(self, whole: Mapping[str, Tensor] | None, *, sums: bool = False) -> dict[str, Tensor]:
        """The opposite of `to_hf`: this rank's part by Megatron's names. Rank 0 gives whole tensors, others None."""
        if parallel.world() == 1:
            assert whole is not None
            return hf_to_megatron(whole, self.shape)
        parts = None
        if whole is not None:
            check_weights(whole, self.shape)
            parts = (
                (rank, split_hf(whole, self.shape, parallel.shard_of(rank), sums=sums))
                for rank in range(parallel.world())
            )
        return hf_to_megatron(parallel.spread(parts), self.shape, self.shard)

    def received(self) -> Tensor:
        """What this pipeline stage got from the one before it: a leaf that the schedule takes the gradient of."""
        tensor: Tensor = self.model.decoder.input_tensor
        return tensor

    def target_logprobs(self, row: TreeRow, ids: Tensor, query: TargetQuery) -> TargetLogprobs:
        """Log-probs of chosen tokens of packed trees.

        `row` says how the trees lie in the row, `ids` [T] are its token ids, and `query` says which tokens and at
        which temperature. Differentiable.

        With pipeline stages it is called inside `StreamingStep`'s schedule, and gives hidden states for the next stage
        on all but the last.
        """
        packed, positions = pack(row, self.shape.head_dim, self.shape.rope_theta, self.dtype, self.device)
        result: TargetLogprobs = self.ddp(
            ids[None],
            positions,
            None,
            packed_seq_params=packed,
            output_processor=partial(query.process, vocab=self.shape.vocab),
        )
        return result

    def logits(self, row: TreeRow, ids: Tensor) -> Tensor:
        """Logits [T, vocab] of every position: for tests and small inputs only, and one rank."""
        packed, positions = pack(row, self.shape.head_dim, self.shape.rope_theta, self.dtype, self.device)
        logits: Tensor = self.ddp(ids[None], positions, None, packed_seq_params=packed)
        return logits[0]


def build_policy(
    shape: ModelShape,
    *,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    seed: int = 0,
    init_std: float = 0.02,
    layout: LayoutConfig | None = None,
) -> Policy:
    """A policy of `shape` with fresh random weights; makes Megatron's process groups if none are there.

    `recompute`: activations are recomputed in the backward pass. `init_std`: of the normal initialisation. `layout`:
    how the model is split over the ranks, each of which calls this; None: one rank. Raises UnsupportedModelError where
    the model cannot be split so, LayoutError where the processes do not fit the layout.
    """
    layout = layout or LayoutConfig()
    check_layout(shape, layout.tensor_parallel, layout.pipeline_parallel)
    parallel.initialize(seed, layout)
    shard = parallel.own_shard()
    config = TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        use_te_activation_func=True,  # takes the layer spec's module, which is SwiGlu
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=init_std,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=layout.tensor_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        # Rows differ in length: a stage tells the next one the shape before the tensor.
        variable_seq_lengths=layout.pipeline_parallel > 1,
        moe_token_dispatcher_type="alltoall",  # no experts here; the default contradicts the line above
        use_cpu_initialization=not torch.cuda.is_available(),
        # The sum over a step's micro-batches is divided once, when the step ends (gyre.training.streaming).
        calculate_per_token_loss=True,
        # These need Transformer Engine, Apex or a compiler.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )
    spec = get_gpt_layer_local_spec(qk_layernorm=shape.qk_norm, normalization="RMSNorm")
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = TreeAttention
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RmsNorm
    if shape.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RmsNorm
    spec.submodules.mlp.keywords["submodules"].activation_func = SwiGlu
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=padded_vocab(shape, layout.tensor_parallel),
        max_sequence_length=shape.max_positions,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="none",  # rotary embedding happens in TreeAttention
        parallel_output=True,
        pre_process=shard.first,
        post_process=shard.last,
    ).to(dtype)
    if torch.cuda.is_available():
        model = model.cuda()
    gradients_in_float32 = dtype in (torch.float32, torch.bfloat16, torch.float16)
    ddp = DistributedDataParallel(
        config=config,
        ddp_config=DistributedDataParallelConfig(
            grad_reduce_in_fp32=gradients_in_float32, overlap_grad_reduce=False, use_distributed_optimizer=False
        ),
        module=model,
    )
    return Policy(shape=shape, config=config, ddp=ddp, shard=shard)


def load_policy(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    seed: int = 0,
    layout: LayoutConfig | None = None,
) -> Policy:
    """The policy in `folder` (Hugging Face's format), ready for training; the weights are read by rank 0.

    Raises UnsupportedModelError for a model that cannot be trained exactly, WeightsError for weights that do not fit.
    """
    policy = build_policy(read_shape(folder), dtype=dtype, recompute=recompute, seed=seed, layout=layout)
    policy.load_hf(read_hf_weights(folder) if parallel.rank() == 0 else None)
    return policy
