"""What a conversion will take, before it is run: sizes, the formulas of memory and work, and the verb's words."""
