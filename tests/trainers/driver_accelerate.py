"""``driver.py`` with an accelerate that takes FSDP on a CPU as it does on a GPU.

accelerate/state.py, AcceleratorState, asks for a GPU before it believes a plugin for FSDP; here it is told afterwards. What
it then does with models and optimizers, on gloo, is its own code.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from tests.trainers import driver


def tell() -> None:
    """Let every accelerator of this process take the plugin that it is given."""
    import accelerate
    import deepspeed  # noqa: F401  before the ranks are forked, so that it is loaded once
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    class Told(accelerate.Accelerator):
        def __init__(self, *, fsdp_plugin: Any = None, parallelism_config: Any = None, **settings: Any) -> None:
            super().__init__(**settings)
            if fsdp_plugin is not None:
                told = {
                    "distributed_type": DistributedType.FSDP,
                    "device": torch.device("cpu"),
                }  # cpu:0 is another to FSDP 1
                for state in (PartialState, AcceleratorState):
                    state._shared_state |= told
                if settings.get("mixed_precision") == "bf16":
                    fsdp_plugin.set_mixed_precision("bf16")
                AcceleratorState._shared_state["fsdp_plugin"] = fsdp_plugin
            if parallelism_config is not None:
                AcceleratorState._shared_state["parallelism_config"] = parallelism_config
                self.state.device_mesh = parallelism_config.get_device_mesh("cpu")
                parallelism_config._validate_accelerator(self)

    accelerate.Accelerator = Told


if __name__ == "__main__":
    tell()
    driver.main(int(sys.argv[1]), Path(sys.argv[2]))
