"""Model state beyond the device: in host memory or on NVMe, streamed past the device and the CPU's AdamW.

[Note: offload is a tier under the same shards]
A block whose state is on the host is the same block: the same owned range, the same collectives in the same order. Its
reduced gradient leaves for host memory during backward (``gradients``), a thread updates the float32 state there piece
by piece (``tier``), and the new values come back to where the block keeps them (``link``). What the main thread has
to know is whether that is done; it asks when it next needs the values (Block.settle). On a CPU the same code runs, and
the copies are plain ones.
"""
