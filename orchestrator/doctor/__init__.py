"""`headfold doctor`: whether a cluster will do, check by check."""
