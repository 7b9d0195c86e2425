// Which plots there are. Columns are those that the daemon keeps (autotune/dashboard/plots.py).

export const panels = (formats) => [
  {
    title: "Load",
    unit: "share",
    floor: 1,
    series: [
      { column: "load", label: "load", look: 1 },
      { column: "kv_usage", label: "KV pool in use", look: 2 },
      { column: "kv_demand", label: "demand if all were native", look: 3 },
    ],
  },
  {
    title: "KV bytes by format",
    unit: "bytes",
    stacked: true,
    series: Object.entries(formats).map(([label, column], index) => ({ column, label, look: index + 1 })),
    limit: { column: "kv_pool_bytes", label: "pool" },
  },
  {
    title: "Time to first token (TTFT), tail",
    unit: "seconds",
    scale: "log",
    series: [{ column: "ttft_tail_s", label: "TTFT", look: 1 }],
    limit: { column: "ttft_target_s", label: "target" },
  },
  {
    title: "Time between tokens (TBT), tail",
    unit: "seconds",
    scale: "log",
    series: [{ column: "tbt_tail_s", label: "TBT", look: 1 }],
    limit: { column: "tbt_target_s", label: "target" },
  },
  {
    title: "Requests",
    unit: "count",
    floor: 4,
    series: [
      { column: "running", label: "running", look: 1 },
      { column: "waiting", label: "waiting", look: 2 },
    ],
  },
  {
    title: "Requests per second",
    unit: "rate",
    floor: 0.1,
    series: [
      { column: "offered_rps", label: "arriving", look: 3 },
      { column: "completed_rps", label: "completed", look: 2 },
      { column: "goodput_rps", label: "inside all targets", look: 1 },
    ],
  },
];
