"""How the processes of a job meet, watch each other and stop together."""
