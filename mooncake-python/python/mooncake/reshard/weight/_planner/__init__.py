"""Planner of transfers between layouts."""
