"""Sharded parameters on `torch.distributed`: gather and scatter as linear maps, and functions of local shards."""
