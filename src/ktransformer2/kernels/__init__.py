"""Arithmetic on pages: storing new rows, sealing full blocks, attention through a page table. `attention` is the door."""
