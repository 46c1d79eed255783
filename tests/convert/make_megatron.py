"""Makes the checkpoints of test_megatron_import.py with megatron-core itself, on a CPU.

    python -m tests.convert.make_megatron TARGET [CASE ...]

Each case is a folder with a checkpoint in one or both forms and expected.safetensors: tokens and the logits that
Megatron computed for them; with an optimizer, also the tokens and the losses of the steps that followed the save.
Megatron expects a GPU: where it asks for the current one it gets the CPU here, and dropout's random states, unused at
dropout 0, are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import shutil
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from safetensors.torch import save_file
from torch.overrides import TorchFunctionMode

from tests.convert.make_ranks import fork, pack

VOCAB, SEQ, BATCH, ITERATION = 32, 16, 2, 3
# Case → model, tensor and pipeline ranks, chunks of each pipeline rank, optimizer, ranks.
CASES: dict[str, dict[str, Any]] = {
    **{
        f"{kind}-tp{tp}-pp{pp}": {"kind": kind, "tp": tp, "pp": pp}
        for kind in ("gpt2", "llama")
        for tp in (1, 2)
        for pp in (1, 2)
    },
    "qwen-tp2-pp2": {"kind": "qwen", "tp": 2, "pp": 2},
    "llama-vp2": {"kind": "llama", "tp": 1, "pp": 2, "vp": 2},
    "llama-distributed-optimizer": {"kind": "llama", "tp": 2, "optimizer": "fully_reshardable", "world": 4},
    "gpt2-optimizer": {"kind": "gpt2", "tp": 2, "optimizer": "plain", "world": 2},
    "llama-bf16": {"kind": "llama", "tp": 2, "optimizer": "plain", "world": 2, "bf16": True},
    "llama-buckets": {"kind": "llama", "tp": 1, "optimizer": "dp_reshardable", "world": 2},
}
LEARNING_RATE = 0.01


def arguments(kind: str, tp: int, pp: int, vp: int, bf16: bool) -> argparse.Namespace:
    """What Megatron-LM would have saved, as far as it says what the model is."""
    values: dict[str, Any] = {
        "num_layers": 4 if vp > 1 else 3,
        "hidden_size": 8,
        "num_attention_heads": 4,
        "kv_channels": 2,
        "group_query_attention": kind != "gpt2",
        "num_query_groups": 1 if kind == "gpt2" else 2,
        "ffn_hidden_size": 32 if kind == "gpt2" else 12,
        "max_position_embeddings": SEQ,
        "padded_vocab_size": VOCAB,
        "normalization": "LayerNorm" if kind == "gpt2" else "RMSNorm",
        "norm_epsilon": 1e-5,
        "swiglu": kind != "gpt2",
        "bias_gelu_fusion": kind == "gpt2",
        "add_bias_linear": kind == "gpt2",
        "add_qkv_bias": kind == "qwen",
        "qk_layernorm": kind == "qwen",
        "position_embedding_type": "learned_absolute" if kind == "gpt2" else "rope",
        "rotary_base": 10000 if kind == "llama" else 500,
        "rotary_percent": 1.0,
        "untie_embeddings_and_output_weights": kind == "llama",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "params_dtype": torch.bfloat16 if bf16 else torch.float32,
        "num_experts": None,
        "multi_latent_attention": False,
        "consumed_train_samples": ITERATION * BATCH,
        "attention_backend": AttnBackend.auto,
        "model_type": ModelType.encoder_or_decoder,
        "exit_signal": signal.SIGTERM,
    }
    return argparse.Namespace(**values)


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on the GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")) == "cuda":
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def use_cpu() -> None:
    @contextlib.contextmanager
    def fork(*_: Any) -> Iterator[None]:
        yield

    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda: None
    OnCpu().__enter__()
    torch._dynamo.config.disable = True
    torch.Tensor.cuda = lambda self, *_, **__: self
    tensor_parallel.random.CudaRNGStatesTracker.fork = fork
    kind = torch.Tensor.type
    torch.Tensor.type = lambda self, *to: kind(self, *to) if to else "torch.cuda." + kind(self).rpartition(".")[2]


def build(args: argparse.Namespace, vp: int) -> list[GPTModel]:
    uneven = {"num_layers_in_first_pipeline_stage": 1} if args.pipeline_model_parallel_size > 1 and vp == 1 else {}
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        kv_channels=args.kv_channels,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        ffn_hidden_size=args.ffn_hidden_size,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        bias_activation_fusion=args.bias_gelu_fusion,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        qk_layernorm=args.qk_layernorm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=args.params_dtype,
        bf16=args.params_dtype == torch.bfloat16,
        pipeline_dtype=args.params_dtype,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=vp if vp > 1 else None,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        **uneven,
    )
    spec = get_gpt_layer_local_spec(normalization=args.normalization, qk_layernorm=args.qk_layernorm)
    chunks = []
    for chunk in range(vp):
        stage = {"ignore_virtual": False, "vp_stage": chunk} if vp > 1 else {}
        model = GPTModel(
            config,
            spec,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=SEQ,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_base=args.rotary_base,
            vp_stage=chunk if vp > 1 else None,
        )
        model = model.to(args.params_dtype)
        randomize(model, chunk)
        chunks.append(model)
    return chunks


def randomize(model: GPTModel, chunk: int) -> None:
    """Values that let no tensor hide; the same on ranks that hold the same one."""
    stage = 10 * chunk + parallel_state.get_pipeline_model_parallel_rank()
    for name, parameter in model.named_parameters():
        tied = name == "output_layer.weight" and model.share_embeddings_and_output_weights
        name = "embedding.word_embeddings.weight" if tied else name
        cut = getattr(parameter, "tensor_model_parallel", False)
        part = parallel_state.get_tensor_model_parallel_rank() if cut else 0
        seed = f"{name} {stage if 'layers' in name else 0} {part}"
        generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
        centre = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        parameter.data.copy_(torch.empty(parameter.shape).normal_(centre, 0.3, generator=generator))


def forward(chunks: list[Any], tokens: torch.Tensor) -> torch.Tensor | None:
    """Logits (B, S, V), whole, on the ranks of the last stage; None on others."""
    rank, size = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    mask = torch.ones(SEQ, SEQ).tril().view(1, 1, SEQ, SEQ) < 0.5
    positions = torch.arange(SEQ).expand_as(tokens)
    y, last = None, size * len(chunks) - 1
    for stage in range(last + 1):
        if stage % size != rank:
            continue
        model = chunks[stage // size]
        if stage and size > 1:
            x = torch.empty(SEQ, len(tokens), model.config.hidden_size, dtype=model.config.params_dtype)
            dist.recv(x, parallel_state.get_pipeline_model_parallel_prev_rank())
            model.set_input_tensor(x)
        y = model(tokens, positions, mask)
        if stage < last:
            dist.send(y.detach().contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
            y = None
    return None if y is None else tensor_parallel.gather_from_tensor_model_parallel_region(y)


def batch(step: int) -> torch.Tensor:
    """(BATCH, SEQ + 1) tokens of a step."""
    return torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(step))


class Trainer:
    """AdamW's steps of a model without pipeline, each data-parallel rank with its part of the batch."""

    def __init__(self, model: GPTModel, args: argparse.Namespace, how: str) -> None:
        distributed, bf16 = how != "plain", args.params_dtype == torch.bfloat16
        settings = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
        self.model = DistributedDataParallel(model.config, settings, model)
        config = OptimizerConfig(
            optimizer="adam",
            lr=LEARNING_RATE,
            weight_decay=0.1,
            clip_grad=1.0,
            bf16=bf16,
            params_dtype=args.params_dtype,
            use_distributed_optimizer=distributed,
        )
        self.optimizer = get_megatron_optimizer(config, [self.model], use_gloo_process_groups=False)
        # As Megatron's scheduler does.
        for group in self.optimizer.param_groups:
            group["weight_decay"] *= group["wd_mult"]

    def step(self, step: int) -> float:
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        tokens = batch(step).chunk(ranks)[rank]
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        logits = forward([self.model.module], tokens[:, :-1])
        assert logits is not None
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        # The gathered logits' gradient is whole on every tensor-parallel rank and cut again on its way back.
        loss.backward()
        finalize_model_grads([self.model])
        self.optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return float(total) / ranks


def make(rank: int, case: Path, store: str, kind: str, tp: int, pp: int = 1, vp: int = 1, **more: Any) -> None:
    world, optimizer = more.get("world", tp * pp), more.get("optimizer")
    limit = timedelta(seconds=300)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=limit)
    parallel_state.initialize_model_parallel(tp, pp, vp if vp > 1 else None)
    args = arguments(kind, tp, pp, vp, more.get("bf16", False))
    chunks = build(args, vp)
    trainer = Trainer(chunks[0], args, optimizer) if optimizer else None
    if trainer:
        for step in range(ITERATION):
            trainer.step(step)
    with torch.no_grad():
        tokens = batch(100)[:, :-1].contiguous()
        logits = forward(chunks, tokens)
    names = [f"model{i}" for i in range(vp)] if vp > 1 else ["model"]
    state: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": ITERATION}
    if not optimizer:
        folder = f"mp_rank_{rank % tp:02d}" + (f"_{rank // tp:03d}" if pp > 1 else "")
        path = case / "legacy" / f"iter_{ITERATION:07d}" / folder / "model_optim_rng.pt"
        path.parent.mkdir(parents=True)
        models = {name: chunk.state_dict_for_save_checkpoint() for name, chunk in zip(names, chunks)}
        torch.save({**state, **models}, path)
    target = case / "dist" / f"iter_{ITERATION:07d}"
    if rank == 0:
        target.mkdir(parents=True)
    dist.barrier()
    sharded = {**state, **{name: chunk.sharded_state_dict() for name, chunk in zip(names, chunks)}}
    if trainer:
        how = {} if optimizer == "plain" else {"metadata": {"distrib_optim_sharding_type": optimizer}}
        sharded["optimizer"] = trainer.optimizer.sharded_state_dict(sharded, **how)
    # The writers' queue, from a fork; by itself it starts a Python that imports everything anew.
    with multiprocessing.get_context("fork").Manager() as manager:
        filesystem_async._results_queue = manager.Queue()
        dist_checkpointing.save(sharded, str(target))
    losses = [trainer.step(ITERATION + step) for step in range(3)] if trainer else []
    if logits is not None and parallel_state.get_tensor_model_parallel_rank() == 0:
        if parallel_state.get_data_parallel_rank() == 0:
            expected = {"tokens": tokens, "logits": logits.detach().float().contiguous()}
            if trainer:
                steps = [batch(ITERATION + step) for step in range(3)]
                expected |= {"losses": torch.tensor(losses, dtype=torch.float64), "batches": torch.stack(steps)}
            save_file(expected, case / "expected.safetensors")
    dist.barrier()
    for form in ("dist", "legacy"):
        if rank == 0 and (case / form).is_dir():
            (case / form / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


def main(target: Path, chosen: list[str]) -> None:
    torch.set_num_threads(1)
    use_cpu()
    for name, case in CASES.items():
        if chosen and name not in chosen:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            store = str(Path(scratch) / "store")
            folder = target / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            fork(case.get("world", case["tp"] * case.get("pp", 1)), make, folder, store, **case)
        print(name, flush=True)
    pack(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
