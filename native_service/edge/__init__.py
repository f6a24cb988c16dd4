"""What every call of our own servers passes, whatever its protocol."""
