"""Which trials go on at a rung."""

from orchestrator.schedulers.halving import BudgetHalving

__all__ = ["BudgetHalving"]
