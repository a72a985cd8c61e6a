"""Lists the user's files and datasets, divides them into units of work, and reads their documents."""
