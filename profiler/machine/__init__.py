"""The machine that measures: its devices, clocks, memory, threads and what keeps them busy."""
