"""Python files that are copied into exports: they are read by people and run by engines, without Headfold."""
