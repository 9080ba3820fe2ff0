"""What tfdist costs beside TensorFlow's strategies, one device, PyTorch and DeepSpeed, measured. Relative figures only; no tests.

    python -m benchmarks.run                the suite: data parallelism of all, side by side in rounds, with tables and plots
    python -m benchmarks.compare_trees      two source trees, before and after a change, in turns
    python -m benchmarks.kernels            what each of tfdist's kernels brings by itself
    python -m benchmarks.tensor_parallel    tensor parallelism beside PyTorch's
    python -m benchmarks.pipeline           pipeline schedules, their speed and memory, beside PyTorch's
    python -m benchmarks.pipeline_picture   what each rank of a pipeline really did, drawn
    python -m benchmarks.links              steps over a slow link between two hosts, compressed and not, beside PyTorch's
    python -m benchmarks.planning           planned times beside measured ones, and what the chosen plan loses to the fastest
    python -m benchmarks.planning_memory    planned memory beside TensorFlow's own count
    python -m benchmarks.one_card           all that one GPU, split in logical ones, can show: exactness, memory, cost, overlap

Ranks are logical CPUs, or with `--logical-gpus N` parts of one GPU; memory is then what their allocators count.

Files, lowest first: `cases` (what is measured, arguments, tables), `job` (the processes that run a case), `resident` (this
process's memory), `memory` (that, or what allocators count), `devices` (what the ranks are), `gpt_arrays` (weights and batches
that are the same in every framework), `measuring` (what processes measure in the same way in every framework), `training`
(strategies, models and loops), `tensor_training`, `pipeline_training`, `child` (what runs in each process of a job), `peers`
(what comparisons with PyTorch share), and the programs. Of one card: `one_card/`. Of the suite: `suites` (its cases), `results`
(its records), `figures` (medians and ratios of them), `promises` (its targets), `summary`, `plots`, `run`. In PyTorch:
`torch_devices`, `torch_gpt`, `torch_data`, `torch_deepspeed`, `torch_tensor`, `torch_pipeline`, `torch_child`. Only the
`training` files, `devices`, `child`, `kernels`, `pipeline_picture`, the `planning` files and `one_card` import TensorFlow.
"""
