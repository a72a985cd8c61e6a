"""The only home of Ray: sessions, jobs, and what of the data plane runs on the cluster."""
