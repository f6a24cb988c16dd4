"""What people do with a server: look at the machine and at it, and change it while it runs."""
