"""What a run will take and do, said before a worker starts: pure arithmetic on the configuration and the data plan."""
