"""Arithmetic on pages: storing rows, sealing full blocks, attention through a page table. `attention` is the door."""
