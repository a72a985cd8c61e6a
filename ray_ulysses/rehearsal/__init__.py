"""The parts of a rehearsal that do not need a cluster: fault schedules, the cost of each fault, and checks."""
