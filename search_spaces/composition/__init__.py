"""Ways to compose the scores of query heads.

A part is `f(plan: AttentionPlan, **knobs) -> AttentionPlan`, the plan with its composition. A
converted model starts with the composition that changes nothing; training moves it from there.
"""
