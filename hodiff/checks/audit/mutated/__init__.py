"""The audit that invents its samples: the calls that torch's database leaves out."""
