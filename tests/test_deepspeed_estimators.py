"""DeepSpeed's own estimators of model states, deepspeed 0.19.8, against what its code holds, byte for byte.

deepspeed/runtime/zero/stage_1_and_2.py and stage3.py, estimate_zero2_model_states_mem_needs and
estimate_zero3_model_states_mem_needs: P parameters, the largest layer L, G GPUs in all. What they print as GB are GiB.
"""

from __future__ import annotations

import pytest

from memcalc.deepspeed import DeepSpeed
from memcalc.host import host_tensors
from memcalc.ledger import ledger
from memcalc.offload import Offload
from memcalc.plan import Plan
from tests.figures import GIB, largest, sized

NONE, STATES, ALL = Offload(), Offload(optimizer="cpu"), Offload(optimizer="cpu", parameters="cpu")
# P, L, GPUs; then what each printed per GPU: ZeRO-2 offloaded and not, ZeRO-3 with both offloaded, the optimizer, none.
PRINTED = [
    (2851 * 10**6, 32 * 10**6, 8, ("5.31", "11.28", "0.12", "0.78", "6.09")),
    (2851 * 10**6, 32 * 10**6, 16, ("5.31", "8.30", "0.12", "0.45", "3.11")),
    (2783 * 10**6, 65 * 10**6, 1, ("5.18", "51.84", "0.24", "5.43", "46.90")),
    (6805 * 10**6, 131 * 10**6, 4, ("12.68", "41.19", "0.49", "3.66", "29.01")),
    (124_439_808, 38_597_376, 8, ("0.23", "0.49", "0.14", "0.17", "0.40")),
    (124_439_808, 38_597_376, 1, ("0.23", "2.32", "0.14", "0.38", "2.23")),
]


def estimators(p: int, layer: int, gpus: int) -> tuple[float, ...]:
    """Bytes per GPU: 2 B weights, and of a share 18 B: weights, float32 gradients, masters and two moments."""
    zero_2, zero_3 = (2 * p, 2 * p + 18 * p / gpus), (0, 2 * p / gpus, 18 * p / gpus)
    return (*zero_2, *(4 * layer + held for held in zero_3))


@pytest.mark.parametrize(("p", "layer", "gpus", "printed"), PRINTED)
def test_what_the_estimators_print(p: int, layer: int, gpus: int, printed: tuple[str, ...]) -> None:
    """One formula for all rows: a single GPU in ZeRO-2 has 2 B and 18 B a parameter."""
    assert tuple(f"{size / GIB:.2f}" for size in estimators(p, layer, gpus)) == printed


LAYERS, EACH, GPUS = 8, 2**24, 4
P = LAYERS * EACH
LEAN = DeepSpeed(reduce_bucket_size=1, prefetch_bucket_size=0, max_live_parameters=1, persistence_threshold=0)


def plan(stage: int, offload: Offload) -> Plan:
    return Plan(
        model=sized(P, layers=LAYERS), strategy=f"deepspeed-{stage}", ranks=GPUS, precision="fp16-master",
        optimizer_kind="fused", offload=offload, deepspeed=LEAN,
    )  # fmt: skip


def held(stage: int, offload: Offload, moment: str = "step") -> int:
    """Weights, gradients, masters and moments of the fullest point of a moment."""
    timeline = ledger(plan(stage, offload))
    return sum(timeline.at_moment(moment, part) for part in ("parameters", "gradients", "optimizer"))


def test_zero_2_holds_a_flat_copy_of_its_gradients_more() -> None:
    """In the step the 16-bit share of gradients stands beside its flat copy and the float32 copy of that (2 + 2 + 4),
    where the estimator has 4; between steps nothing in float32 stands there, and 14 B of a share are held."""
    assert held(2, NONE) == estimators(P, EACH, GPUS)[1] + 2 * P // GPUS
    assert held(2, NONE, "forward") == 2 * P + 12 * P // GPUS


def test_zero_2_with_the_optimizer_offloaded_holds_the_weights() -> None:
    assert held(2, STATES, "forward") == estimators(P, EACH, GPUS)[0] == 2 * P
    # While gradients are made, those of one layer besides, which the estimator leaves out.
    assert held(2, STATES, "backward") == 2 * P + 2 * 2 * EACH


def test_zero_3_holds_16_bit_gradients_and_a_flat_copy_more() -> None:
    """Of a share 2 B weights, 12 B masters and moments and 4 B float32 gradients are the 18 of the estimator; 16-bit
    gradients (2) stand there from the start, a flat copy of them (2) in the step. The 4 B of the largest layer are
    those of its weights and gradients while it is computed, when there are no float32 gradients."""
    share = P // GPUS
    assert held(3, NONE) == estimators(P, EACH, GPUS)[4] - 4 * EACH + (2 + 2) * share
    assert held(3, NONE, "forward") == (2 + 12 + 2) * share
    timeline = ledger(plan(3, NONE))
    assert largest(timeline, "layers.0.weight gather") == largest(timeline, "layers.0.weight gradient") == 2 * EACH


def test_zero_3_offloaded_holds_what_the_estimator_says_but_for_the_layer() -> None:
    assert held(3, STATES, "forward") == estimators(P, EACH, GPUS)[3] - 4 * EACH == 2 * P // GPUS
    assert held(3, ALL, "forward") == estimators(P, EACH, GPUS)[2] - 4 * EACH == 0


@pytest.mark.parametrize(
    ("stage", "offload", "asked", "said"), [(2, STATES, 18, 16), (3, STATES, 18, 16), (3, ALL, 20, 18)]
)
def test_the_host_is_asked_for_2_bytes_more(stage: int, offload: Offload, asked: int, said: int) -> None:
    """The estimators count 16 B of a share, or 18 with the weights, and multiply by 1.5 for what they do not know:
    16-bit gradients (or weights on their way back) stand beside float32 ones, masters and moments."""
    sizes = sum(tensor.size for tensor in host_tensors(plan(stage, offload)))
    assert sizes == asked * P // GPUS == (said + 2) * P // GPUS
    assert sizes < 1.5 * said * P // GPUS
