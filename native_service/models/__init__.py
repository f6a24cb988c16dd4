"""What is served, and how it comes, changes and goes."""
