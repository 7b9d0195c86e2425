"""Which policy is better here, and is it worth having: contenders, workloads, seeds, figures with intervals, a verdict.

    scenarios -> cells -> an executor -> a store (JSON lines, resumable) -> figures -> verdict

Everything is decided beforehand: targets from the unloaded engine, rates from its native capacity, seeds. All
contenders of a workload and a seed serve the same requests (common random numbers).
"""
