"""Rules for what computes, stops or checks gradients: modes, checkpoints, Functions."""
