"""Every key of accelerate's YAML: what it becomes, or why it becomes nothing.

Keys and defaults are those of accelerate 1.15: commands/config/config_args.py (ClusterConfig), commands/launch.py and
utils/dataclasses.py (FullyShardedDataParallelPlugin, DeepSpeedPlugin).
"""

from __future__ import annotations

from memcalc.configs.keys import SAVES, Key, Table, neutral, plan, refused, training

__all__ = ["TABLE"]

_FSDP, _ZERO, _PARALLEL = "fsdp_config", "deepspeed_config", "parallelism_config"
_MEETING = "says where the processes of several machines meet"
_TPU = "is for TPUs"
_LAUNCHER = "says which launcher starts DeepSpeed on several machines"
_NAMES = "FULL_SHARD|SHARD_GRAD_OP|NO_SHARD|HYBRID_SHARD|HYBRID_SHARD_ZERO2"
_NUMBERS = "|1|2|3|4|5"

TABLE: Table = {
    "compute_environment": plan("nothing but LOCAL_MACHINE", "LOCAL_MACHINE"),
    "distributed_type": plan("strategy", "text"),
    "mixed_precision": plan("precision", "no|false|bf16|fp16|fp32"),
    "use_cpu": plan("device", "flag"),
    "num_processes": plan("ranks", "whole", least=1),
    "num_machines": plan("nodes", "whole", least=1),
    "gpu_ids": plan("nothing, but has to name as many GPUs as there are processes on a machine", "any"),
    "machine_rank": neutral(_MEETING),
    "main_process_ip": neutral(_MEETING),
    "main_process_port": neutral(_MEETING),
    "rdzv_backend": neutral(_MEETING),
    "same_network": neutral(_MEETING),
    "main_training_function": neutral("for launches from a notebook or on TPUs"),
    "debug": neutral("checks what collectives are given"),
    "enable_cpu_affinity": neutral("which cores a process may use"),
    "downcast_bf16": neutral(_TPU),
    "tpu_name": neutral(_TPU),
    "tpu_zone": neutral(_TPU),
    "tpu_use_cluster": neutral(_TPU),
    "tpu_use_sudo": neutral(_TPU),
    "tpu_vm": neutral(_TPU),
    "tpu_env": neutral(_TPU),
    "command_file": neutral(_TPU),
    "commands": neutral(_TPU),
    "mpirun_config": neutral(_MEETING),
    "ipex_config": refused("was Intel's extension; leave it out", {}),
    "fp8_config": refused(
        "is 8-bit training, which memcalc counts for torchao only; leave it out and give --float8", {}
    ),
    "megatron_lm_config": refused("is Megatron-LM; give --strategy megatron-distributed", {}),
    _PARALLEL: Key(role="plan", kind="block"),
    f"{_PARALLEL}.{_PARALLEL}_dp_replicate_size": plan("fsdp.replicas, and a hybrid strategy", "whole", least=1),
    f"{_PARALLEL}.{_PARALLEL}_dp_shard_size": plan(
        "nothing, but its product with the others is num_processes", "whole", least=1
    ),
    f"{_PARALLEL}.{_PARALLEL}_tp_size": plan("layout.tensor", "whole", least=1),
    f"{_PARALLEL}.{_PARALLEL}_cp_size": plan("layout.context", "whole", least=1),
    f"{_PARALLEL}.{_PARALLEL}_cp_comm_strategy": neutral("how ranks exchange keys and values"),
    f"{_PARALLEL}.{_PARALLEL}_cp_backend": refused("is DeepSpeed's; leave it out", "torch"),
    f"{_PARALLEL}.{_PARALLEL}_sp_size": refused("is Ulysses, which memcalc does not count; leave it out", 1),
    f"{_PARALLEL}.{_PARALLEL}_sp_backend": neutral("for sp_size only"),
    f"{_PARALLEL}.{_PARALLEL}_sp_seq_length": neutral("for sp_size only"),
    f"{_PARALLEL}.{_PARALLEL}_sp_seq_length_is_variable": neutral("for sp_size only"),
    f"{_PARALLEL}.{_PARALLEL}_sp_attn_implementation": neutral("for sp_size only"),
    "dynamo_config": Key(role="plan", kind="block"),
    "dynamo_config.dynamo_backend": plan("compute.compile", "NO|INDUCTOR"),
    "dynamo_config.dynamo_mode": neutral("how long a compiler may take"),
    "dynamo_config.dynamo_use_dynamic": neutral("whether shapes are compiled one by one"),
    "dynamo_config.dynamo_use_fullgraph": neutral("whether breaks in a graph are an error"),
    "dynamo_config.dynamo_use_regional_compilation": neutral("whether blocks are compiled once"),
    _FSDP: Key(role="plan", kind="block"),
    f"{_FSDP}.fsdp_version": plan("fsdp.version", "1|2"),
    f"{_FSDP}.fsdp_sharding_strategy": plan("strategy", _NAMES + _NUMBERS),
    f"{_FSDP}.fsdp_reshard_after_forward": plan("strategy", f"true|false|{_NAMES}{_NUMBERS}"),
    f"{_FSDP}.fsdp_offload_params": plan("offload.parameters and offload.optimizer", "flag"),
    f"{_FSDP}.fsdp_auto_wrap_policy": plan("nothing but TRANSFORMER_BASED_WRAP, block by block", "text"),
    f"{_FSDP}.fsdp_transformer_layer_cls_to_wrap": plan(
        "nothing, but has to be the class of the model's blocks", "text"
    ),
    f"{_FSDP}.fsdp_min_num_params": neutral("for SIZE_BASED_WRAP only", "whole"),
    f"{_FSDP}.fsdp_backward_prefetch": plan("fsdp.backward_prefetch", "BACKWARD_PRE|BACKWARD_POST|NO_PREFETCH|1|2"),
    f"{_FSDP}.fsdp_backward_prefetch_policy": plan(
        "fsdp.backward_prefetch; the old spelling", "BACKWARD_PRE|BACKWARD_POST|NO_PREFETCH|1|2"
    ),
    f"{_FSDP}.fsdp_forward_prefetch": plan("fsdp.forward_prefetch", "flag"),
    f"{_FSDP}.fsdp_use_orig_params": plan("fsdp.original_parameters", "flag"),
    f"{_FSDP}.fsdp_activation_checkpointing": plan("checkpoint_every: true is 1, each block", "flag"),
    f"{_FSDP}.fsdp_activation_checkpointing_offload": refused("moves inputs of blocks to the CPU; leave it out", False),
    f"{_FSDP}.fsdp_state_dict_type": neutral(SAVES),
    f"{_FSDP}.fsdp_cpu_ram_efficient_loading": neutral("how the first weights are read"),
    f"{_FSDP}.fsdp_sync_module_states": neutral("how the first weights are spread"),
    f"{_FSDP}.fsdp_ignored_modules": refused("leaves modules undivided; leave it out"),
    _ZERO: Key(role="plan", kind="block"),
    f"{_ZERO}.deepspeed_config_file": plan("all that the DeepSpeed file says", "text"),
    f"{_ZERO}.zero_stage": plan("strategy: deepspeed-0 to deepspeed-3", "whole"),
    f"{_ZERO}.gradient_accumulation_steps": plan("accumulation", "whole", least=1, auto=True),
    f"{_ZERO}.gradient_clipping": training("clip, and update.clip of the plan", "number", auto=True),
    f"{_ZERO}.offload_optimizer_device": plan("offload.optimizer", "none|cpu|nvme"),
    f"{_ZERO}.offload_param_device": plan("offload.parameters", "none|cpu|nvme"),
    f"{_ZERO}.offload_optimizer_nvme_path": training("nvme_path", "any"),
    f"{_ZERO}.offload_param_nvme_path": training("nvme_path", "any"),
    f"{_ZERO}.zero3_init_flag": plan("startup.build, in stage 3", "flag"),
    f"{_ZERO}.zero3_save_16bit_model": neutral(SAVES),
    f"{_ZERO}.deepspeed_moe_layer_cls_names": neutral("which modules stage 3 gathers as one"),
    f"{_ZERO}.deepspeed_multinode_launcher": neutral(_LAUNCHER),
    f"{_ZERO}.deepspeed_hostfile": neutral(_LAUNCHER),
    f"{_ZERO}.deepspeed_exclusion_filter": neutral(_LAUNCHER),
    f"{_ZERO}.deepspeed_inclusion_filter": neutral(_LAUNCHER),
}
