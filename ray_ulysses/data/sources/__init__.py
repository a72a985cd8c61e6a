"""Lists the user's files and data sets, divides them into units of work, and reads their documents."""
