"""Rules for recurrent networks and packed sequences."""
