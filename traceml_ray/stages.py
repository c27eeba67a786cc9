"""A row: its stages, why it is less than whole, and its key."""

STAGES = ("post_sync", "data", "prepare", "forward", "backward", "sync_wait")
"""The six stages of a row, in the order in which they happen."""
N_STAGES = len(STAGES)
POST_SYNC, DATA, PREPARE, FORWARD, BACKWARD, SYNC_WAIT = range(N_STAGES)

ROW_BYTES = 8 * N_STAGES
LEAD_BYTES = 3
"""
Number of bytes of a row's lead, on a device's clock: masks with one bit per stage that say how far its host
was ahead.

`late`: the device had caught up with the host at both ends of the stage. `full`: the launch queue was full,
so the host's time says nothing. `sure`: the host had left the stage before the device began it. All three are
LEAD_UNKNOWN if the lead is not known.
"""
LEAD_UNKNOWN = 255

# Why a row is less than whole. A missing mark merges two neighbouring stages.
FLAG_NO_DATA = 1  # no data wait seen: `post_sync` runs to the start of forward
FLAG_NO_FORWARD = 2  # no forward mark: forward starts where the data wait ended
FLAG_NO_SPLIT = 4  # `backward` and `sync_wait` are not separated: `backward` has the time of both
FLAG_NO_PEERS = 8  # nobody waits for this rank here: no gradient exchange in this backward
FLAG_DEVICE_CLOCK = 16  # taken from device events; the CPU's row of the same marks is its host row
FLAG_EXCLUDED = 32  # no statistic covers it: first step of a rank process, or a slowed one
FLAG_NO_BACKWARD = 64  # a step that ran no backward (cut by `trace_step`)
FLAG_INSEPARABLE = 128  # unseen waits inside forward and backward: stages not separable

INFERRED = " (inferred)"
"""
Suffix of a strategy after a function (`all_reduce`, …). No wrapper says where gradients are exchanged, so
rows are cut at the last call of this function before the optimizer in which ranks have waited for each other.
"""

SEGMENT_BITS = 8
"""A row's key is `step << SEGMENT_BITS | segment`; segment counts the syncs inside one step."""
