"""Errors of users, as data: all bad inputs by verb. Commands run in the folder of `bad_input_folder`."""

from __future__ import annotations

from bad_checkpoint_inputs import EVALUATIONS, FINETUNINGS, TRAININGS
from bad_conversion_inputs import CONVERSIONS, ESTIMATES, EXPORTS, INSPECTIONS, RECIPES
from bad_first_inputs import CLUSTERS, DEMOS, FIRST_CONFIGS
from bad_input import Bad
from bad_search_inputs import GENERAL, PAGES, PROMOTIONS, REPORTS, SEARCHES, WATCHES

BY_VERB: dict[str, tuple[Bad, ...]] = {
    "any verb": GENERAL,
    "demo": DEMOS,
    "init": FIRST_CONFIGS,
    "doctor": CLUSTERS,
    "search": SEARCHES,
    "recipes": RECIPES,
    "convert": CONVERSIONS,
    "estimate": ESTIMATES,
    "train": TRAININGS,
    "finetune": FINETUNINGS,
    "evaluate": EVALUATIONS,
    "watch": WATCHES,
    "ui": PAGES,
    "promote": PROMOTIONS,
    "export": EXPORTS,
    "inspect": INSPECTIONS,
    "report": REPORTS,
}
CASES = tuple(bad for cases in BY_VERB.values() for bad in cases)
