"""Launch files as people have posted them, with where; values are theirs."""

from __future__ import annotations

import json

__all__ = ["ACCELERATE_DEEPSPEED", "ACCELERATE_FSDP_1", "ACCELERATE_FSDP_2", "ACCELERATE_LEGACY", "FSDP", "MISPLACED", "TUTORIAL", "ZERO_2_AUTO", "ZERO_3_AUTO"]  # fmt: skip

FSDP = """\
fsdp_config:
  world_size: 8
  local_rank: 0
  shard_optimizer_state: true
  mixed_precision: true
  fp16: true
  activation_checkpointing: true
  device: cuda
  offload_params: true
  offload_optimizer_state: false
  use_reentrant: true
  model_parallel_size: 2
  checkpoint_interval: 1000
  checkpoint_dir: ./checkpoints
"""
"""A tutorial's example of a block with all thirteen keys."""

_SCALING = {"loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2, "min_loss_scale": 1}
_AUTO_BATCH = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"}  # fmt: skip

TUTORIAL = json.dumps({
    "train_batch_size": 32, "gradient_accumulation_steps": 1, "steps_per_print": 200,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16},
    "zero_optimization": {
        "stage": 2,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-7, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}},
    "wall_clock_breakdown": False,
})  # fmt: skip
"""A tutorial's example; the parameters are offloaded in stage 2, which DeepSpeed does not do."""

ZERO_2_AUTO = json.dumps({
    **_AUTO_BATCH, "zero_allow_untested_optimizer": True,
    "fp16": {"enabled": "auto", **_SCALING}, "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "reduce_scatter": True,
        "reduce_bucket_size": 5e8, "overlap_comm": False, "contiguous_gradients": True,
    },
})  # fmt: skip
"""hiyouga/LLaMA-Factory issue 2518."""

ZERO_3_AUTO = json.dumps({
    "fp16": {"enabled": "auto", **_SCALING}, "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True}, "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    **_AUTO_BATCH, "steps_per_print": 2000, "wall_clock_breakdown": False,
})  # fmt: skip
"""deepspeedai/DeepSpeed issues 3228 and 4093."""

MISPLACED = json.dumps({
    "train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "steps_per_print": 1,
    "zero_optimization": {
        "stage": 3, "contiguous_gradients": True, "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
        "stage3_prefetch_bucket_size": 1e7, "stage3_param_persistence_threshold": 1e5, "reduce_bucket_size": 1e7,
        "sub_group_size": 1e9, "cpu_offload": True,
    },
    "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}, "gradient_clipping": 1.0,
    "fp16": {"enabled": True},
})  # fmt: skip
"""A public training repository's: two blocks stand one level too high, one key has its old spelling."""

ACCELERATE_FSDP_1 = """\
distributed_type: FSDP
mixed_precision: 'bf16'
num_processes: 2
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: true
"""
"""huggingface/accelerate, examples/config_yaml_templates/fsdp.yaml."""

ACCELERATE_LEGACY = """\
deepspeed_config: {}
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_offload_params: false
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: GPT2Block
main_process_ip: null
mixed_precision: 'no'
num_processes: 2
"""
"""huggingface/accelerate issue 1943, where the model was a BERT."""

ACCELERATE_FSDP_2 = """\
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
main_process_port: 29500
mixed_precision: bf16
num_processes: 4
"""
"""hiyouga/LLaMA-Factory issue 9708."""

ACCELERATE_DEEPSPEED = """\
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 8
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: false
  zero_stage: 2
distributed_type: DEEPSPEED
mixed_precision: 'bf16'
num_processes: 8
"""
"""huggingface/trl issue 1268: parameters are offloaded in stage 2, which DeepSpeed does not do."""
