"""Numbers of the time model that are fitted on published speeds, or measured on this machine."""
