"""Plain data and pure planning: traces, plans, forecasts, schedules. No framework, no clock, no file system."""
