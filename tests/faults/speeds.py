"""Faults in the time model, the choice of plans, and how both are scored."""

from __future__ import annotations

from .fault import Fault

__all__ = ["FAULTS"]

FAULTS = [
    Fault(
        name="of plans that are predicted to be equally fast the best is chosen",
        file="bench/throughput/score.py",
        right="(row.predicted or 0.0, -(row.measured or 0.0))",
        wrong="(row.predicted or 0.0, row.measured or 0.0)",
    ),
    Fault(
        name="pairs of speeds that are a tie count",
        file="bench/throughput/score.py",
        right=">= (1 + TIE) * (pair.faster.measured or 0)",
        wrong="> (pair.faster.measured or 0)",
    ),
    Fault(
        name="the rate of one GPU is that of all",
        file="bench/throughput/score.py",
        right="each = run.plan.ranks if kind.each else 1",
        wrong="each = 1",
    ),
    Fault(
        name="two tables of one page are in different halves",
        file="bench/throughput/rows.py",
        right='page = " ".join(source.split()[:2]).rstrip(":,;")',
        wrong="page = source",
    ),
    Fault(
        name="the network of a GPU is that of its node",
        file="bench/throughput/places.py",
        right="return each * int(found[1]) * 1e9 / 8",
        wrong="return int(found[1]) * 1e9 / 8",
    ),
    Fault(
        name="optimizer states are divided over all ranks whatever their instances",
        file="plan.py",
        right="(self.fsdp.groups(self) * self.layout.optimizer_instances)",
        wrong="self.fsdp.groups(self)",
    ),
    Fault(
        name="every group of ranks has the whole network of its machine",
        file="links.py",
        right="hardware.link * min(each.near, neighbours) / neighbours",
        wrong="hardware.link",
    ),
    Fault(
        name="interleaved stages wait as long as others for a pipeline to fill",
        file="throughput.py",
        right='(all_of_them - slowest["micro"]) / plan.layout.chunks',
        wrong='(all_of_them - slowest["micro"])',
    ),
    Fault(
        name="gradients of weights move nothing",
        file="rank_time.py",
        right="2 * moved(whole, b) + moved(trained, b) + _cast",
        wrong="2 * moved(whole, b) + _cast",
    ),
    Fault(
        name="fused attention does not compute its scores again in backward",
        file="rank_time.py",
        right="(2.5 if fused else 2.0) * forward",
        wrong="2.0 * forward",
    ),
    Fault(
        name="frozen weights count a gradient in MFU that is never computed",
        file="work.py",
        right="(6 if w.trainable else 4)",
        wrong="6",
    ),
    Fault(
        name="frozen weights are held in float32 beside float32 adapters",
        file="open_choices.py",
        right='return ({"amp-bf16": "bf16", "amp-fp16": "fp16"}.get(usual, usual),)',
        wrong="return (usual,)",
    ),
    Fault(
        name="coefficients are fitted on both halves of the sources",
        file="calibrate/published.py",
        right="for row in rows if row.half == half)",
        wrong="for row in rows)",
    ),
    Fault(
        name="a project with many runs outvotes the others in the range of a step's time",
        file="calibrate/published.py",
        right="np.array([point.weight**2 for point in clock])",
        wrong="np.array([1.0 for point in clock])",
    ),
    Fault(
        name="digits with underscores are a number in a published table",
        file="bench/cells.py",
        right='re.compile(r"[0-9]{1,15}")',
        wrong='re.compile(r"[0-9_]{1,15}")',
    ),
    Fault(
        name="what was measured on this machine is used for every other",
        file="coefficients.py",
        right='return device == self.device and (device == "cpu" or (gpu is not None and gpu == self.gpu))',
        wrong="return True",
    ),
    Fault(
        name="the bound of states takes each rank to hold all of the optimizer's",
        file="fitting.py",
        right="held += states // (shards if row.shards_optimizer else 1)",
        wrong="held += states",
    ),
    Fault(
        name="a deep model has one layer too few of those that are alike",
        file="passes.py",
        right="copies=(layers - low) // span)",
        wrong="copies=(layers - low) // span - 1)",
    ),
    Fault(
        name="layers that are alike are fullest where the first of them is",
        file="alike.py",
        right="max(0, (times - 1) * total))",
        wrong="0)",
    ),
    Fault(
        name="of micro batches that wait in a pipeline the middle one stands for itself alone",
        file="step.py",
        right="tape.repeat(since, less + 1)",
        wrong="tape.repeat(since, 1)",
    ),
    Fault(
        name="one forward pass more than are made waits for the first backward pass",
        file="climb.py",
        right="(self.flights - 2) * left",
        wrong="(self.flights - 1) * left",
    ),
    Fault(
        name="what is solved for ends its bracket one step early",
        file="solve.py",
        right="while high - low > 1:\n        probe",
        wrong="while high - low > 2:\n        probe",
    ),
    Fault(
        name="what shall stay free of a card is used",
        file="search.py",
        right="room = self.capacity - self.keep_free",
        wrong="room = self.capacity",
    ),
    Fault(
        name="the fewest GPUs that will do are the most",
        file="recommend.py",
        right="for count in sorted(set(field.job.ranks)):",
        wrong="for count in sorted(set(field.job.ranks), reverse=True):",
    ),
    Fault(
        name="any card is said to have what is missing",
        file="hardware.py",
        right="if row.usable_bytes >= size and",
        wrong="if",
    ),
]
