"""How many GPUs of which kind, cut up how: the cheapest set-up that meets its targets (`planner.make_plan`)."""
