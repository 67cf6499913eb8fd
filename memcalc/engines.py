"""What runs a pipeline, and which of the tensors passed between stages it holds on to."""

from __future__ import annotations

from dataclasses import dataclass

from memcalc.catalog import Catalog

__all__ = ["ENGINES", "Engine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """One row."""

    name: str
    summary: str
    keeps_output: bool = False
    """A stage's output stays until its backward pass."""
    keeps_logits: int = 0
    """Outputs of the last stage that stay until the same buffer is used again."""
    copies_input: bool = False
    """The model gets a copy of what was received, and the received one stays as the leaf of the graph."""
    buffers: str = "each"
    """Memory to receive into: for ``each`` tensor anew, ``one`` kept each way, or ``all`` micro batches' at once."""
    ties_modules: bool = False
    """A tied head brings the whole embedding to the last stage, with positions that nothing uses there."""
    lingers: bool = False
    """The gradients handed over last stay bound to local variables until the next ones replace them."""
    works: bool = False
    """What was sent stays with the schedule's own lists and variables, in ways that differ by schedule."""
    whole_batch: bool = False
    """All micro batches of a step are on the device from its start."""
    partitions: bool = False
    """Under tensor parallel, what waits and what is sent is divided over its ranks."""


ENGINES: Catalog[Engine] = Catalog(
    "pipeline engine",
    [
        # stage.py: args_recv_info and grad_recv_info are made for every micro batch before the first step; fwd_cache
        # holds outputs, the last stage's too, and inputs until backward_one_chunk has popped and used them.
        # schedules.py: step() takes all micro batches at once. memcalc/pipeline.py says what its schedules hold.
        Engine(
            name="torch",
            summary="torch.distributed.pipelining: buffers for all micro batches; outputs wait for their backward",
            keeps_output=True,
            buffers="all",
            works=True,
            whole_batch=True,
        ),
        # megatron/core/pipeline_parallel/schedules.py: deallocate_output_tensor leaves one element of a sent output.
        Engine(
            name="megatron",
            summary="Megatron-LM: outputs are dropped when sent; each tensor is received anew",
            lingers=True,
        ),
        # deepspeed/runtime/pipe/engine.py: _exec_recv_activations clones pipe_recv_buf and _exec_forward_pass clones
        # again; pipe_buffers["outputs"] is emptied by _exec_backward_pass, which on the last stage returns before it
        # does, and schedule.py, num_pipe_buffers, has two buffers at least. With tensor parallel
        # (is_pipe_partitioned, is_grad_partitioned) inputs are put together into the leaf itself. module.py builds a
        # TiedLayerSpec's whole module on each of its stages.
        Engine(
            name="deepspeed",
            summary="DeepSpeed's PipelineEngine: one buffer each way, copies of inputs, outputs wait for their backward",
            keeps_output=True,
            keeps_logits=2,
            ties_modules=True,
            copies_input=True,
            buffers="one",
            partitions=True,
        ),
    ],
)
