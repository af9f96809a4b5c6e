"""Ways to partition the heads of one layer into groups.

A part, one per file, is `f(problem: GroupingProblem, generator, **knobs) -> Grouping`. It needs
what `needs` says: "similarity" (a matrix to guide moves), "objective" (a score of whole partitions)
or "group_cost" (an additive one); "few_heads" marks a part for few heads alone. Most have a knob
`equal_sizes`: whether all groups have one size; "equal_groups" marks a part that can do no other.
"""
