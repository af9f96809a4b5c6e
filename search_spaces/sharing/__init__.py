"""Ways to let heads of later layers use the weights of earlier ones: one file a part.

A part is `f(problem: SharingProblem, **knobs) -> Shares`. Sharing saves weights and optimiser
state, not KV cache.
"""
