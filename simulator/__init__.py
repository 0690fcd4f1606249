"""Simulates whole clusters on a virtual clock, with the real scheduler, placement and admission."""
