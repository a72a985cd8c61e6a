"""The only package that uses Ray: sessions, jobs, and the stream of rows through Ray Data."""
