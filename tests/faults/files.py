"""Faults in what is read, checked and written: plans, launch files, options."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        name="replicas divide like shards",
        file="plan.py",
        right="(self.fsdp.groups(self) * self.layout.optimizer_instances)",
        wrong="self.layout.optimizer_instances",
    ),
    Fault(
        name="GiB is taken for GB",
        file="units.py",
        right='"GB": 10**9',
        wrong='"GB": 2**30',
    ),
    Fault(
        name="a pickle's keys may be anything",
        file="plain_pickle.py",
        right="if not all(type(key) is str for key in keys):",
        wrong="if False:",
    ),
    Fault(
        name="an unknown key of a launch file is passed over",
        file="configs/keys.py",
        right='    raise FileError(f"{name}: unknown key {shorten(path)}{hint}")',
        wrong='    return f"{name}: unknown key {shorten(path)}{hint}"',
    ),
    Fault(
        name="a batch that is no product is taken",
        file="configs/batch.py",
        right="        if train != micro * rounds * ranks:",
        wrong="        if False:",
    ),
    Fault(
        name="parameters are offloaded where DeepSpeed does not",
        file="configs/deepspeed_json.py",
        right='        if places[part] != "none" and stage < least:',
        wrong="        if False:",
    ),
    Fault(
        name="a launch file is written that says another plan",
        file="configs/write.py",
        right="        if again[name] != value:",
        wrong="        if False:",
    ),
    Fault(
        name="code that a plan names is run unasked",
        file="named_code.py",
        right="        if named is None and option in wanted:\n",
        wrong="        if False:\n",
    ),
    Fault(
        name="the dropout of a config.json is not counted",
        file="cli/options.py",
        right='        fields.setdefault("dropout", model.dropout)\n',
        wrong="        pass\n",
    ),
    Fault(
        name="a lock that a build holds is left behind",
        file="extensions.py",
        right="(os.path.realpath(lock) not in held)",
        wrong="(held is not None)",
    ),
    Fault(
        name="DeepSpeed's own Adam decays as torch's",
        file="configs/deepspeed_json.py",
        right='        said.setdefault("weight_decay", 0.0)',
        wrong="        pass",
    ),
    Fault(
        name="losses are scaled in bfloat16",
        file="configs/settle.py",
        right='if "scaling" in found and not (precision and precision.loss_scaling):',
        wrong='if "scaling" in found and precision is None:',
    ),
    Fault(
        name="a decay that takes memory is not the plan's",
        file="hyperparameters.py",
        right="bool(decay) != plan.update.l2:",
        wrong="bool(decay) and plan.update.l2:",
    ),
    Fault(
        name="LoRA whose dtype nobody says is kept like the weights",
        file="adapters.py",
        right='if kind == "lora" and engine == "torch" else "weights"',
        wrong='if kind == "lora" and engine == "megatron" else "weights"',
    ),
    Fault(
        name="what a search would take otherwise is not said",
        file="open_choices.py",
        right="    if plan.precision == usual:\n",
        wrong="    if plan.precision:\n",
    ),
    Fault(
        name="a narrow terminal loses the accumulation",
        file="cli/plans_table.py",
        right='times = [f" x {c.plan.accumulation}" * (c.plan.accumulation > 1) for c in plans]',
        wrong='times = ["" for c in plans]',
    ),
    Fault(
        name="bytes that a rehearsal lacks pass for other names",
        file="cli/rehearse.py",
        right="if abs(ours - theirs) > ALIKE * theirs or",
        wrong="if ours < theirs or",
    ),
    Fault(
        name="a model's field that its family does not read is taken",
        file="sound.py",
        right="            if (value := getattr(part, field)) != default:",
        wrong="            if (value := getattr(part, field)) is None:",
    ),
    Fault(
        name="data is found odd by the ranks alone",
        file="launch.py",
        right="    data.check(plan, training.data, training.tokenizer)\n",
        wrong="",
    ),
    Fault(
        name="a damaged picture is found by the ranks alone",
        file="images.py",
        right="_read(path).shape if size <= looked_at else _shape(path)",
        wrong="_shape(path)",
    ),
    Fault(
        name="a checkpoint's file that is cut off is taken",
        file="checkpoints.py",
        right="        if (found := file.stat().st_size) < size:",
        wrong="        if (found := file.stat().st_size) < 0:",
    ),
    Fault(
        name="a checkpoint's list of another run is taken",
        file="checkpoints.py",
        right="    if digest(path) != marker.index and marker.index:",
        wrong="    if not digest(path):",
    ),
    Fault(
        name="another number of steps bends the learning rate unseen",
        file="run_folder.py",
        right="was = replace(now, steps=steps)",
        wrong="was = now",
    ),
]
