"""The parts of a rehearsal that do not touch a cluster: schedules of faults, the cost of each fault, and checks."""
