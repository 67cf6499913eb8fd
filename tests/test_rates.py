"""Learning-rate schedules of DeepSpeed's files, against values that its own classes gave.

The values are of deepspeed 0.19.8, deepspeed/runtime/lr_schedules.py, each class around an AdamW of that learning rate,
read before each step.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from memcalc.errors import InputError
from memcalc.rates import SCHEDULES, read_schedule, schedule_text
from memcalc.training import Training

VALUES: list[tuple[str, dict[str, Any], list[float]]] = [('WarmupLR', {'warmup_min_lr': 0.1, 'warmup_num_steps': 5}, [0.1, 0.1, 0.272270623229, 0.373042477794, 0.444541246459, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
('WarmupLR', {'warmup_max_lr': 0.7, 'warmup_num_steps': 4, 'warmup_type': 'linear'}, [0.0, 0.0, 0.175, 0.35, 0.525, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7, 0.7]),
('WarmupDecayLR', {'total_num_steps': 8, 'warmup_max_lr': 0.7, 'warmup_num_steps': 3, 'warmup_type': 'linear'}, [0.0, 0.0, 0.233333333333, 0.466666666667, 0.7, 0.56, 0.42, 0.28, 0.14, 0.0, 0.0, 0.0]),
('WarmupDecayLR', {'total_num_steps': 8, 'warmup_num_steps': 1}, [0.0, 0.0, 0.001, 0.001, 0.000833333333333, 0.000666666666667, 0.0005, 0.000333333333333, 0.000166666666667, 0.0, 0.0, 0.0]),
('WarmupCosineLR', {'total_num_steps': 8, 'warmup_num_steps': 3, 'cos_min_ratio': 0.1, 'warmup_min_ratio': 0.2}, [0.0, 0.1, 0.352371901429, 0.5, 0.457028823734, 0.344528823734, 0.205471176266, 0.0929711762656, 0.05, 0.05, 0.05, 0.05]),
('OneCycle', {'cycle_min_lr': 0.1, 'cycle_max_lr': 1.0, 'cycle_first_step_size': 3, 'cycle_second_step_size': 4, 'decay_step_size': 2, 'decay_lr_rate': 0.5}, [0.1, 0.4, 0.7, 1.0, 0.775, 0.55, 0.325, 0.1, 0.08, 0.0666666666667, 0.0571428571429, 0.05]),
('OneCycle', {'cycle_min_lr': 0.1, 'cycle_max_lr': 1.0, 'cycle_first_step_size': 5, 'cycle_first_stair_count': 2}, [0.1, 0.1, 0.1, 0.55, 0.55, 1.0, 0.55, 0.55, 0.1, 0.1, 0.1, 0.1]),
('LRRangeTest', {'lr_range_test_min_lr': 0.01, 'lr_range_test_step_size': 3, 'lr_range_test_step_rate': 2.0, 'lr_range_test_staircase': True}, [0.01, 0.01, 0.01, 0.03, 0.03, 0.03, 0.05, 0.05, 0.05, 0.07, 0.07, 0.07])]  # fmt: skip


@pytest.mark.parametrize(("kind", "params", "values"), VALUES)
def test_rates_are_deepspeeds(kind: str, params: dict[str, Any], values: list[float]) -> None:
    rate = read_schedule(schedule_text(kind, params), 0.5, 12)
    assert [rate(step) for step in range(len(values))] == pytest.approx(values, rel=1e-9, abs=1e-12)


def test_every_schedule_is_held() -> None:
    assert {kind for kind, _, _ in VALUES} == set(SCHEDULES)


def test_auto_is_the_runs_own() -> None:
    """transformers/integrations/deepspeed.py: min 0, max the learning rate, warm-up 1, total the number of steps."""
    autos = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    said = {"warmup_min_lr": 0, "warmup_max_lr": 0.5, "warmup_num_steps": 1, "total_num_steps": 12}
    told, same = (read_schedule(schedule_text("WarmupDecayLR", each), 0.5, 12) for each in (autos, said))
    assert [told(step) for step in range(13)] == [same(step) for step in range(13)]


def test_a_run_follows_its_schedule() -> None:
    text = schedule_text("WarmupLR", {"warmup_num_steps": 4, "warmup_type": "linear"})
    training = Training(learning_rate=1.0, schedule=text)
    assert [training.rate_at(step) for step in (0, 1, 3, 9)] == [0.0, 0.0, 0.5, 1.0]
    words = training.arguments()
    assert words[words.index("--schedule") + 1] == text
    assert "--schedule" not in Training().arguments()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "schedule is not valid JSON"),
        ("[1]", "is not a JSON object with a type"),
        ('{"type": "WarmupL"}', "unknown schedule 'WarmupL'; did you mean 'WarmupLR'?"),
        (
            '{"type": "WarmupLR", "warmup_steps": 3}',
            "unknown parameter 'warmup_steps'; did you mean 'warmup_num_steps'?",
        ),
        ('{"type": "WarmupLR", "warmup_num_steps": 0}', "warmup_num_steps 0 must be at least 1"),
        ('{"type": "WarmupLR", "warmup_min_lr": -1}', "warmup_min_lr -1 is not a number of at least 0"),
        ('{"type": "WarmupLR", "warmup_min_lr": [0.1]}', "is not a number of at least 0"),
        ('{"type": "WarmupLR", "warmup_type": "cosine"}', "'cosine' is none of: log, linear"),
        ('{"type": "WarmupDecayLR"}', "WarmupDecayLR needs total_num_steps"),
        ('{"type": "OneCycle", "cycle_min_lr": 0.1}', "OneCycle needs cycle_max_lr"),
        ('{"type": "LRRangeTest", "lr_range_test_staircase": 1}', "is not true or false"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        Training(schedule=text)
    assert message in str(caught.value)
    assert json.dumps(str(caught.value)).count("\\n") == 0
