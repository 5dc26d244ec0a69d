"""Update full parameters on owner ranks, for optimizers such as Muon that cannot update rows."""
