"""Pictures of what a run did: one HTML file that needs no network and no server."""
