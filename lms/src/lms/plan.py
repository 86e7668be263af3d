"""Plans from traces: the published name of `lms.core.plan`."""

from lms.core.plan import Plan, make_plan, table

__all__ = ["Plan", "make_plan", "table"]
