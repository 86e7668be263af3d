"""Plain data and pure planning: traces, plans, forecasts, schedules. No framework, no clock, no file system.

A tensor of any kind goes the same way here: `trace` records it, `plan` decides about it, `stepper` moves it.
"""
