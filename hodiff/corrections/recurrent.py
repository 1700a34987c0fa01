"""Rules for recurrent networks."""
