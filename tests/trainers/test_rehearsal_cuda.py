"""A plan for CUDA rehearsed on fake tensors of the CPU: what CUDA does otherwise, by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memcalc.ledger import ledger
from memcalc.loss import Loss
from tests.trainers.rehearsed import planned
from trainers.rehearsal import rehearse, rehearse_module
from trainers.rehearsal.autocast import LISTS, in_float32
from trainers.rehearsal.cuda import cuda_kernels


def kept(function: object, *tensors: torch.Tensor) -> dict[tuple[int, ...], list[torch.dtype]]:
    """Shapes and dtypes of what autograd keeps of a call."""
    found: dict[tuple[int, ...], list[torch.dtype]] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        found.setdefault(tuple(tensor.shape), []).append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(*tensors)  # type: ignore[operator]
    return found


def test_dropout_keeps_one_byte_an_element_and_only_inside() -> None:
    x = torch.ones(4, 6, dtype=torch.bfloat16, requires_grad=True)
    with cuda_kernels():
        assert kept(lambda x: F.dropout(x, 0.5), x) == {(4, 6): [torch.bool]}
        assert kept(lambda x: nn.Dropout(0.5).eval()(x), x) == {}
    assert kept(lambda x: F.dropout(x, 0.5), x) == {(4, 6): [torch.bfloat16]}


def test_a_norm_is_one_kernel() -> None:
    x, weight = torch.ones(4, 6, dtype=torch.bfloat16, requires_grad=True), torch.ones(6, requires_grad=True)
    with cuda_kernels():
        found = kept(lambda x: F.rms_norm(x, [6], weight), x)
    assert found == {(4, 6): [torch.bfloat16], (4, 1): [torch.float32], (6,): [torch.float32]}


def test_autocast_follows_cudas_lists() -> None:
    x = torch.ones(4, 6, dtype=torch.bfloat16)
    with cuda_kernels(), torch.autocast("cpu", torch.bfloat16):
        assert [x.softmax(-1).dtype, x.pow(2).dtype, x.sum().dtype] == 3 * [torch.float32]
        assert x.softmax(-1, dtype=torch.float16).dtype == torch.float16
        assert F.layer_norm(x, [6]).dtype == F.rms_norm(x, [6]).dtype == torch.float32
        assert (x @ x.T).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert x.softmax(-1).dtype == torch.bfloat16


def test_autocast_takes_the_loss_of_sixteen_bits_as_cuda_does() -> None:
    """The log-softmax stays in 16 bits, and nll_loss gets a copy of it in 32; the CPU casts the logits."""
    logits, targets = torch.ones(5, 7, dtype=torch.bfloat16, requires_grad=True), torch.zeros(5, dtype=torch.int64)
    with cuda_kernels(), torch.autocast("cpu", torch.bfloat16):
        on_cuda = kept(lambda x: F.cross_entropy(x, targets), logits)
    with torch.autocast("cpu", torch.bfloat16):
        on_cpu = kept(lambda x: F.cross_entropy(x, targets), logits)
    assert on_cuda[5, 7] == [torch.bfloat16, torch.float32]
    assert set(on_cpu[5, 7]) == {torch.float32}


@pytest.mark.parametrize("name", LISTS)
def test_every_operation_of_the_lists_is_there(name: str) -> None:
    assert callable(in_float32(name))


def test_allocations_are_whole_blocks_and_counters_stay_on_the_host() -> None:
    found = rehearse(planned("mlp", device="cuda"))
    assert found.timeline is not None and not (found.timeline.delta % 512).any()
    # Two moments of ten tensors each, rounded up; no step counters.
    numels = [*[256 * 256, 256] * 4, 10 * 256, 10]
    held = found.timeline.at_moment("start", "optimizer")
    assert held == sum(2 * -(-4 * numel // 512) * 512 for numel in numels)


@pytest.mark.parametrize("kernel", ["flash", "efficient", "math", "eager"])
def test_attention_keeps_what_each_kernel_keeps(kernel: str) -> None:
    plan = planned("gpt2", device="cuda", precision="bf16", attention=kernel, dropout=0.1 * (kernel != "eager"))
    assert ledger(plan).steady().bytes == pytest.approx(rehearse(plan).allocated_peak, rel=2e-3)


def test_fp16_scales_its_loss_and_steps() -> None:
    plan = planned("gpt2", device="cuda", precision="amp-fp16")
    found = rehearse(plan)
    assert found.optimizer > 0  # the step was taken: no gradient is infinite
    assert ledger(plan).steady().bytes == pytest.approx(found.allocated_peak, rel=2e-3)


def test_a_chunked_loss_is_rehearsed() -> None:
    plan = dataclasses.replace(planned("llama", device="cuda", precision="amp-bf16"), loss=Loss(chunks=4))
    assert ledger(plan).steady().bytes == pytest.approx(rehearse(plan).allocated_peak, rel=1e-2)


class Recurrent(nn.Module):
    """Weights used again and again, and a table that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(50, 16), nn.LSTMCell(16, 16)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        state = None
        for place in range(ids.shape[1]):
            state = self.cell(self.table(ids[:, place]), state)
        return {"logits": self.head(state[0])}


def test_any_module_is_rehearsed() -> None:
    found = rehearse_module(Recurrent, lambda: {"ids": torch.zeros(4, 20, dtype=torch.int64)})
    weights = 4 * (50 * 16 + 2 * 64 * 16 + 2 * 64)  # the table once
    assert (found.parameters, found.gradients) == (weights, weights)
    longer = rehearse_module(Recurrent, lambda: {"ids": torch.zeros(4, 40, dtype=torch.int64)})
    assert longer.parameters == found.parameters and longer.by_moment["forward"] > found.by_moment["forward"]


def test_a_frozen_part_has_no_gradient() -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
        model[0].requires_grad_(False)
        return model

    found = rehearse_module(make, lambda: torch.zeros(3, 8), loss=lambda output, targets: output.sum())
    assert (found.parameters, found.gradients) == (4 * (72 + 18), 4 * 18)
