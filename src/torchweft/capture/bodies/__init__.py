"""Bodies: what an op runs, eager or compiled, written where its result belongs."""
